"""Table of a buffer's slots: which item is in which slot, which rank holds it, and the payload that this rank holds.

An item is any dictionary of tensors. Its payload is one row of bytes (`Layout`), so that items of any fields are moved
and sent as one thing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.keys import bits, finalise

Integers = NDArray[np.int64]
NOWHERE = -1
WORD = 8
"""Every field begins at a whole word, so that a row can be read as any dtype without a copy."""
_SLOTS, _COLUMNS = (0x736C6F,), (0x636F6C,)
"""Streams of keyed bits that a digest uses."""


class ItemMisfit(PacelineError):
    """Items with other fields or shapes than the buffer was made for."""

    reason: str
    sentence = "the items do not fit the replay buffer: {reason}"
    hint = "give the fields that the buffer was made with, one row per item"


@dataclass(frozen=True)
class Field:
    """Dtype and shape of one tensor of an item."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_exact(self) -> bool:
        """Integers are the same at any world size; floats are so up to rounding."""
        return not self.dtype.is_floating_point


class Layout:
    """Position of each field in an item's row."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self._spans: dict[str, slice] = {}
        end = 0
        for name, field in self.fields.items():
            self._spans[name] = slice(end, end + field.num_bytes)
            end += -(-field.num_bytes // WORD) * WORD
        self.row_bytes = max(end, WORD)
        self._strides = [
            (name, field.dtype, field.shape, _strides(field.shape), self._spans[name].start // field.dtype.itemsize)
            for name, field in self.fields.items()
        ]

    def empty(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return rows to write to; the bytes between fields are 0, so that equal items are equal rows."""
        return torch.zeros((num_rows, self.row_bytes), dtype=torch.uint8, device=device)

    def unpack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of contiguous rows, as views of them."""
        fields, num_rows, begin = {}, len(rows), rows.storage_offset()
        for name, dtype, shape, strides, offset in self._strides:
            typed = rows if dtype is torch.uint8 else rows.view(dtype)
            row, start = self.row_bytes // dtype.itemsize, begin // dtype.itemsize
            fields[name] = typed.as_strided((num_rows, *shape), (row, *strides), start + offset)
        return fields

    def pack(self, items: Mapping[str, torch.Tensor], chosen: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return rows of the chosen items."""
        rows = self.empty(len(chosen), device)
        for name, view in self.unpack(rows).items():
            tensor = items[name]
            view.copy_(tensor.detach().index_select(0, chosen.to(tensor.device)))
        return rows

    def check(self, items: Mapping[str, torch.Tensor], num_items: int) -> None:
        """Raise `ItemMisfit` unless these are `num_items` items of this layout."""
        if items.keys() != self.fields.keys():
            raise ItemMisfit(f"fields {', '.join(items) or 'none'} instead of {', '.join(self.fields)}")
        for name, field in self.fields.items():
            if tuple(items[name].shape) != (num_items, *field.shape):
                wanted = [num_items, *field.shape]
                raise ItemMisfit(f"{name!r} has the shape {list(items[name].shape)} instead of {wanted}")

    def checksums(self, rows: torch.Tensor, exact_only: bool) -> NDArray[np.uint64]:
        """Return a checksum of each row, a sum of its words times odd numbers; without floats if `exact_only`."""
        factors = (bits(_COLUMNS, np.arange(self.row_bytes // WORD)) | np.uint64(1)).view(np.int64)
        factors = np.where(self._counted_words(exact_only), factors, 0)
        # An integer product in torch wraps around on every device; `@` is not there for integers on GPUs.
        sums = (rows.view(torch.int64) * torch.from_numpy(factors).to(rows.device)).sum(1)
        return sums.cpu().numpy().view(np.uint64)

    def _counted_words(self, exact_only: bool) -> NDArray[np.bool_]:
        counted = np.zeros(self.row_bytes // WORD, np.bool_)
        for name, span in self._spans.items():
            if self.fields[name].is_exact or not exact_only:
                counted[span.start // WORD : -(-span.stop // WORD)] = True
        return counted


class Table:
    """Slots 0..num_stored-1 are in use. All columns but `row` are the same on every rank; `row` is the place of an
    item's payload on this rank, or `NOWHERE`."""

    def __init__(self, layout: Layout, capacity: int, num_rows: int, device: torch.device) -> None:
        self.layout, self.capacity, self.device = layout, capacity, device
        self.num_stored = 0
        self.index = np.full(capacity, NOWHERE)
        """Global index of the item in each slot."""
        self.label = np.full(capacity, NOWHERE)
        self.score = np.zeros(capacity, np.float64)
        self.owner = np.full(capacity, NOWHERE)
        """Rank that saw the item."""
        self.row = np.full(capacity, NOWHERE)
        self.payload = layout.empty(num_rows, device)
        """Rows of bytes on this rank's device; more of them as they are needed."""
        self._free_rows = np.zeros(0, np.int64)
        self._num_rows = 0  # rows that this rank has ever needed

    @property
    def held_slots(self) -> Integers:
        """Slots whose payload this rank has."""
        return np.flatnonzero(self.row != NOWHERE)

    def put(
        self,
        slots: Integers,
        index: Integers,
        owner: Integers,
        is_held: NDArray[np.bool_],
        label: Integers | None = None,
        score: NDArray[Any] | None = None,
    ) -> Integers:
        """Put items into slots, each named once; return the rows for those of them that this rank holds."""
        rows = self._take_rows(slots, int(is_held.sum()))
        self.row[slots[is_held]] = rows
        self.index[slots] = index
        self.owner[slots] = owner
        if label is not None:
            self.label[slots] = label
        if score is not None:
            self.score[slots] = score
        self.num_stored = max(self.num_stored, int(slots.max()) + 1)
        return rows

    def keep(self, slots: Integers) -> None:
        """Free all other slots; those kept become 0..n-1 in this order."""
        is_freed = np.ones(self.capacity, np.bool_)
        is_freed[slots] = False
        freed = self.row[is_freed]
        self._free_rows = np.concatenate([self._free_rows, freed[freed != NOWHERE]])
        num_kept = len(slots)
        for column in (self.index, self.label, self.score, self.owner, self.row):
            column[:num_kept] = column[slots]
        for column in (self.index, self.label, self.owner, self.row):
            column[num_kept:] = NOWHERE
        self.score[num_kept:] = 0.0
        self.num_stored = num_kept

    def read(self, slots: Integers) -> torch.Tensor:
        """Return the payload of slots that this rank holds."""
        return self.payload.index_select(0, self.on_device(self.row[slots]))

    def write(self, rows: Integers, payload: torch.Tensor) -> None:
        """Write payload to the rows that `put` returned."""
        if self._num_rows > len(self.payload):
            room = max(self._num_rows, min(self.capacity, len(self.payload) + len(self.payload) // 2))
            grown = self.layout.empty(room, self.device)
            grown[: len(self.payload)] = self.payload
            self.payload = grown
        if len(rows):
            self.payload.index_copy_(0, self.on_device(rows), payload)

    def on_device(self, numbers: Integers) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(numbers))
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def digest(self, exact_only: bool) -> int:
        """Return a number over slot, global index and payload that this rank holds (floats left out if `exact_only`).

        It is a sum over slots modulo 2**64: ranks that hold different slots add theirs and get that of one process.
        """
        slots = self.held_slots
        return slots_digest(slots, self.index[slots], self.layout.checksums(self.read(slots), exact_only))

    def _take_rows(self, slots: Integers, num_needed: int) -> Integers:
        """Return rows for new payload: those of what it replaces, then free ones, then new ones."""
        freed = self.row[slots]
        self.row[slots] = NOWHERE
        available = np.concatenate([freed[freed != NOWHERE], self._free_rows])
        num_new = max(0, num_needed - len(available))
        rows = np.concatenate([available, np.arange(self._num_rows, self._num_rows + num_new)])
        self._num_rows += num_new
        self._free_rows = rows[num_needed:]
        return rows[:num_needed]


def slots_digest(slots: Integers, index: Integers, sums: NDArray[np.uint64]) -> int:
    """Return the digest of slots with these items and checksums; digests of disjoint slots are added modulo 2**64."""
    placed = finalise(bits(_SLOTS, slots) + index.astype(np.uint64))
    return int(finalise(placed ^ sums).sum(dtype=np.uint64))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
