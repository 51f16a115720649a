"""Samples of any map-style data set as something to pack: tensors, arrays, numbers and texts become streams."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import PacelineError, first_line
from paceline.core.keys import key
from paceline.data.fetch import seed_everything
from paceline.data.packed.checked import RowDamaged
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import NoSuchStream
from paceline.data.packed.layout import Kind
from paceline.data.packed.piece import Piece, PieceMaker, StreamSpec

ROWS_AT_ONCE = 256
"""In a piece."""
_MOST_NAME_BYTES = 1000
_NUM_LOOKED_AT = 4
"""Samples by which data is known to be the same."""


class NotPackable(PacelineError):
    """A sample that is not made of tensors, numbers and texts."""

    hint = "a sample must be a tensor, or a tuple or dictionary of tensors, arrays, numbers and texts"

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"sample {row}: {what}")
        self.row = row


class SampleFails(PacelineError):
    """The data set raised when it was asked for a sample: its own traceback is shown, ours is not."""

    def __init__(self, row: int, error: Exception) -> None:
        # The first frame is the one that asks.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        shown = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        is_ours = isinstance(error, PacelineError)
        super().__init__(f"sample {row}: {error}" if is_ours else f"sample {row} cannot be read\n\n{shown}\n")
        self.row, self.why = row, first_line(error)
        self.hint = "mend it, or leave out all samples that fail: `--bad-data skip`"


class SampleSource:
    """A data set in its own order. What is random in a sample is drawn as in an epoch of training, and then fixed."""

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
        """`name`: where the data is from, in words that another run of the same command has, too.

        Some samples are looked at: where they are others than they were, a packing that was stopped does not go on.
        """
        self._data, self._rows, self._seed, self._epoch = data, rows, seed, epoch
        self._tags = getattr(data, "tags", None)
        self.skip_bad = skip_bad
        with _dice_put_back():
            first, parts, kind = self._first()
        there = list(parts)
        self._streams = there if streams is None else list(streams)
        for each in self._streams:
            if each not in there:
                raise NoSuchStream(each, there)
        self._row_bytes = 1 + sum(_stream(each, parts[each], first)[1].nbytes for each in self._streams)
        """Of the first one, for want of a better guess."""
        self.num_bytes = len(rows) * self._row_bytes
        self._columns = {
            column: np.asarray(values)[rows.start : rows.stop]
            for column in ("lengths", "counts")
            if (values := getattr(data, column, None)) is not None
        }
        structure = {"kind": "dict" if streams is not None else kind, "names": self._streams}
        self.about: dict[str, Any] = {"structure": structure}
        own = getattr(data, "fingerprint", "")
        with _dice_put_back():
            seen = [self._digest(row) for row in _spread(rows)]
        identity = f"{name}|{own}|{len(data)}|{rows}|{seed}|{epoch}|{structure}|{seen}"
        self.fingerprint = xxhash.xxh3_64_hexdigest(identity.encode())

    def __len__(self) -> int:
        return len(self._rows)

    def cuts(self, most_bytes: int | None) -> list[range]:
        number = ROWS_AT_ONCE if most_bytes is None else max(1, min(ROWS_AT_ONCE, most_bytes // self._row_bytes))
        return [range(first, min(first + number, len(self))) for first in range(0, len(self), number)]

    def stamp(self, rows: range) -> str:
        """What samples are made of is not known; some of them are in the fingerprint."""
        return ""

    def read(self, rows: range) -> Piece:
        maker, kept, skipped = PieceMaker(), [], []
        for row in rows:
            sample = self._rows[row]
            tag = f"seq-{sample}" if self._tags is None else str(self._tags[sample])
            try:
                found = self._sample(sample)
            except (SampleFails, RowDamaged) as bad:
                if not self.skip_bad:
                    raise
                skipped.append(f"sample {sample}: {bad.why if isinstance(bad, SampleFails) else bad}")
                continue
            maker.add(tag, found)
            kept.append(row)
        extras = [self._data.extra(self._rows[row]) for row in kept] if isinstance(self._data, PackedDataset) else []
        return maker.finish({name: column[kept] for name, column in self._columns.items()}, skipped, extras)

    def _first(self) -> tuple[int, dict[str, Any], str]:
        """The first sample that can be read, and all that it is; the others are like it."""
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

    def _parts_of(self, sample: int) -> tuple[dict[str, Any], str]:
        if isinstance(self._data, PackedDataset):
            self._data.require_sound(sample)
        seed_everything(key(self._seed, self._epoch, sample))  # as `Fetch` does
        try:
            found = self._data[sample]
        except Exception as error:
            raise SampleFails(sample, error) from None
        return _parts(found)

    def _digest(self, sample: int) -> str:
        """Of what a sample holds; empty where it is another one each time, whatever the seed, or is left out."""
        try:
            seen = {_digest(self._sample(sample)) for _ in range(2)}
        except (SampleFails, RowDamaged):
            if not self.skip_bad:
                raise
            return ""
        return seen.pop() if len(seen) == 1 else ""


def _spread(rows: range) -> list[int]:
    """Some rows from all over the data, the first and the last among them."""
    places = np.unique(np.linspace(0, len(rows) - 1, _NUM_LOOKED_AT).astype(np.int64))
    return [rows[place] for place in places.tolist()]


def _digest(sample: Sequence[tuple[StreamSpec, NDArray[Any]]]) -> str:
    digest = xxhash.xxh3_64()
    for spec, values in sample:
        digest.update(repr((spec, values.shape)).encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


@contextmanager
def _dice_put_back() -> Iterator[None]:
    """Samples are drawn, and the numbers that the caller draws next stay the same."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _parts(sample: Any) -> tuple[dict[str, Any], str]:
    """The streams of a sample by name, and what it is itself."""
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
