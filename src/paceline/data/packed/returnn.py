"""RETURNN's HDF files, read as its `HDFDataset` reads them: `inputs`, `targets/data/*`, `seqLengths`, `seqTags`.

Its `hdf_dump` writes contiguous data sets, which are mapped into memory like our own; its `SimpleHDFWriter` writes
chunks, which only h5py can read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import PackedFile, StreamPlace, check_places, offset_of
from paceline.data.strings import Strings

INPUT = "data"
"""What RETURNN calls the stream that lies in `inputs`."""


def read_returnn(path: Path, stamp: tuple[int, int], file: Any) -> PackedFile:
    """A file that is open in h5py."""
    if "seqLengths" not in file or "seqTags" not in file:
        there = ", ".join(sorted(file)) or "nothing"
        hint = "give a file of `paceline pack`, or one of RETURNN's hdf_dump or SimpleHDFWriter"
        raise PackedUnreadable(path, f"is HDF5 of another kind: it holds {there}", hint)
    keys = sorted({*file["targets/data"], *file["targets/size"].attrs}) if "targets" in file else []
    inputs = [INPUT] if "inputs" in file else []
    lengths = np.asarray(file["seqLengths"][...], dtype=np.int64)
    if lengths.ndim == 1:  # one length for all streams
        lengths = np.repeat(lengths[:, None], len(inputs) + max(1, len(keys)), axis=1)
    # A file without targets still has a second column, which means nothing.
    if lengths.shape[1] < len(inputs) + len(keys):
        what = f"{lengths.shape[1]} columns of lengths for {len(inputs) + len(keys)} streams"
        raise PackedUnreadable(path, f"is damaged: it has {what}")
    streams = {}
    for column, name in enumerate([*inputs, *keys]):
        dataset = file["inputs"] if name == INPUT and inputs else file[f"targets/data/{name}"]
        if dataset.dtype.hasobject:
            continue  # text of variable length, which RETURNN itself does not train on
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths[:, column], out=starts[1:])
        if starts[-1] > dataset.shape[0]:
            what = f"{dataset.shape[0]:,} of {starts[-1]:,} steps of stream {name!r}"
            raise PackedUnreadable(path, f"is incomplete: it holds {what}")
        offset = offset_of(dataset)
        streams[name] = StreamPlace(dataset.name, dataset.dtype, tuple(dataset.shape[1:]), starts, offset)
    tags = Strings.pack(_bytes(tag) for tag in file["seqTags"][...].tolist())
    found = PackedFile(path, stamp, "returnn", streams, tags, about={"labels": _labels(file)})
    check_places(found)
    return found


def _labels(file: Any) -> dict[str, list[str]]:
    """What the numbers of sparse streams stand for."""
    groups = file.get("targets/labels", {})
    found = {name: [_bytes(label).decode() for label in groups[name][...].tolist()] for name in groups}
    if "labels" in file and len(file["labels"]):
        found.setdefault(INPUT, [_bytes(label).decode() for label in file["labels"][...].tolist()])
    return found


def _bytes(text: str | bytes) -> bytes:
    """Up to the first zero, as RETURNN reads it."""
    raw = text.encode() if isinstance(text, str) else text
    return raw.partition(b"\0")[0]
