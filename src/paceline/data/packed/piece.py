"""Pieces of a packing: rows that one process has read, kept in a file until the packed file is written."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.disk import replacing
from paceline.core.errors import PacelineError
from paceline.data.packed.layout import StreamSpec


class StreamsDiffer(PacelineError):
    """Rows whose streams are of different types, which cannot lie in one data set."""

    tag: str
    specs: Sequence[StreamSpec]
    expected: Sequence[StreamSpec]
    sentence = "{tag}: {difference}"
    hint = "rows may differ in their first axis only: give all the same other axes, and the same type"

    @property
    def difference(self) -> str:
        named = {spec.name: spec for spec in self.expected}
        other = next((spec for spec in self.specs if named.get(spec.name) != spec), None)
        if other is not None and other.name in named:
            return f"stream {other.name!r} is {other}, and {named[other.name]} before"
        return f"its streams are {', '.join(spec.name for spec in self.specs)}, and {', '.join(named)} before"


@dataclass
class Piece:
    """Consecutive rows."""

    specs: Sequence[StreamSpec]
    values: Mapping[str, NDArray[Any]]
    """All steps of all rows, by stream."""
    lengths: Mapping[str, NDArray[np.int64]]
    """Steps of each row, by stream."""
    tags: Sequence[bytes]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    """Reasons why rows were left out."""
    max_values: Mapping[str, int] = field(default_factory=dict)
    """Largest number of each stream of whole numbers, which tells how many classes there are."""
    stamp: str = ""
    """Stamp of the files that the rows were read from."""
    extras: Sequence[bytes] = ()
    """Further keys of each row's line, as JSON; empty where no row has any."""

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.values.values())


class PieceMaker:
    """Collects rows into a piece."""

    def __init__(self) -> None:
        self._specs: list[StreamSpec] = []
        self._rows: dict[str, list[NDArray[Any]]] = {}
        self._tags: list[bytes] = []

    def add(self, tag: str, row: Sequence[tuple[StreamSpec, NDArray[Any]]]) -> None:
        specs = [spec for spec, _ in row]
        if not self._tags:
            self._specs = specs
            self._rows = {spec.name: [] for spec in specs}
        elif specs != self._specs:
            raise StreamsDiffer(tag, specs, self._specs)
        for spec, values in row:
            self._rows[spec.name].append(values)
        self._tags.append(tag.encode("utf-8", "surrogateescape"))

    def finish(
        self, columns: Mapping[str, NDArray[Any]], skipped: Sequence[str] = (), extras: Sequence[bytes] = ()
    ) -> Piece:
        lengths = {name: np.array([len(row) for row in rows], np.int64) for name, rows in self._rows.items()}
        values = {name: np.concatenate(rows) for name, rows in self._rows.items()}
        max_values = {
            spec.name: int(values[spec.name].max(initial=-1))
            for spec in self._specs
            if not spec.shape and spec.kind not in ("audio", "text") and np.dtype(spec.dtype).kind in "iub"
        }
        return Piece(
            self._specs, values, lengths, self._tags, columns, skipped, max_values, extras=extras if any(extras) else ()
        )


def write_piece(path: Path, piece: Piece) -> None:
    """Write a piece, whole or not at all."""
    about = {
        "specs": [asdict(spec) for spec in piece.specs],
        "skipped": list(piece.skipped),
        "tops": dict(piece.max_values),
        "stamp": piece.stamp,
    }
    arrays: dict[str, NDArray[Any]] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for name, texts in (("tag", piece.tags), ("extra", piece.extras)):
        arrays[f"{name}s"] = np.frombuffer(b"".join(texts), np.uint8)
        arrays[f"{name}_lengths"] = np.array([len(text) for text in texts], np.int64)
    arrays |= {f"values-{name}": values for name, values in piece.values.items()}
    arrays |= {f"lengths-{name}": values for name, values in piece.lengths.items()}
    arrays |= {f"column-{name}": values for name, values in piece.columns.items()}
    with replacing(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_piece(path: Path, *, with_values: bool = True) -> Piece | None:
    """Read what `write_piece` wrote; return None if it is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            specs = [StreamSpec(**{**each, "shape": tuple(each["shape"])}) for each in about["specs"]]
            return Piece(
                specs,
                {spec.name: arrays[f"values-{spec.name}"] for spec in specs} if with_values else {},
                {spec.name: arrays[f"lengths-{spec.name}"] for spec in specs},
                _texts(arrays, "tag"),
                {name.partition("-")[2]: arrays[name] for name in arrays.files if name.startswith("column-")},
                about["skipped"],
                about["tops"],
                about["stamp"],
                _texts(arrays, "extra"),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _texts(arrays: Any, name: str) -> list[bytes]:
    ends = np.cumsum(arrays[f"{name}_lengths"]).tolist()
    packed = arrays[f"{name}s"].tobytes()
    return [packed[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
