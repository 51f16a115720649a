"""One item as a row of bytes: any dictionary of tensors, in the dtypes they have, moved and sent as one thing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.core.errors import PacelineError

WORD = 8
"""Every field begins at a whole word, so that a row can be read as any dtype without a copy."""


class ItemMisfit(PacelineError):
    """An item that is not made as the buffer was told."""

    hint = "give the fields that the buffer was made with, one row per item"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the items do not fit the replay buffer: {reason}")


@dataclass(frozen=True)
class Field:
    """A tensor of an item."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_exact(self) -> bool:
        """Whole numbers are the same at any world size; floats are up to rounding."""
        return not self.dtype.is_floating_point


class Layout:
    """Where each field of an item lies in its row."""

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
        """Rows to write to; the bytes between fields are 0, so that equal items are equal rows."""
        return torch.zeros((num_rows, self.row_bytes), dtype=torch.uint8, device=device)

    def unpack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of rows (whole and one after the other in memory), as views of them."""
        found, num_rows, begin = {}, len(rows), rows.storage_offset()
        for name, dtype, shape, strides, offset in self._strides:
            same = rows if dtype is torch.uint8 else rows.view(dtype)
            row, start = self.row_bytes // dtype.itemsize, begin // dtype.itemsize
            found[name] = same.as_strided((num_rows, *shape), (row, *strides), start + offset)
        return found

    def pack(self, items: Mapping[str, torch.Tensor], chosen: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Rows of the chosen items."""
        rows = self.empty(len(chosen), device)
        for name, view in self.unpack(rows).items():
            tensor = items[name]
            view.copy_(tensor.detach().index_select(0, chosen.to(tensor.device)))
        return rows

    def check(self, items: Mapping[str, torch.Tensor], num_items: int) -> None:
        """Whether these are items of this layout, one row each."""
        if items.keys() != self.fields.keys():
            raise ItemMisfit(f"fields {', '.join(items) or 'none'} instead of {', '.join(self.fields)}")
        for name, field in self.fields.items():
            if tuple(items[name].shape) != (num_items, *field.shape):
                wanted = [num_items, *field.shape]
                raise ItemMisfit(f"{name!r} has the shape {list(items[name].shape)} instead of {wanted}")

    def words(self, exact_only: bool) -> torch.Tensor:
        """For each word of a row, whether a digest counts it."""
        counted = torch.zeros(self.row_bytes // WORD, dtype=torch.bool)
        for name, span in self._spans.items():
            if self.fields[name].is_exact or not exact_only:
                counted[span.start // WORD : -(-span.stop // WORD)] = True
        return counted


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a whole tensor of this shape."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
