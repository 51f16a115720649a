"""Values between ranks: what goes in comes out, and what a stranger would send runs nothing."""

from __future__ import annotations

import enum
import math
import os
import pickle
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.data.grain import Grain
from paceline.world.link import Link
from paceline.world.values import NotAValue, NotSendable, decode, encode
from tests.ranks import ranks

Pair = namedtuple("Pair", "a b")


class Colour(enum.Enum):
    RED = 1


class Broken(PacelineError):
    path: Path
    sentence = "{path} is broken"
    hint = "mend {path}"


@dataclass(frozen=True)
class Point:
    x: int
    rest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.x > 100:
            raise AssertionError("called while decoding")


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.sets(keys),
    max_leaves=20,
)


@given(values)
def test_plain_values(value: Any) -> None:
    again = decode(encode(value))
    assert (again, repr(again)) == (value, repr(value)) or isinstance(value, (set, dict, list, tuple))
    assert again == value


@pytest.mark.parametrize(
    "value",
    [
        Point(3, {"a": (1, Colour.RED)}),
        Pair(1, [2.0]),
        Path("/a/b"),
        torch.float16,
        torch.Size([2, 3]),
        frozenset({1}),
        np.float32(0.5),
        -math.inf,
    ],
    ids=str,
)
def test_values_with_a_type(value: Any) -> None:
    again = decode(encode(value))
    assert (type(again), again) == (type(value), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_and_arrays(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    for each in (tensor, tensor.t(), tensor[0, 0], tensor[0, 1].expand(1), tensor[:0]):
        again = decode(encode(each))
        assert again.dtype == dtype
        assert torch.equal(again, each)
    array = np.array([["a", "bc"]])
    assert np.array_equal(decode(encode(array)), array)
    assert math.isnan(decode(encode(math.nan)))


def test_errors_and_grains() -> None:
    error = decode(encode(Broken(Path("x"))))
    assert (type(error), str(error), error.hint, error.path) == (Broken, "x is broken", "mend x", Path("x"))
    grain = decode(encode(Grain({"x": torch.ones(2)}, 3, np.array([5, 6]))))
    assert (grain.number, grain.x.tolist(), grain.samples.tolist()) == (3, [1.0, 1.0], [5, 6])


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_a_stranger_sends_runs_nothing(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "owned"))
    named = encode(Point(3)).replace(b"tests.world.test_values:Point", b"tests.world.test_values:Bomb ")
    calls = encode(["x"]).replace(b'["list", "x"]', b'["exec", "x"]')
    modules = encode(Point(3)).replace(b"tests.world.test_values:Point", b"antigravity.aaaaaaaaaaaaaaaaa")
    for data in (bomb, named, calls, modules, b"", b"\x00" * 8, b"\xff" * 64, encode([1] * 9)[:-3]):
        with pytest.raises(NotAValue):
            decode(data)
    assert decode(encode(Point(50)).replace(b'["x", 50]', b'["x",500]')).x == 500  # no constructor is called
    assert not (tmp_path / "owned").exists()
    with pytest.raises(NotSendable, match=r"tests\.world\.test_values\.Bomb"):
        encode([Bomb(tmp_path)])
    with pytest.raises(NotSendable, match="Python objects"):
        encode(np.array([Bomb(tmp_path)], dtype=object))


@ranks(2)
def test_between_ranks(link: Link) -> None:
    rank = link.world.rank
    assert link.gather_objects((rank, "x" * rank * 100)) == [(0, ""), (1, "x" * 100)]
    assert link.gather_objects(None) == [None, None]
    assert link.broadcast_object(Path("a") if rank == 1 else None, src=1) == Path("a")
