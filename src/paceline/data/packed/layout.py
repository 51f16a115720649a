"""Layout of a packed file: the places of its streams, its index, and the digests over both.

All sequences of a stream lie one after the other in one contiguous data set. Files of Paceline keep an index of them in
the group `paceline`, whatever the names of the data sets are (`layout`: Paceline's own, or RETURNN's). A file without
that group is read as RETURNN's `HDFDataset` would read it (`returnn.py`). A file of shards holds only their names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.units import counted, plural, size
from paceline.data.packed.errors import PackageMissing, PackedUnreadable
from paceline.data.packed.mapping import available_bytes
from paceline.data.strings import Strings

VERSION = 1
OURS = "paceline"
"""Group that marks a file as Paceline's."""
BLOCK_BYTES = 1 << 18
"""A digest covers as many whole rows as have this size together."""
_MOST_EXPANDED, _ALWAYS_READ = 1100, 1 << 20
"""Bytes of an index for each stored byte (deflate gives at most 1,032), and those that are read in any case."""
Layout = Literal["paceline", "returnn"]
Kind = Literal["audio", "text", "features", "values", "int", "float", "bool"]
"""Meaning of a stream: `text` is UTF-8; the last three are single Python numbers."""
SampleKind = Literal["dict", "tuple", "single"]
"""Container of a sample's streams."""
Stamp = tuple[int, int]
"""Size and time of change of a file: another pair means another content."""


@dataclass(frozen=True)
class StreamSpec:
    """Type of a stream, the same for all rows."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...] = ()
    """Of one step."""
    is_single: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} (any, {', '.join(map(str, self.shape))})" if self.shape else f"{self.dtype} (any)"

    @property
    def step_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class StreamPlace:
    """Place of a stream in a file: row `n` is steps `starts[n]` to `starts[n + 1]`."""

    dataset: str
    """Name of the HDF5 data set."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of one step, as users get it."""
    starts: NDArray[np.int64]
    offset: int | None
    """Bytes from the beginning of the file; None for a data set in chunks, which is read with h5py."""
    kind: Kind = "values"
    is_single: bool = False
    """Every row is one step, and users get it without its first axis."""
    blocks: NDArray[np.int64] | None = None
    """First row of each block, and the number of rows."""
    digests: NDArray[np.uint64] | None = None
    """XXH3 of each block."""

    @property
    def step_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.step_bytes * int(self.starts[-1])


@dataclass(frozen=True)
class Structure:
    """Shape of a sample: the streams it consists of, and what holds them."""

    kind: SampleKind
    names: tuple[str, ...]


@dataclass(frozen=True)
class LeftOut:
    """Lines of a manifest that were skipped when it was packed: their number, and the first of them."""

    number: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class About:
    """Description of packed data, given by its source."""

    structure: Structure | None = None
    """None for files of other programs."""
    sample_rate: int | None = None
    """Of audio and features, in Hz."""
    sources: tuple[str, ...] = ()
    """Names of the manifests it was packed from."""
    features: Mapping[str, Any] | None = None
    """Settings of the front end that computed the features."""
    bad_lines: LeftOut | None = None
    is_trimmed: bool = False
    """Silence was cut off both ends of each recording (`--trim-silence`)."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Meaning of the numbers of sparse streams, in files of RETURNN."""

    def to_json(self) -> dict[str, Any]:
        """Return what is set, as it is written into the file."""
        values: dict[str, Any] = {}
        if self.structure is not None:
            values["structure"] = {"kind": self.structure.kind, "names": list(self.structure.names)}
        if self.sample_rate is not None:
            values["sample_rate"] = self.sample_rate
        if self.sources:
            values["sources"] = list(self.sources)
        if self.features is not None:
            values["features"] = dict(self.features)
        if self.bad_lines is not None:
            values["bad_lines"] = {"number": self.bad_lines.number, "first": list(self.bad_lines.first)}
        if self.is_trimmed:
            values["is_trimmed"] = True
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> About:
        structure, bad_lines = values.get("structure"), values.get("bad_lines")
        return cls(
            None if structure is None else Structure(structure["kind"], tuple(structure["names"])),
            values.get("sample_rate"),
            tuple(values.get("sources", ())),
            values.get("features"),
            None if bad_lines is None else LeftOut(int(bad_lines["number"]), tuple(bad_lines["first"])),
            values.get("is_trimmed") is True,
        )


@dataclass(frozen=True)
class PackingRecord:
    """The packing that wrote a file, and the share of it that is in this file."""

    pack: str
    """Name of the packing, the same in all of its shards."""
    pieces: tuple[int, int]
    """First piece, and the one behind the last."""
    stamp: str | None
    """Digest of the stamps of what the pieces were read from; old files have none."""
    skipped: tuple[str, ...] = ()
    """Reasons why rows were left out."""

    def to_json(self) -> dict[str, Any]:
        return {"pack": self.pack, "pieces": list(self.pieces), "stamp": self.stamp, "skipped": list(self.skipped)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PackingRecord:
        first, end = values.get("pieces", (0, 0))
        skipped = tuple(values.get("skipped", ()))
        return cls(values.get("pack", ""), (int(first), int(end)), values.get("stamp"), skipped)


@dataclass(frozen=True)
class PackedFile:
    """Index of one file, without its data."""

    path: Path
    stamp: Stamp
    """When the index was read."""
    layout: Layout
    streams: Mapping[str, StreamPlace]
    tags: Strings
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """One number per row: `lengths` (of audio in seconds), `counts`."""
    about: About = field(default_factory=About)
    packing: PackingRecord | None = None
    """None where another program wrote the file."""
    extras: Strings | None = None
    """Further keys of each row's line in a manifest, as JSON."""

    def __len__(self) -> int:
        return len(self.tags)


@dataclass(frozen=True)
class Shards:
    """A file that names the shards of a data set."""

    path: Path
    files: Sequence[Path]
    num_rows: Sequence[int]
    pack: str
    skipped: Sequence[str] = ()
    """Reasons why rows behind those of the last shard were left out; shards name their own."""


def stamp_of(path: Path) -> Stamp:
    """Return size and time of change of a file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def stamp_or_none(path: Path) -> Stamp | None:
    """Return the stamp of a file, None if there is no such file."""
    try:
        return stamp_of(path)
    except OSError:
        return None


def h5py_or_error() -> Any:
    """Import h5py, or raise `PackageMissing`."""
    try:
        import h5py
    except ModuleNotFoundError:
        raise PackageMissing from None
    return h5py


def index_digest(about: str, arrays: Sequence[NDArray[Any]]) -> str:
    """Return the digest of a file's index and description."""
    digest = xxhash.xxh3_64(about.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def index_arrays(
    streams: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]],
    tags: Strings,
    columns: Mapping[str, NDArray[Any]],
) -> list[NDArray[Any]]:
    """Return the arrays that `index_digest` covers, in its order; of each stream starts, blocks and digests."""
    return [array for stream in streams for array in stream] + [
        tags.packed,
        tags.lengths,
        *(columns[name] for name in sorted(columns)),
    ]


def cut_blocks(starts: NDArray[np.int64], step_bytes: int, block_bytes: int | None = None) -> NDArray[np.int64]:
    """Return the first row of each block, and the number of rows: a block ends with the row that fills it."""
    block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
    ends = starts[1:] * max(step_bytes, 1)
    firsts, row = [0], 0
    while row < len(ends):
        row = int(np.searchsorted(ends, (ends[row - 1] if row else 0) + block_bytes)) + 1
        firsts.append(min(row, len(ends)))
    return np.array(firsts, np.int64)


def block_digests(
    values: NDArray[Any], starts: NDArray[np.int64], blocks: NDArray[np.int64], which: Iterable[int] | None = None
) -> NDArray[np.uint64]:
    """Return the digests of all blocks of a stream, or of those that `which` names."""
    chosen = range(len(blocks) - 1) if which is None else which
    digests = [values_digest(values[starts[blocks[block]] : starts[blocks[block + 1]]]) for block in chosen]
    return np.array(digests, np.uint64)


def values_digest(values: NDArray[Any]) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def offset_of(dataset: Any) -> int | None:
    """Return the byte of the file at which an HDF5 data set begins; None if it is in chunks."""
    if dataset.size == 0:
        return 0
    offset: int | None = dataset.id.get_offset() if dataset.chunks is None else None
    return offset


def read_index(path: Path, dataset: Any) -> NDArray[Any]:
    """Return a data set of the index, which is held in memory, unless it claims more than the file can hold.

    A few bytes can claim any number of rows: HDF5 makes up what was never written.
    """
    claimed, stored = dataset.size * dataset.dtype.itemsize, dataset.id.get_storage_size()
    if claimed > _MOST_EXPANDED * stored + _ALWAYS_READ:
        what = f"{dataset.name} claims {size(claimed)}, and {size(stored)} are in the file"
        raise PackedUnreadable(path, f"is damaged: {what}")
    if claimed > available_bytes():
        raise PackedUnreadable(path, f"needs {size(claimed)} of memory for {dataset.name}, which are not free", "")
    values: NDArray[Any] = dataset[...]
    return values


def check_places(file: PackedFile) -> None:
    """Require that rows lie in their data sets and data sets in the file: mapped data is not checked again."""
    for name, column in file.columns.items():
        if column.shape != (len(file),) or column.dtype.kind not in "iuf":
            raise PackedUnreadable(file.path, f"is damaged: {name!r} are not {len(file):,} numbers")
    for name, place in file.streams.items():
        damage = _stream_damage(name, place, len(file))
        if damage is not None:
            raise PackedUnreadable(file.path, f"is damaged: {damage}")
        missing = 0 if place.offset is None else place.offset + place.nbytes - file.stamp[0]
        if missing > 0:
            raise PackedUnreadable(
                file.path,
                f"is truncated: {counted(missing, 'byte')} of stream {name!r} {plural(missing, 'is')} missing",
            )


def _stream_damage(name: str, place: StreamPlace, num_rows: int) -> str | None:
    """Return what is wrong with the index of a stream, None if it is sound."""
    lengths = np.diff(place.starts)
    if place.starts.shape != (num_rows + 1,) or place.starts[0] < 0 or np.any(lengths < 0):
        return f"stream {name!r} does not have {counted(num_rows, 'row')}"
    if place.dtype.kind not in "biufc" or not all(isinstance(each, int) and each >= 0 for each in place.shape):
        return f"stream {name!r} has values of type {place.dtype}, shape {place.shape}"
    if (place.is_single or place.kind in ("int", "float", "bool")) and np.any(lengths != 1):
        return f"a row of stream {name!r} is not one value"
    return None
