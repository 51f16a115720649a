"""Compressed sums over ranks: fewer bytes per number; what rounding loses is kept and sent the next time.

A sum in two hops, as a ring would move it: every rank gets its own slice of all ranks' numbers, adds them
up in fp32, and gives the sum to all. Both hops are encoded; the error of each is added to what the same place sends
next time (error feedback: Seide et al. 2014; for both hops Tang et al. 2021), so that nothing is lost, only late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them and warns of the old names, which 2.11 has.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BLOCK = 1024
"""Numbers that share one int8 scale: 4 bytes for 1024."""


class Wire(ABC):
    """A format: rows of fp32 numbers, whole blocks each, into rows of bytes and back."""

    @abstractmethod
    def num_bytes(self, length: int) -> int:
        """Return the bytes of a row of `length` numbers."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode (rows, length) fp32 as (rows, bytes) uint8."""

    @abstractmethod
    def decode(self, payload: Tensor) -> Tensor:
        """Decode what `encode` returned."""


class HalfWire(Wire):
    """16 bits per number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def num_bytes(self, length: int) -> int:
        return 2 * length

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).view(torch.uint8)

    def decode(self, payload: Tensor) -> Tensor:
        return payload.view(self._dtype).float()


class Int8Wire(Wire):
    """8 bits per number, times one scale per block: the largest of a block is 127, to the nearest step."""

    def num_bytes(self, length: int) -> int:
        return length + 4 * (length // BLOCK)

    def encode(self, values: Tensor) -> Tensor:
        rows, length = values.shape
        blocks = values.reshape(rows, -1, BLOCK)
        peaks = torch.maximum(blocks.amax(2), -blocks.amin(2))  # (rows, blocks)
        steps = torch.where(peaks > 0, 127.0 / peaks, 0.0)
        payload = torch.empty(rows, self.num_bytes(length), dtype=torch.uint8, device=values.device)
        levels = (blocks * steps.unsqueeze(2)).round_().to(torch.int8)
        payload[:, :length] = levels.view(rows, length).view(torch.uint8)
        payload[:, length:] = (peaks / 127.0).contiguous().view(torch.uint8)
        return payload

    def decode(self, payload: Tensor) -> Tensor:
        rows, num_blocks = payload.shape[0], payload.shape[1] // (BLOCK + 4)
        length = num_blocks * BLOCK
        levels = payload[:, :length].contiguous().view(torch.int8).view(rows, num_blocks, BLOCK)
        scales = payload[:, length:].contiguous().view(torch.float32)
        return levels.float().mul_(scales.unsqueeze(2)).view(rows, length)


def build(name: str) -> Wire | None:
    """Return the format of a setting; None for numbers as they are."""
    return {
        "full": None,
        "fp16": HalfWire(torch.float16),
        "bf16": HalfWire(torch.bfloat16),
        "int8": Int8Wire(),
    }[name]


def half_of(name: str) -> torch.dtype | None:
    """Return the dtype of a format that rounds each number by itself; None for numbers as they are."""
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name)


def goes_by_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if tensors of a GPU travel through main memory: gloo moves them so, and not by every operation."""
    return device.type == "cuda" and "cuda:gloo" in dist.get_backend_config(group)


class Exchange:
    """A sum over the ranks in flight, in a compressed format; the same bits on every rank.

    `start` sends, `poll` now and then lets the second hop begin as soon as the first is done, `finish` waits. Every
    rank must issue the same operations in the same order on a process group that nobody else uses; when, is free.
    """

    def __init__(
        self, length: int, wire: Wire, group: dist.ProcessGroup, device: torch.device, *, carries: bool = True
    ) -> None:
        """With `carries`, what rounding loses is sent the next time."""
        self._wire, self._group, self._carries = wire, group, carries
        self._size, self._length = group.size(), length
        self._slice = -(-length // (self._size * BLOCK)) * BLOCK
        self._road = torch.device("cpu") if goes_by_host(group, device) else device
        self._device = device
        self.lost = torch.zeros(self._size, self._slice, dtype=torch.float32, device=device)
        """Rounding errors of this rank's numbers in the last encoding."""
        self.lost_in_sum = torch.zeros(1, self._slice, dtype=torch.float32, device=device)
        """Rounding errors of the sums that this rank makes."""
        self._work: dist.Work | None = None
        self._arriving = torch.empty(0, dtype=torch.float32, device="cpu")
        self._is_second_hop = False

    def start(self, values: Tensor) -> None:
        """Send numbers, (length,)."""
        assert self._work is None, "one exchange at a time"
        self.lost.view(-1)[: self._length] += values
        payload = self._wire.encode(self.lost)
        self._carry(self.lost, payload)
        payload = payload.to(self._road)
        self._arriving = torch.empty_like(payload)
        self._sending = payload
        self._is_second_hop = False
        self._work = dist.all_to_all_single(self._arriving.view(-1), payload.view(-1), group=self._group, async_op=True)

    def poll(self) -> bool:
        """Begin the second hop if the first is done, without waiting; return True if it has begun."""
        if self._work is not None and not self._is_second_hop and self._work.is_completed():
            self._send_sums()
        return self._is_second_hop

    def go_on(self) -> None:
        """Begin the second hop, waiting for the first."""
        if self._work is not None and not self._is_second_hop:
            self._send_sums()

    def finish(self) -> Tensor:
        """Return the sum over the ranks, (length,) fp32."""
        self.go_on()
        assert self._work is not None, "nothing is under way"
        self._work.wait()
        self._work = None
        total = self._wire.decode(self._arriving.to(self._device))
        self._arriving = self._sending = torch.empty(0, dtype=torch.float32, device="cpu")
        return total.view(-1)[: self._length]

    def _carry(self, wanted: Tensor, payload: Tensor) -> None:
        """Keep the part of `wanted` that `payload` does not hold, or nothing."""
        if self._carries:
            wanted -= self._wire.decode(payload)
        else:
            wanted.zero_()

    def _send_sums(self) -> None:
        assert self._work is not None
        self._work.wait()
        parts = self._wire.decode(self._arriving.to(self._device))  # (ranks, slice)
        self.lost_in_sum += parts.sum(0, keepdim=True)
        payload = self._wire.encode(self.lost_in_sum)
        self._carry(self.lost_in_sum, payload)
        payload = payload.to(self._road)
        self._arriving = torch.empty(self._size, payload.shape[1], dtype=torch.uint8, device=self._road)
        self._sending = payload
        self._is_second_hop = True
        self._work = all_gather_flat(self._arriving.view(-1), payload.view(-1), group=self._group, async_op=True)
