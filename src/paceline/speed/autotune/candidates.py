"""Ways to compute a step that `-O4` may choose from: one of the other levels, with or without what comes on top."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """A level, the task's own kernels, CUDA graphs."""

    level: int
    kernels: bool = False
    graphs: bool = False

    @property
    def name(self) -> str:
        """`-O2 + kernels + graphs`"""
        parts = [f"-O{self.level}", *(["kernels"] if self.kernels else []), *(["graphs"] if self.graphs else [])]
        return " + ".join(parts)

    @property
    def is_compiled(self) -> bool:
        return self.level == 3

    def record(self) -> dict[str, Any]:
        """As plain values, for a file."""
        return {"level": self.level, "kernels": self.kernels, "graphs": self.graphs}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Candidate:
        """The counterpart of `record`."""
        return cls(int(record["level"]), bool(record["kernels"]), bool(record["graphs"]))


def candidates(
    levels: Iterable[int], *, has_kernels: bool, can_graph: bool, leaves_some: bool = False
) -> list[Candidate]:
    """What is worth measuring, the likely winners first, so that the hopeless are known after one step.

    `levels` are those that the device can compute. Kernels are for bf16, so they stand on level 2. On 3 as well where
    they leave some of the network as it was: a compiler may fuse that, and what they have fused already it may not.
    """
    # Level 2 before level 3: it needs no compilation, and tells whether that could still win.
    ranked = sorted(levels, key=lambda level: (level < 2, level if level >= 2 else -level))
    kernel_levels = ([2, 3] if leaves_some else [2]) if has_kernels else []
    graph_levels = [2, 3] if can_graph else []
    return [
        Candidate(level, kernels, graphs)
        for level in ranked
        for kernels in ([True, False] if level in kernel_levels else [False])
        for graphs in ([True, False] if level in graph_levels else [False])
    ]
