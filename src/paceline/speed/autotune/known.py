"""Ways that are known to be the fastest, by GPU generation and kind of network: `level: auto` takes them unmeasured.

The table holds what contests of `-O4` on such GPUs have found (benchmarks/RESULTS.md); a contest on the machine itself,
whose choice is kept (cache.py), goes before it. A way that is not in the table has not been measured on that
generation: `auto` does without it and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.speed.autotune.candidates import Candidate

Kind = Literal["covered", "partly", "plain"]
"""Of a network: the task's kernels compute all of it, or parts of it, or there are none."""
Generation = tuple[int, int]
"""Compute capability: (9, 0) is Hopper."""

_KERNELS, _PLAIN = Candidate(2, kernels=True, graphs=True), Candidate(2, graphs=True)
_MEASURED: dict[Generation, dict[Kind, Candidate]] = {
    # QuartzNet 15x5 on an H200: 26 ms a step, -O2 340. Jasper 10x5dr: 171 ms, -O2 256. What the kernels leave as it was
    # may be faster compiled, after minutes, which nobody should wait for unasked. Transformer base, 25,000 tokens:
    # 13 ms, -O2 36.
    (9, 0): {"covered": _KERNELS, "partly": _KERNELS, "plain": _PLAIN},
}
_ELSEWHERE: dict[Kind, Candidate] = {"covered": _PLAIN, "partly": _PLAIN, "plain": _PLAIN}
"""Any other GPU with bf16: recording changes no number, and no kernel needs more than the library's."""


@dataclass(frozen=True)
class Known:
    """Ways to try in turn: the first that runs is taken."""

    ways: tuple[Candidate, ...]
    reason: str
    """How the first of them is known."""
    notes: tuple[str, ...] = ()


def known_ways(generation: Generation | None, kind: Kind, *, can_graph: bool) -> Known:
    """Return the ways to take on a GPU, the fastest known one first, and what to fall back on where it fails.

    Args:
        generation: None where it is not known, or where the ranks' GPUs are of several.
        kind: Of the network.
        can_graph: CUDA graphs are possible.
    """
    row = _MEASURED.get(generation or (0, 0))
    best = (row or _ELSEWHERE)[kind]
    chain = [best, Candidate(best.level, best.kernels), Candidate(best.level, graphs=best.graphs), Candidate(2)]
    ways = tuple(dict.fromkeys(way for way in chain if can_graph or not way.graphs))
    name = "GPUs of several kinds" if generation is None else f"compute capability {generation[0]}.{generation[1]}"
    if row is not None:
        return Known(ways, f"the fastest known on {name}")
    unmeasured = f"no kernels: they have not been measured on {name}; `-O4` measures them"
    return Known(ways, f"the fastest that is sure on {name}", (unmeasured,) if kind != "plain" else ())
