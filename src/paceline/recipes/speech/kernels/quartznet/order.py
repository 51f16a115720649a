"""The order in which a kernel goes through the channels.

An activation is a little larger than the cache, or much: a kernel that begins where the one before it began finds
nothing of it there, one that begins where that one ended finds the most. So kernels that follow each other take turns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nth(number, channels, IS_TURNED: tl.constexpr):
    """Return the channel that comes at this place: from the first on, or turned, from the last."""
    if IS_TURNED:
        number = channels - 1 - number
    return number
