"""Layout of checkpoints on disk: the names and the meaning that the writer and the reader share.

    <run>/checkpoints/step-00000120/
        model.safetensors, optimizer.safetensors, ...   one file per part, a part being a dict of named tensors
        model.shard-0-of-4.safetensors, ...             or one per part and rank: see pieces.py
        state.json                                      plain values: positions, counters, settings
        digests.json                                    size and xxh3_128 of every file above, written last

The folder is whole or it is not there. It is read by the safetensors library and the JSON parser, neither of which can
run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import PacelineError
from paceline.train.checkpoint.snapshot import Digest

FORMAT = 1
STATE, DIGESTS, TENSORS = "state.json", "digests.json", ".safetensors"
# Names of folders that are no checkpoints. A replaced one counts until the one that replaces it has its name.
WRITING, REMOVING, REPLACED, LEFT = ".writing-", ".removing-", ".replaced-", "left-"
Mode = Literal["min", "max"]


class CheckpointBroken(PacelineError):
    """A checkpoint whose content is not what was written."""

    path: Path
    file: str
    why: str
    sentence = "{full_path}: {why}"
    hint = "take an earlier checkpoint, or `--resume auto`, which takes the newest sound one"

    @property
    def full_path(self) -> Path:
        return self.path / self.file


# -- folders -----------------------------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the number of steps from the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def listed(folder: Path) -> list[Path]:
    """Return the folders that hold, or claim to hold, a checkpoint; newest first."""
    by_step: dict[int, Path] = {}
    for path in folder.glob("*step-*"):
        match = re.fullmatch(rf"({re.escape(REPLACED)})?step-(\d{{8,}})", path.name)
        if match and (match[1] is None or int(match[2]) not in by_step):
            by_step[int(match[2])] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def by_score(paths: Sequence[Path], mode: Mode) -> list[Path]:
    """Return those with a score, best first; of equals the newest, as `paths` are newest first.

    Scores of different stages are not compared: in a run with stages those of the newest stage come first.
    """
    scores = {path: score for path in paths for score, _ in [score_of(path)] if score is not None}
    stages = {path: stage_of(path) for path in scores}
    return sorted(scores, key=lambda path: (-stages[path], scores[path] if mode == "min" else -scores[path]))


def stage_of(path: Path) -> int:
    """Return the number of stages that had begun; 0 where the state names no position."""
    state = read_json(path, STATE).get("state")
    position = state.get("position") if isinstance(state, dict) else None
    if not isinstance(position, dict):
        return 0
    numbers = [position.get(name) for name in ("stage", "epoch", "step")]
    stage, epoch, step = (number if isinstance(number, int) else 0 for number in numbers)
    return stage + (epoch > 0 or step > 0)  # as `Position.num_begun_stages`


def score_of(path: Path) -> tuple[float | None, Mode]:
    """Return score and mode; a checkpoint that cannot be read, or whose score is NaN, has none."""
    try:
        document = read_json(path, STATE)
    except CheckpointBroken:
        return None, "min"
    score, mode = document.get("score"), document.get("mode")
    if isinstance(score, int | float) and score == score and mode in ("min", "max"):
        return score, mode
    return None, "min"


# -- state.json --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateFile:
    """Content of `state.json`."""

    step: int
    score: float | None
    mode: Mode
    state: dict[str, Any]
    """Plain values of the run."""

    def to_json(self) -> bytes:
        document = {"format": FORMAT, "step": self.step, "score": self.score, "mode": self.mode, "state": self.state}
        return json.dumps(document, indent=1).encode()


def read_state(path: Path) -> StateFile:
    """Read the `state.json` of a checkpoint; raises `CheckpointBroken`."""
    document = read_json(path, STATE)
    if document.get("format") != FORMAT:
        raise CheckpointBroken(path, STATE, f"has format {document.get('format')}, this version reads {FORMAT}")
    if missing := {"step", "score", "state"} - document.keys():
        raise CheckpointBroken(path, STATE, f"lacks {', '.join(sorted(missing))}")
    return StateFile(document["step"], document["score"], document.get("mode", "min"), document["state"])


def read_json(path: Path, file: str) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint; raises `CheckpointBroken`."""
    try:
        document = json.loads((path / file).read_bytes())
    except OSError as error:
        raise CheckpointBroken(path, file, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointBroken(path, file, f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointBroken(path, file, "is not a JSON object")
    return document


# -- digests.json ------------------------------------------------------------------------------------------------------

Entries = dict[str, dict[str, Any]]
"""Size and digest by file name, as JSON has them."""


def entries_of(digests: Mapping[str, Digest]) -> Entries:
    """Return digests by file name as `digests.json` has them."""
    return {file: {"bytes": digest.num_bytes, "xxh3_128": digest.xxh3_128} for file, digest in digests.items()}


def entries_to_json(entries: Entries) -> bytes:
    return json.dumps(entries, indent=1).encode()


def read_digests(path: Path) -> dict[str, Digest]:
    """Read the `digests.json` of a checkpoint; raises `CheckpointBroken`."""
    digests: dict[str, Digest] = {}
    for file, entry in read_json(path, DIGESTS).items():
        try:
            digests[file] = Digest(int(entry["bytes"]), str(entry["xxh3_128"]))
        except (TypeError, KeyError, ValueError):
            raise no_digest(path, file) from None
    if STATE not in digests:
        raise no_digest(path, STATE)
    return digests


def no_digest(path: Path, file: str) -> CheckpointBroken:
    return CheckpointBroken(path, DIGESTS, f"has no size and digest for {file}")


def handed_in(rank: int) -> str:
    """Return the file by which a rank tells the first one that its pieces are on disk, with their entries."""
    return f"rank-{rank}.json"
