"""Oracles on run folders: read what a run left, compare it with what an undisturbed one left. Pure but for reading."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.train.checkpoint import reader

_UNSTABLE = ("seconds", "time", "so_far", "world_size", "about", "choice")
"""Keys of state and records that may differ between equal runs: times, and who computed it."""
_ASIDE = (".writing", ".removing-", ".replaced-")


@dataclass(frozen=True)
class RunFacts:
    """What a run has left."""

    status: str
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    epochs: list[tuple[int, int]]
    """(epoch, step) of each record."""
    newest_step: int
    parts: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]


def read_run(folder: Path) -> RunFacts:
    """Read a run and its newest checkpoint, which must be sound."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds: dict[str, list[dict[str, Any]]] = {"step": [], "validation": [], "epoch": []}
    for line in lines:
        kinds.setdefault(line["kind"], []).append(line)
    found = reader.newest(folder / "checkpoints")
    assert found.checkpoint is not None, f"no sound checkpoint in {folder}: {found.broken}"
    assert not found.broken, found.broken
    checkpoint = found.checkpoint
    return RunFacts(
        status=status_of(folder),
        steps=kinds["step"],
        validations=[_stable(record) for record in kinds["validation"]],
        epochs=[(record["epoch"], record["step"]) for record in kinds["epoch"]],
        newest_step=checkpoint.step,
        parts={
            part: {name: tensor.clone() for name, tensor in each.items()} for part, each in checkpoint.parts.items()
        },
        state={name: checkpoint.state[name] for name in ("engine", "position")},
    )


def _copied(parts: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
    return {part: {name: tensor.clone() for name, tensor in tensors.items()} for part, tensors in parts.items()}


def status_of(folder: Path) -> str:
    """Return the status in the record, `none` without one."""
    try:
        return str(json.loads((folder / "run.json").read_text())["status"])
    except FileNotFoundError:
        return "none"


def _stable(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _UNSTABLE}


def differences(run: RunFacts, expected: RunFacts, tolerance: float) -> list[str]:
    """Return how a finished run differs from the undisturbed one; `tolerance` 0 asks for the same bits."""
    troubles = []
    if run.status != "finished":
        troubles.append(f"status {run.status!r} instead of 'finished'")
    numbers, wanted = [step["step"] for step in run.steps], [step["step"] for step in expected.steps]
    if numbers != wanted:
        troubles.append(f"steps in the journal: {_runs_of(numbers)} instead of {_runs_of(wanted)}")
    elif (worst := _worst_loss(run.steps, expected.steps)) > tolerance * 10:
        troubles.append(f"losses in the journal differ by {worst:.1e}")
    if run.epochs != expected.epochs:
        troubles.append(f"epochs in the journal: {run.epochs} instead of {expected.epochs}")
    seen, meant = [(v["step"]) for v in run.validations], [(v["step"]) for v in expected.validations]
    if seen != meant:
        troubles.append(f"validations in the journal after steps {seen} instead of {meant}")
    elif tolerance == 0 and run.validations != expected.validations:
        troubles.append("validations differ")
    if run.newest_step != expected.newest_step:
        troubles.append(f"newest checkpoint of step {run.newest_step} instead of {expected.newest_step}")
    if tolerance == 0 and run.state != expected.state:
        troubles.append(f"state differs: {_first_difference(run.state, expected.state)}")
    return troubles + tensor_differences(run.parts, expected.parts, tolerance)


def line_differences(folder: Path, other: Path) -> list[str]:
    """Return the first lines on steps, epochs and validations that are not the same; times, rates and ranks aside."""
    return [
        f"the {kind} lines of {folder.name} and {other.name} differ: {mine!r} instead of {meant!r}"
        for kind, names in _LINES.items()
        for mine, meant in _unequal(_lines(folder, kind, names), _lines(other, kind, names))[:1]
    ]


_LINES: Mapping[str, Sequence[str]] = {
    "step": (),
    "validation": (),
    "epoch": ("step", "epoch", "steps", "loss", "samples"),
}
"""Keys that equal runs have equal, by kind of line; where none is named all but times and what one rank cannot have."""


def _lines(folder: Path, kind: str, names: Sequence[str]) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    aside = ("time", "seconds", "spread")
    return [
        {name: value for name, value in line.items() if (name in names if names else name not in aside)}
        for line in lines
        if line["kind"] == kind
    ]


def _unequal(lines: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    pairs = zip_longest(lines, others)
    return [(mine, meant) for mine, meant in pairs if mine != meant]


def tensor_differences(
    parts: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, Tensor]], tolerance: float
) -> list[str]:
    """Return a line per part whose tensors are not the same."""
    if tolerance > 0:  # ranks have come or gone: how they shared the sums of batch norm is their own matter
        parts, expected = ({k: v for k, v in each.items() if k != "statistics"} for each in (parts, expected))
    if parts.keys() != expected.keys():
        return [f"parts {sorted(parts)} instead of {sorted(expected)}"]
    troubles = []
    for part, tensors in parts.items():
        if tensors.keys() != expected[part].keys():
            troubles.append(f"{part}: names {sorted(tensors.keys() ^ expected[part].keys())} in one only")
            continue
        worst = {name: _distance(tensor, expected[part][name]) for name, tensor in tensors.items()}
        far = {name: distance for name, distance in worst.items() if distance > tolerance}
        if far:
            name = max(far, key=lambda key: far[key])
            troubles.append(f"{part}: {len(far)} of {len(worst)} tensors differ, {name} by {far[name]:.1e}")
    return troubles


def _distance(tensor: Tensor, other: Tensor) -> float:
    """Return 0 for the same bits, else the largest difference, relative to the largest value or 1."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return float("inf")
    if torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
        return 0.0
    difference = (tensor.double() - other.double()).abs().max().item()
    relative = difference / max(1.0, other.double().abs().max().item())
    return max(relative, 1e-300) if math.isfinite(relative) else float("inf")


def _worst_loss(steps: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> float:
    return max(
        (abs(a["loss"] - b["loss"]) / max(1.0, abs(b["loss"])) for a, b in zip(steps, others, strict=True)), default=0
    )


def _runs_of(numbers: Iterable[int]) -> str:
    """Return `0-5, 4-9` for 0..5, 4..9."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" for a, b in spans) or "none"


def _first_difference(value: Any, other: Any, where: str = "") -> str:
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        for name in {**value, **other}:
            if value.get(name) != other.get(name):
                return _first_difference(value.get(name), other.get(name), f"{where}.{name}")
    return f"{where.lstrip('.')} is {value!r} instead of {other!r}"[:200]


def leftovers(folder: Path) -> list[str]:
    """Return what no run may leave: half-written files, a lock that is held."""
    troubles = [f"{path.relative_to(folder)} is left" for path in folder.rglob(".*") if path.name.startswith(_ASIDE)]
    troubles += [
        f"{path.relative_to(folder)} is left" for path in folder.rglob("*.writing") if not path.name.startswith(_ASIDE)
    ]
    if is_locked(folder):
        troubles.append("the folder's lock is held")
    return troubles


def is_locked(folder: Path) -> bool:
    """Return True if a process holds the lock of a run."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
