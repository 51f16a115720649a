"""Packing: rows read by several processes, piece by piece, and written as one packed file or as shards.

A finished piece is a file beside the packed one, in `OUT.h5.parts`: after a kill the same command goes on with those
that are missing. Shards are written as soon as their pieces are complete, into the same folder. The file that users
name comes last.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import xxhash

from paceline.core.disk import CannotWrite, cannot_write
from paceline.core.errors import Failed, InvalidData, PacelineError
from paceline.core.paths import near
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import About, Layout, PackedFile, PackingRecord
from paceline.data.packed.parts import Parts, locked, open_parts, parts_folder
from paceline.data.packed.piece import Piece, StreamsDiffer, read_piece, write_piece
from paceline.data.packed.reader import read_layout
from paceline.data.packed.returnn import agree_on_sizes
from paceline.data.packed.writer import content_of, write_file, write_shards
from paceline.world.parent_process import end_with_parent, leave_with_parent

_THREADS = 16
"""Files checked for changes at a time, which hides the latency of a distant disk."""
_MOST_SHOWN = 20


class Source(Protocol):
    """Data that can be packed."""

    about: About
    fingerprint: str
    """Differs for other rows, or for the same in another form."""
    num_bytes: int
    """Approximate size of all rows."""
    skip_bad: bool
    """Leave out rows that cannot be read. A packing that one has stopped may go on with this, or without."""

    def __len__(self) -> int: ...

    def cuts(self, most_bytes: int | None) -> Sequence[range]:
        """Return the rows of each piece, in order; not much more than `most_bytes` each."""

    def read(self, rows: range) -> Piece:
        """Read rows; called in a process of its own, after a fork."""

    def stamp(self, rows: range) -> str:
        """Return a stamp that changes with the files these rows are read from. Called in several threads."""


class PackExists(PacelineError):
    """A file that exists is to be written."""

    path: Path
    sentence = "{place} exists"
    hint = "`--force` replaces it; name another file otherwise"

    @property
    def place(self) -> str:
        return near(self.path)


@dataclass
class PackResult:
    """Files and numbers of a finished packing."""

    files: list[Path] = field(default_factory=list)
    """With data in them."""
    num_rows: int = 0
    nbytes: int = 0
    skipped: list[str] = field(default_factory=list)
    """Reasons why rows were left out."""
    num_resumed: int = 0
    """Rows that an earlier packing had done."""


def pack(
    source: Source,
    out: Path,
    *,
    layout: Layout = "paceline",
    shard_bytes: int | None = None,
    processes: int = 1,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> PackResult:
    """Write `out`, going on with what an earlier call has left."""
    cuts = list(source.cuts(shard_bytes))
    plan = {
        "source": source.fingerprint,
        "about": source.about.to_json(),
        "layout": layout,
        "cuts": [rows.stop for rows in cuts],
        "most": shard_bytes,
    }
    identity = xxhash.xxh3_64_hexdigest(json.dumps(plan, sort_keys=True).encode())
    if out.exists() and not force:
        raise PackExists(out)
    try:
        with locked(out, parts_folder(out)):
            if out.exists() and not force:  # written by another packing meanwhile
                raise PackExists(out)
            parts = open_parts(out, identity, force)
            try:
                packer = _Packer(source, cuts, out, parts, layout, shard_bytes)
                result = packer.run(processes, progress or (lambda done: None))
            except (OSError, CannotWrite) as error:
                cause = error.error if isinstance(error, CannotWrite) else error
                num_left = bytes_left(source.num_bytes, shard_bytes, *parts.num_bytes())
                raise cannot_write(out, cause, num_left, "it goes on where it was") from error
            parts.finish(result.files)
    except OSError as error:
        raise cannot_write(out, error, bytes_left(source.num_bytes, shard_bytes), "it begins anew") from error
    return result


def bytes_left(total: int, shard_bytes: int | None, in_pieces: int = 0, in_shards: int = 0) -> int:
    """Estimate the bytes still needed: for rows in no shard yet and for their pieces, or those of a shard at a time."""
    missing = max(total - in_shards, 0)
    return missing + max(min(missing, shard_bytes or missing) - in_pieces, 0)


def default_processes() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Packer:
    """One packing: makes the missing pieces, and writes shards of those that are complete."""

    def __init__(
        self,
        source: Source,
        cuts: Sequence[range],
        out: Path,
        parts: Parts,
        layout: Layout,
        shard_bytes: int | None,
    ) -> None:
        self._source, self._cuts, self._out, self._parts = source, cuts, out, parts
        self._layout, self._shard_bytes = layout, shard_bytes
        self._result = PackResult()
        self._shard_rows: list[int] = []
        """Number of rows of each shard."""
        self._waiting: list[int] = []
        """Complete pieces, in order, that are in no shard yet."""
        self._waiting_bytes = 0

    def run(self, processes: int, progress: Callable[[int], None]) -> PackResult:
        first = self._resume_shards()
        remaining = range(first, len(self._cuts))
        with ThreadPoolExecutor(_THREADS) as pool:
            ready = set(itertools.compress(remaining, pool.map(self._is_complete, remaining)))
        num_done = self._result.num_resumed = self._num_rows(range(first)) + self._num_rows(ready)
        progress(num_done)
        missing = [number for number in remaining if number not in ready]
        next_piece = self._collect(first, ready)
        for number in in_processes(self._make, missing, processes):
            ready.add(number)
            num_done += len(self._cuts[number])
            progress(num_done)
            next_piece = self._collect(next_piece, ready)
        self._finish()
        return self._result

    def _collect(self, number: int, ready: Collection[int]) -> int:
        """Collect the ready pieces from `number` on, and write the shards they fill; return the next to wait for."""
        while number in ready:
            self._waiting.append(number)
            self._waiting_bytes += self._parts.piece(number).stat().st_size
            number += 1
            if self._shard_bytes is not None and self._waiting_bytes >= self._shard_bytes and number < len(self._cuts):
                self._write_shard()
        return number

    def _num_rows(self, pieces: Iterable[int]) -> int:
        return sum(len(self._cuts[number]) for number in pieces)

    def _make(self, number: int) -> None:
        rows = self._cuts[number]
        stamp = self._source.stamp(rows)  # before they are read: what changes meanwhile is read again
        write_piece(self._parts.piece(number), dataclasses.replace(self._source.read(rows), stamp=stamp))

    def _is_complete(self, number: int) -> bool:
        piece = read_piece(self._parts.piece(number), with_values=False)
        if piece is None or (piece.skipped and not self._source.skip_bad):
            return False
        return piece.stamp == self._source.stamp(self._cuts[number])

    def _resume_shards(self) -> int:
        """Count the shards that an earlier packing wrote; return the first piece that is in none of them."""
        first = 0
        while (shard := self._find_shard(len(self._shard_rows), first)) is not None:
            file, record = shard
            self._count(file, record)
            first = record.pieces[1]
        return first

    def _find_shard(self, number: int, first: int) -> tuple[PackedFile, PackingRecord] | None:
        """Return the shard that begins with piece `first`, if it exists and its sources have not changed."""
        try:
            file = read_layout(self._parts.find_shard(number))
        except PackedUnreadable:
            return None
        if not isinstance(file, PackedFile) or file.packing is None or file.packing.pack != self._parts.pack:
            return None
        record = file.packing
        if record.skipped and not self._source.skip_bad:
            return None
        begin, end = record.pieces
        with ThreadPoolExecutor(_THREADS) as pool:
            stamps = pool.map(self._source.stamp, self._cuts[begin:end])
            return (file, record) if begin == first and record.stamp == _joined(stamps) else None

    def _count(self, file: PackedFile, record: PackingRecord) -> None:
        self._shard_rows.append(len(file))
        self._result.num_rows += len(file)
        self._result.nbytes += sum(place.nbytes for place in file.streams.values())
        self._result.skipped += record.skipped

    def _write_shard(self) -> None:
        if self._write(self._parts.shard(len(self._shard_rows))):
            for number in self._waiting:
                self._parts.piece(number).unlink()
            self._waiting = []
        self._waiting_bytes = 0  # rows that could not be read wait for others that can

    def _write(self, path: Path) -> bool:
        """Write the pieces that wait; return False if none of their rows could be read."""
        pieces = [self._read(number, with_values=False) for number in self._waiting]
        filled = [piece for piece in pieces if len(piece)]
        for piece in filled:
            if list(piece.specs) != list(filled[0].specs):
                raise StreamsDiffer(piece.tags[0].decode("utf-8", "replace"), piece.specs, filled[0].specs)
        if not filled:
            return False
        record = PackingRecord(
            self._parts.pack,
            (self._waiting[0], self._waiting[-1] + 1),
            _joined(piece.stamp for piece in pieces),
            tuple(line for piece in pieces for line in piece.skipped),
        )
        content = content_of(pieces, self._source.about, record)
        write_file(path, self._layout, content, lambda: map(self._read, self._waiting))
        file = read_layout(path)
        assert isinstance(file, PackedFile)
        self._count(file, record)
        return True

    def _read(self, number: int, *, with_values: bool = True) -> Piece:
        path = self._parts.piece(number)
        piece = read_piece(path, with_values=with_values)
        if piece is None:
            raise PackedUnreadable(path, "is damaged", "remove it, and type the same command again")
        return piece

    def _finish(self) -> None:
        if not self._shard_rows:
            if not self._waiting or not self._write(self._out):
                reasons = "".join(f"\n  {line}" for line in self._skipped()[:_MOST_SHOWN])
                raise InvalidData(
                    f"there is nothing to pack{reasons}", hint="give data with at least one row that can be read"
                )
            self._result.files = [self._out]
            return
        if self._waiting:
            self._write_shard()
        last = self._skipped()
        self._result.skipped += last
        if self._layout == "returnn":
            agree_on_sizes([self._parts.find_shard(number) for number in range(len(self._shard_rows))])
        self._result.files = self._parts.name_shards(len(self._shard_rows))
        names = [path.name for path in self._result.files]
        write_shards(self._out, list(zip(names, self._shard_rows, strict=True)), self._parts.pack, last)

    def _skipped(self) -> list[str]:
        """Return the reasons for rows at the end that no shard will take."""
        return [line for number in self._waiting for line in self._read(number, with_values=False).skipped]


def _joined(stamps: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(stamps).encode())


Make = Callable[[int], None]
"""Makes the piece of this number, and leaves it where it belongs."""
_make: Make | None = None
"""Task of forked processes: a data set need not be one that can be pickled."""


def in_processes(make: Make, missing: Sequence[int], processes: int) -> Iterator[int]:
    """Make these pieces in several processes, which end with this one; yield their numbers as they are done."""
    global _make
    if not missing:
        return
    _make = make
    pool = ProcessPoolExecutor(min(processes, len(missing)), multiprocessing.get_context("fork"), _start_worker)
    waiting: set[Future[int]] = set()
    todo = iter(missing)
    try:
        while True:
            # Not all at once: a stop at the first error must not wait for thousands of others.
            waiting |= {pool.submit(_make_one, number) for number in islice(todo, 2 * processes - len(waiting))}
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise Failed(
            "a process that read data was killed",
            hint="type the same command to continue; fewer `--processes` need less memory",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        _make = None


def _start_worker() -> None:
    """Use one thread, and end with the parent process, even if that is killed."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    leave_with_parent()  # it may be gone already


def _make_one(number: int) -> int:
    assert _make is not None
    _make(number)
    return number
