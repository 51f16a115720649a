"""Map-style data sets as a source of packing: tensors, arrays, numbers and texts of a sample become streams."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import PacelineError, first_line
from paceline.core.keys import key
from paceline.data.dataset import DatasetTraits
from paceline.data.fetch import seed_everything
from paceline.data.packed.errors import NoSuchStream
from paceline.data.packed.layout import About, Kind, SampleKind, StreamSpec, Structure
from paceline.data.packed.piece import Piece, PieceMaker
from paceline.data.packed.verify import RowDamaged

ROWS_AT_ONCE = 256
"""Rows of a piece."""
_MOST_NAME_BYTES = 1000
_NUM_COMPARED = 4
"""Samples whose content is in the fingerprint."""


class NotPackable(PacelineError):
    """A sample that is not made of tensors, numbers and texts."""

    row: int
    what: str
    sentence = "sample {row}: {what}"
    hint = "a sample must be a tensor, or a tuple or dictionary of tensors, arrays, numbers and texts"


class SampleFails(PacelineError):
    """An exception of the data set: its own traceback is shown, ours is not."""

    hint = "mend it, or leave out all samples that fail: `--bad-data skip`"

    def __init__(self, row: int, error: Exception) -> None:
        # The exception itself is not stored: this one comes from another process, and users' exceptions may not pickle.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame that asks
        shown = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        is_ours = isinstance(error, PacelineError)
        super().__init__(f"sample {row}: {error}" if is_ours else f"sample {row} cannot be read\n\n{shown}\n")
        self.row, self.why = row, first_line(error)


@runtime_checkable
class PackedSamples(Protocol):
    """Data set whose samples are packed already: they are verified before they are copied, and keep their extras."""

    def require_sound(self, index: int) -> None:
        """Raise `RowDamaged` if the bytes of a sample are not those that were packed."""

    def extra(self, index: int) -> bytes:
        """Return further keys of the line of a packed manifest, as JSON; empty if there are none."""


class SampleSource:
    """A data set in its own order. Random samples are drawn as in an epoch of training, and then fixed."""

    def __init__(
        self,
        data: Any,
        rows: range,
        *,
        name: str,
        seed: int = 0,
        epoch: int = 0,
        streams: Sequence[str] | None = None,
        skip_bad: bool = False,
    ) -> None:
        """`name`: origin of the data, the same in another run of the same command.

        Some samples are read: if they have changed, a packing that was stopped does not go on.
        """
        self._data, self._rows, self._seed, self._epoch = data, rows, seed, epoch
        self._packed = data if isinstance(data, PackedSamples) else None
        traits = DatasetTraits(data)
        self._tags = traits.tags
        self.skip_bad = skip_bad
        with _random_state_restored():
            first, parts, kind = self._first()
        self._streams = list(parts if streams is None else streams)
        for stream in self._streams:
            if stream not in parts:
                raise NoSuchStream(stream, list(parts))
        self._row_bytes = 1 + sum(_stream(stream, parts[stream], first)[1].nbytes for stream in self._streams)
        """Size of the first row, as an estimate of all."""
        self.num_bytes = len(rows) * self._row_bytes
        self._columns = {
            column: values[rows.start : rows.stop]
            for column, values in (("lengths", traits.lengths), ("counts", traits.counts))
            if values is not None
        }
        self.about = About(Structure(kind if streams is None else "dict", tuple(self._streams)))
        fingerprint = traits.fingerprint or ""
        structure = self.about.to_json()["structure"]
        with _random_state_restored():
            digests = [self._digest(row) for row in _spread(rows)]
        identity = f"{name}|{fingerprint}|{len(data)}|{rows}|{seed}|{epoch}|{structure}|{digests}"
        self.fingerprint = xxhash.xxh3_64_hexdigest(identity.encode())

    def __len__(self) -> int:
        return len(self._rows)

    def cuts(self, most_bytes: int | None) -> list[range]:
        number = ROWS_AT_ONCE if most_bytes is None else max(1, min(ROWS_AT_ONCE, most_bytes // self._row_bytes))
        return [range(first, min(first + number, len(self))) for first in range(0, len(self), number)]

    def stamp(self, rows: range) -> str:
        """Return nothing: the files behind the samples are not known; some samples are in the fingerprint."""
        return ""

    def read(self, rows: range) -> Piece:
        maker, packed_rows, skipped = PieceMaker(), [], []
        for row in rows:
            sample = self._rows[row]
            tag = f"seq-{sample}" if self._tags is None else str(self._tags[sample])
            try:
                streams = self._sample(sample)
            except (SampleFails, RowDamaged) as bad:
                if not self.skip_bad:
                    raise
                skipped.append(f"sample {sample}: {bad.why if isinstance(bad, SampleFails) else bad}")
                continue
            maker.add(tag, streams)
            packed_rows.append(row)
        columns = {name: column[packed_rows] for name, column in self._columns.items()}
        extras = [self._packed.extra(self._rows[row]) for row in packed_rows] if self._packed is not None else []
        return maker.finish(columns, skipped, extras)

    def _first(self) -> tuple[int, dict[str, Any], SampleKind]:
        """Return the first sample that can be read, its streams and its kind; the others are like it."""
        for sample in self._rows:
            try:
                return sample, *self._parts_of(sample)
            except (SampleFails, RowDamaged):
                if not self.skip_bad or sample == self._rows[-1]:
                    raise
        raise AssertionError("there are rows")

    def _sample(self, sample: int) -> list[tuple[StreamSpec, NDArray[Any]]]:
        parts, _ = self._parts_of(sample)
        missing = [name for name in self._streams if name not in parts]
        if missing:
            raise NotPackable(sample, f"it has no {missing[0]!r}")
        return [_stream(name, parts[name], sample) for name in self._streams]

    def _parts_of(self, sample: int) -> tuple[dict[str, Any], SampleKind]:
        if self._packed is not None:
            self._packed.require_sound(sample)
        seed_everything(key(self._seed, self._epoch, sample))  # as `Fetch` does
        try:
            value = self._data[sample]
        except Exception as error:
            raise SampleFails(sample, error) from None
        return _parts(value)

    def _digest(self, sample: int) -> str:
        """Return the digest of a sample; empty if it differs each time, whatever the seed, or is left out."""
        try:
            digests = {_digest(self._sample(sample)) for _ in range(2)}
        except (SampleFails, RowDamaged):
            if not self.skip_bad:
                raise
            return ""
        return digests.pop() if len(digests) == 1 else ""


def _spread(rows: range) -> list[int]:
    """Return some rows from all over the data, the first and the last among them."""
    places = np.unique(np.linspace(0, len(rows) - 1, _NUM_COMPARED).astype(np.int64))
    return [rows[place] for place in places.tolist()]


def _digest(sample: Sequence[tuple[StreamSpec, NDArray[Any]]]) -> str:
    digest = xxhash.xxh3_64()
    for spec, values in sample:
        digest.update(repr((spec, values.shape)).encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


@contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restore the random number generators, so that drawing samples does not change what the caller draws next."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _parts(sample: Any) -> tuple[dict[str, Any], SampleKind]:
    """Return the streams of a sample by name, and its kind."""
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}, "dict"
    if isinstance(sample, tuple) and hasattr(sample, "_asdict"):
        return {str(name): value for name, value in sample._asdict().items()}, "dict"
    if isinstance(sample, tuple | list):
        return {str(number): value for number, value in enumerate(sample)}, "tuple"
    return {"data": sample}, "single"


def _stream(name: str, value: Any, row: int) -> tuple[StreamSpec, NDArray[Any]]:
    if not name or "/" in name or name in (".", "..") or len(name.encode()) > _MOST_NAME_BYTES:
        raise NotPackable(row, f"{name!r} is no name for a stream")
    if isinstance(value, str):
        return StreamSpec(name, "text", "uint8"), np.frombuffer(value.encode(), np.uint8)
    kinds: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
    kind = kinds.get(type(value), "values")
    array = _array(name, value, row)
    spec = StreamSpec(name, kind, array.dtype.name, array.shape[1:], is_single=array.ndim == 0)
    return (spec, array[None]) if array.ndim == 0 else (spec, array)


def _array(name: str, value: Any, row: int) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            raise NotPackable(row, f"{name!r} is bfloat16, which HDF5 does not know: give it as float32 or float16")
        value = value.numpy()
    elif not isinstance(value, np.ndarray | np.generic | bool | int | float):
        raise NotPackable(row, f"{name!r} is {type(value).__name__}")
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise NotPackable(row, f"{name!r} is of type {array.dtype}")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
