"""Write the checkpoints of a run in the background, each whole or not at all; the last and the best are kept.

A checkpoint is written aside, synced to disk and only then given its name, so a kill at any moment leaves the
checkpoints that were there, and at most a folder that nobody takes for one. format.py has their layout.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.core.disk import sync
from paceline.core.errors import Failed, PacelineError
from paceline.train.checkpoint.format import (
    DIGESTS,
    LEFT,
    REMOVING,
    REPLACED,
    STATE,
    TENSORS,
    WRITING,
    Entries,
    Mode,
    StateFile,
    by_score,
    entries_of,
    entries_to_json,
    folder_name,
    handed_in,
    listed,
    step_of,
)
from paceline.train.checkpoint.snapshot import Snapshot, refill, write_file
from paceline.world.store import poll


class CheckpointFailed(PacelineError):
    """A checkpoint that the disk refused; those before it are untouched."""

    path: Path
    what: str
    error: OSError
    sentence = "{path}: {what}: {error}"
    hint = "free some space or choose another folder with `--out`, then go on with `--resume auto`"


class StateNotPlain(PacelineError):
    """A value of the state that JSON would not give back as it was."""

    where: str
    value: object
    sentence = "{where} is a {kind}, which JSON cannot hold"
    hint = "keep numbers, strings, lists and dicts with string keys in the state, and tensors in a part"

    @property
    def kind(self) -> str:
        return type(self.value).__name__


class Checkpointer:
    """Writes the checkpoints of one run, in the background, and keeps the last and the best.

    One process per run may have one, or every rank where checkpoints are written in pieces: then each writes its files
    into the same folder, and the first, when all are there, gives it its name. Nobody may save before the save before
    is over on the first rank. Steps only grow: folders of a later step than the one saved are what a resumption
    from an earlier point left behind; they are put aside as `left-step-...` and neither found nor deleted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        mode: Mode = "min",
        background: bool = True,
        rank: int = 0,
        num_writers: int = 1,
        timeout_s: float = 1800.0,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout_s` is how long the first of several writers waits for the others.

        `on_written` is called, in the thread that writes, when a checkpoint has its name.
        """
        assert keep_last >= 1, keep_last
        assert mode in ("min", "max"), mode
        self.folder, self.keep_last, self.keep_best, self.mode = folder, keep_last, keep_best, mode
        self.stall_s = 0.0
        """Seconds that callers have been blocked so far."""
        self.write_s = 0.0
        """Seconds that the last checkpoint took until it was on disk, beside the steps."""
        self._background = background
        self._rank, self._num_writers, self._timeout_s = rank, num_writers, timeout_s
        self._on_written = on_written
        self._snapshots: dict[str, Snapshot] = {}
        self._pending: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
            if rank == 0:
                _clean(folder)
        except OSError as error:
            raise CheckpointFailed(folder, "checkpoints cannot be kept here", error) from error

    def save(
        self,
        step: int,
        parts: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Take a copy of everything and have it written; blocks for the copy and for a write still going on."""
        assert all(re.fullmatch(r"\w[\w.-]*", part) for part in parts), list(parts)
        with self._stalled():
            self._settle()
            _check_plain(dict(state), "state")
            values = StateFile(step, score, self.mode, copy.deepcopy(dict(state)), None)
            refill(self._snapshots, parts)
            self._pending = self._writer.submit(self._write, values)
            if not self._background:
                self._settle()

    def wait(self) -> None:
        """Return when the last save is on disk."""
        with self._stalled():
            self._settle()

    def close(self) -> None:
        """Finish the last save and let the buffers go."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._snapshots = {}

    def abandon(self) -> None:
        """Leave after a failure of the run: a save that is going on ends in the background, nobody waits for it."""
        self._writer.shutdown(wait=False)

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - start

    def _settle(self) -> None:
        if self._pending is None:
            return
        # An interrupt here leaves the write pending, so that nobody refills the buffers it reads from.
        wait_for([self._pending])
        pending, self._pending = self._pending, None
        pending.result()

    def _write(self, values: StateFile) -> None:
        start = time.perf_counter()
        final = self.folder / folder_name(values.step)
        aside = self.folder / (WRITING + final.name)
        try:
            aside.mkdir(exist_ok=self._num_writers > 1)
            digests = {
                part + TENSORS: snapshot.write(aside / (part + TENSORS)) for part, snapshot in self._snapshots.items()
            }
            entries = entries_of(digests)
            if self._rank > 0:
                self._hand_in(aside, entries)
                return
            entries |= self._collect(aside, final)
            state = write_file(aside / STATE, replace(values, files=entries).to_json())
            write_file(aside / DIGESTS, entries_to_json({**entries, **entries_of({STATE: state})}))
            sync(aside)
            if final.exists():
                final.rename(self.folder / (REPLACED + final.name))
            aside.rename(final)
            sync(self.folder)
        except OSError as error:
            if self._rank == 0:  # the others' pieces are not this rank's to remove
                shutil.rmtree(aside, ignore_errors=True)  # the space it holds is what the next attempt needs
            raise CheckpointFailed(final, "the checkpoint was not written", error) from error
        try:
            self._retain(values.step)
        except OSError as error:
            raise CheckpointFailed(self.folder, "older checkpoints cannot be removed", error) from error
        self.write_s = time.perf_counter() - start
        self._on_written()

    def _hand_in(self, aside: Path, entries: Entries) -> None:
        """Tell the first rank that the files are on disk, by one that is whole or not there."""
        unnamed = aside / f".{handed_in(self._rank)}"
        write_file(unnamed, json.dumps(entries).encode())
        sync(aside)
        unnamed.rename(aside / handed_in(self._rank))

    def _collect(self, aside: Path, final: Path) -> Entries:
        """Wait for the other ranks' files, and return their entries."""
        notes = {rank: aside / handed_in(rank) for rank in range(1, self._num_writers)}
        if not poll(lambda: all(note.exists() for note in notes.values()), self._timeout_s):
            ranks = ", ".join(str(rank) for rank, note in notes.items() if not note.exists())
            raise Failed(
                f"{final}: no pieces from rank {ranks} in {self._timeout_s:g} s, so the checkpoint was not written",
                hint="look into the logs of these ranks; all ranks must write to the same run folder",
            )
        entries: Entries = {}
        for note in notes.values():
            entries |= json.loads(note.read_bytes())
            note.unlink()
        return entries

    def _retain(self, step: int) -> None:
        """Remove what is neither among the last nor the best; the one just written is always among the last."""
        for later in [path for path in listed(self.folder) if step_of(path) > step]:
            later.rename(_unused(self.folder / (LEFT + later.name.removeprefix(REPLACED))))
        paths = listed(self.folder)
        keep = {*paths[: self.keep_last], *by_score(paths, self.mode)[: self.keep_best]}
        for path in paths:
            if path not in keep:
                path.rename(_unused(self.folder / (REMOVING + path.name)))
        _clean(self.folder)


def _check_plain(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise StateNotPlain(f"the key {key!r} of {where}", key)
            _check_plain(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{where}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise StateNotPlain(where, value)


def _clean(folder: Path) -> None:
    """Delete folders that are no checkpoints.

    What cannot be deleted yet (files on NFS that a process has mapped) is left to the next save."""
    for path in folder.iterdir():
        replaced = path.name.startswith(REPLACED) and (folder / path.name.removeprefix(REPLACED)).exists()
        if replaced or path.name.startswith((WRITING, REMOVING)):
            shutil.rmtree(path, ignore_errors=True)


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number, candidate = number + 1, path.with_name(f"{path.name}-{number}")
    return candidate
