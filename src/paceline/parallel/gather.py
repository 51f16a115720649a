"""Tensors of every rank onto the first one, for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.world.link import Link


@torch.no_grad()
def gather_tensors(link: Link, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Everyone's named tensors, by rank, in the first rank's main memory; an empty list elsewhere.

    They may differ in names and shapes from rank to rank. One rank after the other sends: memory holds them all anyway.
    """
    own = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    if link.world.size == 1:
        return [own]
    layouts = link.gather_objects([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()])
    if not link.is_first:
        if own:
            dist.send(torch.cat([_bytes(tensor) for tensor in own.values()]), dst=0)
        return []
    found = [own]
    for rank, layout in enumerate(layouts[1:], start=1):
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in layout]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        if layout:
            dist.recv(flat, src=rank)
        pieces = flat.split(sizes) if sizes else ()
        found.append(
            {
                # Copied, because a piece may start at an address that its dtype does not allow.
                name: piece.clone().view(dtype).view(shape)
                for (name, shape, dtype), piece in zip(layout, pieces, strict=True)
            }
        )
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
