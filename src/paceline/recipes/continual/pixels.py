"""Operations on pictures: views of a domain stream, augmentation and scaling on the device."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ROTATED_AT_ONCE = 10_000
"""Pictures rotated in one call, to bound memory."""


def permute(x: Tensor, seed: int) -> Tensor:
    """Return all pictures with their pixels in the same other order."""
    order = torch.randperm(x[0].numel(), generator=torch.Generator().manual_seed(seed), device="cpu")
    return x.flatten(1)[:, order].view_as(x)


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Return all pictures turned about their middle, between pixels linearly, black outside."""
    angle = math.radians(degrees)
    rows = [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    turn = torch.tensor(rows, dtype=torch.float32, device=x.device)

    def turned(part: Tensor) -> Tensor:
        grid = F.affine_grid(turn.expand(len(part), 2, 3), list(part.shape), align_corners=False)
        moved = F.grid_sample(part.float(), grid, align_corners=False)
        return moved.round().clamp(0, 255).to(torch.uint8)

    return torch.cat([turned(part) for part in x.split(ROTATED_AT_ONCE)])


def permutations(num_tasks: int, seed: int) -> list[partial[Tensor]]:
    return [partial(permute, seed=seed * 1000 + number) for number in range(num_tasks)]


def rotations(num_tasks: int, seed: int) -> list[partial[Tensor]]:
    """Angles from 0 to below 180 degrees, one per task."""
    angles = (
        torch.rand(num_tasks, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu") * 180
    )
    return [partial(rotate, degrees=float(angle)) for angle in angles]


def crop_and_flip(x: Tensor, padding: int = 4) -> Tensor:
    """Return each picture shifted by up to `padding` pixels, black outside, and mirrored or not; from torch's
    generator, which is keyed for each grain, so the same on any rank."""
    num, _, height, width = x.shape
    chance = torch.rand((3, num), dtype=torch.float32, device=x.device)
    down, right = (chance[:2] * (2 * padding + 1)).long()
    rows = down[:, None] + torch.arange(height, device=x.device)
    columns = right[:, None] + torch.arange(width, device=x.device)
    columns = torch.where((chance[2] < 0.5)[:, None], columns, columns.flip(1))
    padded = F.pad(x, (padding,) * 4)
    everyone = torch.arange(num, device=x.device)[:, None, None]
    return padded[everyone, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def scale(x: Tensor, mean: tuple[float, ...] = (), deviation: tuple[float, ...] = ()) -> Tensor:
    """Return bytes as numbers from 0 to 1, then per channel to mean 0 and deviation 1 where those are given."""
    x = x.float().div_(255.0) if x.dtype == torch.uint8 else x
    if mean:
        shape = (1, -1, *([1] * (x.dim() - 2)))
        x = (x - x.new_tensor(mean).view(shape)) / x.new_tensor(deviation).view(shape)
    return x
