"""Running statistics of batch norms whose moments a kernel has computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.core.torch_private import foreach_add_, foreach_lerp_

Seen = list[tuple[nn.BatchNorm1d, Tensor]]
"""The batch norms of a pass, with the moments of its batch: (3, channel) mean, 1 / deviation, unbiased variance."""


@torch.no_grad()
def track(seen: Seen) -> None:
    """The running statistics of all batch norms, in three kernels."""
    momentum = seen[0][0].momentum
    assert momentum is not None
    for name, row in (("running_mean", 0), ("running_var", 2)):
        foreach_lerp_([norm.get_buffer(name) for norm, _ in seen], [moments[row] for _, moments in seen], momentum)
    foreach_add_([norm.get_buffer("num_batches_tracked") for norm, _ in seen], 1)
