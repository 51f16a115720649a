"""Gathering of the ranks' tensors on the first rank, for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.world.link import Link


@torch.no_grad()
def gather_tensors(link: Link, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return all ranks' named tensors, by rank, in the first rank's main memory; an empty list on other ranks.

    Names and shapes may differ from rank to rank. One rank after the other sends: memory holds them all anyway.
    """
    local = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    if link.world.size == 1:
        return [local]
    layouts = link.gather_objects([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in local.items()])
    if not link.is_first:
        if local:
            dist.send(torch.cat([_bytes(tensor) for tensor in local.values()]), dst=0)
        return []
    ranks = [local]
    for rank, layout in enumerate(layouts[1:], start=1):
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in layout]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        if layout:
            dist.recv(flat, src=rank)
        pieces = flat.split(sizes) if sizes else ()
        ranks.append(
            {
                # Copied, because a piece may start at an address that its dtype does not allow.
                name: piece.clone().view(dtype).view(shape)
                for (name, shape, dtype), piece in zip(layout, pieces, strict=True)
            }
        )
    return ranks


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
