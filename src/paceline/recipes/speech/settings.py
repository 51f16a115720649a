"""Every setting of speech recognition beside those of training itself, and the default recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

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
from paceline.core.run_folder import BrokenRecord, RunFolder, read_record
from paceline.core.together import SettingsExclusion
from paceline.recipes.speech.exchange.weights import front_end_of
from paceline.recipes.speech.network.config import NetworkInvalid, NetworkSettings, Trim, read_network, read_trim
from paceline.recipes.speech.network.transducer.settings import TransducerSettings, usual_sizes
from paceline.recipes.speech.sound.features import FrontEnd
from paceline.recipes.speech.sound.perturb import PerturbSettings
from paceline.recipes.speech.text.labels import Labels, TextMode, read_labels

OPTIMIZER: OptimizerName = "novograd"
BETAS = (0.95, 0.5)
"""QuartzNet's, where NovoGrad's own are 0.95, 0.25."""
VOCABULARY = 128
"""Subwords of `--labels bpe`: few enough for hours of speech, and about 2 characters long."""
HEADS = ("ctc", "transducer", "hybrid")
Finite = Annotated[float, Field(allow_inf_nan=False)]
Network = Annotated[NetworkSettings, BeforeValidator(read_network)]


class SpeechSettings(Section):
    """What is heard and what is trained on it."""

    aliases: ClassVar[dict[str, str]] = {
        "model_config": "network",
        "train_dataset": "train_manifest",
        "eval_datasets": "val_manifest",
        "min_duration": "min_seconds",
        "max_duration": "max_seconds",
    }

    network: Network = "quartznet15x5"  # type: ignore[assignment]
    """Network, front end and labels: a shipped name (quartznet15x5, fastconformer-s, conformer-m, jasper10x5dr, small,
    ...) or a YAML file, NeMo's too."""
    spec_augment: bool = True
    """Mask parts of the spectrogram in training, as the network's file says."""
    head: Literal["ctc", "transducer", "hybrid"] | None = free(None)
    """What reads labels off the encoder and gives the loss, instead of what the network's file has: CTC, a transducer
    (RNN-T), or a transducer with CTC beside it in training."""
    ctc_weight: Fraction = 0.3
    """Share of CTC in the loss of a hybrid."""
    fastemit: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Let a transducer write labels earlier: this share more of their gradients, which is 0.001 to 0.01 in practice
    (FastEmit)."""
    interctc_layers: tuple[int, ...] = ()
    """Layers of a Conformer, counted from 0, that the decoder reads in training beside the last one (InterCTC)."""
    interctc_weight: Fraction = 0.3
    """Share of the loss that `interctc_layers` make together."""
    cr_ctc_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Train on two differently masked views of each utterance, and weigh the divergence between them by this, which is
    0.2 in the paper (CR-CTC); 0: one view. Twice the work per step."""
    train_manifest: tuple[AbsolutePlace, ...] = ()
    """Manifests to train on, or packed files (.h5), with commas between them: together one data set."""
    val_manifest: tuple[SetWord, ...] = ()
    """Manifests or packed files to validate on, each a set of its own, named by its file or as `name=file.json`;
    several files of one set are `name=a.json+b.h5`."""
    min_seconds: Annotated[float, Field(ge=0)] = 0.1
    """Shorter training utterances are dropped."""
    max_seconds: PositiveFloat | None = 16.7
    """Longer training utterances are dropped; validation keeps all."""
    max_utterances: Positive | None = None
    """Train on the first so many only."""
    new_decoder: bool = False
    """With `init_from`: take the encoder only and start with a new last layer, for other labels."""
    labels: str | None = free(None)
    """Characters that the network writes, as one text (`--labels " abcdefghijklmnopqrstuvwxyzäöüß'"`), instead of those
    of its file; or a text file (.txt) with them."""
    vocabulary: Positive | None = None
    """Write so many subwords (BPE) instead of characters: learned from the training transcripts, made of `labels`,
    stored with the run. `--labels bpe` alone learns 128."""
    tokenizer: AbsolutePlace | None = free(None)
    """Write the subwords of a SentencePiece model (tokenizer.model), of a folder that NeMo made (or vocab.txt of word
    pieces), of a run or an export, or of a .nemo archive."""
    trim_silence: Trim | None = Field(default=None, json_schema_extra={"free": True, "bare": "all"})
    """Cut off the silence at both ends of recordings (60 dB below the loudest part, as NeMo does): of training data
    (`train`) or of all that the model hears (`all`, or no value); as the network's file says if not set. Limits of
    duration and batches by length count recordings as they are in the manifest."""
    front_end: FrontEnd | None = free(None)
    """Version of NeMo whose frames and edges the features have (`nemo-0.11`, `nemo-1.0`: 1.0 to 2.4, `nemo-2.5`); if
    not set, that of the network's file, or of the archive that `init_from` names."""
    text_rules: TextMode = "en"
    """How transcripts are brought to the labels: English (numbers as words), spelling only, or not at all."""


class UseSettings(Section):
    """What may be chosen anew whenever a model is used."""

    aliases: ClassVar[dict[str, str]] = {"beam": "beam_width"}

    decoder: Literal["greedy", "beam"] = free("greedy")
    """How letters are read off the network's output."""
    max_symbols: Positive = free(10)
    """Labels that a transducer may write in one frame."""
    beam_width: Annotated[int, Field(gt=0, le=10_000)] = free(16)
    """Hypotheses that the beam decoder keeps (`--beam` for short)."""
    lm: AbsolutePlace | None = free(None)
    """Language model for the beam decoder: an ARPA file (.arpa, .arpa.gz; `paceline lm` makes one of text) or a binary
    of KenLM."""
    lm_weight: Finite = free(0.5)
    """Factor of the language model's log-probabilities."""
    word_bonus: Finite = free(1.5)
    """Added for each word where a language model is used, which else prefers few words."""
    hotwords: tuple[str, ...] = free(())
    """Words to be heard rather than others, with commas between them, for the beam decoder; the language model need not
    know them."""
    hotword_weight: Finite = free(10.0)
    """Added for each hot word."""
    bad_data: Literal["stop", "skip"] = free("stop")
    """Whether a bad line or file ends the run before it starts, or is left out and listed. Of a file whose damage shows
    only when it is read whole: whether it ends the run then, or adds nothing to it."""
    max_lost_words: Annotated[float, Field(ge=0, le=1)] = free(0.01)
    """Largest share of a data set's words that may lose letters because these are no labels; fewer are reported, more
    refused."""
    max_too_short: Annotated[float, Field(ge=0, le=1)] = free(0.5)
    """Largest share of the training utterances that may have fewer frames at the network's output than their
    transcripts need: they add nothing. Fewer are reported, more refused."""
    long_s: PositiveFloat = free(120.0)
    """Audio files longer than this are transcribed in windows by `infer`, with times and in constant memory."""
    window_s: PositiveFloat = free(30.0)
    """Seconds of a long recording that are read at a time."""
    overlap_s: Annotated[float, Field(ge=0)] = free(4.0)
    """Seconds that are heard before each window and behind it, for context; of live audio, before each chunk."""
    chunk_s: PositiveFloat = free(0.5)
    """Seconds of live audio (`infer RUN -`) that become text at a time."""
    lookahead_s: Annotated[float, Field(ge=0)] = free(1.0)
    """Seconds of live audio that are heard behind each chunk before its text is final."""
    pause_s: Annotated[float, Field(ge=0)] = free(0.5)
    """Seconds without a letter that end a word of long or live audio; 0: only a space does."""
    stream_norm: Literal["auto", "file", "running", "window"] = free("auto")
    """Mean and deviation that features of long and live audio are normalized by: of the whole file, of the last minute,
    or of each window; `auto` is `file` for files, and `running` for live audio."""
    rate: Annotated[int, Field(ge=1000, le=768000)] | None = free(None)
    """Sample rate of raw audio on standard input; the model's if not set. A WAV says its own."""
    check_audio: bool = free(True)
    """Look at every audio file before the first step: is it there, whole, and as long as the manifest says."""

    @classmethod
    def forgotten(cls, typed: Mapping[str, Any]) -> frozenset[str]:
        """`--decoder greedy` alone leaves out the language model and the hot words that the run was validated with."""
        unused = {"lm", "hotwords"} if typed.get("decoder") == "greedy" else set[str]()
        return super().forgotten(typed) | unused


class AsrSettings(SpeechSettings, PerturbSettings, UseSettings, TrainConfig):
    """Settings of `paceline train asr`. The defaults are QuartzNet's recipe: NovoGrad, cosine with warm-up."""

    exclusions: ClassVar[tuple[SettingsExclusion, ...]] = (
        SettingsExclusion(
            "the recipe `asr`",
            "`--train-files`, `--val-files`",
            "one thing twice",
            "Its packed files are named by `--train-manifest` and `--val-manifest`, as its manifests are.",
            "packed files go into `train_manifest` and `val_manifest` here, not `train_files` and `val_files`",
            lambda s: bool(s.train_files or s.val_files),
        ),
        SettingsExclusion(
            "`--vocabulary`",
            "`--tokenizer`",
            "one thing twice",
            "One learns subwords from the transcripts, the other takes those of a file.",
            "`vocabulary` learns subwords, `tokenizer` takes those of a file: set one of them",
            lambda s: s.vocabulary is not None and s.tokenizer is not None,
        ),
        SettingsExclusion(
            "`--cr-ctc-weight`",
            "a transducer",
            "mathematics",
            "The divergence is between outputs of CTC in the same frame; those of a transducer depend on its labels.",
            "`cr_ctc_weight` compares outputs of CTC, which a transducer has not: train with `--head ctc`",
            lambda s: bool(s.cr_ctc_weight) and s.network.transducer is not None,
        ),
    )

    optimizer: OptimizerName = OPTIMIZER
    lr: PositiveFloat = 0.01
    betas: tuple[Fraction, Fraction] | None = None
    """Decay of the moments; if not set, 0.95, 0.5 with NovoGrad, and 0.9, 0.999 with the others."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.001
    schedule: ScheduleName = "cosine"
    warmup_ratio: Fraction | None = 0.05
    order: Order = "bucket"

    @model_validator(mode="before")
    @classmethod
    def _into_network(cls, values: Any) -> Any:
        """Put `labels`, `trim_silence`, `front_end` and `head` into the network, where everything looks for them."""
        if not isinstance(values, dict):
            return values
        changes: dict[str, Any] = {}
        if values.get("labels") == "bpe":
            values = {"vocabulary": VOCABULARY, **values, "labels": None}
        if isinstance(values.get("labels"), str | list | tuple):
            text = read_labels(values["labels"])
            values = {**values, "labels": text}
            changes["labels"] = Labels(tuple(text)).symbols
        if read_trim(values.get("trim_silence")) in ("no", "train", "all"):
            changes["trim_silence"] = read_trim(values["trim_silence"])
        front_end = values.get("front_end") or _front_end_of_weights(values)
        head = values.get("head")
        if not changes and front_end not in get_args(FrontEnd) and head not in HEADS:
            return values
        try:
            network = read_network(values.get("network", cls.model_fields["network"].default))
        except NetworkInvalid:
            return values
        if front_end in get_args(FrontEnd) and (
            values.get("front_end") or "front_end" not in network.features.model_fields_set
        ):
            changes["features"] = network.features.model_copy(update={"front_end": front_end})
        if head in HEADS:
            changes["transducer"] = with_head(network, head)
        return {**values, "network": network.model_copy(update=changes)}

    @model_validator(mode="before")
    @classmethod
    def _own_warmup(cls, values: Any) -> Any:
        """Drop the recipe's `warmup_ratio` if `warmup_steps` is set."""
        if isinstance(values, dict) and "warmup_steps" in values and "warmup_ratio" not in values:
            return {**values, "warmup_ratio": None}
        return values

    @model_validator(mode="before")
    @classmethod
    def _betas_of_novograd(cls, values: Any) -> Any:
        """Set QuartzNet's betas for NovoGrad only: another optimizer has its own."""
        is_recipe = isinstance(values, dict) and values.get("optimizer", OPTIMIZER) == OPTIMIZER
        return {**values, "betas": BETAS} if is_recipe and "betas" not in values else values

    @model_validator(mode="before")
    @classmethod
    def _recipe_of_network(cls, values: Any) -> Any:
        """Train as the network's file advises, where nothing else is set; another optimizer has its own rates."""
        network = values.get("network") if isinstance(values, dict) else None
        if not isinstance(network, str | Path | NetworkSettings):
            return values
        try:
            recipe = dict(read_network(network).recipe)
        except NetworkInvalid:
            return values  # told when the field is read, with its place and the other mistakes
        unknown = [name for name in recipe if name not in cls.model_fields or name == "network"]
        if unknown:
            raise ValueError(
                f"{unknown[0]}: there is no such setting of training, in the `recipe` of the network's file"
            )
        if values.get("optimizer", recipe.get("optimizer")) != recipe.get("optimizer"):
            recipe = {name: value for name, value in recipe.items() if name not in ("lr", "betas", "weight_decay")}
        if "warmup_steps" in values:
            recipe.pop("warmup_ratio", None)
        return {**recipe, **values}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        conformer = self.network.conformer
        if self.interctc_layers and conformer is None:
            yield "`interctc_layers` needs a Conformer: blocks of convolutions have widths that the decoder cannot read"
        elif conformer is not None:
            last = conformer.n_layers - 2
            wrong = [layer for layer in self.interctc_layers if not 0 <= layer <= last]
            if wrong:
                yield f"`interctc_layers` are 0 to {last} of this network, below its last layer, not {wrong[0]}"
            if len(set(self.interctc_layers)) < len(self.interctc_layers):
                yield "`interctc_layers` names a layer twice"
        transducer = self.network.transducer
        if self.interctc_layers and transducer is not None and not transducer.ctc:
            yield "`interctc_layers` are read by CTC, which a transducer has not: set `--head hybrid`"
        if self.fastemit and transducer is None:
            yield "`fastemit` is for transducers: set `--head transducer`"
        if self.cr_ctc_weight and not self.spec_augment:
            yield "`cr_ctc_weight` compares two sets of masks, and `spec_augment` is off"

    def missing(self) -> Iterator[str]:
        yield from super().missing()
        if not self.train_manifest:
            yield "set `train_manifest`: what to train on (`paceline manifest scan FOLDER` makes one)"


def with_head(network: NetworkSettings, head: str) -> TransducerSettings | None:
    """Return the transducer that a network has with this head: its file's, or one of the usual sizes."""
    if head == "ctc":
        return None
    is_hybrid = head == "hybrid"
    if network.transducer is not None:
        return network.transducer.model_copy(update={"ctc": is_hybrid})
    return usual_sizes(network.channels[-1], ctc=is_hybrid)


def _front_end_of_weights(values: dict[str, Any]) -> str | None:
    """Return the front end of the archive or export that a new run takes its weights from, if the network is one that
    a file or a name stands for; a run that goes on has chosen."""
    path, network, out = values.get("init_from"), values.get("network"), values.get("out")
    if not isinstance(path, str | Path) or not str(path) or not isinstance(network, str | Path | None):
        return None
    if isinstance(out, str | Path) and RunFolder(Path(out)).is_run and values.get("resume", "no") != "no":
        try:
            stored = read_record(Path(out)).settings["network"]["features"]
        except (OSError, BrokenRecord, KeyError, TypeError):
            return None  # whoever opens the run says why
        return str(stored.get("front_end", "nemo-0.11"))
    return front_end_of(Path(path))
