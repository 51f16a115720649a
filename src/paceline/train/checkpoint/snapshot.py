"""Copies of tensors in CPU memory, so that training goes on while they are written to safetensors files.

The buffer of a part is the image of its file, header included. Writing it is a plain loop of hash and `write` over
large chunks, both of which release the interpreter lock, past the page cache: the copy into the cache would take
processor time from the training step, and evict training data.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from paceline.core.errors import PacelineError

CHUNK_BYTES = 16 * 2**20
BLOCK_BYTES = 4096
"""Unit of memory addresses, file offsets and lengths for writes past the page cache; a multiple of every disk's."""
# What file systems (or kinds of memory) answer that cannot be written past the page cache.
NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)

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

    part: str
    name: str
    why: str
    sentence = "{part}: tensor {name!r} cannot be saved: {why}"
    hint = "store it as a dense tensor of a plain dtype, e.g. with `torch.view_as_real` or `.to_dense()`"


@dataclass(frozen=True)
class Digest:
    """Size and hash of a file, by which it is known again."""

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
        offsets, end = {}, 0
        for name in order:
            begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
            offsets[name] = (begin, end)
        header = _header({name: tensors[name] for name in order}, offsets)
        self._num_bytes = len(header) + end
        # Copies from a GPU run at the speed of the bus, and all at once, only into page-locked memory.
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        self._image = _aligned(_round_up(self._num_bytes), pinned)
        self._image.numpy().data[: len(header)] = header
        data = self._image[len(header) :]
        self._views = {
            name: data[begin:end].view(tensors[name].dtype).view(tensors[name].shape)
            for name, (begin, end) in offsets.items()
        }

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The copies, as views of the buffer."""
        return self._views

    @property
    def image(self) -> Tensor:
        """The whole buffer, as bytes: the same on all ranks for tensors of the same names, shapes and dtypes."""
        return self._image

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if these tensors can be copied into the buffer as it is."""
        return self._signature == _signature(tensors)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Start copying; what comes from a GPU is there only after its stream is synchronized."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name], non_blocking=tensors[name].is_cuda)

    def write(self, path: Path) -> Digest:
        """Write the safetensors file and return once it is on disk."""
        try:
            return self._write(path, getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno not in NOT_DIRECT:
                raise
        path.unlink(missing_ok=True)
        return self._write(path, 0)

    def _write(self, path: Path, flags: int) -> Digest:
        image, digest = self._image.numpy().data, xxhash.xxh3_128()
        with open(path, "xb", buffering=0, opener=lambda name, mode: os.open(name, mode | flags, 0o666)) as file:
            for begin in range(0, len(image), CHUNK_BYTES):
                chunk = image[begin : begin + CHUNK_BYTES]
                digest.update(chunk[: self._num_bytes - begin])
                _write_all(file, chunk)
            file.truncate(self._num_bytes)
            os.fsync(file.fileno())
        return Digest(self._num_bytes, digest.hexdigest())


def refill(snapshots: dict[str, Snapshot], parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Make `snapshots` hold these parts as they are now, with new buffers only where the old do not fit."""
    for part in snapshots.keys() - parts.keys():
        del snapshots[part]
    for part, tensors in parts.items():
        if part in snapshots and not snapshots[part].fits(tensors):
            del snapshots[part]  # before its successor is made, as there may not be memory for both
        if part not in snapshots:
            snapshots[part] = Snapshot(part, tensors)
        snapshots[part].fill(tensors)
    for device in {tensor.device for tensors in parts.values() for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def write_file(path: Path, content: bytes) -> Digest:
    """Write a new small file and return its digest once it is on disk."""
    with open(path, "xb", buffering=0) as file:
        _write_all(file, memoryview(content))
        os.fsync(file.fileno())
    return Digest(len(content), xxhash.xxh3_128_hexdigest(content))


def digest_of(path: Path) -> Digest:
    """Read a whole file for its digest."""
    num_bytes, digest = 0, xxhash.xxh3_128()
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while (count := file.readinto(chunk)) > 0:
            digest.update(chunk[:count])
            num_bytes += count
    return Digest(num_bytes, digest.hexdigest())


def _write_all(file: FileIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def _header(tensors: Mapping[str, Tensor], offsets: Mapping[str, tuple[int, int]]) -> bytes:
    """Return the head of a safetensors file: its length in 8 bytes, then JSON, padded with spaces to whole blocks."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets[name]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(_round_up(8 + len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


def _aligned(num_bytes: int, pinned: bool) -> Tensor:
    """Return uninitialised memory that starts at a whole block."""
    memory = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned, device="cpu")
    begin = -memory.data_ptr() % BLOCK_BYTES
    return memory[begin : begin + num_bytes]


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


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
