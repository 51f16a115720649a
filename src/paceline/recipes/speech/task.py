"""Speech recognition with CTC or a transducer: `paceline train asr`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch import Tensor, nn

from paceline.core.errors import NotFound
from paceline.core.units import counted
from paceline.data.grain import Grain
from paceline.observe.sample_scores import SampleScores, write_scores
from paceline.observe.throughput import RateWords
from paceline.recipes.speech.data.ladder import ladder
from paceline.recipes.speech.data.speech_data import SpeechData, utterances
from paceline.recipes.speech.data.utterances import Utterances, collate
from paceline.recipes.speech.exchange.export import write_export
from paceline.recipes.speech.exchange.nemo import write_nemo
from paceline.recipes.speech.exchange.weights import read_weights
from paceline.recipes.speech.head import Head, head_of, outputs_of
from paceline.recipes.speech.manifest.bad_line import BadLine, shown
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.network.ctc_objective import Objective
from paceline.recipes.speech.network.flops import training_flops
from paceline.recipes.speech.network.model import AcousticModel, acoustic
from paceline.recipes.speech.network.transducer.decoder import Shares
from paceline.recipes.speech.settings import AsrSettings, UseSettings
from paceline.recipes.speech.sound.perturb import check_clips, is_active
from paceline.recipes.speech.sound.placement import Placement, describe, place
from paceline.recipes.speech.text.error_rate import character_errors
from paceline.recipes.speech.text.pieces import WORD_START, are_subwords
from paceline.recipes.speech.transcriber import Transcriber
from paceline.recipes.speech.word_errors.book import ErrorBook, joined
from paceline.recipes.speech.word_errors.file import Analysis, kinds, write_analyses
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
    Surroundings,
    Task,
)

_USED_BATCH = 32
"""Utterances that a model without a run hears at a time."""
_NO_SETS = {
    "eval": "name some: `paceline eval RUN --manifest a.json,b.json`",
    "infer": "say what to transcribe: `paceline infer RUN a.flac folder manifest.json`",
}


class Asr(Task, Accelerates, Exports, ReadsModels, Recordable, Reports, SavesState, ShowsSamples, StreamsInputs):
    """Conformers, QuartzNet, Jasper and their relatives, from manifests."""

    Settings = AsrSettings
    Use = UseSettings
    settings: AsrSettings
    collate = staticmethod(collate)
    length_unit = "seconds"
    sample_unit = "utterances"
    rate_words: Mapping[str, RateWords] = {"seconds": RateWords("audio_hours_per_hour", "hours of audio per hour")}
    eval_cost = 1200.0  # training has `max_seconds`, validation takes recordings of any length
    monitor = "wer"
    _data: SpeechData
    _head: Head
    _transcriber: Transcriber

    def __init__(self) -> None:
        self._unread: set[BadLine] = set()
        self._errors = ErrorBook()
        self._analyses: dict[str, Analysis] = {}
        self._scores: dict[str, dict[str, SampleScores]] = {}
        self._is_introduced = False
        self._placement: Placement | None = None

    def attach(self, surroundings: Surroundings) -> None:
        super().attach(surroundings)
        settings = self.settings
        if not hasattr(self, "_data") or not self._data.serves(settings):
            self._data = SpeechData(settings, self.link, self.say)
        self._head = head_of(settings.network, _objective(settings))
        self._transcriber = Transcriber(settings, self._data, self._head, self.say)

    @property
    def network(self) -> NetworkSettings:
        """Network with the labels that this run writes. All ranks must ask for it."""
        return self._data.network

    def model(self) -> AcousticModel:
        settings = self.settings
        if not self._is_introduced and settings.mode in ("train", "train_eval"):
            self._introduce()
        self._is_introduced = True
        objective = _objective(settings)
        model = AcousticModel(
            self.network,
            spec_augment=settings.spec_augment,
            views=objective.views,
            inter_layers=settings.interctc_layers,
            shares=Shares(settings.ctc_weight, objective, settings.fastemit),
        )
        self._transcriber.decoder(model)  # raises here for a language model that cannot be used, not in validation
        return model

    def train_data(self) -> Utterances:
        settings, corpus = self.settings, self._data.corpora().training
        check_clips(settings)  # before workers are forked, which share the clips that were found
        self._data.write(settings.out)
        data = utterances(corpus, settings, is_training=True)
        self._placement = place(settings, on_gpu=self.link.device.type == "cuda", are_mapped=data.are_mapped)
        if settings.augment_on != "auto" and not is_active(settings):
            self.say("`augment_on` has no effect: nothing varies the sound (`--speed-range`, `--gain-db`, ...)")
        return utterances(corpus, settings, is_training=True, on_device=True) if self._placement.on_device else data

    def val_data(self) -> Mapping[str, Utterances]:
        settings = self.settings
        if not settings.val_manifest and settings.mode in _NO_SETS:
            hint = _NO_SETS[settings.mode]
            raise NotFound("the run has no validation manifests, and no others are named", hint=hint)
        return {name: utterances(corpus, settings) for name, corpus in self._data.corpora().validation.items()}

    def summary_rows(self) -> Sequence[tuple[str, str]]:
        if not is_active(self.settings) or self._placement is None:
            return []
        return [("augmentation", describe(self.settings, self._placement))]

    def train_collate(self, data: Any) -> Callable[[list[Any]], Any]:
        return ladder(data, self.settings.network) if self.few_shapes else collate

    def accelerate(self, model: nn.Module) -> Sequence[str]:
        from paceline.recipes.speech.fast import accelerate  # needs Triton, there wherever kernels are offered

        return accelerate(acoustic(model).encoder)

    @property
    def can_record(self) -> bool:
        return self._head.can_record

    def recordable(self, grain: Grain) -> dict[str, Tensor]:
        self._note_unread(grain)
        return {name: grain[name] for name in ("audio", "lengths", "keys", "text", "out_frames", "text_lengths")}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[Tensor, int]:
        """Return the loss summed over utterances, and their number."""
        if "bad" in grain.data:  # `recordable` has noted those of the others
            self._note_unread(grain)
        return self._head.training_loss(acoustic(model), grain), len(grain)

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Sums]:
        self._note_unread(grain)
        network = acoustic(model)
        outputs = outputs_of(network, grain)
        texts = zip(self._transcriber.references(grain), self._transcriber.texts(network, grain, outputs), strict=True)
        read = zip(grain.samples.tolist(), texts, grain["bad"], strict=True)
        heard = [(sample, pair) for sample, pair, bad in read if bad is None]
        words = [self._errors.note(sample, *pair) for sample, pair in heard]
        characters = [character_errors(*pair) for _, pair in heard]
        return {
            "wer": (sum(edits.errors for edits in words), sum(edits.words for edits in words)),
            "cer": (sum(errors for errors, _ in characters), sum(weight for _, weight in characters)),
            "loss": (self._head.loss(network, outputs, grain), len(heard)),
        }

    def analysis(self, name: str, data: Any) -> dict[str, float]:
        """Return word errors by kind; errors of each utterance, the worst ones and those by speaker go into files."""
        is_ours = isinstance(data, Utterances)
        self._scores[name] = {"wer": SampleScores.of("ratio", self.gather(self._errors.rows()))}
        part = self._errors.take(data.name if is_ours else str, data.speakers if is_ours else {})
        whole = joined(self.gather(part))
        if not whole["words"] and name not in self._analyses:
            hypothesised = counted(whole["insertions"], "word")
            self.say(f"{name}: all references are empty, so its WER is undefined ({hypothesised} hypothesised)")
        self._analyses[name] = whole
        out = self.settings.out
        if self.world.rank == 0 and self.settings.mode not in ("eval", "infer") and out is not None:
            write_analyses(out, self._analyses)
            write_scores(out, self._scores)
        return dict(kinds(whole))

    def predict(self, model: nn.Module, grain: Grain) -> list[str] | list[DetailedText]:
        self._note_unread(grain)
        return self._transcriber.predict(acoustic(model), grain)

    def samples(self, model: nn.Module, grain: Grain) -> Sequence[Mapping[str, str]]:
        texts = zip(self._transcriber.references(grain), self.predict(model, grain), grain["bad"], strict=True)
        return [{"reference": said, "hypothesis": str(heard)} for said, heard, bad in texts if bad is None]

    def read_inputs(self, words: Sequence[str]) -> Utterances:
        return self._transcriber.read_inputs(words)

    def is_stream(self, words: Sequence[str]) -> bool:
        return self._transcriber.is_stream(words)

    def stream(self, model: nn.Module, words: Sequence[str], out: IO[str], *, as_json: bool) -> int:
        return self._transcriber.stream(acoustic(model), words, out, as_json=as_json)

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
        return training_flops(self.network) * _objective(self.settings).views

    def about(self) -> dict[str, Any]:
        network = self.network
        about = {"labels": list(network.labels), "sample_rate": network.sample_rate}
        return {**about, "front_end": network.features.front_end}

    def report(self) -> None:
        """List the utterances that could not be read; without `bad_data: skip` there are none, or no run."""
        if self.settings.bad_data != "skip":
            return
        unread = sorted({line for lines in self.gather(self._unread) for line in lines}, key=_position)
        self._unread = set()
        if unread:
            self.say(f"{counted(len(unread), 'utterance')} could not be read and added nothing:")
            for line in shown(unread, len(unread)):
                self.say(line)
            if self.settings.mode not in ("eval", "infer"):  # which leave the run as it is
                self._data.write(self.settings.out, unread)

    def export(self, folder: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        if folder.suffix == ".nemo":
            write_nemo(folder, self.network, weights, self._data.tokenizer)
        else:
            write_export(folder, self.network, weights, about, self._data.tokenizer)

    def _note_unread(self, grain: Grain) -> None:
        self._unread.update(line for line in grain["bad"] if line is not None)

    def _introduce(self) -> None:
        """Name what the network's file leaves unread, and the settings that come from it."""
        settings = self.settings
        network = settings.network
        if network.unread:
            self.say(network.unread)
        values = settings.model_dump(mode="json", include=set(network.recipe))
        advised = {name: values[name] for name, value in network.recipe.items() if values[name] == value}
        if advised:
            listed = ", ".join(f"{name} {_plain(value)}" for name, value in advised.items())
            self.say(f"the network's file trains with {listed}; what you set yourself wins")


def _objective(settings: AsrSettings) -> Objective:
    """Return the loss of training of CTC."""
    return Objective(
        1 + len(settings.interctc_layers),
        2 if settings.cr_ctc_weight else 1,
        settings.interctc_weight,
        settings.cr_ctc_weight,
    )


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _position(line: BadLine) -> tuple[str, int]:
    return str(line.path), line.line
