"""An acoustic network as settings: labels, front end, augmentation and the list of blocks, read from YAML.

The block list is NeMo's (Jasper: arXiv 1904.03288, QuartzNet: arXiv 1910.10261). `read_network` takes the name of a
shipped network, a file in our own form or in NeMo's, or what a run has stored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from paceline.config.problems import Problem, nearest
from paceline.config.settings import Fraction, Positive, Section
from paceline.config.yaml_text import NotYaml, read_yaml_text
from paceline.core.errors import PacelineError
from paceline.recipes.speech.exchange.document import Document, Location, parse
from paceline.recipes.speech.exchange.nemo_yaml import Translated, is_nemo, translate, unread
from paceline.recipes.speech.network.conformer.settings import ConformerSettings
from paceline.recipes.speech.network.frames import strided_length
from paceline.recipes.speech.network.transducer.settings import TransducerSettings
from paceline.recipes.speech.sound.features import FeatureSettings
from paceline.recipes.speech.sound.spec_augment import SpecAugmentSettings
from paceline.recipes.speech.text.pieces import check_symbols, from_wordpiece

ENGLISH = (" ", *"abcdefghijklmnopqrstuvwxyz", "'")
"""NeMo's 28 labels; the blank of CTC comes after them."""
ALSO_CALLED = {"jasper15x5sep": "quartznet15x5"}
"""NeMo's own earlier names of shipped networks."""


RECIPE = "recipe"
"""Section of a network's file with settings of training."""


class NetworkInvalid(PacelineError, ValueError):
    """A network that cannot be built, with every reason. Also a ValueError, so that settings can hold networks."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        self.name, self.problems = name, tuple(problems)
        if len(problems) == 1:
            super().__init__(str(problems[0]))
            self.hint = problems[0].hint
            return
        lines = [f"{len(problems)} mistakes in the network {name}"]
        for problem in problems:
            lines.append(f"  {problem}")
            lines += [f"    {problem.hint}"] if problem.hint else []
        super().__init__("\n".join(lines))


def read_trim(value: Any) -> Any:
    """Take yes and no, too: true is `all`."""
    return {"true": "all", "yes": "all", "false": "no"}.get(str(value).lower(), value)


Trim = Annotated[Literal["no", "train", "all"], BeforeValidator(read_trim)]


def _only_entry(value: Any) -> Any:
    """NeMo writes kernel, stride and dilation as lists with one entry."""
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError(f"must be one number, not {len(value)}: sound has one axis of time")
        return value[0]
    return value


MAX_WEIGHTS = 4_000_000_000
"""Of one network; the largest speech models of this kind have 0.6 billion."""
Width = Annotated[int, Field(gt=0, le=100_000)]
"""Size of a layer: a slip of the keyboard in a file is told from a network."""
One = Annotated[Width, BeforeValidator(_only_entry)]


class BlockSettings(Section):
    """One block: `repeat` sub-blocks of convolution, batch norm, activation and dropout."""

    filters: Width
    """Channels it puts out."""
    kernel: One
    """Width of the convolution in frames; odd."""
    repeat: Annotated[int, Field(gt=0, le=1000)] = 1
    """Sub-blocks."""
    stride: One = 1
    """Every so many frames are kept."""
    dilation: One = 1
    """Frames between the taps of the kernel."""
    dropout: Fraction = 0.0
    """Share of activations dropped in training, after each sub-block."""
    residual: bool = False
    """Add the block's input, through a 1x1 convolution and a batch norm, before the last activation."""
    residual_dense: bool = False
    """Add the inputs of all dense blocks directly before this one as well (Jasper DR)."""
    separable: bool = False
    """Split the convolution into one per channel over time and one over channels at each frame."""
    groups: Positive = 1
    """Groups of channels that the convolution over channels keeps apart; they are shuffled after it."""
    se: bool = False
    """Squeeze and excite: weigh channels by their mean over the utterance, before the residual is added."""
    se_reduction_ratio: Positive = 16
    """How much narrower the middle of squeeze and excite is."""

    @model_validator(mode="after")
    def _buildable(self) -> BlockSettings:
        wrong = []
        if self.kernel % 2 == 0:
            wrong.append(f"kernel {self.kernel} is even and has no middle frame: take {self.kernel + 1}, as NeMo does")
        if self.stride > 1 and self.dilation > 1:
            wrong.append(f"stride {self.stride} and dilation {self.dilation} cannot be combined: one of them must be 1")
        if self.stride > 1 and self.residual:
            wrong.append(
                f"stride {self.stride} leaves another length than the residual has: give the stride a block of its own"
            )
        if self.stride > 1 and self.repeat > 1:
            wrong.append(
                f"stride {self.stride} in each of {self.repeat} sub-blocks would shorten the utterance "
                f"{self.stride**self.repeat}-fold: give the stride a block of its own, with repeat 1"
            )
        if self.residual_dense and not self.residual:
            wrong.append("residual_dense needs residual: true")
        if self.filters % self.groups:
            wrong.append(f"groups {self.groups} do not divide its {self.filters} filters")
        if self.se and self.filters < self.se_reduction_ratio:
            wrong.append(f"se_reduction_ratio {self.se_reduction_ratio} leaves nothing of {self.filters} filters")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class NetworkSettings(Section):
    """All that makes an acoustic model beside its weights."""

    sample_rate: Annotated[int, Field(gt=0, le=1_000_000)] = 16000
    """Samples per second that the network hears."""
    labels: tuple[str, ...] = ENGLISH
    """What it writes: characters, or subwords with `▁` at the beginning of a word; class `len(labels)` is the blank."""
    trim_silence: Trim = "no"
    """Silence cut off both ends of recordings before they are heard: in training (`train`), or wherever the network is
    used (`all`)."""
    features: FeatureSettings = FeatureSettings(n_fft=512)
    """From sound to mels."""
    spec_augment: SpecAugmentSettings = SpecAugmentSettings()
    """What is hidden of the mels in training."""
    activation: Literal["relu", "hardtanh", "selu", "swish"] = "relu"
    """After each batch norm."""
    conv_mask: bool = True
    """Set frames behind an utterance's end to 0 before each convolution, so that padding changes nothing."""
    init_mode: Literal["xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"] = "xavier_uniform"
    """How weights are drawn at the start."""
    blocks: tuple[BlockSettings, ...] = ()
    """From the mels upwards, of a network of convolutions."""
    conformer: ConformerSettings | None = None
    """A Conformer instead of blocks; the settings between `spec_augment` and `blocks` have no effect on it."""
    transducer: TransducerSettings | None = None
    """A transducer (RNN-T) instead of CTC."""
    _unread: str = PrivateAttr("")
    _recipe: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def unread(self) -> str:
        """What of its file was not read, in words; empty where all was, and in a network that a run has stored."""
        return self._unread

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Settings of training that its file advises; a network that a run has stored has none, the run has them."""
        return self._recipe

    def __eq__(self, other: object) -> bool:
        """Compare the networks, not the files."""
        return isinstance(other, NetworkSettings) and self.__dict__ == other.__dict__

    def trims(self, *, is_training: bool) -> bool:
        """Return True if recordings are trimmed: those of training, or all others."""
        return self.trim_silence == "all" or (is_training and self.trim_silence == "train")

    @model_serializer(mode="wrap")
    def _only_if_trimmed(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what earlier versions did not know, where it changes nothing: their runs go on."""
        values: dict[str, Any] = dump(self)
        if values.get("trim_silence") == "no":
            del values["trim_silence"]
        if values.get("conformer") is None:
            values.pop("conformer", None)
        else:
            values.pop("blocks", None)
        if values.get("transducer") is None:
            values.pop("transducer", None)
        return values

    @field_validator("labels", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, str) else value

    @field_validator("labels", mode="after")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        labels = from_wordpiece(labels)
        check_symbols(labels)
        return labels

    @model_validator(mode="after")
    def _joined(self) -> NetworkSettings:
        if self.conformer is None and not self.blocks:
            raise ValueError("`blocks` must be at least one block, or there must be a `conformer`")
        if self.conformer is not None and self.blocks:
            raise ValueError("`blocks` and `conformer` are two networks: keep one of them")
        if self.conformer is not None:
            of_blocks = ("activation", "conv_mask", "init_mode")
            fields = type(self).model_fields
            idle = [name for name in of_blocks if getattr(self, name) != fields[name].default]
            if idle:
                raise ValueError(f"{idle[0]} is a setting of `blocks`: it has no effect on a `conformer`")
        wrong = [
            f"block {number}: groups {block.groups} do not divide the {channels} channels it gets"
            for number, (block, channels) in enumerate(zip(self.blocks, self.channels, strict=False), 1)
            if channels % block.groups
        ]
        if self.num_weights > MAX_WEIGHTS:
            wrong.append(f"the layers have about {self.num_weights:,} weights, more than {MAX_WEIGHTS:,}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def num_weights(self) -> int:
        """Weights of the products, groups and residuals left out."""
        transducer = self.transducer
        decoder = 0 if transducer is None else transducer.num_weights(self.channels[-1], self.num_classes)
        if self.conformer is not None:
            return decoder + self.conformer.num_weights(self.features.num_mels)
        return decoder + sum(
            block.repeat * block.filters * max(channels, block.filters) * (1 if block.separable else block.kernel)
            for block, channels in zip(self.blocks, self.channels, strict=False)
        )

    @property
    def channels(self) -> tuple[int, ...]:
        """Input channels of each block, then the output channels of the last one."""
        if self.conformer is not None:
            return self.features.num_mels, self.conformer.d_model
        return (self.features.num_mels, *(block.filters for block in self.blocks))

    @property
    def num_classes(self) -> int:
        """Labels and the blank."""
        return len(self.labels) + 1

    def output_length(self, frames: int) -> int:
        """Frames that come out for so many mel frames of an utterance."""
        if self.conformer is not None:
            return self.conformer.output_length(frames)
        return functools.reduce(strided_length, (block.stride for block in self.blocks), frames)


def shipped_names() -> list[str]:
    """The networks that come with Paceline."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def read_network(what: str | Path | Mapping[str, Any] | NetworkSettings) -> NetworkSettings:
    """A shipped name, a YAML file (ours or NeMo's), an archive of NeMo's, a mapping of the same form, or settings as
    they are."""
    if isinstance(what, NetworkSettings):
        return what
    if isinstance(what, Mapping):
        return build_network(Document("network", what, {}))
    if not isinstance(what, str | Path):
        hint = f"shipped: {', '.join(shipped_names())}"
        raise NetworkInvalid(str(what), [Problem("network", "must be a name, a file or a mapping", hint, repr(what))])
    given = str(what)
    name = _name(given)
    # A bare name is a shipped network even where a folder is called the same; with a suffix, an existing file wins.
    if name in shipped_names() and not (given.endswith(".yaml") and Path(given).is_file()):
        return _shipped(name)
    return _of_archive(Path(what)) if given.endswith(".nemo") else build_network(read_document(Path(what)))


def _of_archive(path: Path) -> NetworkSettings:
    """Return the network of a .nemo archive, without its weights."""
    from paceline.recipes.speech.exchange.nemo import NotANemoArchive, read_nemo_network  # it imports this module

    try:
        return read_nemo_network(path)
    except NotANemoArchive as error:
        raise NetworkInvalid(str(path), [Problem(str(path), error.why, error.hint)]) from None


def read_document(path: Path) -> Document:
    """A YAML file of a network; a folder stands for its `network.yaml`."""
    if path.is_dir():
        path = path / "network.yaml"
    try:
        return parse(str(path), read_yaml_text(path))
    except FileNotFoundError:
        raise NetworkInvalid(str(path), [_unknown(path)]) from None
    except UnicodeDecodeError:
        raise NetworkInvalid(str(path), [Problem(str(path), "is not a text file")]) from None
    except OSError as error:
        raise NetworkInvalid(str(path), [Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except NotYaml as error:
        raise NetworkInvalid(str(path), [error.problem]) from None


def _name(given: str) -> str:
    """Return the shipped name of a network."""
    name = given.removesuffix(".yaml")
    return ALSO_CALLED.get(name.lower(), name)


@functools.cache
def _shipped(name: str) -> NetworkSettings:
    return build_network(parse(f"{name}.yaml", (_folder() / f"{name}.yaml").read_text(encoding="utf-8")))


def _folder() -> Any:
    return resources.files("paceline.recipes.speech.network") / "shipped"


def build_network(document: Document) -> NetworkSettings:
    """The network that a document of any of the forms describes."""
    value = document.value
    if not isinstance(value, Mapping):
        raise NetworkInvalid(document.name, [Problem(document.name, "must hold lines of the form `name: value`")])
    if is_nemo(value):
        ours = translate(document)
    elif "blocks" in value or "conformer" in value:
        ours = Translated({name: each for name, each in value.items() if name != RECIPE})
    else:
        what = "is no network: it has neither `blocks`, `conformer` nor NeMo's `JasperEncoder` or `encoder`"
        near = {key: nearest(str(key), ["blocks", "conformer", "JasperEncoder", "encoder"]) for key in value}
        hint = next((f"{key}: did you mean {meant}?" for key, meant in near.items() if meant), "")
        raise NetworkInvalid(document.name, [Problem(document.name, what, hint)])
    problems = [*document.repeated, *ours.problems]
    recipe = {} if is_nemo(value) else value.get(RECIPE) or {}
    if not isinstance(recipe, Mapping):
        problems.append(Problem(document.where((RECIPE,)), "must hold lines of the form `name: value`"))
        recipe = {}
    try:
        network = NetworkSettings.model_validate(ours.values)
    except ValidationError as error:
        problems += _problems(error, document, ours)
    if problems:
        raise NetworkInvalid(document.name, problems)
    network._recipe = {str(name): setting for name, setting in recipe.items()}
    sections = unread(value) if is_nemo(value) else []
    if sections:
        network._unread = f"{document.name}: not read here: {', '.join(sections)}; these are settings of the run"
    return network


def _problems(error: ValidationError, document: Document, ours: Translated) -> list[Problem]:
    """One problem per wrong value, with the line and the name it has in the document."""
    found: dict[Location, list[Any]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_own_part(detail["loc"]), []).append(detail)
    problems = []
    for location, details in found.items():
        given = details[0]["input"]
        shown = str(given) if isinstance(given, str | int | float | list) and len(str(given)) < 60 else ""
        where = document.where(ours.origin(location))
        if details[0]["type"] == "extra_forbidden":
            fields = _model_at(location).model_fields
            meant = nearest(str(location[-1]), fields)
            hint = f"did you mean {meant}?" if meant else f"there are: {', '.join(fields)}"
            problems.append(Problem(where, "there is no such setting", hint, shown))
        elif details[0]["type"] == "missing":
            problems.append(Problem(document.where(ours.origin(location[:-1])), f"{location[-1]} is missing"))
        else:
            what = ", or ".join(dict.fromkeys(_phrase(detail) for detail in details))
            problems.append(Problem(where, what, given=shown))
    return problems


def _phrase(detail: Any) -> str:
    own = detail.get("ctx", {}).get("error")
    if own is not None:
        return str(own)
    message = re.sub(r"^(Input|Value) should be ", "must be ", str(detail["msg"]))
    return message[0].lower() + message[1:]


def _own_part(location: tuple[int | str, ...]) -> Location:
    """Down to a setting, without the names that pydantic gives to the types a setting may have."""
    depth = {"blocks": 3, "conformer": 2, "transducer": 2, "features": 2, "spec_augment": 2, "labels": 2}
    return location[: depth.get(str(location[0]), 1)] if location else ()


def _model_at(location: Location) -> type[BaseModel]:
    """The settings that a key at this place belongs to."""
    inner: dict[Any, type[BaseModel]] = {
        "features": FeatureSettings,
        "spec_augment": SpecAugmentSettings,
        "blocks": BlockSettings,
        "conformer": ConformerSettings,
        "transducer": TransducerSettings,
    }
    return inner.get(location[0], NetworkSettings) if len(location) > 1 else NetworkSettings


def _unknown(path: Path) -> Problem:
    name, names = _name(path.name), shipped_names()
    if name in names:
        return Problem(str(path), "there is no such file", f"a network of this name is shipped: type {name} alone")
    meant = nearest(name, [*names, *ALSO_CALLED])
    hint = f"did you mean {meant}?" if meant else f"shipped: {', '.join(names)}; or give a YAML file"
    return Problem(str(path), "is neither a file nor a shipped network", hint)
