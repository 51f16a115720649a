"""Parts of a checkpoint that every rank wrote its pieces of (`checkpoint_form: sharded`), joined when somebody reads.

    model.shard-0-of-4.safetensors    rows of the first rank, and what is no piece (buffers, counts of steps)
    model.shard-1-of-4.safetensors    the next rows of the same tensors, and so on

Every tensor is cut along its first axis, in the order of the ranks. So a part can be read by any number of ranks, and
by those that are not sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

Parts = dict[str, Mapping[str, Tensor]]
"""Named tensors by part."""
_NAME = re.compile(r"(?P<part>.+)\.shard-(?P<rank>\d+)-of-(?P<size>\d+)")


def shard_name(part: str, rank: int, size: int) -> str:
    """Return the name of a file with one rank's pieces of a part."""
    return f"{part}.shard-{rank}-of-{size}"


def whole_name(name: str) -> str:
    """Return the part that a file has pieces of; of one that is whole, its own name."""
    match = _NAME.fullmatch(name)
    return match["part"] if match else name


def share_of_rank(
    parts: Mapping[str, Mapping[str, Tensor]],
    rank: int,
    size: int,
    is_piece: Callable[[str, str, Tensor], bool],
) -> Parts:
    """Return what this rank writes: its pieces, by `is_piece(part, name, tensor)`, and on the first rank all else."""
    share: Parts = {}
    for part, tensors in parts.items():
        pieces = {name for name, tensor in tensors.items() if is_piece(part, name, tensor)}
        if pieces:
            written = {name: tensor for name, tensor in tensors.items() if rank == 0 or name in pieces}
            share[shard_name(part, rank, size)] = written
        elif rank == 0:
            share[part] = tensors
    return share


class Joined(Mapping[str, Tensor]):
    """The tensors of one part, each put together when it is asked for: memory holds one at a time, not all."""

    def __init__(self, shards: Sequence[Mapping[str, Tensor]]) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> Tensor:
        pieces = [shard[name] for shard in self._shards if name in shard]
        if not pieces:
            raise KeyError(name)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards[0])

    def __len__(self) -> int:
        return len(self._shards[0])


def join(parts: Mapping[str, Mapping[str, Tensor]]) -> Parts:
    """Return parts by name, those in pieces as one."""
    whole: Parts = {}
    for name, tensors in parts.items():
        match = _NAME.fullmatch(name)
        if match is None:
            whole[name] = tensors
        elif match["part"] not in whole:
            part, size = match["part"], int(match["size"])
            whole[part] = Joined([parts[shard_name(part, rank, size)] for rank in range(size)])
    return whole


def missing(names: Sequence[str]) -> list[str]:
    """Return names of pieces that should be there, as others of the same part are."""
    absent: list[str] = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            size = int(match["size"])
            ranks = range(min(size, len(names) + 1))  # a size that is damaged may be any number
            every = [shard_name(match["part"], rank, size) for rank in ranks]
            absent += [other for other in every if other not in names and other not in absent]
    return absent
