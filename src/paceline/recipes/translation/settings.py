"""Every setting of translation beside those of training itself, and the default recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.config.named_sets import SetWord
from paceline.config.settings import (
    Fraction,
    OptimizerName,
    Order,
    Positive,
    PositiveFloat,
    ScheduleName,
    Section,
    TrainConfig,
    free,
)
from paceline.core.cloud.address import AbsolutePlace
from paceline.core.together import SettingsExclusion
from paceline.recipes.translation.network.shape import SIZES, Kind, Shape, Size
from paceline.recipes.translation.text.vocabulary import Tokens

_SHAPED = (
    "width",
    "ffn_width",
    "heads",
    "encoder_layers",
    "decoder_layers",
    "dropout",
    "attention_dropout",
    "activation_dropout",
)
_OF_TRANSFORMERS = ("ffn_width", "heads", "norm", "attention_dropout", "activation_dropout")
_OF_UNITS = ("tokens", "vocabulary", "lowercase")


class TextSettings(Section):
    """What is read."""

    train_source: tuple[AbsolutePlace, ...] = ()
    """Sentences to train on, one per line, in one or more files with commas between them; .gz is unpacked."""
    train_target: tuple[AbsolutePlace, ...] = ()
    """Their translations: line N of one is the translation of line N of the other."""
    train_pairs: tuple[AbsolutePlace, ...] = ()
    """Files of pairs, instead or beside them: .tsv (sentence, tab, translation), .jsonl ("source" and "target"), or
    packed (.h5)."""
    source_lang: str = free("source")
    """Key of sources in JSONL, beside `source`: en, say."""
    target_lang: str = free("target")
    """Key of translations in JSONL, beside `target`."""
    reverse: bool = False
    """Translate files of pairs from their second side to their first."""
    min_tokens: Positive = 1
    """Training pairs with a shorter side are dropped."""
    max_tokens: Positive | None = 256
    """Training pairs with a longer side are dropped; validation keeps all."""
    max_ratio: PositiveFloat | None = None
    """Training pairs of which one side has more than so many times the tokens of the other are dropped."""
    max_pairs: Positive | None = None
    """Train on the first so many only."""
    tokens: Tokens = "bpe"
    """Units of texts: byte-pair encoding that both languages share, or `words` between spaces."""
    vocabulary: Positive = 8000
    """Units at most, rounded down to a multiple of 8."""
    lowercase: bool = False
    """Read and write in small letters."""
    tokenizer: AbsolutePlace | None = free(None)
    """Units of another run (its folder, or its tokenizer.json) instead of new ones: for fine-tuning (`init_from`)."""
    packed: bool = False
    """Train on sentences that lie one after the other instead of in padded rows (Transformer): less work on a GPU, the
    same numbers to rounding. `auto` and -O4 do so on a GPU without being asked."""
    pad_multiple: Positive = 1
    """Lengths are counted in multiples of this, and grains padded to it where few shapes are wanted: 8 lets a GPU work
    with few CUDA graphs."""


class ModelSettings(Section):
    """What is trained."""

    model: Kind = "transformer"
    """Transformer, or LSTM encoder and decoder with attention."""
    size: Size = "small"
    """Named sizes; what is set below counts before them."""
    width: Positive | None = None
    """Numbers per token."""
    ffn_width: Positive | None = None
    """Numbers per token inside of a feed-forward layer (Transformer)."""
    heads: Positive | None = None
    """Attention heads; they share the width."""
    encoder_layers: Positive | None = None
    """Layers that read."""
    decoder_layers: Positive | None = None
    """Layers that write."""
    norm: Literal["pre", "post"] = "pre"
    """Layer norms before each part of a layer, or after it as in the paper (Transformer)."""
    share: Literal["all", "target", "none"] = "all"
    """Embeddings of source, target and last layer as one; those of target and last layer; or each its own."""
    dropout: Fraction | None = None
    """Of embeddings and of what each part of a layer adds."""
    attention_dropout: Fraction | None = None
    """Of attention weights."""
    activation_dropout: Fraction | None = None
    """Inside of feed-forward layers."""
    label_smoothing: Fraction = 0.1
    """Share of the target's probability that is spread over the vocabulary."""

    @property
    def shape(self) -> Shape:
        """The network's sizes, all of them."""
        values = {name: value for name in _SHAPED if (value := getattr(self, name)) is not None}
        return replace(SIZES[self.model, self.size], norm=self.norm, share=self.share, **values)


class UseSettings(Section):
    """What may be chosen anew whenever a model is used."""

    together: ClassVar[tuple[str, ...]] = ("val_source", "val_target", "val_pairs")

    val_source: tuple[SetWord, ...] = free(())
    """Sentences to validate on; each file is a set of its own, named by the file or as `name=val.en`."""
    val_target: tuple[AbsolutePlace, ...] = free(())
    """Their translations, in the same order."""
    val_pairs: tuple[SetWord, ...] = free(())
    """Files of pairs to validate on, instead or beside them."""
    beam: Positive = free(1)
    """Hypotheses that are followed; 1 is greedy."""
    length_penalty: Annotated[float, Field(ge=0)] = free(0.6)
    """How much beam search favours long translations: 0 not at all."""
    output_ratio: PositiveFloat = free(2.0)
    """A translation has at most so many times the tokens of its source, and 10."""
    bleu_tokenize: Literal["13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "none"] = free("13a")
    """How BLEU takes texts apart; `none` for texts that are tokenised already."""
    bleu_lowercase: bool = free(False)
    """BLEU and chrF in small letters, as much of the literature on small data sets has it."""
    bad_data: Literal["stop", "skip"] = free("stop")
    """Whether a bad line ends the run before it starts, or is left out and listed."""


class TranslationSettings(TextSettings, ModelSettings, UseSettings, TrainConfig):
    """Settings of `paceline train translation`. The defaults are the Transformer's recipe: Adam, inverse root."""

    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "the recipe `translation`",
            "`--train-files`, `--val-files`",
            "one thing twice",
            "Its packed files are named by `--train-pairs` and `--val-pairs`, as its other files are.",
            "packed files go into `train_pairs` and `val_pairs` here, not `train_files` and `val_files`",
            lambda s: bool(s.train_files or s.val_files),
        ),
        SettingsExclusion(
            "`--packed`",
            "`-O3`, `--model lstm`",
            "hardware",
            "Packed batches never have the same shape twice, so that a compiler would compile each; a recurrent layer "
            "has a step for each position, and needs rows.",
            "`packed` is for a Transformer that is not compiled: leave it out, or take another `model` or `level`",
            lambda s: s.packed and (s.level == 3 or s.model == "lstm"),
        ),
    )

    optimizer: OptimizerName = "adam"
    lr: PositiveFloat = 1e-3
    betas: tuple[Fraction, Fraction] | None = (0.9, 0.98)
    """Decay of the moments."""
    schedule: ScheduleName = "inverse-sqrt"
    warmup_steps: Annotated[int, Field(ge=0)] = 1000
    order: Order = "bucket"
    batch_cost: PositiveFloat | None = 4096
    """Tokens per step over all ranks, source and target and padding counted; with `global_batch` or `batch_per_device`
    alone, sentence pairs are counted instead."""
    monitor_mode: Literal["min", "max"] = free("max")
    """Whether a lower or a higher `monitor` is better; `min` if that is a loss."""

    @model_validator(mode="before")
    @classmethod
    def _own_batch(cls, values: Any) -> Any:
        """Count pairs if that is what is set."""
        by_pairs = isinstance(values, dict) and (values.get("global_batch") or values.get("batch_per_device"))
        return {**values, "batch_cost": None} if by_pairs and "batch_cost" not in values else values

    @model_validator(mode="before")
    @classmethod
    def _own_warmup(cls, values: Any) -> Any:
        """Drop the recipe's `warmup_steps` if `warmup_ratio` is set."""
        if isinstance(values, dict) and values.get("warmup_ratio") is not None and "warmup_steps" not in values:
            return {**values, "warmup_steps": 0}
        return values

    @model_validator(mode="before")
    @classmethod
    def _low_losses(cls, values: Any) -> Any:
        """Losses, smoothed or plain, are the better the lower."""
        monitor = values.get("monitor") if isinstance(values, dict) else None
        is_loss = str(monitor).rpartition("/")[2] in ("loss", "nll")
        return {**values, "monitor_mode": "min"} if is_loss and "monitor_mode" not in values else values

    @model_validator(mode="after")
    def _width_for_noam(self) -> TranslationSettings:
        """Noam's schedule asks for the model's width, which is known here."""
        if self.schedule == "noam" and self.model_size is None:
            object.__setattr__(self, "model_size", self.shape.width)
        return self

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for name in ("train", "val"):
            if len(getattr(self, f"{name}_source")) != len(getattr(self, f"{name}_target")):
                files = f"`{name}_source` and `{name}_target` need as many files each"
                yield f"{files}: line N of one is the translation of line N of the other"
        shape = self.shape
        if shape.kind == "transformer" and shape.width % shape.heads:
            yield f"`heads` {shape.heads} do not divide `width` {shape.width}: heads share the width evenly"

    def missing(self) -> Iterator[str]:
        yield from super().missing()
        if not (self.train_source or self.train_pairs):
            yield "set `train_source` and `train_target`, or `train_pairs`: what to train on"

    def idle(self) -> Iterator[str]:
        """Yield a line for settings that were changed and have no effect in this run."""
        reasons = (
            (self.model == "lstm", _OF_TRANSFORMERS, "`--model lstm` has no such part"),
            (self.tokenizer is not None, _OF_UNITS, "units are those of `--tokenizer`"),
        )
        for applies, names, reason in reasons:
            changed = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
            if applies and changed:
                words = " and ".join(f"`{name}`" for name in changed)
                yield f"{words} {'has' if len(changed) == 1 else 'have'} no effect: {reason}"

    def cautions(self) -> Iterator[str]:
        """Yield a line for settings that are allowed together, but hardly meant so."""
        is_small = self.lowercase and self.tokenizer is None
        if is_small and not self.bleu_lowercase and (self.val_source or self.val_pairs):
            yield "`lowercase` writes small letters, and BLEU compares them with capitals: set `--bleu-lowercase`, too"
