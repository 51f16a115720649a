"""Table of the addresses of an update's tensors, on the device, for kernels that work on all of them in one launch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import Failed
from paceline.world.installed import has_triton

ALIGNMENT = 16
"""In bytes: what the widest load wants."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of weights that the kernels know; float64 would lose digits in them."""
_PLAIN = {Tensor, torch.nn.Parameter}  # a DTensor does not lie in one place
KEPT = 40
"""Tables per optimizer: gradients come to lie in a few places in turn, those of recorded steps by shape."""
RESERVE = 32
"""Tables that may be made while CUDA graphs are captured, where no page-locked memory can be had."""


def has_kernels(dtype: torch.dtype, device: torch.device, fused: bool | None) -> bool:
    """Return True if Triton's kernels update such weights: on CUDA where Triton is installed, unless `fused` is False.

    On CPU only where `fused` is True and Triton is set to interpret its kernels, which is for tests.
    """
    if fused is False or dtype not in DTYPES or not has_triton():
        return False
    return device.type == "cuda" or (bool(fused) and os.environ.get("TRITON_INTERPRET") == "1")


def fit(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if kernels may walk through all of these from the first to the last element."""
    # Sets and maps, because this is done at every step for hundreds of gradients.
    return (
        {each.dtype for each in tensors} == {dtype}
        and {each.device for each in tensors} == {device}
        and all(map(Tensor.is_contiguous, tensors))
        and set(map(type, tensors)) <= _PLAIN
    )


@dataclass(frozen=True)
class Table:
    """The chunks of some tensors, and columns of addresses; nothing else about the tensors is known to a kernel."""

    owners: Tensor
    """(chunks,) int64: the tensor that a chunk is of"""
    numbers: Tensor
    """(chunks,) int64: which chunk of its tensor it is"""
    firsts: Tensor
    """(tensors + 1,) int64: the first chunk of each tensor"""
    sizes: Tensor
    """(tensors,) int64"""
    columns: Tensor
    """(columns, tensors) int64: addresses"""
    is_aligned: bool
    room: Tensor
    """(2, chunks) float32, and behind it (2, tensors): for what one kernel finds and the next one needs"""
    host: Tensor
    """Source of the copy to the device: a captured copy reads it again at every replay."""

    @property
    def num_tensors(self) -> int:
        return self.columns.shape[1]

    @property
    def num_chunks(self) -> int:
        return self.owners.shape[0]

    def partials(self, column: int) -> Tensor:
        return self.room[column * self.num_chunks : (column + 1) * self.num_chunks]

    def factors(self, column: int) -> Tensor:
        begin = 2 * self.num_chunks + column * self.num_tensors
        return self.room[begin : begin + self.num_tensors]


class Tables:
    """The tables of one optimizer. One is made anew only where a tensor has moved."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, ...], Table] = {}
        self._captured: list[Table] = []
        self._reserve: list[Tensor] = []

    def of(self, columns: Sequence[Sequence[Tensor]], chunk: int, dtypes: Sequence[torch.dtype]) -> Table | None:
        """A table of these columns, whose dtypes are given; None where a kernel could not walk through one of them.

        The first column gives the sizes; all are cut alike. Tensors of no elements must not be among them. Layouts
        and dtypes are looked at when a tensor has moved; of gradients, which are new at every step, by the caller.
        """
        addresses = [address for column in columns for address in map(Tensor.data_ptr, column)]
        # Sizes too: a tensor that took the place of another may be a larger one.
        sizes = list(map(Tensor.numel, columns[0]))
        key = (len(columns), chunk, *sizes, *addresses)
        table = self._recent.pop(key, None)
        device = columns[0][0].device
        is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if table is None:
            if not all(fit(column, dtype, device) for column, dtype in zip(columns, dtypes, strict=True)):
                return None
            table = self._make(sizes, addresses, len(columns), chunk, device, is_capturing)
        if is_capturing:
            # A graph holds its addresses for as long as it is replayed.
            self._captured.append(table)
        while len(self._recent) >= KEPT:
            self._recent.pop(next(iter(self._recent)))
        self._recent[key] = table  # the last one used is the last one to go
        return table

    def _make(
        self,
        sizes: list[int],
        addresses: list[int],
        num_columns: int,
        chunk: int,
        device: torch.device,
        is_capturing: bool,
    ) -> Table:
        parts = layout(sizes, chunk)
        flat = np.concatenate([part.astype(np.int64) for part in (*parts, np.array(addresses, dtype=np.int64))])
        host = self._page_locked(torch.from_numpy(flat), device, is_capturing)
        on_device = host.to(device, non_blocking=True)
        counts = [len(part) for part in parts]
        owners, numbers, firsts, own_sizes, columns = on_device.split([*counts, len(addresses)])
        return Table(
            owners,
            numbers,
            firsts,
            own_sizes,
            columns.view(num_columns, len(sizes)),
            all(address % ALIGNMENT == 0 for address in addresses),
            torch.empty(2 * (counts[0] + len(sizes)), dtype=torch.float32, device=device),
            host,
        )

    def _page_locked(self, values: Tensor, device: torch.device, is_capturing: bool) -> Tensor:
        if device.type != "cuda":
            return values
        if not is_capturing:
            if not self._reserve or self._reserve[-1].numel() < values.numel():
                self._reserve = list(
                    torch.empty(RESERVE, values.numel(), dtype=torch.int64, device="cpu").pin_memory().unbind()
                )
            return values.pin_memory()
        if not self._reserve or self._reserve[-1].numel() < values.numel():
            raise Failed(
                f"no memory is set aside for this captured update, or {RESERVE} captures have used it up",
                hint="make one update before the first capture, and keep gradients in place: "
                "`zero_grad(set_to_none=False)`",
            )
        return self._reserve.pop()[: values.numel()].copy_(values)


def layout(sizes: Sequence[int], chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(owner of each chunk, number of each chunk in its tensor, first chunk of each tensor, sizes)"""
    counts = -(-np.asarray(sizes, dtype=np.int64) // chunk)
    firsts = np.concatenate([[0], counts.cumsum()])
    owners = np.repeat(np.arange(len(sizes)), counts)
    return owners, np.arange(len(owners)) - firsts[owners], firsts, np.asarray(sizes, dtype=np.int64)
