"""How often this process has compiled something again, and what compiling took: torch's own counters."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """Since the process began, or between two readings."""

    recompiles: int = 0
    """Times that code was compiled for other shapes or values than before; the first time of each is none."""
    seconds: float = 0.0

    def since(self, earlier: Compiled) -> Compiled:
        return Compiled(self.recompiles - earlier.recompiles, self.seconds - earlier.seconds)


def read() -> Compiled:
    """What torch's compiler has counted; it is not imported for the sake of a zero."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if frames is None or utils is None:
        return Compiled()
    again = sum(count - 1 for count in frames.FRAME_COMPILE_COUNTER.values() if count > 1)
    spent_ns = utils.cumulative_time_spent_ns
    return Compiled(again, sum(spent_ns.get(name, 0.0) for name in _WHOLE) * 1e-9)


_WHOLE = ("entire_frame_compile", "entire_backward_compile")
"""All that is counted below them is part of them."""
