"""Seconds of collectives over links with a bandwidth and a latency (alpha and beta), as they are made here. Pure.

With W ranks, S bytes, latency a and B bytes per second, of the slowest link that takes part:

    all-reduce, ring        2 (W - 1) a + 2 (W - 1) / W S / B
    all-reduce, tree        2 log2(W) a + 2 S / B           NCCL takes the faster of the two
    all-gather, ring        (W - 1) a + (W - 1) / W S / B
    all-to-all              a + c (W - 1) / W S / B         all messages at once; c: see `GLOO`
    reduce-scatter          NCCL: as an all-gather; gloo: an all-reduce of which a rank keeps its piece
    exact sum               all-to-all of all partial sums, then all-gather; two ranks with one each: an all-reduce;
                            gloo: both by messages between two ranks, receives first, with another c: see `direct`

A machine has one way out. A ring crosses it once; in an all-to-all, all ranks of a machine send through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.sum_tree import Layout
from paceline.lab.predict.links import LinkSpeed

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Library:
    """Costs of a collective beside its messages."""

    call_s: float
    """Of a call: threads that are woken, kernels that are launched."""
    message_s: float
    """Of a message, beside the link's latency."""
    has_trees: bool
    scatters: bool
    """A reduce-scatter sends no more than an all-gather."""
    crowding: float
    """Factor on the bytes of an all-to-all of more than two ranks."""
    pair_crowding: float = 1.0
    """The same of two ranks."""
    pair_gather: float = 1.0
    """Factor on the bytes of an all-gather of two ranks."""
    direct: float | None = None
    """Factor on the bytes of both hops of an exact sum of more than two ranks, where they are messages between two."""
    pair_direct: float | None = None
    """The same of two ranks."""


GLOO = Library(
    *(1.5e-4, 3e-5),
    has_trees=False,
    scatters=False,
    crowding=1.4,
    pair_crowding=1.5,
    pair_gather=1.15,
    direct=1.3,
    pair_direct=1.1,
)
NCCL = Library(1.5e-5, 3e-6, has_trees=True, scatters=True, crowding=1.1)
"""Where a run did not measure them. Crowding of gloo: between two ranks an all-to-all is half duplex more often than
not, among more it leaves links idle now and then; exact sums post their receives first, which mends the former
(measured by benchmarks/collectives.py)."""


@dataclass(frozen=True)
class Place:
    """Ranks on machines, and the links between them."""

    ranks: int
    nodes: int
    inside: LinkSpeed
    """Between two ranks of one machine."""
    between: LinkSpeed
    """From a machine to the others."""
    library: Library = GLOO

    @property
    def per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    @property
    def slowest(self) -> LinkSpeed:
        """Link that a ring over all ranks waits for."""
        if self.nodes == 1:
            return self.inside
        if self.per_node == 1:
            return self.between
        return min(self.inside, self.between, key=lambda link: link.bytes_per_s)

    @property
    def round_s(self) -> float:
        """A round of messages, without their bytes."""
        inside = self.inside.latency_s if self.per_node > 1 else 0.0
        between = self.between.latency_s if self.nodes > 1 else 0.0
        return self.library.message_s + max(inside, between)


def all_reduce(place: Place, num_bytes: float) -> float:
    ranks, link = place.ranks, place.slowest
    if ranks == 1:
        return 0.0
    ring = 2 * (ranks - 1) * place.round_s + 2 * (ranks - 1) / ranks * num_bytes / link.bytes_per_s
    if not place.library.has_trees:
        return place.library.call_s + ring
    tree = 2 * math.ceil(math.log2(ranks)) * place.round_s + 2 * num_bytes / link.bytes_per_s
    return place.library.call_s + min(ring, tree)


def all_gather(place: Place, num_bytes: float) -> float:
    """`num_bytes` are those of the whole."""
    ranks, link = place.ranks, place.slowest
    if ranks == 1:
        return 0.0
    factor = place.library.pair_gather if ranks == 2 else 1.0
    bandwidth_s = factor * (ranks - 1) / ranks * num_bytes / link.bytes_per_s
    return place.library.call_s + (ranks - 1) * place.round_s + bandwidth_s


def all_to_all(place: Place, num_bytes: float, rows: Sequence[int] = (1,)) -> float:
    """Each rank sends its rows of `num_bytes`, a piece of each to every rank; `rows` is by rank, or one for all."""
    ranks, nodes, per_node = place.ranks, place.nodes, place.per_node
    if ranks == 1:
        return 0.0
    each = list(rows) if len(rows) == ranks else [max(rows)] * ranks
    total, piece = sum(each), num_bytes / ranks
    # What a rank sends, and what it gets of the others, go at the same time.
    inside_bytes = max(max(own * (ranks - 1), total - own) for own in each) * piece
    bandwidth_s = inside_bytes / place.inside.bytes_per_s if per_node > 1 else 0.0
    if nodes > 1:
        machines = [sum(each[start : start + per_node]) for start in range(0, ranks, per_node)]
        outside = max(max(own * (ranks - per_node), (total - own) * per_node) for own in machines)
        bandwidth_s = max(bandwidth_s, outside * piece / place.between.bytes_per_s)
    factor = place.library.crowding if ranks > 2 else place.library.pair_crowding
    return place.library.call_s + place.round_s + factor * bandwidth_s


def exchange(place: Place, sources: Ranks, receivers: Ranks, row_bytes: int) -> float:
    """All-to-all of single rows, each from its source to its receiver; rows that stay cost nothing."""
    if place.ranks == 1:
        return 0.0
    bandwidth_s = _most(sources, receivers) * row_bytes / place.inside.bytes_per_s if place.per_node > 1 else 0.0
    if place.nodes > 1:
        outside = _most(sources // place.per_node, receivers // place.per_node)
        bandwidth_s = max(bandwidth_s, outside * row_bytes / place.between.bytes_per_s)
    factor = place.library.crowding if place.ranks > 2 else place.library.pair_crowding
    return place.library.call_s + place.round_s + factor * bandwidth_s


def _most(sources: Ranks, receivers: Ranks) -> int:
    """Return the most rows that one of them sends to others, or gets from others."""
    travels = sources != receivers
    if not travels.any():
        return 0
    return int(max(np.bincount(sources[travels]).max(), np.bincount(receivers[travels]).max()))


def reduce_scatter(place: Place, num_bytes: float) -> float:
    return all_gather(place, num_bytes) if place.library.scatters else all_reduce(place, num_bytes)


def exact_sum(place: Place, num_bytes: float, layout: Layout) -> float:
    """Sum of one bucket in the order of the tree (`parallel/tree/all_reduce.py`)."""
    if layout.is_plain:
        return all_reduce(place, num_bytes)
    first_s = all_to_all(_direct(place), num_bytes, layout.rows)
    return first_s + (
        all_gather(place, num_bytes) if place.library.direct is None else all_to_all(_direct(place), num_bytes)
    )


def exact_scatter(place: Place, num_bytes: float, layout: Layout) -> float:
    """Sum of one block of which each rank gets its piece (`parallel/tree/reduce_scatter.py`)."""
    return reduce_scatter(place, num_bytes) if layout.is_plain else all_to_all(_direct(place), num_bytes, layout.rows)


def _direct(place: Place) -> Place:
    """Return the same ranks, whose all-to-all is one of messages between two of them, where exact sums make it so."""
    library = place.library
    if library.direct is None or library.pair_direct is None:
        return place
    return replace(place, library=replace(library, crowding=library.direct, pair_crowding=library.pair_direct))
