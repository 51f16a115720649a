"""Find and read the checkpoints of a run; format.py has their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.core.cloud.address import shown
from paceline.core.cloud.file_copy import bring_parts
from paceline.core.errors import Conflict, PacelineError
from paceline.train.checkpoint import pieces
from paceline.train.checkpoint.format import (
    DIGESTS,
    STATE,
    TENSORS,
    CheckpointBroken,
    by_score,
    check_file,
    check_parts,
    listed,
    no_digest,
    read_digests,
    read_state,
    score_of,
)
from paceline.train.checkpoint.snapshot import Digest

HEADS = (STATE, DIGESTS)


class PartMissing(PacelineError):
    """A sound checkpoint without a part that was asked for."""

    path: Path
    part: str
    have: Sequence[str]
    sentence = "{path} has no part {part!r}, it has {names}"
    hint = "take one of those, or a checkpoint of a run that keeps this part"

    @property
    def names(self) -> str:
        return ", ".join(self.have)


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint, as `load` read it."""

    step: int
    parts: dict[str, Mapping[str, Tensor]]
    """Memory-mapped: pages are read when touched, and changing a tensor does not change the file."""
    state: dict[str, Any]
    score: float | None
    path: Path


@dataclass(frozen=True)
class Found:
    """The checkpoint looked for, and the better ones that had to be skipped."""

    checkpoint: Checkpoint | None
    broken: list[CheckpointBroken]


@dataclass(frozen=True)
class LoadedNames:
    """Result of a load by name."""

    loaded: list[str]
    missing: list[str]
    """In the model only; these keep their values."""
    unexpected: list[str]
    """In the checkpoint only."""
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """In both, with other shapes: (the model's, the checkpoint's)."""

    def line(self, source: Path) -> str:
        """Return the result as a line for the console."""
        new = [*self.missing, *self.mismatched]
        names = ": " + ", ".join(new[:5]) + (", ..." if len(new) > 5 else "") if new else ""
        return f"{len(self.loaded)} weights from {shown(source)}, {len(new)} new{names}"


def load(path: Path, parts: Sequence[str] | None = None, verify: bool = True) -> Checkpoint:
    """Read a checkpoint, all parts or some.

    Sizes are always checked. `verify=False` leaves out the digests, for ranks that load what another has verified.
    """
    bring_parts(path, HEADS)
    digests = read_digests(path)
    check_file(path, STATE, digests[STATE], verify)
    state = read_state(path)
    check_parts(path, digests, state)
    files = _files_of(path, digests, parts)
    bring_parts(path, [name + TENSORS for name in files])
    for name in files:
        check_file(path, name + TENSORS, digests[name + TENSORS], verify)
    tensors = {name: _read_tensors(path, name + TENSORS) for name in files}
    return Checkpoint(state.step, pieces.join(tensors), state.state, state.score, path)


def _files_of(path: Path, digests: Mapping[str, Digest], parts: Sequence[str] | None) -> list[str]:
    """Return the names, without their ending, of the files that hold these parts, or all parts."""
    names = [file.removesuffix(TENSORS) for file in digests if file.endswith(TENSORS)]
    for name in pieces.missing(names):
        raise no_digest(path, name + TENSORS)
    have = list(dict.fromkeys(map(pieces.whole_name, names)))
    for part in parts or ():
        if part not in have:
            raise PartMissing(path, part, have)
    return [name for name in names if parts is None or pieces.whole_name(name) in parts]


def newest(folder: Path, parts: Sequence[str] | None = None) -> Found:
    """Load the newest sound checkpoint of a run."""
    return _first_sound(listed(folder), parts)


def best(folder: Path, parts: Sequence[str] | None = None) -> Found:
    """Load the sound checkpoint with the best score; which way is better is what the newest one says."""
    paths = listed(folder)
    modes = [mode for path in paths for score, mode in [score_of(path)] if score is not None]
    return _first_sound(by_score(paths, modes[0]) if modes else [], parts)


def load_by_name(model: nn.Module, tensors: Mapping[str, Tensor]) -> LoadedNames:
    """Copy the weights whose name and shape the model has; for fine-tuning, where heads or vocabularies differ."""
    weights = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    shapes = {name: (tuple(weights[name].shape), tuple(tensors[name].shape)) for name in weights if name in tensors}
    loaded = [name for name, (expected, stored) in shapes.items() if expected == stored]
    if not loaded:
        raise Conflict(
            f"no weight fits by name and shape: the model has {_first_names(list(weights))}; the checkpoint has "
            f"{_first_names(list(tensors))}",
            hint="check that the checkpoint is of the same kind of model; its names may have another prefix",
        )
    for name in loaded:
        weights[name].copy_(tensors[name])
    return LoadedNames(
        loaded=loaded,
        missing=[name for name in weights if name not in tensors],
        unexpected=[name for name in tensors if name not in weights],
        mismatched={name: pair for name, pair in shapes.items() if pair[0] != pair[1]},
    )


def _first_sound(paths: Sequence[Path], parts: Sequence[str] | None) -> Found:
    broken: list[CheckpointBroken] = []
    for path in paths:
        try:
            return Found(load(path, parts), broken)
        except CheckpointBroken as error:
            broken.append(error)
    return Found(None, broken)


def _read_tensors(path: Path, file: str) -> dict[str, Tensor]:
    try:
        return load_file(path / file)
    except (OSError, SafetensorError) as error:
        raise CheckpointBroken(path, file, f"is not a safetensors file: {error}") from error
