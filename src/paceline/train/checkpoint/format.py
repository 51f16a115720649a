"""Layout of checkpoints on disk: the names and the meaning that the writer and the reader share.

    <run>/checkpoints/step-00000120/
        model.safetensors, optimizer.safetensors, ...   one file per part, a part being a dict of named tensors
        model.shard-0-of-4.safetensors, ...             or one per part and rank: see pieces.py
        state.json                                      plain values: positions, counters, settings; size and digest of
                                                        every file above; digest of all of these values
        digests.json                                    size and digest (xxh3_128) of every file above, written last

The folder is whole or it is not there. State, digests and folder must name the same files, so that no flipped bit drops
or renames a part; checkpoints of before name none in their state. It is read by the safetensors library and the JSON
parser, neither of which can run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from paceline.core.errors import PacelineError
from paceline.train.checkpoint.snapshot import Digest, digest_of

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
    """Return score and mode; a checkpoint whose state cannot be read or is damaged, or whose score is NaN, has none."""
    try:
        check_file(path, STATE, read_digests(path)[STATE])
        state = read_state(path)
    except CheckpointBroken:
        return None, "min"
    if isinstance(state.score, int | float) and state.score == state.score and state.mode in ("min", "max"):
        return state.score, state.mode
    return None, "min"


# -- state.json --------------------------------------------------------------------------------------------------------


Entries = dict[str, dict[str, Any]]
"""Size and digest by file name, as JSON has them."""
_SEAL = "xxh3_128"


@dataclass(frozen=True)
class StateFile:
    """Content of `state.json`."""

    step: int
    score: float | None
    mode: Mode
    state: dict[str, Any]
    """Plain values of the run."""
    files: Entries | None
    """Entries of the files with the parts; None in checkpoints of before."""

    def to_json(self) -> bytes:
        document: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "score": self.score,
            "mode": self.mode,
            "state": self.state,
        }
        if self.files is not None:
            document["files"] = self.files
            document[_SEAL] = _digest_of_values(document)
        return json.dumps(document, indent=1).encode()


def _digest_of_values(document: Mapping[str, Any]) -> str:
    values = {key: value for key, value in document.items() if key != _SEAL}
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def read_state(path: Path) -> StateFile:
    """Read the `state.json` of a checkpoint; raises `CheckpointBroken`."""
    document = read_json(path, STATE)
    if document.get("format") != FORMAT:
        why = f"has format {document.get('format')}, this version reads {FORMAT}"
        raise CheckpointBroken(path, STATE, why)
    if missing := {"step", "score", "state"} - document.keys():
        raise CheckpointBroken(path, STATE, f"lacks {', '.join(sorted(missing))}")
    if _SEAL in document and document[_SEAL] != _digest_of_values(document):
        raise CheckpointBroken(path, STATE, "its values are not what was written (digest differs)")
    step, state, files = document["step"], document["state"], document.get("files")
    if type(step) is not int or not isinstance(state, dict) or not isinstance(files, dict | None):
        raise CheckpointBroken(path, STATE, "has a step, state or files of another type")
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match and int(match[1]) != step:
        raise CheckpointBroken(path, STATE, f"is of step {step}, its folder was renamed")
    return StateFile(step, document["score"], document.get("mode", "min"), state, files)


def read_json(path: Path, file: str) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint; raises `CheckpointBroken`."""
    try:
        if (path / file).exists() and not (path / file).is_file():  # reading a device might never end
            raise CheckpointBroken(path, file, "is not a plain file")
        document = json.loads((path / file).read_bytes())
    except OSError as error:
        raise CheckpointBroken(path, file, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointBroken(path, file, f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointBroken(path, file, "is not a JSON object")
    return document


# -- digests.json ------------------------------------------------------------------------------------------------------


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
        except (TypeError, KeyError, ValueError, OverflowError):
            raise no_digest(path, file) from None
        if file != STATE and not _is_part(file):
            raise CheckpointBroken(path, DIGESTS, f"lists {file!r}, which is no part")
    if STATE not in digests:
        raise no_digest(path, STATE)
    return digests


def _is_part(file: str) -> bool:
    return file.endswith(TENSORS) and "/" not in file


def check_file(path: Path, file: str, expected: Digest, verify: bool = True) -> None:
    """Raise `CheckpointBroken` unless a file has its size and, with `verify`, its digest."""
    try:
        num_bytes = (path / file).stat().st_size
        if num_bytes != expected.num_bytes:
            why = f"has {num_bytes} bytes instead of {expected.num_bytes}"
            raise CheckpointBroken(path, file, why)
        if verify and digest_of(path / file) != expected:
            raise CheckpointBroken(path, file, "its content is not what was written (digest differs)")
    except OSError as error:
        raise CheckpointBroken(path, file, error.strerror or str(error)) from error


def check_parts(path: Path, digests: Mapping[str, Digest], state: StateFile) -> None:
    """Raise `CheckpointBroken` unless digests, state and folder have the same parts.

    Files that are not there are left to those who read them: some read only some parts.
    """
    entries = entries_of({file: digest for file, digest in digests.items() if file != STATE})
    for file in {} if state.files is None else {**state.files, **entries}:
        if file not in entries:
            raise no_digest(path, file)
        if state.files is not None and entries[file] != state.files.get(file):
            why = f"says something else of {file} than {STATE}"
            raise CheckpointBroken(path, DIGESTS, why)
    for file in sorted(each.name for each in path.glob(f"*{TENSORS}")):
        if file not in entries:
            raise CheckpointBroken(path, file, "is not a part that was saved here")


def no_digest(path: Path, file: str) -> CheckpointBroken:
    return CheckpointBroken(path, DIGESTS, f"has no size and digest for {file}")


def handed_in(rank: int) -> str:
    """Return the file by which a rank tells the first one that its pieces are on disk, with their entries."""
    return f"rank-{rank}.json"
