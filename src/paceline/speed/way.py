"""Ways to compute a step that `-O4` may choose from: one of the other levels, with or without what comes on top."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
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
    def read(cls, record: Mapping[str, Any]) -> Way:
        """The counterpart of `record`."""
        return cls(int(record["level"]), bool(record["kernels"]), bool(record["graphs"]))


def candidates(levels: Iterable[int], *, has_kernels: bool, can_graph: bool) -> list[Way]:
    """What is worth measuring, the likely winners first, so that the hopeless are known after one step.

    `levels` are those that the device can compute. Kernels are for bf16, so they stand on level 2, or 3: where they are
    not for everything, a compiler may fuse the rest.
    """
    # Level 2 before level 3: it needs no compilation, and tells whether that could still win.
    ranked = sorted(levels, key=lambda level: (level < 2, level if level >= 2 else -level))
    return [
        Way(level, kernels, graphs)
        for level in ranked
        for kernels in (True, False)
        for graphs in (True, False)
        if (has_kernels or not kernels) and (can_graph or not graphs) and (level >= 2 or not (kernels or graphs))
    ]
