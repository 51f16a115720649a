"""RETURNN's HDF layout, read as its `HDFDataset` reads it and written as that expects it.

`inputs`, `targets/data/*`, `seqLengths`, `seqTags`. RETURNN's `hdf_dump` writes contiguous data sets, which are mapped
into memory like Paceline's own; its `SimpleHDFWriter` writes chunks, which only h5py can read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.disk import CannotWrite, sync
from paceline.core.units import counted
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import (
    About,
    PackedFile,
    Stamp,
    StreamPlace,
    StreamSpec,
    check_places,
    offset_of,
    read_index,
)
from paceline.data.strings import Strings

INPUT = "data"
"""RETURNN's name of the stream that lies in `inputs`."""
BYTES = 256
"""Values of a byte, which RETURNN takes for the size of a vocabulary."""


def read_returnn(path: Path, stamp: Stamp, file: Any) -> PackedFile:
    """Return the index of a file that is open in h5py."""
    if "seqLengths" not in file or "seqTags" not in file:
        names = ", ".join(sorted(file)) or "nothing"
        hint = "give a file of `paceline pack`, or one of RETURNN's hdf_dump or SimpleHDFWriter"
        raise PackedUnreadable(path, f"is HDF5 of another kind: it holds {names}", hint)
    keys = sorted({*file["targets/data"], *file["targets/size"].attrs}) if "targets" in file else []
    inputs = [INPUT] if "inputs" in file else []
    lengths = _lengths(path, file["seqLengths"], len(inputs), len(keys))
    streams = {}
    for column, name in enumerate([*inputs, *keys]):
        dataset = file["inputs"] if name == INPUT and inputs else file[f"targets/data/{name}"]
        if dataset.dtype.kind in "biufc":  # not text, which RETURNN itself does not train on
            streams[name] = _place(path, name, dataset, lengths[:, column])
    tags = Strings.pack(_bytes(tag) for tag in read_index(path, file["seqTags"]).tolist())
    packed = PackedFile(path, stamp, "returnn", streams, tags, about=About(labels=_labels(path, file)))
    check_places(packed)
    return packed


def returnn_name(name: str) -> str:
    """Return the name of a target stream; `data` is what RETURNN calls the input."""
    return "classes" if name == INPUT else name


def write_returnn_index(
    file: Any,
    specs: Sequence[StreamSpec],
    starts: Mapping[str, NDArray[np.int64]],
    tags: Strings,
    max_values: Mapping[str, int],
) -> None:
    """Write the lengths, tags and sizes that `HDFDataset` reads."""
    first, *targets = specs
    columns = [first, *sorted(targets, key=lambda spec: returnn_name(spec.name))]
    lengths = [np.diff(starts[spec.name]) for spec in columns]
    if not targets:
        lengths.append(np.zeros_like(lengths[0]))  # RETURNN counts targets even where there are none
    file["seqLengths"] = np.stack(lengths, axis=1).astype(np.int32)
    raw_tags = [tags.raw(row) for row in range(len(tags))]
    file["seqTags"] = np.array(raw_tags, dtype=f"S{max(map(len, raw_tags)) + 1}")
    size = first.shape[0] if first.shape else 1
    file.attrs["inputPattSize"] = file.attrs["numLabels"] = size
    file.attrs["numDims"], file.attrs["numSeqs"] = 1, len(raw_tags)
    file.attrs["numTimesteps"] = int(starts[first.name][-1])
    if targets:
        sizes = file.create_group("targets/size")
        file.create_group("targets/labels")
        for spec in targets:
            dim = spec.shape[-1] if spec.shape else max_values.get(spec.name, BYTES - 1) + 1
            sizes.attrs[returnn_name(spec.name)] = [max(dim, 1), 1 + len(spec.shape)]


def agree_on_sizes(files: Sequence[Path]) -> None:
    """Give all shards the largest number of classes: RETURNN refuses files of one data set that differ in it.

    Called before the files have their names. Numbers change in their places and nothing moves, so that a kill leaves a
    file that is whole, and to which this can be done again.
    """
    import h5py

    try:
        sizes: list[dict[str, Any]] = []
        for path in files:
            with h5py.File(path, "r") as file:
                sizes.append(dict(file["targets/size"].attrs) if "targets/size" in file else {})
        largest = {name: np.max([size[name] for size in sizes], axis=0) for name in sizes[0]}
        for path, size_of_file in zip(files, sizes, strict=True):
            if all(np.array_equal(size_of_file[name], largest[name]) for name in largest):
                continue
            with h5py.File(path, "r+") as file:
                for name, size in largest.items():
                    file["targets/size"].attrs.modify(name, size)
            sync(path)
    except OSError as error:
        raise CannotWrite(path, error) from error


def _lengths(path: Path, dataset: Any, num_inputs: int, num_targets: int) -> NDArray[np.int64]:
    """Return the steps of each row and stream: (rows, streams)."""
    lengths = np.asarray(read_index(path, dataset), dtype=np.int64)
    if lengths.ndim == 1:  # one length for all streams
        lengths = np.repeat(lengths[:, None], num_inputs + max(1, num_targets), axis=1)
    # A file without targets still has a second column, which means nothing.
    if lengths.shape[1] < num_inputs + num_targets:
        what = f"{counted(lengths.shape[1], 'column')} of lengths for {counted(num_inputs + num_targets, 'stream')}"
        raise PackedUnreadable(path, f"is damaged: it has {what}")
    return lengths


def _place(path: Path, name: str, dataset: Any, lengths: NDArray[np.int64]) -> StreamPlace:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if starts[-1] > dataset.shape[0]:
        what = f"{dataset.shape[0]:,} of {starts[-1]:,} steps of stream {name!r}"
        raise PackedUnreadable(path, f"is incomplete: it holds {what}")
    return StreamPlace(dataset.name, dataset.dtype, tuple(dataset.shape[1:]), starts, offset_of(dataset))


def _labels(path: Path, file: Any) -> dict[str, list[str]]:
    """Return the meaning of the numbers of sparse streams."""
    groups = file.get("targets/labels", {})
    labels = {name: _decoded(read_index(path, groups[name])) for name in groups}
    if "labels" in file and len(file["labels"]):
        labels.setdefault(INPUT, _decoded(read_index(path, file["labels"])))
    return labels


def _decoded(labels: NDArray[Any]) -> list[str]:
    return [_bytes(label).decode("utf-8", "replace") for label in labels.tolist()]


def _bytes(text: str | bytes) -> bytes:
    """Return a string up to its first zero, as RETURNN reads it."""
    raw = text.encode() if isinstance(text, str) else text
    return raw.partition(b"\0")[0]
