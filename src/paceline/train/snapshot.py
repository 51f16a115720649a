"""Tensors as they are now, in kept CPU memory, so that training goes on while they are written to safetensors files.

The buffer of a part has the byte layout of the data in its file. Writing it is a plain loop of hash and `write` over
large chunks, both of which release the interpreter lock; a library call that serialises tensor by tensor would hold it
and stall the training step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from paceline.config.errors import PacelineError

CHUNK_BYTES = 16 * 2**20

# The names of the safetensors format. Its reader knows all of these since 0.4.5, the oldest we allow.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NotStorable(PacelineError):
    """A tensor that a safetensors file cannot hold."""

    hint = "store it as a dense tensor of a plain dtype, e.g. with `torch.view_as_real` or `.to_dense()`"

    def __init__(self, part: str, name: str, why: str) -> None:
        super().__init__(f"{part}: tensor {name!r} cannot be saved: {why}")
        self.part, self.name, self.why = part, name, why


@dataclass(frozen=True)
class Digest:
    """What a file must look like to be taken for the one that was written."""

    num_bytes: int
    xxh3_128: str


class Snapshot:
    """The tensors of one part, in one flat buffer that is filled again at every save."""

    def __init__(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            _check_storable(part, name, tensor)
        self._signature = _signature(tensors)
        # Wide elements first, so that every tensor starts at a multiple of its element size without holes in between.
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        # Copies from a GPU run at the speed of the bus, and all at once, only into page-locked memory.
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._views: dict[str, Tensor] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for name in order:
            tensor = tensors[name]
            end = begin + tensor.numel() * tensor.element_size()
            self._views[name] = self._buffer[begin:end].view(tensor.dtype).view(tensor.shape)
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        self._header = _framed(header)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these tensors can be copied into the buffer as it is."""
        return self._signature == _signature(tensors)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Start copying; what comes from a GPU is there only after its stream is synchronized."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name], non_blocking=tensors[name].is_cuda)

    def write(self, path: Path) -> Digest:
        """Write the safetensors file and return once it is on disk."""
        return write_file(path, self._chunks())

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield self._header
        data = self._buffer.numpy().data
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


def refill(kept: dict[str, Snapshot], parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Make `kept` hold these parts as they are now, with new buffers only where the old do not fit."""
    for part in kept.keys() - parts.keys():
        del kept[part]
    for part, tensors in parts.items():
        if part in kept and not kept[part].fits(tensors):
            del kept[part]  # before its successor is made, as there may not be memory for both
        if part not in kept:
            kept[part] = Snapshot(part, tensors)
        kept[part].fill(tensors)
    for device in {tensor.device for tensors in parts.values() for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def write_file(path: Path, chunks: Iterator[bytes | memoryview]) -> Digest:
    """Write a new file and return its digest once it is on disk."""
    num_bytes, digest = 0, xxhash.xxh3_128()
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            num_bytes += len(chunk)
            left = memoryview(chunk)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return Digest(num_bytes, digest.hexdigest())


def digest_of(path: Path) -> Digest:
    """Read a whole file for its digest."""
    num_bytes, digest = 0, xxhash.xxh3_128()
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while (count := file.readinto(chunk)) > 0:
            digest.update(chunk[:count])
            num_bytes += count
    return Digest(num_bytes, digest.hexdigest())


def _framed(header: Mapping[str, object]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON, padded so that the data starts aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _signature(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size, bool]]:
    return [(name, tensor.dtype, tensor.shape, tensor.is_cuda) for name, tensor in tensors.items()]


def _check_storable(part: str, name: str, tensor: Tensor) -> None:
    if name == "__metadata__":
        raise NotStorable(part, name, "safetensors reserves the name")
    if tensor.dtype not in DTYPE_NAMES:
        raise NotStorable(part, name, f"safetensors has no {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise NotStorable(part, name, f"its layout is {tensor.layout}, not dense")
    if tensor.is_meta:
        raise NotStorable(part, name, "it is on the meta device and has no values")
