"""Packed data: random access to rows of streams that lie in memory-mapped files.

A file is opened with h5py once, to learn where its data lies; after that a read is a copy from the page cache, which
all workers and ranks of a machine share. Nothing is open that a fork could break, and only arrays are pickled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.packed.errors import NoSuchStream, PackedUnreadable
from paceline.data.packed.layout import Kind, PackedFile, Shards, StreamPlace, read_layout, stamp_of
from paceline.data.packed.mapping import mapped
from paceline.data.packed.page_cache import available_bytes, stays_cached
from paceline.data.strings import Strings

LOOK_EVERY_S = 0.1
"""Whether a mapped file still has its size is asked no more often."""


class Packed:
    """The rows of one packed file, or of all shards that a file stands for."""

    def __init__(self, path: Path, files: Sequence[PackedFile], skipped: Sequence[str] = ()) -> None:
        """`skipped`: rows that were left out, beside those of which the files tell."""
        self.path, self.files = path, tuple(files)
        self.skipped = [*(line for file in files for line in file.about.get("skipped", ())), *skipped]
        self.about = files[0].about
        self.tags = Strings.concat([file.tags for file in files])
        self.columns = {name: np.concatenate([file.columns[name] for file in files]) for name in files[0].columns}
        self.extras = _extras(files)
        self._streams = {name: Stream(files, name) for name in files[0].streams}

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def names(self) -> list[str]:
        """Of the streams."""
        return list(self._streams)

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            raise NoSuchStream(name, self.names)
        return self._streams[name]

    def of_kind(self, kind: Kind) -> Stream | None:
        """The first stream that means this."""
        return next((stream for stream in self._streams.values() if stream.kind == kind), None)

    def extra(self, row: int) -> dict[str, Any]:
        """What the line of a row said in its manifest beside what we know: `{"speaker": "anna"}`"""
        found: dict[str, Any] = json.loads(raw) if self.extras is not None and (raw := self.extras.raw(row)) else {}
        return found

    @property
    def sample_rate(self) -> int | None:
        """Of audio and features, in Hz."""
        return self.about.get("sample_rate")


def open_packed(path: Path) -> Packed:
    """What a packed file holds; the same object as long as its files stay as they are."""
    name = os.path.abspath(path)
    known = _known.get(name)
    if known is None or not _is_fresh(path, *known):
        known = _known[name] = (_stamp(path), _open(path))
    return known[1]


class Stream:
    """One stream of all rows."""

    def __init__(self, files: Sequence[PackedFile], name: str) -> None:
        places = [_place(file, files[0], name) for file in files]
        first = places[0]
        self.name, self.kind, self.is_single = name, first.kind, first.is_single
        self.dtype, self.shape = first.dtype, first.shape
        total = sum(place.nbytes for place in places)
        self._values = [_Values(file.path, file.stamp, place, total) for file, place in zip(files, places, strict=True)]
        self.lengths: NDArray[np.int64] = np.concatenate([np.diff(place.starts) for place in places])
        """Steps of each row."""
        self._begins = np.concatenate([place.starts[:-1] for place in places])
        self._file_of = np.repeat(np.arange(len(files), dtype=np.int32), [len(place.starts) - 1 for place in places])

    def __len__(self) -> int:
        return len(self.lengths)

    def view(self, row: int) -> NDArray[Any]:
        """A row as it lies in the file: it can be read, and not written to."""
        begin = int(self._begins[row])
        found: NDArray[Any] = self._values[self._file_of[row]].array[begin : begin + int(self.lengths[row])]
        return found

    def pad(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """(rows, longest, ...) with zeros behind each, and the lengths: one copy per row, straight from the file.

        `out` is filled instead of a new array, if it is given and wide enough.
        """
        lengths = self.lengths[rows]
        longest = int(lengths.max(initial=0))
        padded = np.empty((len(rows), longest, *self.shape), self.dtype) if out is None else out
        width = padded.shape[1]
        files = self._file_of[rows].tolist()
        sources = {number: self._values[number].array for number in set(files)}
        places = zip(padded, files, self._begins[rows].tolist(), lengths.tolist(), strict=True)
        for row, number, begin, length in places:
            row[:length] = sources[number][begin : begin + length]
            if length < width:
                row[length:] = 0
        return padded, lengths

    def text(self, row: int) -> str:
        return self.view(row).tobytes().decode("utf-8")

    @property
    def is_mapped(self) -> bool:
        """Whether all of it is read without h5py."""
        return all(values.place.offset is not None for values in self._values)

    def parts(self) -> Iterator[tuple[Path, StreamPlace, Any]]:
        """(file, place, all steps of the file), file by file."""
        for values in self._values:
            yield values.path, values.place, values.array


class _Values:
    """All steps of a stream in one file, mapped when they are first asked for, in each process by itself."""

    def __init__(self, path: Path, stamp: tuple[int, int], place: StreamPlace, total_bytes: int) -> None:
        """`total_bytes`: of the stream in all files."""
        self.path, self.stamp, self.place = Path(os.path.abspath(path)), stamp, place
        self._total_bytes = total_bytes
        self._array: Any = None
        self._inode, self._looked_s = 0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}

    @property
    def array(self) -> Any:
        now_s = time.monotonic()
        if self._array is None:
            self._array = self._open()
        elif now_s > self._looked_s + LOOK_EVERY_S:
            self._check_size()
        else:
            return self._array
        self._looked_s = now_s
        return self._array

    def _check_size(self) -> None:
        """A file that is cut short while it is mapped ends the process at the next touch, without a word."""
        try:
            found = os.stat(self.path)
        except OSError:
            return  # moved or removed: the map still has all of it
        if self.place.offset is None or found.st_ino != self._inode:
            return
        end = self.place.offset + self.place.nbytes
        if found.st_size < end:
            left = f"{found.st_size:,} bytes are left of it, and a stream of it ends at {end:,}"
            hint = "pack it again, and go on with `--resume auto`"
            raise PackedUnreadable(self.path, f"has been cut short while it was read: {left}", hint)

    def _open(self) -> Any:
        try:
            now = stamp_of(self.path)
        except OSError as error:
            raise PackedUnreadable(self.path, f"cannot be read: {error.strerror}") from None
        if now != self.stamp:  # a map of a file that was cut short would end the process
            hint = "start again, and leave the file alone meanwhile"
            raise PackedUnreadable(self.path, "has been changed since it was opened", hint)
        self._inode = os.stat(self.path).st_ino
        place = self.place
        shape = (int(place.starts[-1]), *place.shape)
        if place.offset is None:
            return _Chunks(self.path, place.dataset, place.shape)
        if place.nbytes == 0:
            return np.empty(shape, place.dtype)
        # An epoch then reads every byte once. What is read for its neighbours' sake and gone before they are asked for
        # would be read many times over.
        is_kept = stays_cached(self._total_bytes, available_bytes())
        found = mapped(self.path, place.offset, place.nbytes, in_large_pieces=is_kept)
        return found.view(place.dtype).reshape(shape)


class _Chunks:
    """A data set in chunks, as others write them: h5py reads it, opened by each process for itself."""

    def __init__(self, path: Path, dataset: str, shape: tuple[int, ...]) -> None:
        self._path, self._dataset, self._shape = path, dataset, shape
        self._open: tuple[int, Any] = (0, None)

    def __getitem__(self, steps: slice) -> NDArray[Any]:
        import h5py

        if self._open[0] != os.getpid():
            self._open = os.getpid(), h5py.File(self._path, "r")[self._dataset]
        found: NDArray[Any] = self._open[1][steps]
        return found.reshape(len(found), *self._shape)


def _place(file: PackedFile, first: PackedFile, name: str) -> StreamPlace:
    """The same stream in another file, which must be like it."""
    place, model = file.streams.get(name), first.streams[name]
    if place is None or (place.dtype, place.shape, place.kind) != (model.dtype, model.shape, model.kind):
        raise PackedUnreadable(
            file.path, f"is not a shard of the same data as {first.path.name}: stream {name!r} differs"
        )
    return place


def _extras(files: Sequence[PackedFile]) -> Strings | None:
    if all(file.extras is None for file in files):
        return None
    return Strings.concat([file.extras or Strings.pack([b""] * len(file)) for file in files])


def _is_fresh(path: Path, stamp: tuple[int, int] | None, packed: Packed) -> bool:
    return _stamp(path) == stamp and all(_stamp(file.path) == file.stamp for file in packed.files)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        return stamp_of(path)
    except OSError:
        return None


def _open(path: Path) -> Packed:
    found = read_layout(path)
    if isinstance(found, PackedFile):
        return Packed(path, [found])
    return Packed(path, [_shard(found, number) for number in range(len(found.files))], found.skipped)


def _shard(whole: Shards, number: int) -> PackedFile:
    path = whole.files[number]
    if not path.exists():
        what = f"there is no such file, and it is shard {number + 1} of {len(whole.files)} of {whole.path.name}"
        raise PackedUnreadable(path, what, f"put it back beside {whole.path.name}, or pack that again")
    found = read_layout(path)
    if not isinstance(found, PackedFile) or found.about.get("pack") != whole.pack:
        raise PackedUnreadable(path, f"is not the shard that {whole.path.name} was made with")
    if len(found) != whole.num_rows[number]:
        raise PackedUnreadable(path, f"has {len(found):,} rows, and {whole.path.name} says {whole.num_rows[number]:,}")
    return found


_known: dict[str, tuple[tuple[int, int] | None, Packed]] = {}
