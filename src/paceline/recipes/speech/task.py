"""Speech recognition with CTC or a transducer: `paceline train asr`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.core.run_folder import RunFolder
from paceline.core.units import counted
from paceline.data.grain import Grain
from paceline.observe.sample_scores import SampleScores, write_scores
from paceline.recipes.speech.data.corpus import Corpus, Opening, Part, list_bad, parts_of
from paceline.recipes.speech.data.inputs import open_inputs
from paceline.recipes.speech.data.ladder import ladder
from paceline.recipes.speech.data.packing import check_packed
from paceline.recipes.speech.data.run_labels import RunLabels
from paceline.recipes.speech.data.utterances import Utterances, collate
from paceline.recipes.speech.decoding.decoder import TextDecoder
from paceline.recipes.speech.decoding.from_settings import detailed, make_decoder
from paceline.recipes.speech.error_analysis import ErrorBook, joined
from paceline.recipes.speech.error_file import Analysis, kinds, write_analyses
from paceline.recipes.speech.exchange.export import write_export
from paceline.recipes.speech.exchange.nemo import write_nemo
from paceline.recipes.speech.exchange.weights import read_weights
from paceline.recipes.speech.manifest.bad_line import BadLine, shown
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.network.flops import training_flops
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.network.transducer.decoder import Shares, Transcripts, TransducerDecoder
from paceline.recipes.speech.objective import Objective
from paceline.recipes.speech.settings import AsrSettings, UseSettings
from paceline.recipes.speech.sound.perturb import check_clips, is_active
from paceline.recipes.speech.sound.placement import Placement, describe, place
from paceline.recipes.speech.streaming.use import (
    STANDARD_INPUT,
    NoFileYet,
    NotAlone,
    StreamsAreForCtc,
    StreamsAreGreedy,
    Windows,
    infer_live,
    infer_long,
    long_files,
    standard_input,
)
from paceline.recipes.speech.streaming.windows import Listener, Norm
from paceline.recipes.speech.text.error_rate import character_errors
from paceline.recipes.speech.text.labels import Labels
from paceline.recipes.speech.text.pieces import WORD_START, Pieces, are_subwords
from paceline.recipes.speech.text.subwords.labels import Subwords
from paceline.train.predictions import DetailedText
from paceline.train.task import (
    Accelerates,
    Exports,
    ReadsModels,
    Recordable,
    Reports,
    SavesState,
    ShowsSamples,
    StreamsInputs,
    Sums,
    Task,
)

_USED_BATCH = 32
"""Utterances that a model without a run hears at a time."""


class NothingNamed(PacelineError):
    """A run without validation sets is to be validated, or to predict them."""

    mode: Literal["eval", "infer"]
    sentence = "the run has no validation manifests, and no others are named"
    hint = "{advice}"

    @property
    def advice(self) -> str:
        if self.mode == "eval":
            return "name some: `paceline eval RUN --manifest a.json,b.json`"
        return "say what to transcribe: `paceline infer RUN a.flac folder manifest.json`"


class Asr(Task, Accelerates, Exports, ReadsModels, Recordable, Reports, SavesState, ShowsSamples, StreamsInputs):
    """Conformers, QuartzNet, Jasper and their relatives, from manifests."""

    Settings = AsrSettings
    Use = UseSettings
    settings: AsrSettings
    collate = staticmethod(collate)
    length_unit = "seconds"
    sample_unit = "utterances"
    eval_cost = 1200.0  # training has `max_seconds`, validation takes recordings of any length
    monitor = "wer"
    _opened: dict[Part, Corpus] | None = None

    def __init__(self) -> None:
        self._unread: set[BadLine] = set()
        self._errors = ErrorBook()
        self._analyses: dict[str, Analysis] = {}
        self._scores: dict[str, dict[str, SampleScores]] = {}
        self._is_introduced = False
        self._finding_labels: RunLabels | None = None
        self._placement: Placement | None = None
        self._reader: TextDecoder | None = None

    def model(self) -> AcousticModel:
        if not self._is_introduced and self.settings.mode in ("train", "train_eval"):
            if self.settings.network.unread:
                self.say(self.settings.network.unread)
            self._say_recipe()
        self._is_introduced = True
        objective = self._objective
        model = AcousticModel(
            self.network,
            spec_augment=self.settings.spec_augment,
            views=objective.views,
            inter_layers=self.settings.interctc_layers,
            shares=Shares(self.settings.ctc_weight, objective, self.settings.fastemit),
        )
        self._decoder(model)  # a language model that cannot be used is told now, not at the first validation
        return model

    def train_data(self) -> Utterances:
        settings = self.settings
        corpus = next(corpus for part, corpus in self._corpora().items() if part.is_training)
        check_clips(settings)  # here, before workers are forked: they share what was found
        self._list_bad()
        self._run_labels.store()
        data = self._utterances(corpus, settings)
        self._placement = place(settings, on_gpu=self.link.device.type == "cuda", are_mapped=data.are_mapped)
        if settings.augment_on != "auto" and not is_active(settings):
            self.say("`augment_on` has no effect: nothing varies the sound (`--speed-range`, `--gain-db`, ...)")
        return self._utterances(corpus, settings, on_device=True) if self._placement.on_device else data

    def val_data(self) -> Mapping[str, Any]:
        settings = self.settings
        if not settings.val_manifest and settings.mode in ("eval", "infer"):
            raise NothingNamed(settings.mode)
        return {part.name: self._utterances(corpus) for part, corpus in self._corpora().items() if not part.is_training}

    def summary_rows(self) -> Sequence[tuple[str, str]]:
        if not is_active(self.settings) or self._placement is None:
            return []
        return [("augmentation", describe(self.settings, self._placement))]

    def train_collate(self, data: Any) -> Callable[[list[Any]], Any]:
        return ladder(data, self.settings.network) if self.few_shapes else collate

    def accelerate(self, model: nn.Module) -> Sequence[str]:
        from paceline.recipes.speech.fast import accelerate  # needs Triton, there wherever kernels are offered

        assert isinstance(model, AcousticModel)
        return accelerate(model.encoder)

    @property
    def can_record(self) -> bool:
        """False of a transducer, whose chunks of scores are computed twice with the same dropout."""
        return self.settings.network.transducer is None

    def recordable(self, grain: Grain) -> dict[str, Tensor]:
        self._note_unread(grain)
        return {name: grain[name] for name in ("audio", "lengths", "keys", "text", "out_frames", "text_lengths")}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[Tensor, int]:
        """Return the loss summed over utterances and, later, divided by how many there are on all ranks."""
        if self.settings.network.transducer is not None:
            transcripts = self._transcripts(model, grain)
            return model(grain["audio"], grain["lengths"], grain["keys"], transcripts), len(grain)
        return self._loss(model, grain, self._listen(model, grain), self._objective), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Sums]:
        outputs = self._listen(model, grain)
        texts = zip(self._references(grain), self._read(model, grain, outputs), strict=True)
        read = zip(grain.samples.tolist(), texts, grain["bad"], strict=True)
        utterances = [(sample, pair) for sample, pair, bad in read if bad is None]
        pairs = [pair for _, pair in utterances]
        words = [self._errors.note(sample, *pair) for sample, pair in utterances]
        characters = [character_errors(*pair) for pair in pairs]
        return {
            "wer": (sum(edits.errors for edits in words), sum(edits.words for edits in words)),
            "cer": (sum(errors for errors, _ in characters), sum(weight for _, weight in characters)),
            "loss": (self._plain_loss(model, grain, outputs), len(pairs)),
        }

    def analysis(self, name: str, data: Any) -> dict[str, float]:
        """Return word errors by kind; errors of each utterance, the worst ones and those by speaker go into files."""
        is_ours = isinstance(data, Utterances)
        self._scores[name] = {"wer": SampleScores.of("ratio", self.gather(self._errors.rows()))}
        part = self._errors.take(data.name if is_ours else str, data.speakers if is_ours else {})
        whole = joined(self.gather(part))
        if not whole["words"] and name not in self._analyses:
            heard = counted(whole["insertions"], "word")
            self.say(f"{name}: no text to compare with has a word, so its WER is nan; {heard} heard in it")
        self._analyses[name] = whole
        out = self.settings.out
        if self.world.rank == 0 and self.settings.mode not in ("eval", "infer") and out is not None:
            write_analyses(out, self._analyses)
            write_scores(out, self._scores)
        return dict(kinds(whole))

    def predict(self, model: nn.Module, grain: Grain) -> list[str] | list[DetailedText]:
        outputs = self._listen(model, grain)
        if self.settings.mode != "infer":
            return self._read(model, grain, outputs)
        found = zip(self._decoder(model)(outputs, self._frames(model, grain)), grain["begins"], strict=True)
        return [detailed([each.later(begin) for each in best[:1]]) for best, begin in found]

    def samples(self, model: nn.Module, grain: Grain) -> Sequence[Mapping[str, str]]:
        texts = zip(self._references(grain), self.predict(model, grain), grain["bad"], strict=True)
        return [{"reference": said, "hypothesis": str(heard)} for said, heard, bad in texts if bad is None]

    def read_inputs(self, words: Sequence[str]) -> Utterances:
        settings = self.settings
        check_packed([Path(word) for word in words], settings.network, is_perturbed=False, is_training=False)
        return open_inputs(
            words,
            settings.network.sample_rate,
            skip_bad=settings.bad_data == "skip",
            check_audio=settings.check_audio,
            say=self.say,
            trim=settings.network.trims(is_training=False),
        )

    def is_stream(self, words: Sequence[str]) -> bool:
        return STANDARD_INPUT in words or long_files(words, self.settings.long_s) is not None

    def stream(self, model: nn.Module, words: Sequence[str], out: IO[str], *, as_json: bool) -> int:
        """Text of long files in windows, or of audio on standard input while it arrives."""
        assert isinstance(model, AcousticModel)
        settings, labels = self.settings, Pieces(self.network.labels)
        is_live = STANDARD_INPUT in words
        if is_live and len(words) > 1:
            raise NotAlone(words)
        if settings.network.transducer is not None:
            raise StreamsAreForCtc("standard input" if is_live else words[0])
        if settings.decoder == "beam":
            raise StreamsAreGreedy("standard input" if is_live else words[0])
        norm: Norm = settings.stream_norm if settings.stream_norm != "auto" else "running" if is_live else "file"
        if is_live and norm == "file":
            raise NoFileYet
        if not is_live:
            paths = long_files(words, settings.long_s) or []
            trims = self.network.trims(is_training=False)
            windows = Windows(settings.window_s, settings.overlap_s, norm, settings.pause_s, trims)
            return infer_long(model, labels, paths, windows, out, as_json=as_json)
        listener = Listener(
            model,
            labels,
            step_s=settings.chunk_s,
            left_s=settings.overlap_s,
            right_s=settings.lookahead_s,
            pause_s=settings.pause_s,
            norm=norm,
        )
        if self.network.trims(is_training=False):
            self.say(
                "the network was trained with `trim_silence`: of live audio no silence is cut off, because its loudest "
                "part is not known before its end"
            )
        with standard_input() as pipe:
            infer_live(listener, pipe, out, rate=settings.rate, as_json=as_json, screen=out.isatty())
        return 1

    def model_settings(self, path: Path) -> dict[str, Any]:
        """Return settings for a .nemo archive or an export, which bring their network and their subwords."""
        network = read_network(path)
        subwords = {"tokenizer": path} if are_subwords(network.labels) else {}
        is_english = all(label.replace(WORD_START, "").isascii() for label in network.labels)
        rules = "en" if is_english else "basic"  # numbers in references become words of English only there
        return {"network": network, **subwords, "text_rules": rules, "global_batch": _USED_BATCH, "steps": 1}

    def read_weights(self, path: Path) -> Mapping[str, Tensor]:
        return read_weights(path, self.network, new_decoder=self.settings.new_decoder, say=self.say)

    def flops(self, model: nn.Module) -> float:
        return training_flops(self.network) * self._objective.views

    def about(self) -> dict[str, Any]:
        network = self.network
        about = {"labels": list(network.labels), "sample_rate": network.sample_rate}
        return {**about, "front_end": network.features.front_end}

    def report(self) -> None:
        """List the utterances that could not be read; without `bad_data: skip` there are none, or no run."""
        if self.settings.bad_data != "skip":
            return
        unread = sorted({line for lines in self.gather(self._unread) for line in lines}, key=_place)
        self._unread = set()
        if unread:
            self.say(f"{counted(len(unread), 'utterance')} could not be read and added nothing:")
            for line in shown(unread, len(unread)):
                self.say(line)
            self._list_bad(unread)

    def export(self, folder: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        labels = self._labels
        tokenizer = labels.tokenizer if isinstance(labels, Subwords) else None
        if folder.suffix == ".nemo":
            write_nemo(folder, self.network, weights, tokenizer)
        else:
            write_export(folder, self.network, weights, about, tokenizer)

    # -- what these are made of ----------------------------------------------------------------------------------

    @property
    def network(self) -> NetworkSettings:
        """The network with the labels that this run writes. All ranks must ask for it."""
        labels = self._labels.symbols
        network = self.settings.network
        return network if network.labels == labels else network.model_copy(update={"labels": labels})

    @property
    def _labels(self) -> Labels | Subwords:
        """Labels of this run. Where they are learned, that opens the training data; all ranks must ask for them."""
        known = self._run_labels.known()
        if known is None:
            self._corpora()
            known = self._run_labels.known()
        assert known is not None
        return known

    @property
    def _run_labels(self) -> RunLabels:
        if self._finding_labels is None or not self._finding_labels.are_of(self.settings):
            self._finding_labels = RunLabels(self.settings, self.world.rank, self.gather, self.say)
        return self._finding_labels

    def _corpora(self) -> dict[Part, Corpus]:
        """Return all data sets of the run, opened together when the first is asked for."""
        if self._opened is None:
            share = self.world.rank, self.world.size
            self._opening = Opening(self.settings, share, self.gather, self.say, self._run_labels.learn)
            self._opened = self._opening.open(parts_of(self.settings))
        return self._opened

    def _utterances(self, corpus: Corpus, perturb: AsrSettings | None = None, *, on_device: bool = False) -> Utterances:
        network, skip_bad = self.settings.network, self.settings.bad_data == "skip"
        trim = network.trims(is_training=perturb is not None)
        return Utterances(
            corpus.manifest,
            corpus.texts,
            network.sample_rate,
            perturb,
            trim=trim,
            skip_bad=skip_bad,
            on_device=on_device,
        )

    def _list_bad(self, more: Sequence[BadLine] = ()) -> None:
        """List bad lines in the run's folder, which exists by the time training asks for data; a benchmark has none."""
        if self.settings.mode in ("eval", "infer"):
            return  # the run is used, and stays what it is
        out, opening = self.settings.out, self._opening
        new = [line for line in more if line not in opening.bad]
        opening.bad, opening.num_bad = [*opening.bad, *new], opening.num_bad + len(new)
        if opening.num_bad and self.world.rank == 0 and out is not None and RunFolder(out).is_run:
            list_bad(out, opening.bad, opening.num_bad)

    def _listen(self, model: nn.Module, grain: Grain) -> Tensor:
        """Return log-probabilities of CTC, or frames of a transducer."""
        outputs: Tensor = model(grain["audio"], grain["lengths"], grain["keys"] if model.training else None)
        return outputs

    def _say_recipe(self) -> None:
        """Name the settings that come from the network's file."""
        shown = self.settings.model_dump(mode="json", include=set(self.settings.network.recipe))
        advised = {name: shown[name] for name, value in self.settings.network.recipe.items() if shown[name] == value}
        if advised:
            listed = ", ".join(f"{name} {_plain(value)}" for name, value in advised.items())
            self.say(f"the network's file trains with {listed}; what you set yourself wins")

    @property
    def _objective(self) -> Objective:
        settings = self.settings
        return Objective(
            1 + len(settings.interctc_layers),
            2 if settings.cr_ctc_weight else 1,
            settings.interctc_weight,
            settings.cr_ctc_weight,
        )

    def _loss(self, model: nn.Module, grain: Grain, log_probs: Tensor, objective: Objective) -> Tensor:
        if "out_frames" in grain.data:  # a grain of the ladder: no length is on the host alone
            if "bad" in grain.data:
                self._note_unread(grain)
            return objective.loss_sum(log_probs, grain["text"], grain["out_frames"], grain["text_lengths"])
        return objective.loss_sum(log_probs, grain["text"], self._frames(model, grain), grain["num_labels"])

    def _plain_loss(self, model: nn.Module, grain: Grain, outputs: Tensor) -> Tensor:
        """Return the loss of validation, of what `_listen` has returned."""
        assert isinstance(model, AcousticModel)
        if isinstance(model.decoder, TransducerDecoder):
            return model.decoder.loss_sum(outputs, self._transcripts(model, grain))
        return self._loss(model, grain, outputs, Objective())

    def _transcripts(self, model: nn.Module, grain: Grain) -> Transcripts:
        return Transcripts.of(grain["text"], self._frames(model, grain), grain["num_labels"])

    def _frames(self, model: nn.Module, grain: Grain) -> list[int]:
        """Return the output frames of each utterance, without asking the device; none of one that could not be read,
        so that it adds nothing to a loss and has no text."""
        assert isinstance(model, AcousticModel)
        self._note_unread(grain)
        lengths = zip(grain["num_samples"], grain["bad"], strict=True)
        output_length = model.output_frames if grain["audio"].dim() == 3 else model.output_length
        return [output_length(length) if bad is None else 0 for length, bad in lengths]

    def _note_unread(self, grain: Grain) -> None:
        self._unread.update(line for line in grain["bad"] if line is not None)

    def _references(self, grain: Grain) -> list[str]:
        texts = grain["text"].tolist()
        return [self._labels.decode(ids[:length]) for ids, length in zip(texts, grain["num_labels"], strict=True)]

    def _read(self, model: nn.Module, grain: Grain, outputs: Tensor) -> list[str]:
        return self._decoder(model).texts(outputs, self._frames(model, grain))

    def _decoder(self, model: nn.Module) -> TextDecoder:
        assert isinstance(model, AcousticModel)
        if isinstance(model.decoder, TransducerDecoder):
            return make_decoder(self.settings, self._labels, model)  # it reads with the weights of this very model
        if self._reader is None:
            self._reader = make_decoder(self.settings, self._labels, model)
            if self._reader.note is not None:
                self.say(self._reader.note)
        return self._reader


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _place(line: BadLine) -> tuple[str, int]:
    return str(line.path), line.line
