"""Translation, and any other task that writes a sequence for a sequence: `paceline train translation`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from paceline.core.disk import replacing
from paceline.core.errors import InvalidSetting, NotFound
from paceline.core.run_folder import RunFolder
from paceline.data.grain import Grain
from paceline.observe.sample_scores import SampleScores, write_scores
from paceline.recipes.translation.data.corpus import Corpus, as_lines
from paceline.recipes.translation.data.packed import CollatePacked, PackedLadder
from paceline.recipes.translation.data.pairs import Collate, Lines, Pairs, ladder
from paceline.recipes.translation.exchange import write_export
from paceline.recipes.translation.network.build import build_network
from paceline.recipes.translation.network.flops import training_flops
from paceline.recipes.translation.network.scores import ScoresTokens, smoothed_loss
from paceline.recipes.translation.network.transformer import Transformer
from paceline.recipes.translation.search.decoder import Writer, beam_search, greedy, most_tokens
from paceline.recipes.translation.settings import TranslationSettings, UseSettings
from paceline.recipes.translation.text.parallel import STANDARD_INPUT, ParallelText, read_lines
from paceline.recipes.translation.text.scores import Bleu, Chrf
from paceline.recipes.translation.text.vocabulary import END, FILE, PAD, Vocabulary
from paceline.train.metrics import Gathered
from paceline.train.task import (
    Accelerates,
    Exports,
    Metric,
    ReadsInputs,
    Recordable,
    Reports,
    SavesState,
    ShowsSamples,
    Task,
)


class Translation(Task, Accelerates, Exports, ReadsInputs, Recordable, Reports, SavesState, ShowsSamples):
    """A Transformer or an LSTM with attention, from parallel text."""

    Settings = TranslationSettings
    Use = UseSettings
    settings: TranslationSettings
    collate = Collate()
    length_unit = "tokens"
    sample_unit = "pairs"
    eval_cost = 8192.0
    monitor = "bleu"

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._corpus: Corpus | None = None
        self._sentences: list[tuple[int, list[float]]] = []
        self._scores: dict[str, dict[str, SampleScores]] = {}

    def model(self) -> nn.Module:
        return build_network(self.settings.shape, len(self.vocabulary))

    def train_data(self) -> Pairs:
        self._store_vocabulary()
        for line in (*self.settings.idle(), *self.settings.cautions()):
            self.say(line)
        return self._texts.train(self.vocabulary)

    def val_data(self) -> Mapping[str, Pairs]:
        settings = self.settings
        if not (settings.val_source or settings.val_pairs) and self.purpose != "train":
            if self.purpose == "eval":
                hint = "name some: `paceline eval RUN --val-source test.en --val-target test.de`"
            else:
                hint = "say what to translate: `paceline infer RUN lines.txt`, or `-` for standard input"
            raise InvalidSetting("the run has no validation sets, and no others are named", hint=hint)
        if self.purpose != "infer" and (settings.val_source or settings.val_pairs):
            self._bleu.check()
        return self._texts.val(self.vocabulary)

    def train_collate(self, data: Any) -> Callable[[list[Any]], Any]:
        settings = self.settings
        is_open = settings.level in ("auto", 4) and self.link.device.type == "cuda"  # kernels for it may be chosen
        is_packed = settings.packed or (is_open and settings.model == "transformer")
        if self.few_shapes:
            return PackedLadder(data) if is_packed else ladder(data, settings.pad_multiple)
        return CollatePacked() if is_packed else self.collate

    def accelerate(self, model: nn.Module) -> Sequence[str]:
        """Train a Transformer through our kernels; of others let the loss never have all scores in memory."""
        from paceline.recipes.translation.fast.fused import accelerate  # needs Triton, there wherever kernels are

        assert isinstance(model, ScoresTokens)
        model.is_chunked = True
        if isinstance(model, Transformer):
            return accelerate(model)
        return ["recurrent layers are cuDNN's"]

    def recordable(self, grain: Grain) -> dict[str, Any]:
        return {name: grain[name] for name in ("source", "target", "truth", "packings") if name in grain.data}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy with smoothed labels, summed over target tokens, and their number."""
        truth, packings = grain["truth"], grain.data.get("packings")
        total = model(grain["source"], grain["target"], truth, self.settings.label_smoothing, packings)
        return total, (truth != PAD).sum()

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Metric]:
        settings, truth = self.settings, grain["truth"]
        logits, count = model(grain["source"], grain["target"]), (truth != PAD).sum()
        smoothed = smoothed_loss(logits, truth, settings.label_smoothing)
        plain = smoothed_loss(logits, truth, 0.0)
        hypotheses, references = self.predict(model, grain), grain["reference"]
        bleu = self._bleu
        texts = zip(grain.samples.tolist(), hypotheses, references, strict=True)
        self._sentences += [(sample, bleu.statistics(*pair)) for sample, *pair in texts]
        return {
            "bleu": Gathered(bleu, hypotheses, references),
            "chrf": Gathered(Chrf(settings.bleu_lowercase), hypotheses, references),
            "loss": (smoothed, count),
            "nll": (plain, count),
        }

    def analysis(self, name: str, data: Any) -> dict[str, float]:
        """Return how long translations are beside their references; scores of sentences go into a file of the run."""
        scores = SampleScores.of("bleu", self.gather(self._sentences))
        self._sentences = []
        self._scores[name] = {"bleu": scores}
        out = self.settings.out
        if self.world.rank == 0 and self.purpose == "train" and out is not None:
            write_scores(out, self._scores)
        written, wanted = scores.rows[:, :2].sum(0).tolist()
        return {"words": written, "reference_words": wanted}

    def predict(self, model: nn.Module, grain: Grain) -> list[str]:
        settings, source = self.settings, grain["source"]
        writer = cast(Writer[Any], model)
        longest = most_tokens(source, settings.output_ratio)
        if settings.beam == 1:
            rows = greedy(writer, source, longest)
        else:
            found = beam_search(writer, source, longest, settings.beam, settings.length_penalty)
            rows = [tokens for tokens, _ in found]
        is_empty = (source[:, 0] == END).tolist()  # nothing is translated as nothing
        return self.vocabulary.decode([[] if empty else row for row, empty in zip(rows, is_empty, strict=True)])

    def samples(self, model: nn.Module, grain: Grain) -> Sequence[Mapping[str, str]]:
        texts = zip(grain["text"], grain["reference"], self.predict(model, grain), strict=True)
        return [{"source": source, "reference": reference, "hypothesis": text} for source, reference, text in texts]

    def read_inputs(self, words: Sequence[str]) -> Lines:
        here = sys.stdin.buffer.read() if STANDARD_INPUT in words and self.world.rank == 0 else b""
        languages = self.settings.source_lang, self.settings.target_lang
        paths = [Path(word) for word in words]
        lines = read_lines(paths, self.gather(here)[0], languages, is_reversed=self.settings.reverse)
        return as_lines(self.vocabulary, lines)

    def pack_data(self) -> Mapping[str, ParallelText]:
        """Return texts as they were read: packed files know nothing of units, and any run may learn its own of them."""
        return self._texts.texts()

    def flops(self, model: nn.Module) -> float:
        return training_flops(self.settings.shape, len(self.vocabulary))

    def about(self) -> dict[str, Any]:
        return {"vocabulary": len(self.vocabulary)}

    def export(self, folder: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        write_export(folder, self.settings.shape, self.vocabulary, weights, about)

    # -- what these are made of ----------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> Vocabulary:
        """Units of this run: its own file, those that it was told to take, or new ones. All ranks must ask for them."""
        if self._vocabulary is None:
            text = self._find_vocabulary() if self.world.rank == 0 else None
            self._vocabulary = Vocabulary(next(each for each in self.gather(text) if each is not None))
        return self._vocabulary

    @property
    def _bleu(self) -> Bleu:
        return Bleu(self.settings.bleu_tokenize, self.settings.bleu_lowercase)

    @property
    def _texts(self) -> Corpus:
        if self._corpus is None:
            self._corpus = Corpus(self.settings, self.say)
        return self._corpus

    def _find_vocabulary(self) -> str:
        settings = self.settings
        homes = [] if settings.out is None else [settings.out]
        if isinstance(settings.resume, Path):  # a checkpoint of another run
            homes.append(settings.resume.parent.parent)
        for home in homes:
            if (home / FILE).is_file():
                return Vocabulary.read(home).json
        if self.purpose != "train" and homes:
            raise NotFound(
                f"{homes[0]} has lost its tokenizer.json: without it, no text can be read or written",
                hint="bring it back: a copy or an export of the run has it, too",
            )
        if settings.tokenizer is not None:
            return Vocabulary.read(settings.tokenizer).json
        lines = self._texts.train_text().lines()
        made = Vocabulary.train(lines, settings.vocabulary, tokens=settings.tokens, lowercase=settings.lowercase)
        return made.json

    def _store_vocabulary(self) -> None:
        """Write the units into the run's folder, which is there when training asks for data."""
        out = self.settings.out
        if self.world.rank != 0 or out is None or not RunFolder(out).is_run or (out / FILE).exists():
            return
        with replacing(out / FILE) as file:
            file.write(self.vocabulary.json)
