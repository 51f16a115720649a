"""Fused updates of pieces of tensors, on a CPU, with the bits of the whole tensor.

torch's fused Adam and SGD compute most of a tensor in vectors of the CPU and its last few numbers one by one, where
they round otherwise (a product and a sum in one instruction or in two). So the bits would depend on where it is cut.
Here those numbers are computed in a vector of their own, filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.torch_private import foreach_copy_

VECTOR = 16
"""Numbers that every CPU's widest vectors divide: 16 of fp32 with AVX-512."""


def update_by_vectors(update: Callable[[list[list[Tensor]], list[int]], None], columns: Sequence[list[Tensor]]) -> None:
    """Let `update` change contiguous tensors elementwise, in whole vectors only.

    Each column has one tensor per weight (weights, gradients, moments), of the same sizes. `update` gets columns and,
    for each of their tensors, the position of its weight; it is called for what is whole, and for what is left over.
    """
    sizes = [tensor.numel() for tensor in columns[0]]
    ragged = [index for index, size in enumerate(sizes) if size % VECTOR]
    if not ragged:
        update(list(columns), list(range(len(sizes))))
        return
    long = [index for index, size in enumerate(sizes) if size >= VECTOR]
    if long:
        update([[_head(column[index]) for index in long] for column in columns], long)
    ends = [[_tail(column[index]) for index in ragged] for column in columns]
    rows = [column[0].new_zeros(len(ragged), VECTOR) for column in columns]
    filled = [[row[: sizes[index] % VECTOR] for row, index in zip(room, ragged, strict=True)] for room in rows]
    for parts, values in zip(filled, ends, strict=True):
        foreach_copy_(parts, values)
    update([list(room.unbind()) for room in rows], ragged)
    for parts, values in zip(filled, ends, strict=True):
        foreach_copy_(values, parts)


def _head(tensor: Tensor) -> Tensor:
    return tensor.view(-1)[: tensor.numel() // VECTOR * VECTOR]


def _tail(tensor: Tensor) -> Tensor:
    return tensor.view(-1)[tensor.numel() // VECTOR * VECTOR :]


def cuts_matter(device: torch.device) -> bool:
    """Return True if this kind of device computes the end of a tensor otherwise than the rest."""
    return device.type == "cpu"
