"""Writer of a packed file: h5py lays out its data sets, their bytes are put in place, read again and compared.

The file gets its name when all of this is done; until then it has a temporary one, which no reader takes for whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.disk import CannotWrite, sync
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import (
    OURS,
    VERSION,
    About,
    Layout,
    PackingRecord,
    StreamSpec,
    block_digests,
    cut_blocks,
    index_arrays,
    index_digest,
    values_digest,
)
from paceline.data.packed.piece import Piece
from paceline.data.packed.returnn import returnn_name, write_returnn_index
from paceline.data.strings import Strings

_PAGE = 4096


@dataclass(frozen=True)
class Content:
    """Everything that is written into a file, except the data."""

    specs: Sequence[StreamSpec]
    starts: Mapping[str, NDArray[np.int64]]
    tags: Strings
    columns: Mapping[str, NDArray[Any]]
    max_values: Mapping[str, int]
    """Largest number of each stream of whole numbers."""
    about: About
    packing: PackingRecord
    extras: Strings | None = None
    """Further keys of the lines of a manifest, as JSON; None where no line has any."""

    def dataset(self, spec: StreamSpec, layout: Layout) -> str:
        """Return the name of a stream's HDF5 data set."""
        if layout == "paceline":
            return f"streams/{spec.name}"
        return "inputs" if spec is self.specs[0] else f"targets/data/{returnn_name(spec.name)}"

    def to_json(self, layout: Layout) -> str:
        """Return the description of the data, as it is written."""
        streams = {
            spec.name: {
                "kind": spec.kind,
                "dataset": self.dataset(spec, layout),
                "shape": list(spec.shape),
                "is_single": spec.is_single,
            }
            for spec in self.specs
        }
        index = {"version": VERSION, "layout": layout, "streams": streams}
        return json.dumps({**index, **self.about.to_json(), **self.packing.to_json()})


def content_of(pieces: Iterable[Piece], about: About, packing: PackingRecord) -> Content:
    """Return the content of a file that holds these pieces in order; their values are not needed."""
    filled = [piece for piece in pieces if len(piece)]
    specs, columns, max_values = filled[0].specs, filled[0].columns, filled[0].max_values
    extras = [text for piece in filled for text in piece.extras or [b""] * len(piece)]
    return Content(
        specs,
        {spec.name: _starts(np.concatenate([piece.lengths[spec.name] for piece in filled])) for spec in specs},
        Strings.pack(tag for piece in filled for tag in piece.tags),
        {name: np.concatenate([piece.columns[name] for piece in filled]) for name in columns},
        {name: max(piece.max_values[name] for piece in filled) for name in max_values},
        about,
        packing,
        Strings.pack(extras) if any(piece.extras for piece in filled) else None,
    )


def write_file(path: Path, layout: Layout, content: Content, pieces: Callable[[], Iterable[Piece]]) -> None:
    """Write a packed file, and compare what it then holds with what was to be written."""
    with _finished(path) as unfinished:
        offsets = _lay_out(unfinished, layout, content)
        digests = _fill(unfinished, content, offsets, pieces())
        _seal(unfinished, content, digests, offsets)


def write_shards(path: Path, files: Sequence[tuple[str, int]], pack: str, skipped: Sequence[str] = ()) -> None:
    """Write the file that names shards, given as (name, number of rows)."""
    import h5py

    shards = [{"name": name, "num_rows": number} for name, number in files]
    about = json.dumps({"version": VERSION, "pack": pack, "shards": shards, "skipped": list(skipped)})
    with _finished(path) as unfinished, h5py.File(unfinished, "w") as file:
        ours = file.create_group(OURS)
        ours.attrs["about"], ours.attrs["digest"] = about, index_digest(about, [])


@contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends.

    Not `core.disk.replacing`, whose temporary names contain the process id: a kill may leave many gigabytes behind, and
    under a fixed name the next attempt writes over them. The lock on the parts keeps others away from it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        raise CannotWrite(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _lay_out(path: Path, layout: Layout, content: Content) -> dict[str, int]:
    """Make a file with room for all values; return the offset of each stream in it."""
    import h5py

    offsets = {}
    with h5py.File(path, "w", alignment_threshold=_PAGE, alignment_interval=_PAGE) as file:
        ours = file.create_group(OURS)
        ours.attrs["about"] = content.to_json(layout)
        for spec in content.specs:
            starts, name = content.starts[spec.name], content.dataset(spec, layout)
            ours[f"starts/{spec.name}"] = starts
            ours[f"blocks/{spec.name}"] = (blocks := cut_blocks(starts, spec.step_bytes))
            ours[f"digests/{spec.name}"] = np.zeros(len(blocks) - 1, np.uint64)
            shape = spec.shape or ((1,) if layout == "returnn" and spec.kind == "audio" else ())
            offsets[spec.name] = _allocate(file, name, (int(starts[-1]), *shape), spec.dtype)
        ours["tags/values"], ours["tags/starts"] = content.tags.packed, _starts(content.tags.lengths)
        if content.extras is not None:
            ours["extra/values"], ours["extra/starts"] = content.extras.packed, _starts(content.extras.lengths)
            ours["extra"].attrs["digest"] = index_digest("", [content.extras.packed, content.extras.lengths])
        columns = ours.create_group("columns")
        for name, column in content.columns.items():
            columns[name] = column
        if layout == "returnn":
            write_returnn_index(file, content.specs, content.starts, content.tags, content.max_values)
    return offsets


def _allocate(file: Any, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Make room for a contiguous data set without filling it; return where it begins."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    space = h5py.h5s.create_simple(shape)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, creation, links)
    return int(dataset.get_offset() or 0)


def _fill(path: Path, content: Content, offsets: Mapping[str, int], pieces: Iterable[Piece]) -> dict[str, int]:
    """Put all values in their places; return a digest of each stream as it was handed over."""
    ends = dict(offsets)
    digests = {spec.name: xxhash.xxh3_64() for spec in content.specs}
    with path.open("r+b", buffering=0) as file:
        for piece in pieces:
            for name, values in piece.values.items():
                raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
                digests[name].update(raw)
                while raw:
                    written = os.pwrite(file.fileno(), raw, ends[name])
                    ends[name] += written
                    raw = raw[written:]
    return {name: digest.intdigest() for name, digest in digests.items()}


def _seal(path: Path, content: Content, expected: Mapping[str, int], offsets: Mapping[str, int]) -> None:
    """Read all again, compare, and write the digests of all blocks and of the index."""
    import h5py

    with h5py.File(path, "r+") as file:
        ours = file[OURS]
        streams = []
        for spec in content.specs:
            starts, blocks = content.starts[spec.name], ours[f"blocks/{spec.name}"][...]
            shape = (int(starts[-1]), *spec.shape)
            is_empty = int(starts[-1]) * spec.step_bytes == 0
            values = (
                np.empty(shape, spec.dtype) if is_empty else np.memmap(path, spec.dtype, "r", offsets[spec.name], shape)
            )
            if values_digest(values) != expected[spec.name]:
                raise PackedUnreadable(path, f"stream {spec.name!r} is not what was written: is the disk sound?")
            digests = block_digests(values, starts, blocks)
            ours[f"digests/{spec.name}"][...] = digests
            streams.append((starts, blocks, digests))
        arrays = index_arrays(streams, content.tags, content.columns)
        ours.attrs["digest"] = index_digest(str(ours.attrs["about"]), arrays)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
