"""Packed data as a map-style data set, which returns samples as they were packed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from paceline.core.cloud.address import local_path
from paceline.core.cloud.file_copy import send
from paceline.data.dataset import DatasetTraits
from paceline.data.packed.from_samples import SampleSource
from paceline.data.packed.layout import Layout, SampleKind
from paceline.data.packed.pack import pack
from paceline.data.packed.reader import Packed, Stream, open_packed
from paceline.data.packed.verify import CheckedRows


class PackedDataset:
    """Random access to a packed file of any layout, for a task's own data.

    A sample has the shape that it had when it was packed: a tensor, a tuple or a dictionary of tensors, numbers and
    texts. For files of other programs it is a dictionary of tensors by stream.
    """

    reads_leave_nothing_open = True
    is_packed = True
    """A run that waits for this data is not advised to pack it."""

    def __init__(self, path: Path | str, streams: Sequence[str] | None = None) -> None:
        """`streams`: the wanted ones, all if not set; samples are dictionaries then."""
        self._packed: Packed = open_packed(local_path(path))
        structure = self._packed.about.structure
        self._kind: SampleKind = "dict" if streams is not None or structure is None else structure.kind
        packed_names = self._packed.names if structure is None else structure.names
        names = list(packed_names if streams is None else streams)
        self._streams = [self._packed.stream(name) for name in names]
        self._checked = CheckedRows(self._packed, names)
        columns = self._packed.columns
        self.lengths: NDArray[Any] = columns["lengths"] if "lengths" in columns else self._streams[0].lengths
        """Cost of each sample: as the packed data set gave it, else the steps of its first stream."""
        if "counts" in columns:
            self.counts = columns["counts"]

    @classmethod
    def write(
        cls, path: Path | str, data: Any, *, layout: Layout = "paceline", processes: int = 1, force: bool = False
    ) -> PackedDataset:
        """Pack a map-style data set, as `paceline pack` does, and open it."""
        source = SampleSource(data, range(len(data)), name=type(data).__name__)
        pack(source, local_path(path), layout=layout, processes=processes, force=force)
        send(local_path(path))
        return cls(path)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        values = [_value(stream, index % len(self)) for stream in self._streams]
        if self._kind == "dict":
            return {stream.name: value for stream, value in zip(self._streams, values, strict=True)}
        return tuple(values) if self._kind == "tuple" else values[0]

    def require_sound(self, index: int) -> None:
        """Raise `RowDamaged` if the bytes of a sample are not those that were packed.

        Reading a sample does not check this: it would cost as much as the reading.
        """
        self._checked.require(index % len(self))

    def extra(self, index: int) -> bytes:
        """Return further keys of the line of a packed manifest, as JSON; empty if there are none."""
        extras = self._packed.extras
        return b"" if extras is None else extras.raw(index % len(self))

    @property
    def tags(self) -> Sequence[str]:
        """Tag of each row."""
        return [self._packed.tags[row] for row in range(len(self))]

    @property
    def names(self) -> Sequence[str]:
        """Names of samples in predictions."""
        return self.tags

    @property
    def labels(self) -> dict[str, list[str]]:
        """Meaning of the numbers of RETURNN's sparse streams."""
        return {name: list(labels) for name, labels in self._packed.about.labels.items()}

    @property
    def fingerprint(self) -> str:
        """Digest of all tags and block digests."""
        digest = xxhash.xxh3_64(self._packed.tags.packed.tobytes())
        for stream in self._streams:
            for _, place, _ in stream.parts():
                digest.update(np.ascontiguousarray(place.starts if place.digests is None else place.digests).data)
        return digest.hexdigest()


class PackedFiles:
    """Several packed files as one data set, one after the other."""

    reads_leave_nothing_open = True
    is_packed = True

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [PackedDataset(path) for path in paths]
        self._ends = np.cumsum([len(file) for file in self._files])
        self.lengths: NDArray[Any] = np.concatenate([file.lengths for file in self._files])
        """Cost of each sample."""
        counts = [DatasetTraits(file).counts for file in self._files]
        if all(each is not None for each in counts):
            self.counts = np.concatenate([np.asarray(each) for each in counts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = index % len(self)
        number = int(np.searchsorted(self._ends, row, side="right"))
        return self._files[number][row - (int(self._ends[number - 1]) if number else 0)]

    @property
    def names(self) -> Sequence[str]:
        """Names of samples in predictions."""
        return [name for file in self._files for name in file.names]

    @property
    def fingerprint(self) -> str:
        """Digest of the files' own, in their order."""
        return xxhash.xxh3_64_hexdigest("".join(file.fingerprint for file in self._files).encode())


def open_files(paths: Sequence[Path]) -> PackedDataset | PackedFiles:
    """Open packed files as one data set."""
    return PackedDataset(paths[0]) if len(paths) == 1 else PackedFiles(paths)


def _value(stream: Stream, row: int) -> Any:
    if stream.kind == "text":
        return stream.text(row)
    values = stream.view(row)
    if stream.kind in ("int", "float", "bool"):
        return values[0].item()
    # A copy: what users do to a sample must not reach the next reader.
    return torch.from_numpy(np.array(values[0] if stream.is_single else values))
