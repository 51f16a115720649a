"""Check that all ranks do the same: settings, code, versions, models and data are compared before they are used.

Ranks that differ would train something else each, and nothing would fail: gradients of equal shape add up.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import PacelineError
from paceline.core.provenance import code_digest, version_of
from paceline.core.units import ranges
from paceline.core.version import VERSION
from paceline.world.link import Link

Facts = Mapping[str, Any]
"""Plain values (as JSON has them) by the name that a message calls them by: `--lr`, `torch`, `code of task.py`."""

VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Environment variables that change what a step computes."""
_MOST_LINES = 12


@dataclass(frozen=True)
class Difference:
    """A fact that ranks do not agree on."""

    name: str
    values: Mapping[str, tuple[int, ...]]
    """Ranks by value; the value of rank 0 comes first, if it has one."""
    hosts: Mapping[int, str]
    """Machine of each rank that has another value than the first, where there are several machines."""

    def __str__(self) -> str:
        places = [f"{value} on {_ranks(ranks, self.hosts)}" for value, ranks in self.values.items()]
        return f"{self.name} is {', '.join(places[:-1])} and {places[-1]}"


class RanksDisagree(PacelineError):
    """Ranks were started with different settings, code, versions or data."""

    differences: Sequence[Difference]
    sentence = "ranks differ, and would not train one model:\n{lines}"
    hint = "start all ranks with the same command, the same files and the same installation"

    @property
    def lines(self) -> str:
        shown = [f"  {difference}" for difference in self.differences[:_MOST_LINES]]
        more = len(self.differences) - len(shown)
        return "\n".join([*shown, *([f"  and {more} more"] if more else [])])


def check_same(link: Link, facts: Facts) -> None:
    """Raise `RanksDisagree` on all ranks unless all have the same facts. All ranks must call it.

    Digests travel first, and the facts themselves only where these differ.
    """
    if not link.has_group:
        return
    text = json.dumps(facts, sort_keys=True, default=str)
    digests = link.gather_objects(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    found = differences([json.loads(each) for each in link.gather_objects(text)], link.hosts)
    if found:
        raise RanksDisagree(found)


def differences(everyone: Sequence[Facts], hosts: Sequence[str] = ()) -> list[Difference]:
    """Return the facts whose values are not equal on all ranks. What a rank does not know is not compared."""
    found = []
    for name in sorted({name for facts in everyone for name in facts}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            if name in facts:
                ranks_by_value.setdefault(_shown(facts[name]), []).append(rank)
        if len(ranks_by_value) > 1:
            values = {value: tuple(ranks) for value, ranks in ranks_by_value.items()}
            others = [rank for ranks in list(values.values())[1:] for rank in ranks]
            places = {rank: hosts[rank] for rank in others} if len(set(hosts)) > 1 else {}
            found.append(Difference(name, values, places))
    return found


@functools.cache
def own_code() -> str:
    """Return a digest of this package: checkouts of one version may differ."""
    root = Path(__file__).parents[1]
    return code_digest(sorted(root.rglob("*.py")), root)


def installation() -> dict[str, Any]:
    """Return versions and circumstances of this process that change results."""
    facts: dict[str, Any] = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": version_of("numpy"),
        "paceline": VERSION,
        "code of paceline": own_code(),
        "torch's default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    return facts | {f"${name}": os.environ.get(name, "not set") for name in VARIABLES}


def _shown(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value)


def _ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    names = sorted({hosts[rank] for rank in ranks if rank in hosts})
    where = f" (host{'s' * (len(names) > 1)} {', '.join(names[:3])}{', ...' * (len(names) > 3)})" if names else ""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"
