"""Ranks by machine, for what is done inside a machine and for what is done across machines."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.world.link import Link


class UnevenMachines(PacelineError):
    """Machines with different numbers of ranks: there is no rank on each that has the same piece."""

    sizes: list[int]
    excludes = (
        Exclusion(
            "`--shard node`",
            "machines with different numbers of ranks",
            "mathematics",
            "Each rank sums its piece of the gradients with the ranks of other machines that have the same piece.",
        ),
    )
    sentence = "`shard` is node, but the machines have different numbers of ranks: {shown}"
    hint = "start as many ranks on every machine, or shard over all ranks with `--shard full`"

    @property
    def shown(self) -> str:
        return ", ".join(map(str, self.sizes))


def machines_of(link: Link) -> list[list[int]]:
    """Return the ranks of each machine, that of rank 0 first. All ranks must call it."""
    return group_ranks(link.gather_objects(link.world.node_rank))


def group_ranks(nodes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each machine, in order, from the number of the machine that each rank is on.

    Raises `UnevenMachines` if they are not equally many.
    """
    machines: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        machines.setdefault(node, []).append(rank)
    sizes = [len(ranks) for ranks in machines.values()]
    if len(set(sizes)) > 1:
        raise UnevenMachines(sizes)
    return list(machines.values())
