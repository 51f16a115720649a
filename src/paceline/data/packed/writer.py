"""A packed file written: its data sets laid out by h5py, their bytes put in place, read again and compared.

The file gets its name when all of this is done; until then it has another one, and nobody takes it for whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.disk import CannotWrite, sync
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import OURS, VERSION, Layout, index_arrays, index_digest
from paceline.data.packed.piece import Piece, StreamSpec
from paceline.data.strings import Strings

BLOCK_BYTES = 1 << 18
"""A digest is of as many whole rows as have this size together."""
_PAGE = 4096
BYTES = 256
"""Values of a byte: what RETURNN takes for the size of a vocabulary."""


@dataclass(frozen=True)
class Content:
    """What is to be written, without the data."""

    specs: Sequence[StreamSpec]
    starts: Mapping[str, NDArray[np.int64]]
    tags: Strings
    columns: Mapping[str, NDArray[Any]]
    tops: Mapping[str, int]
    """The largest number of streams of whole numbers."""
    about: Mapping[str, Any]
    extras: Strings | None = None
    """What lines say beside what we know, as JSON; none where no line does."""

    def dataset(self, spec: StreamSpec, layout: Layout) -> str:
        """Where a stream lies in the file."""
        if layout == "paceline":
            return f"streams/{spec.name}"
        return "inputs" if spec is self.specs[0] else f"targets/data/{returnn_name(spec.name)}"


def content_of(pieces: Iterable[Piece], about: Mapping[str, Any]) -> Content:
    """Of pieces one after the other; their values are not looked at."""
    found = [piece for piece in pieces if len(piece)]
    specs = found[0].specs
    starts = {}
    for spec in specs:
        lengths = np.concatenate([piece.lengths[spec.name] for piece in found])
        starts[spec.name] = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    tags = Strings.pack(tag for piece in found for tag in piece.tags)
    columns = {name: np.concatenate([piece.columns[name] for piece in found]) for name in found[0].columns}
    tops = {name: max(piece.tops[name] for piece in found) for name in found[0].tops}
    extras = Strings.pack(text for piece in found for text in piece.extras or [b""] * len(piece))
    return Content(specs, starts, tags, columns, tops, about, extras if any(piece.extras for piece in found) else None)


def write_file(path: Path, layout: Layout, content: Content, pieces: Callable[[], Iterable[Piece]]) -> None:
    """Write a packed file, and compare what it then holds with what was to be written."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        offsets = _lay_out(unfinished, layout, content)
        wanted = _fill(unfinished, content, offsets, pieces())
        _seal(unfinished, content, wanted, offsets)
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CannotWrite(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_shards(path: Path, files: Sequence[tuple[str, int]], pack: str, skipped: Sequence[str] = ()) -> None:
    """The file that stands for shards, given as (name, number of rows)."""
    import h5py

    shards = [{"name": name, "num_rows": number} for name, number in files]
    about = json.dumps({"version": VERSION, "pack": pack, "shards": shards, "skipped": list(skipped)})
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with h5py.File(unfinished, "w") as file:
            ours = file.create_group(OURS)
            ours.attrs["about"], ours.attrs["digest"] = about, index_digest(about, [])
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CannotWrite(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def agree_on_sizes(files: Sequence[Path]) -> None:
    """RETURNN refuses files of one data set that differ in how many classes they say there are: all get the most.

    Called before the files have their names. Numbers change in their places and nothing moves, so that a kill leaves a
    file that is whole, and to which this can be done again.
    """
    import h5py

    try:
        sizes: list[dict[str, Any]] = []
        for path in files:
            with h5py.File(path, "r") as file:
                sizes.append(dict(file["targets/size"].attrs) if "targets/size" in file else {})
        most = {name: np.max([each[name] for each in sizes], axis=0) for name in sizes[0]}
        for path, mine in zip(files, sizes, strict=True):
            if all(np.array_equal(mine[name], most[name]) for name in most):
                continue
            with h5py.File(path, "r+") as file:
                for name, size in most.items():
                    file["targets/size"].attrs.modify(name, size)
            sync(path)
    except OSError as error:
        raise CannotWrite(path, error) from error


def cut_blocks(starts: NDArray[np.int64], step_bytes: int, block_bytes: int = BLOCK_BYTES) -> NDArray[np.int64]:
    """The rows with which blocks begin, and the number of rows: a block ends with the row that fills it."""
    ends = starts[1:] * max(step_bytes, 1)
    firsts, row = [0], 0
    while row < len(ends):
        row = int(np.searchsorted(ends, (ends[row - 1] if row else 0) + block_bytes)) + 1
        firsts.append(min(row, len(ends)))
    return np.array(firsts, np.int64)


def block_digests(
    values: NDArray[Any], starts: NDArray[np.int64], blocks: NDArray[np.int64], which: Iterable[int] | None = None
) -> NDArray[np.uint64]:
    """Of the blocks of a stream, or of some of them."""
    chosen = range(len(blocks) - 1) if which is None else which
    digests = [_digest(values[starts[blocks[each]] : starts[blocks[each + 1]]]) for each in chosen]
    return np.array(digests, np.uint64)


def returnn_name(name: str) -> str:
    """`data` is what RETURNN calls the input."""
    return "classes" if name == "data" else name


def _digest(values: NDArray[Any]) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _lay_out(path: Path, layout: Layout, content: Content) -> dict[str, int]:
    """A file with room for all values; where in it they go, by stream."""
    import h5py

    about = _about(layout, content)
    offsets = {}
    with h5py.File(path, "w", alignment_threshold=_PAGE, alignment_interval=_PAGE) as file:
        ours = file.create_group(OURS)
        ours.attrs["about"] = about
        for spec in content.specs:
            starts, name = content.starts[spec.name], content.dataset(spec, layout)
            ours[f"starts/{spec.name}"] = starts
            ours[f"blocks/{spec.name}"] = (blocks := cut_blocks(starts, _step_bytes(spec)))
            ours[f"digests/{spec.name}"] = np.zeros(len(blocks) - 1, np.uint64)
            shape = spec.shape or ((1,) if layout == "returnn" and spec.kind == "audio" else ())
            offsets[spec.name] = _allocate(file, name, (int(starts[-1]), *shape), spec.dtype)
        ours["tags/values"], ours["tags/starts"] = content.tags.packed, _starts(content.tags)
        if content.extras is not None:
            ours["extra/values"], ours["extra/starts"] = content.extras.packed, _starts(content.extras)
            ours["extra"].attrs["digest"] = index_digest("", [content.extras.packed, content.extras.lengths])
        columns = ours.create_group("columns")
        for name, column in content.columns.items():
            columns[name] = column
        if layout == "returnn":
            _for_returnn(file, content)
    return offsets


def _allocate(file: Any, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Room for a contiguous data set, which nobody fills first; where it begins."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    space = h5py.h5s.create_simple(shape)
    made = h5py.h5d.create(file.id, name.encode(), kind, space, creation, links)
    return int(made.get_offset() or 0)


def _fill(path: Path, content: Content, offsets: Mapping[str, int], pieces: Iterable[Piece]) -> dict[str, int]:
    """Put all values in their places; a digest of each stream as it was handed over."""
    at = dict(offsets)
    digests = {spec.name: xxhash.xxh3_64() for spec in content.specs}
    with path.open("r+b", buffering=0) as file:
        for piece in pieces:
            for name, values in piece.values.items():
                raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                digests[name].update(raw)
                while raw:
                    written = os.pwrite(file.fileno(), raw, at[name])
                    at[name] += written
                    raw = raw[written:]
    return {name: digest.intdigest() for name, digest in digests.items()}


def _seal(path: Path, content: Content, wanted: Mapping[str, int], offsets: Mapping[str, int]) -> None:
    """Read all again, compare, and write down digests of all blocks and of the index."""
    import h5py

    with h5py.File(path, "r+") as file:
        ours = file[OURS]
        streams = []
        for spec in content.specs:
            starts, blocks = content.starts[spec.name], ours[f"blocks/{spec.name}"][...]
            shape = (int(starts[-1]), *spec.shape)
            is_empty = int(starts[-1]) * _step_bytes(spec) == 0
            values = (
                np.empty(shape, spec.dtype) if is_empty else np.memmap(path, spec.dtype, "r", offsets[spec.name], shape)
            )
            if _digest(values) != wanted[spec.name]:
                raise PackedUnreadable(path, f"stream {spec.name!r} is not what was written: is the disk sound?")
            digests = block_digests(values, starts, blocks)
            ours[f"digests/{spec.name}"][...] = digests
            streams.append((starts, blocks, digests))
        arrays = index_arrays(streams, content.tags, content.columns)
        ours.attrs["digest"] = index_digest(str(ours.attrs["about"]), arrays)
    sync(path)


def _for_returnn(file: Any, content: Content) -> None:
    """What `HDFDataset` asks for beside the data."""
    first, *others = content.specs
    columns = [first, *sorted(others, key=lambda spec: returnn_name(spec.name))]
    lengths = [np.diff(content.starts[spec.name]) for spec in columns]
    if not others:
        lengths.append(np.zeros_like(lengths[0]))  # of targets that are not there, which it counts nevertheless
    file["seqLengths"] = np.stack(lengths, axis=1).astype(np.int32)
    tags = [content.tags.raw(row) for row in range(len(content.tags))]
    file["seqTags"] = np.array(tags, dtype=f"S{max(map(len, tags)) + 1}")
    size = first.shape[0] if first.shape else 1
    file.attrs["inputPattSize"] = file.attrs["numLabels"] = size
    file.attrs["numDims"], file.attrs["numSeqs"] = 1, len(tags)
    file.attrs["numTimesteps"] = int(content.starts[first.name][-1])
    if others:
        sizes = file.create_group("targets/size")
        file.create_group("targets/labels")
        for spec in others:
            dim = spec.shape[-1] if spec.shape else content.tops.get(spec.name, BYTES - 1) + 1
            sizes.attrs[returnn_name(spec.name)] = [max(dim, 1), 1 + len(spec.shape)]


def _about(layout: Layout, content: Content) -> str:
    streams = {
        spec.name: {
            "kind": spec.kind,
            "dataset": content.dataset(spec, layout),
            "shape": list(spec.shape),
            "is_single": spec.is_single,
        }
        for spec in content.specs
    }
    return json.dumps({"version": VERSION, "layout": layout, "streams": streams, **content.about})


def _step_bytes(spec: StreamSpec) -> int:
    return np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape, dtype=np.int64))


def _starts(strings: Strings) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(strings.lengths)])
