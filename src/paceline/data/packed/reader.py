"""Packed data opened: random access to rows of streams that lie in memory-mapped files.

The index of a file is read with h5py once; after that a read is a copy from the page cache, which all workers and ranks
of a machine share. Nothing is open that a fork could break, and only arrays are pickled.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.cloud.address import address_of, local_path
from paceline.core.cloud.file_copy import bring
from paceline.core.errors import first_line
from paceline.core.json_text import parse_json
from paceline.core.paths import near
from paceline.core.units import counted
from paceline.data.packed.errors import NoSuchStream, PackedUnreadable
from paceline.data.packed.layout import (
    OURS,
    VERSION,
    About,
    Kind,
    PackedFile,
    PackingRecord,
    Shards,
    Stamp,
    StreamPlace,
    check_places,
    h5py_or_error,
    index_arrays,
    index_digest,
    offset_of,
    read_index,
    stamp_of,
    stamp_or_none,
)
from paceline.data.packed.mapping import available_bytes, mapped, stays_cached
from paceline.data.packed.returnn import read_returnn
from paceline.data.strings import Strings

LOOK_EVERY_S = 0.1
"""Least time between two checks that a mapped file still has its size."""
_DAMAGED = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""How h5py, numpy and Python answer a file that is not what it says."""
_MAGIC = b"\x89HDF\r\n\x1a\n"


def open_packed(path: Path) -> Packed:
    """Open a packed file; return the same object as long as its files do not change.

    One at an address is brought first, if it is not here as it is there; a process looks there once.
    """
    path = local_path(path)
    name = os.path.abspath(path)
    cached = _cache.get(name)
    if cached is None and address_of(path) is not None:
        _bring_all(path)
    if cached is None or not _is_fresh(path, *cached):
        cached = _cache[name] = (stamp_or_none(path), _open(path))
    return cached[1]


def _bring_all(path: Path) -> None:
    """Bring a packed file, and the shards that it names, to this machine."""
    bring(path)
    layout = read_layout(path)
    for shard in layout.files if isinstance(layout, Shards) else ():
        bring(shard)


class Packed:
    """Rows of one packed file, or of all shards that it names."""

    def __init__(self, path: Path, files: Sequence[PackedFile], skipped: Sequence[str] = ()) -> None:
        """`skipped`: reasons why rows were left out, beside those that the files name."""
        self.path, self.files = path, tuple(files)
        self.skipped = [line for file in files if file.packing is not None for line in file.packing.skipped]
        self.skipped += skipped
        self.about = files[0].about
        self.tags = Strings.concat([file.tags for file in files])
        self.columns = {name: np.concatenate([file.columns[name] for file in files]) for name in files[0].columns}
        self.extras = _extras(files)
        self._streams = {name: Stream(files, name) for name in files[0].streams}

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def names(self) -> list[str]:
        """Names of the streams."""
        return list(self._streams)

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            raise NoSuchStream(name, self.names)
        return self._streams[name]

    def of_kind(self, kind: Kind) -> Stream | None:
        """Return the first stream of this kind."""
        return next((stream for stream in self._streams.values() if stream.kind == kind), None)

    def seconds(self) -> NDArray[np.float64] | None:
        """Return the duration of each row: as its manifest gave it, else by its samples; None without audio."""
        audio = self.of_kind("audio")
        if "lengths" in self.columns and (audio is not None or self.of_kind("features") is not None):
            return self.columns["lengths"].astype(np.float64)
        return None if audio is None or self.sample_rate is None else audio.lengths / self.sample_rate

    def extra(self, row: int) -> dict[str, Any]:
        """Return further keys of the row's line in its manifest: `{"speaker": "anna"}`."""
        raw = b"" if self.extras is None else self.extras.raw(row)
        try:
            extra = parse_json(raw) if raw else {}
        except ValueError as error:
            raise PackedUnreadable(self.path, f"row {row + 1}: its further keys are not JSON ({error})") from None
        if not isinstance(extra, dict):
            raise PackedUnreadable(self.path, f"row {row + 1}: its further keys have no names")
        return extra

    @property
    def sample_rate(self) -> int | None:
        """Of audio and features, in Hz."""
        return self.about.sample_rate


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
        """Return a row as it lies in the file, read-only."""
        begin = int(self._begins[row])
        steps: NDArray[Any] = self._values[self._file_of[row]].array[begin : begin + int(self.lengths[row])]
        return steps

    def pad(self, rows: NDArray[np.int64], out: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return (rows, longest, ...) with zeros behind each row, and the lengths: one copy per row from the file.

        `out` is filled instead of a new array, if it is given and wide enough.
        """
        lengths = self.lengths[rows]
        padded = np.empty((len(rows), int(lengths.max(initial=0)), *self.shape), self.dtype) if out is None else out
        self.fill(rows, padded, padded.shape[1])
        return padded, lengths

    def fill(self, rows: NDArray[np.int64], places: Iterable[NDArray[Any]], width: int) -> None:
        """Copy each row to its place, (width, ...), with zeros behind it."""
        files = self._file_of[rows].tolist()
        sources = {number: self._values[number].array for number in set(files)}
        begins, lengths = self._begins[rows].tolist(), self.lengths[rows].tolist()
        for place, number, begin, length in zip(places, files, begins, lengths, strict=True):
            place[:length] = sources[number][begin : begin + length]
            if length < width:
                place[length:] = 0

    def text(self, row: int) -> str:
        raw = self.view(row).tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            path = self._values[self._file_of[row]].path
            what = (
                f"row {row + 1} of stream {self.name!r} is not text (UTF-8): {error.reason} at byte {error.start + 1}"
            )
            raise PackedUnreadable(path, what) from None

    @property
    def step_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_mapped(self) -> bool:
        """True if all of it is read without h5py."""
        return all(values.place.offset is not None for values in self._values)

    def parts(self) -> Iterator[tuple[Path, StreamPlace, Any]]:
        """Yield (file, place, all steps of the file), file by file."""
        for values in self._values:
            yield values.path, values.place, values.array


def read_layout(path: Path) -> PackedFile | Shards:
    """Read the index of a file; raise `PackedUnreadable` for one that is cut short, damaged, or something else."""
    h5py = h5py_or_error()
    _refuse_other_things(path)
    try:
        stamp = stamp_of(path)
        with h5py.File(path, "r") as file:
            return _read_ours(path, stamp, file) if OURS in file else read_returnn(path, stamp, file)
    except _DAMAGED as error:
        # h5py's words for a file that is cut short: "truncated file: eof = 2048, sblock->base_addr = 0, ...".
        message = str(error.args[0] if error.args else error)
        why = "is truncated: its end is missing" if "truncated" in message else None
        raise PackedUnreadable(path, why or f"is damaged, or no packed data: {message}") from None


def _read_ours(path: Path, stamp: Stamp, file: Any) -> PackedFile | Shards:
    ours = file[OURS]
    written = str(ours.attrs["about"])
    about = parse_json(written)
    if about["version"] != VERSION:
        hint = "use the Paceline that packed it, or pack it again with this one"
        raise PackedUnreadable(path, f"is of version {about['version']}, and this is {VERSION}", hint)
    if "shards" in about:
        if index_digest(written, []) != ours.attrs["digest"]:
            raise PackedUnreadable(path, "is damaged: what it says of its shards has been changed")
        files = [path.with_name(shard["name"]) for shard in about["shards"]]
        num_rows = [shard["num_rows"] for shard in about["shards"]]
        return Shards(path, files, num_rows, about["pack"], about.get("skipped", ()))
    starts = {name: read_index(path, ours[f"starts/{name}"]) for name in about["streams"]}
    blocks = {name: read_index(path, ours[f"blocks/{name}"]) for name in about["streams"]}
    digests = {name: read_index(path, ours[f"digests/{name}"]) for name in about["streams"]}
    tags = Strings(read_index(path, ours["tags/values"]), read_index(path, ours["tags/starts"]))
    columns = {name: read_index(path, column) for name, column in ours["columns"].items()}
    arrays = index_arrays([(starts[name], blocks[name], digests[name]) for name in about["streams"]], tags, columns)
    if index_digest(written, arrays) != ours.attrs["digest"]:
        raise PackedUnreadable(path, "is damaged: its index is not the one that was written")
    streams = {}
    for name, stream in about["streams"].items():
        dataset = file[stream["dataset"]]
        streams[name] = StreamPlace(
            stream["dataset"],
            dataset.dtype,
            tuple(stream["shape"]),
            starts[name],
            offset_of(dataset),
            stream["kind"],
            stream["is_single"],
            blocks[name],
            digests[name],
        )
    packed = PackedFile(
        path,
        stamp,
        about["layout"],
        streams,
        tags,
        columns,
        About.from_json(about),
        PackingRecord.from_json(about),
        _read_extras(path, ours),
    )
    check_places(packed)
    return packed


def _read_extras(path: Path, ours: Any) -> Strings | None:
    if "extra" not in ours:
        return None
    extras = Strings(read_index(path, ours["extra/values"]), read_index(path, ours["extra/starts"]))
    # A separate digest: older versions, which ignore extras, read the same files.
    if index_digest("", [extras.packed, extras.lengths]) != ours["extra"].attrs["digest"]:
        raise PackedUnreadable(path, "is damaged: its index is not the one that was written")
    return extras


def _refuse_other_things(path: Path) -> None:
    try:
        if path.is_dir():
            raise PackedUnreadable(path, "is a folder", "name a file in it")
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
    except FileNotFoundError:
        names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = [near(path.with_name(name)) for name in difflib.get_close_matches(path.name, names, n=1)]
        hint = f"did you mean {nearest[0]}?" if nearest else "`paceline pack IN... OUT.h5` makes packed files"
        raise PackedUnreadable(path, "there is no such file", hint) from None
    except OSError as error:
        raise PackedUnreadable(path, f"cannot be read: {error.strerror}", "") from None
    if begin != _MAGIC:
        what = "is empty" if not begin else "is not HDF5"
        hint = "`paceline pack IN... OUT.h5` makes packed files; a manifest's name ends in .json"
        raise PackedUnreadable(path, what, hint)


class _Values:
    """All steps of a stream in one file, mapped at the first access, by each process for itself."""

    def __init__(self, path: Path, stamp: Stamp, place: StreamPlace, total_bytes: int) -> None:
        """`total_bytes`: of the stream in all files."""
        self.path, self.stamp, self.place = Path(os.path.abspath(path)), stamp, place
        self._total_bytes = total_bytes
        self._array: Any = None
        self._inode, self._checked_s = 0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}

    @property
    def array(self) -> Any:
        now_s = time.monotonic()
        if self._array is None:
            self._array = self._open()
        elif now_s > self._checked_s + LOOK_EVERY_S:
            self._check_size()
        else:
            return self._array
        self._checked_s = now_s
        return self._array

    def _check_size(self) -> None:
        """Raise if the file was cut short while it is mapped: the next access would kill the process silently."""
        try:
            status = os.stat(self.path)
        except OSError:
            return  # moved or removed: the map still has all of it
        if self.place.offset is None or status.st_ino != self._inode:
            return
        end = self.place.offset + self.place.nbytes
        if status.st_size < end:
            left = f"{status.st_size:,} bytes are left of it, and a stream of it ends at {end:,}"
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
        # An epoch then reads every byte once. Pages that are read ahead for their neighbours, and dropped before those
        # are asked for, would be read many times over.
        is_cached = stays_cached(self._total_bytes, available_bytes())
        values = mapped(self.path, place.offset, place.nbytes, in_large_pieces=is_cached)
        return values.view(place.dtype).reshape(shape)


class _Chunks:
    """A data set in chunks, as other programs write them: read with h5py, opened by each process for itself."""

    def __init__(self, path: Path, dataset: str, shape: tuple[int, ...]) -> None:
        self._path, self._dataset, self._shape = path, dataset, shape
        self._open: tuple[int, Any] = (0, None)

    def __getitem__(self, steps: slice) -> NDArray[Any]:
        import h5py

        try:
            if self._open[0] != os.getpid():
                self._open = os.getpid(), h5py.File(self._path, "r")[self._dataset]
            values: NDArray[Any] = self._open[1][steps]
            return values.reshape(len(values), *self._shape)
        except _DAMAGED as error:  # a filter that cannot decode a chunk, most of all
            what = f"steps {steps.start + 1:,} to {steps.stop:,} of {self._dataset} cannot be read: {first_line(error)}"
            raise PackedUnreadable(self._path, what) from None


def _place(file: PackedFile, first: PackedFile, name: str) -> StreamPlace:
    """Return the place of a stream in a shard; it must be of the same type as in the first shard."""
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


def _is_fresh(path: Path, stamp: Stamp | None, packed: Packed) -> bool:
    return stamp_or_none(path) == stamp and all(stamp_or_none(file.path) == file.stamp for file in packed.files)


def _open(path: Path) -> Packed:
    file = read_layout(path)
    if isinstance(file, PackedFile):
        return Packed(path, [file])
    return Packed(path, [_shard(file, number) for number in range(len(file.files))], file.skipped)


def _shard(whole: Shards, number: int) -> PackedFile:
    path = whole.files[number]
    if not path.exists():
        what = f"there is no such file, and it is shard {number + 1} of {len(whole.files)} of {whole.path.name}"
        raise PackedUnreadable(path, what, f"put it back beside {whole.path.name}, or pack that again")
    shard = read_layout(path)
    if not isinstance(shard, PackedFile) or shard.packing is None or shard.packing.pack != whole.pack:
        raise PackedUnreadable(path, f"is not the shard that {whole.path.name} was made with")
    if len(shard) != whole.num_rows[number]:
        raise PackedUnreadable(
            path, f"has {counted(len(shard), 'row')}, and {whole.path.name} says {whole.num_rows[number]:,}"
        )
    return shard


_cache: dict[str, tuple[Stamp | None, Packed]] = {}
