"""Packing: rows read by several processes, piece by piece, and written as one packed file or as shards.

A piece that is done is a file beside the packed one, in `OUT.h5.parts`: after a kill the same command goes on with
those that are missing. Shards are written as soon as their pieces are there, into the same folder. The file that users
name comes last.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import xxhash

from paceline.core.disk import CannotWrite, cannot_write
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import Layout, PackedFile, read_layout
from paceline.data.packed.lock import locked
from paceline.data.packed.parts import Parts, open_parts, parts_folder
from paceline.data.packed.piece import Piece, StreamsDiffer, read_piece, write_piece
from paceline.data.packed.processes import in_processes
from paceline.data.packed.writer import agree_on_sizes, content_of, write_file, write_shards

_LOOKS_AT_ONCE = 16
"""Whether files have changed: what a distant disk is asked at a time."""


class Source(Protocol):
    """What is packed."""

    about: dict[str, Any]
    """What a reader must know of it, as JSON."""
    fingerprint: str
    """Another one for other rows, or for the same in another form."""
    num_bytes: int
    """Of all rows, about."""
    skip_bad: bool
    """Whether rows that cannot be read are left out. A packing that was stopped by one may go on so, or without."""

    def __len__(self) -> int: ...

    def cuts(self, most_bytes: int | None) -> Sequence[range]:
        """The rows of each piece, in order; not much more than so many bytes each."""

    def read(self, rows: range) -> Piece:
        """Called in a process of its own, after a fork."""

    def stamp(self, rows: range) -> str:
        """Another one where what these rows are read from has changed. Called in several threads."""


class PackExists(PacelineError):
    """A file that exists is to be written."""

    hint = "`--force` replaces it; name another file otherwise"

    def __init__(self, path: Path) -> None:
        super().__init__(f"{near(path)} exists")
        self.path = path


class NothingToPack(PacelineError):
    """Not one row is left."""

    hint = "give data with at least one row that can be read"

    def __init__(self, skipped: Sequence[str]) -> None:
        super().__init__("\n".join(["there is nothing to pack", *(f"  {line}" for line in skipped[:20])]))


@dataclass
class Packing:
    """What was done."""

    files: list[Path] = field(default_factory=list)
    """With data in them."""
    num_rows: int = 0
    nbytes: int = 0
    skipped: list[str] = field(default_factory=list)
    num_kept: int = 0
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
) -> Packing:
    """Write `out`, going on with what an earlier call has left."""
    cuts = list(source.cuts(shard_bytes))
    ends = [rows.stop for rows in cuts]
    plan = {"source": source.fingerprint, "about": source.about, "layout": layout, "cuts": ends, "most": shard_bytes}
    identity = xxhash.xxh3_64_hexdigest(json.dumps(plan, sort_keys=True).encode())
    if out.exists() and not force:
        raise PackExists(out)
    try:
        with locked(out, parts_folder(out)):
            if out.exists() and not force:  # by another packing, until now
                raise PackExists(out)
            parts = open_parts(out, identity, force)
            try:
                found = _Work(source, cuts, out, parts, layout, shard_bytes).run(
                    processes, progress or (lambda done: None)
                )
            except (OSError, CannotWrite) as error:
                cause = error.error if isinstance(error, CannotWrite) else error
                num_left = bytes_left(source.num_bytes, shard_bytes, *parts.num_bytes())
                raise cannot_write(out, cause, num_left, "it goes on where it was") from error
            parts.finish(found.files)
    except OSError as error:
        raise cannot_write(out, error, bytes_left(source.num_bytes, shard_bytes), "it begins anew") from error
    return found


def bytes_left(total: int, shard_bytes: int | None, in_pieces: int = 0, in_shards: int = 0) -> int:
    """That are still needed, about: for what is in no shard yet, and for the pieces of it, or of a shard at a time."""
    missing = max(total - in_shards, 0)
    return missing + max(min(missing, shard_bytes or missing) - in_pieces, 0)


class _Work:
    """One packing."""

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
        self._done = Packing()
        self._rows_of: list[int] = []
        """Of each shard."""
        self._waiting: list[int] = []
        """Pieces that are there, in order, and in no shard yet."""
        self._waiting_bytes = 0

    def run(self, processes: int, progress: Callable[[int], None]) -> Packing:
        first = self._take_shards()
        all_others = range(first, len(self._cuts))
        with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
            ready = set(itertools.compress(all_others, pool.map(self._is_there, all_others)))
        self._done.num_kept = self._num_rows(range(first)) + self._num_rows(ready)
        progress(self._done.num_kept)
        missing = [number for number in all_others if number not in ready]
        num_done, at = self._done.num_kept, self._take(first, ready)
        for number in in_processes(self._make, missing, processes):
            ready.add(number)
            num_done += len(self._cuts[number])
            progress(num_done)
            at = self._take(at, ready)
        self._finish()
        return self._done

    def _take(self, at: int, ready: Collection[int]) -> int:
        """Take the pieces that are ready from `at` on, and write the shards that they fill; the next to wait for."""
        while at in ready:
            self._waiting.append(at)
            self._waiting_bytes += self._parts.piece(at).stat().st_size
            at += 1
            if self._shard_bytes is not None and self._waiting_bytes >= self._shard_bytes and at < len(self._cuts):
                self._write_shard()
        return at

    def _num_rows(self, pieces: Iterable[int]) -> int:
        return sum(len(self._cuts[number]) for number in pieces)

    def _make(self, number: int) -> None:
        rows = self._cuts[number]
        stamp = self._source.stamp(rows)  # before they are read: what changes meanwhile is read again
        write_piece(self._parts.piece(number), dataclasses.replace(self._source.read(rows), stamp=stamp))

    def _is_there(self, number: int) -> bool:
        piece = read_piece(self._parts.piece(number), with_values=False)
        if piece is None or (piece.skipped and not self._source.skip_bad):
            return False
        return piece.stamp == self._source.stamp(self._cuts[number])

    def _take_shards(self) -> int:
        """Shards that are written already; the first piece that is in none of them."""
        first = 0
        while (found := self._find_shard(len(self._rows_of), first)) is not None:
            self._count(found)
            first = int(found.about["pieces"][1])
        return first

    def _find_shard(self, number: int, first: int) -> PackedFile | None:
        """The shard that begins with this piece, if it is there, and what it was read from has not changed."""
        try:
            found = read_layout(self._parts.find_shard(number))
        except PackedUnreadable:
            return None
        if not isinstance(found, PackedFile) or found.about.get("pack") != self._parts.pack:
            return None
        if found.about["skipped"] and not self._source.skip_bad:
            return None
        begin, end = found.about["pieces"]
        with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
            stamps = pool.map(self._source.stamp, self._cuts[begin:end])
            return found if begin == first and found.about.get("stamp") == _joined(stamps) else None

    def _count(self, found: PackedFile) -> None:
        self._rows_of.append(len(found))
        self._done.num_rows += len(found)
        self._done.nbytes += sum(place.nbytes for place in found.streams.values())
        self._done.skipped += found.about["skipped"]

    def _write_shard(self) -> None:
        if self._write(self._parts.shard(len(self._rows_of))):
            for number in self._waiting:
                self._parts.piece(number).unlink()
            self._waiting = []
        self._waiting_bytes = 0  # rows that could not be read wait for others that can

    def _write(self, path: Path) -> bool:
        """What is waiting; false where nothing of it could be read."""
        pieces = [self._read(number, with_values=False) for number in self._waiting]
        kept = [piece for piece in pieces if len(piece)]
        for piece in kept:
            if list(piece.specs) != list(kept[0].specs):
                raise StreamsDiffer(piece.tags[0].decode("utf-8", "replace"), piece.specs, kept[0].specs)
        if not kept:
            return False
        about = {
            **self._source.about,
            "pack": self._parts.pack,
            "pieces": [self._waiting[0], self._waiting[-1] + 1],
            "stamp": _joined(piece.stamp for piece in pieces),
            "skipped": [line for piece in pieces for line in piece.skipped],
        }
        write_file(path, self._layout, content_of(pieces, about), lambda: map(self._read, self._waiting))
        found = read_layout(path)
        assert isinstance(found, PackedFile)
        self._count(found)
        return True

    def _read(self, number: int, *, with_values: bool = True) -> Piece:
        path = self._parts.piece(number)
        piece = read_piece(path, with_values=with_values)
        if piece is None:
            raise PackedUnreadable(path, "is damaged", "remove it, and type the same command again")
        return piece

    def _finish(self) -> None:
        if not self._rows_of:
            if not self._waiting or not self._write(self._out):
                raise NothingToPack(self._skipped())
            self._done.files = [self._out]
            return
        if self._waiting:
            self._write_shard()
        last = self._skipped()
        self._done.skipped += last
        if self._layout == "returnn":
            agree_on_sizes([self._parts.find_shard(number) for number in range(len(self._rows_of))])
        self._done.files = self._parts.name_shards(len(self._rows_of))
        names = [path.name for path in self._done.files]
        write_shards(self._out, list(zip(names, self._rows_of, strict=True)), self._parts.pack, last)

    def _skipped(self) -> list[str]:
        """What is wrong with rows that wait in vain."""
        return [line for number in self._waiting for line in self._read(number, with_values=False).skipped]


def _joined(stamps: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(stamps).encode())
