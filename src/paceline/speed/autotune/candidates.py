"""Candidates of `-O4`: one of the other levels, with or without the task's kernels and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """One way to compute a step."""

    level: int
    kernels: bool = False
    """With the task's own kernels."""
    graphs: bool = False
    """With CUDA graphs."""

    @property
    def name(self) -> str:
        """`-O2 + kernels + graphs`"""
        parts = [f"-O{self.level}", *(["kernels"] if self.kernels else []), *(["graphs"] if self.graphs else [])]
        return " + ".join(parts)

    @property
    def is_compiled(self) -> bool:
        return self.level == 3

    @property
    def change(self) -> tuple[int, bool, bool]:
        """Distance from `-O0`, to sort by: the level first, then kernels, which round otherwise than torch's; a graph
        changes no number."""
        return self.level, self.kernels, self.graphs

    def record(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        return {"level": self.level, "kernels": self.kernels, "graphs": self.graphs}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Candidate:
        """Return the candidate that `record` was made of."""
        return cls(int(record["level"]), bool(record["kernels"]), bool(record["graphs"]))


def candidates(
    levels: Iterable[int], *, has_kernels: bool, can_graph: bool, leaves_some: bool = False
) -> list[Candidate]:
    """Return the candidates worth measuring, likely winners first, so that the hopeless are known after one step.

    Args:
        levels: The levels that the device can compute.
        has_kernels: The task has kernels. They are for bf16, so they go with level 2.
        can_graph: CUDA graphs are possible.
        leaves_some: The kernels leave parts of the network as they were. A compiler may fuse those, so that kernels are
            tried with level 3, too.
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
