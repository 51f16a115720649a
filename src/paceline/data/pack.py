"""Packing: rows read by several processes, piece by piece, and written as one packed file or as shards.

A piece that is done is a file beside the packed one, in `OUT.h5.parts`: after a kill the same command goes on with
those that are missing. Shards are written as soon as their pieces are there. The file that users name comes last.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import xxhash

from paceline.config.errors import PacelineError
from paceline.config.paths import CannotWrite, near
from paceline.data.hdf_errors import PackedUnreadable
from paceline.data.hdf_layout import Layout, PackedFile, Shards, read_layout
from paceline.data.hdf_write import agree_on_sizes, content_of, write_file, write_shards
from paceline.data.pack_piece import Piece, StreamsDiffer, read_piece, write_piece
from paceline.data.pack_processes import in_processes

_PLAN = "plan.json"


class Source(Protocol):
    """What is packed."""

    about: dict[str, Any]
    """What a reader must know of it, as JSON."""
    fingerprint: str
    """Another one for other rows, or for the same in another form."""

    def __len__(self) -> int: ...

    def cuts(self, most_bytes: int | None) -> Sequence[range]:
        """The rows of each piece, in order; not much more than so many bytes each."""

    def read(self, rows: range) -> Piece:
        """Called in a process of its own, after a fork."""


class PackExists(PacelineError):
    """A file that exists is to be written."""

    hint = "`--force` replaces it; name another file otherwise"

    def __init__(self, path: Path) -> None:
        super().__init__(f"{near(path)} exists")
        self.path = path


class OtherParts(PacelineError):
    """Parts of another data set are in the way."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{near(folder)} holds parts of a packing that was not finished, of other data or options")
        self.folder = folder
        self.hint = "give the same inputs and options to go on with it; `--force` begins anew"


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
    plan = {"source": source.fingerprint, "about": source.about, "layout": layout, "shard_bytes": shard_bytes}
    identity = xxhash.xxh3_64_hexdigest(json.dumps(plan, sort_keys=True).encode())
    if out.exists() and not force:
        raise PackExists(out)
    parts = out.with_name(f"{out.name}.parts")
    try:
        before = _shards_of(out)
        name = _prepare(parts, identity, force)
        work = _Work(source, out, parts, name, layout, shard_bytes)
        found = work.run(processes, progress or (lambda done: None))
        for path in set(before) - set(found.files):
            path.unlink(missing_ok=True)
        shutil.rmtree(parts)
    except OSError as error:
        raise CannotWrite(out, error) from error
    return found


def shard_name(out: Path, number: int) -> Path:
    """`train-00003.h5` beside `train.h5`."""
    return out.with_name(f"{out.stem}-{number:05d}{out.suffix}")


def _shards_of(out: Path) -> Sequence[Path]:
    """Of the packed file that is to be replaced."""
    try:
        found = read_layout(out) if out.exists() else None
    except PackedUnreadable:
        return ()
    return found.files if isinstance(found, Shards) else ()


def _prepare(parts: Path, identity: str, force: bool) -> str:
    """A folder for pieces of this packing, and of no other; the packing's name, which its shards bear."""
    plan = parts / _PLAN
    if parts.exists():
        known = plan.read_text() if plan.exists() else ""
        if known.startswith(identity):
            return known
        if known and not force:
            raise OtherParts(parts)
        shutil.rmtree(parts)
    parts.mkdir(parents=True)
    name = f"{identity}-{secrets.token_hex(4)}"  # packed again, data may be other than it was
    plan.write_text(name)
    return name


class _Work:
    """One packing."""

    def __init__(
        self, source: Source, out: Path, parts: Path, name: str, layout: Layout, shard_bytes: int | None
    ) -> None:
        self._source, self._out, self._parts, self._name = source, out, parts, name
        self._layout, self._shard_bytes = layout, shard_bytes
        self._cuts = list(source.cuts(shard_bytes))
        self._done = Packing()
        self._rows_of: list[int] = []
        """Of each shard."""
        self._waiting: list[int] = []
        """Pieces that are there, in order, and in no shard yet."""
        self._waiting_bytes = 0

    def run(self, processes: int, progress: Callable[[int], None]) -> Packing:
        first = self._take_shards()
        all_others = range(first, len(self._cuts))
        ready = {number for number in all_others if self._is_there(number)}
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
            self._waiting_bytes += self._piece(at).stat().st_size
            at += 1
            if self._shard_bytes is not None and self._waiting_bytes >= self._shard_bytes and at < len(self._cuts):
                self._write_shard()
        return at

    def _num_rows(self, pieces: Iterable[int]) -> int:
        return sum(len(self._cuts[number]) for number in pieces)

    def _make(self, number: int) -> None:
        write_piece(self._piece(number), self._source.read(self._cuts[number]))

    def _piece(self, number: int) -> Path:
        return self._parts / f"{number:06d}.npz"

    def _is_there(self, number: int) -> bool:
        return self._piece(number).exists() and read_piece(self._piece(number), with_values=False) is not None

    def _take_shards(self) -> int:
        """Shards that are written already; the first piece that is in none of them."""
        first = 0
        while (path := shard_name(self._out, len(self._done.files))).exists():
            try:
                found = read_layout(path)
            except PackedUnreadable:
                break
            if not isinstance(found, PackedFile) or found.about.get("pack") != self._name:
                break
            self._count(path, found)
            first = int(found.about["pieces"][1])
        return first

    def _count(self, path: Path, found: PackedFile) -> None:
        self._done.files.append(path)
        self._rows_of.append(len(found))
        self._done.num_rows += len(found)
        self._done.nbytes += sum(place.nbytes for place in found.streams.values())
        self._done.skipped += found.about["skipped"]

    def _write_shard(self) -> None:
        if self._write(shard_name(self._out, len(self._done.files))):
            for number in self._waiting:
                self._piece(number).unlink()
            self._waiting, self._waiting_bytes = [], 0

    def _write(self, path: Path) -> bool:
        """What is waiting; false where nothing of it could be read."""
        pieces = [
            _must(read_piece(self._piece(number), with_values=False), self._piece(number)) for number in self._waiting
        ]
        skipped = [line for piece in pieces for line in piece.skipped]
        kept = [piece for piece in pieces if len(piece)]
        for piece in kept:
            if list(piece.specs) != list(kept[0].specs):
                raise StreamsDiffer(piece.tags[0].decode("utf-8", "replace"), piece.specs, kept[0].specs)
        if not kept:
            self._done.skipped += skipped
            return False
        numbers = [self._waiting[0], self._waiting[-1] + 1]
        about = {**self._source.about, "pack": self._name, "pieces": numbers, "skipped": skipped}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self._layout, content_of(pieces, about), self._values)
        found = read_layout(path)
        assert isinstance(found, PackedFile)
        self._count(path, found)
        return True

    def _values(self) -> Iterator[Piece]:
        for number in self._waiting:
            yield _must(read_piece(self._piece(number)), self._piece(number))

    def _finish(self) -> None:
        if not self._done.files:
            if not self._waiting or not self._write(self._out):
                raise NothingToPack(self._done.skipped)
            return
        if self._waiting:
            self._write_shard()
        if self._layout == "returnn":
            agree_on_sizes(self._done.files)
        names = [path.name for path in self._done.files]
        write_shards(self._out, list(zip(names, self._rows_of, strict=True)), self._name)


def _must(piece: Piece | None, path: Path) -> Piece:
    if piece is None:
        raise PackedUnreadable(path, "is damaged", "remove it, and type the same command again")
    return piece
