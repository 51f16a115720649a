"""Find and read the checkpoints of a run.

    <run>/checkpoints/step-00000120/
        model.safetensors, optimizer.safetensors, ...   one file per part, a part being a dict of named tensors
        model.shard-0-of-4.safetensors, ...             or one per part and rank: see pieces.py
        state.json                                      plain values: positions, counters, settings
        digests.json                                    size and xxh3_128 of every file above, written last

The folder is whole or it is not there; it is read by the safetensors library and the JSON parser, neither of which can
run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.train.checkpoint import pieces
from paceline.train.checkpoint.snapshot import Digest, digest_of

FORMAT = 1
STATE, DIGESTS, TENSORS = "state.json", "digests.json", ".safetensors"
# Names of folders that are no checkpoints. A replaced one counts until the one that replaces it has its name.
WRITING, REMOVING, REPLACED, LEFT = ".writing-", ".removing-", ".replaced-", "left-"
Mode = Literal["min", "max"]


class CheckpointBroken(PacelineError):
    """A checkpoint that is not what was written."""

    hint = "take an earlier checkpoint, or `--resume auto`, which takes the newest sound one"

    def __init__(self, path: Path, file: str, why: str) -> None:
        super().__init__(f"{path / file}: {why}")
        self.path, self.file, self.why = path, file, why


class PartMissing(PacelineError):
    """A sound checkpoint without a part that was asked for."""

    def __init__(self, path: Path, part: str, have: Sequence[str]) -> None:
        super().__init__(f"{path} has no part {part!r}, it has {', '.join(have)}")
        self.path, self.part, self.have = path, part, have
        self.hint = "take one of those, or a checkpoint of a run that keeps this part"


class NothingMatches(PacelineError):
    """Weights of which not one fits the model."""

    hint = "check that the checkpoint is of the same kind of model; its names may carry another prefix"

    def __init__(self, expected: Sequence[str], found: Sequence[str]) -> None:
        names = [", ".join(side[:3]) + (", ..." if len(side) > 3 else "") for side in (expected, found)]
        super().__init__(f"no weight fits by name and shape: the model has {names[0]}; the checkpoint has {names[1]}")
        self.expected, self.found = expected, found


@dataclass(frozen=True)
class Checkpoint:
    """What `load` read."""

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
    """What a load by name did to each name."""

    loaded: list[str]
    missing: list[str]
    """In the model only; these keep their values."""
    unexpected: list[str]
    """In the checkpoint only."""
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """In both, with other shapes: (the model's, the checkpoint's)."""

    def line(self, source: Path) -> str:
        """For the console."""
        new = [*self.missing, *self.mismatched]
        names = ": " + ", ".join(new[:5]) + (", ..." if len(new) > 5 else "") if new else ""
        return f"{len(self.loaded)} weights from {source}, {len(new)} new{names}"


def load(path: Path, parts: Sequence[str] | None = None, verify: bool = True) -> Checkpoint:
    """Read a checkpoint, all parts or some.

    Sizes are always checked. `verify=False` leaves out the digests, for ranks that load what another has verified.
    """
    entries = _read_json(path, DIGESTS)
    digests: dict[str, Digest] = {}
    for file, entry in entries.items():
        try:
            digests[file] = Digest(int(entry["bytes"]), str(entry["xxh3_128"]))
        except (TypeError, KeyError, ValueError):
            raise CheckpointBroken(path, DIGESTS, f"has no size and digest for {file}") from None
    files = [file.removesuffix(TENSORS) for file in digests if file.endswith(TENSORS)]
    for name in pieces.missing(files):
        raise CheckpointBroken(path, DIGESTS, f"has no size and digest for {name}{TENSORS}")
    have = list(dict.fromkeys(map(pieces.whole_name, files)))
    for part in parts or ():
        if part not in have:
            raise PartMissing(path, part, have)
    wanted = [file for file in files if parts is None or pieces.whole_name(file) in parts]
    if STATE not in digests:
        raise CheckpointBroken(path, DIGESTS, f"has no size and digest for {STATE}")
    for file in (STATE, *(part + TENSORS for part in wanted)):
        _check(path, file, digests[file], verify)
    document = _read_json(path, STATE)
    if document.get("format") != FORMAT:
        raise CheckpointBroken(path, STATE, f"has format {document.get('format')}, this version reads {FORMAT}")
    if missing := {"step", "score", "state"} - document.keys():
        raise CheckpointBroken(path, STATE, f"lacks {', '.join(sorted(missing))}")
    tensors = {part: _read_tensors(path, part + TENSORS) for part in wanted}
    return Checkpoint(document["step"], pieces.join(tensors), document["state"], document["score"], path)


def newest(folder: Path, parts: Sequence[str] | None = None) -> Found:
    """The newest sound checkpoint of a run."""
    return _first_sound(listed(folder), parts)


def best(folder: Path, parts: Sequence[str] | None = None) -> Found:
    """The sound checkpoint with the best score; which way is better is what the newest one says."""
    paths = listed(folder)
    modes = [mode for path in paths for score, mode in [_score_of(path)] if score is not None]
    return _first_sound(by_score(paths, modes[0]) if modes else [], parts)


def load_by_name(model: nn.Module, tensors: Mapping[str, Tensor]) -> LoadedNames:
    """Copy the weights whose name and shape the model has; for fine-tuning, where heads or vocabularies differ."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    shapes = {name: (tuple(own[name].shape), tuple(tensors[name].shape)) for name in own if name in tensors}
    loaded = [name for name, (expected, found) in shapes.items() if expected == found]
    if not loaded:
        raise NothingMatches(list(own), list(tensors))
    for name in loaded:
        own[name].copy_(tensors[name])
    return LoadedNames(
        loaded=loaded,
        missing=[name for name in own if name not in tensors],
        unexpected=[name for name in tensors if name not in own],
        mismatched={name: pair for name, pair in shapes.items() if pair[0] != pair[1]},
    )


def listed(folder: Path) -> list[Path]:
    """The folders that hold, or claim to hold, a checkpoint; newest first."""
    found: dict[int, Path] = {}
    for path in folder.glob("*step-*"):
        match = re.fullmatch(rf"({re.escape(REPLACED)})?step-(\d{{8,}})", path.name)
        if match and (match[1] is None or int(match[2]) not in found):
            found[int(match[2])] = path
    return [found[step] for step in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _score_of(path: Path) -> tuple[float | None, Mode]:
    """Score and mode; a checkpoint that cannot be read, or whose score is NaN, has none."""
    try:
        document = _read_json(path, STATE)
    except CheckpointBroken:
        return None, "min"
    score, mode = document.get("score"), document.get("mode")
    if isinstance(score, int | float) and score == score and mode in ("min", "max"):
        return score, mode
    return None, "min"


def by_score(paths: Sequence[Path], mode: Mode) -> list[Path]:
    """Those with a score, best first; of equals the newest, as `paths` are newest first."""
    scores = {path: score for path in paths for score, _ in [_score_of(path)] if score is not None}
    return sorted(scores, key=lambda path: scores[path] if mode == "min" else -scores[path])


def _first_sound(paths: Sequence[Path], parts: Sequence[str] | None) -> Found:
    broken: list[CheckpointBroken] = []
    for path in paths:
        try:
            return Found(load(path, parts), broken)
        except CheckpointBroken as error:
            broken.append(error)
    return Found(None, broken)


def _check(path: Path, file: str, expected: Digest, verify: bool) -> None:
    try:
        num_bytes = (path / file).stat().st_size
        if num_bytes != expected.num_bytes:
            raise CheckpointBroken(path, file, f"has {num_bytes} bytes instead of {expected.num_bytes}")
        if verify and digest_of(path / file) != expected:
            raise CheckpointBroken(path, file, "its content is not what was written (digest differs)")
    except OSError as error:
        raise CheckpointBroken(path, file, error.strerror or str(error)) from error


def _read_json(path: Path, file: str) -> dict[str, Any]:
    try:
        document = json.loads((path / file).read_bytes())
    except OSError as error:
        raise CheckpointBroken(path, file, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointBroken(path, file, f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointBroken(path, file, "is not a JSON object")
    return document


def _read_tensors(path: Path, file: str) -> dict[str, Tensor]:
    try:
        return load_file(path / file)
    except (OSError, SafetensorError) as error:
        raise CheckpointBroken(path, file, f"is not a safetensors file: {error}") from error
