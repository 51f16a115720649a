from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.tree import map_leaves


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Named:
    x: Any
    note: str = "as it is"
    size: int = field(default=3, init=False)


def test_leaves_of_a_kind_change_and_the_structure_stays() -> None:
    data = {"a": [1.0, (2.0, "text")], "b": Pair(3.0, None), "c": Named(4.0), "d": OrderedDict(e=5.0), "f": Named}
    assert map_leaves(lambda value: -value, data, float) == {
        "a": [-1.0, (-2.0, "text")],
        "b": Pair(-3.0, None),
        "c": Named(-4.0),
        "d": {"e": -5.0},
        "f": Named,
    }
    assert map_leaves(lambda value: -value, 2.0, float) == -2.0
    assert map_leaves(lambda value: -value, "text", float) == "text"
    assert data["c"] == Named(4.0)
