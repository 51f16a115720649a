"""Damage to packed files: no changed byte goes unseen, and rows are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.reader import open_packed
from paceline.data.packed.verify import verify
from tests.data.packing import Sentences, assert_same, opened, packed

LAYOUTS = ["paceline", "returnn"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_change_of_a_byte_goes_unseen(tmp_path: Path, layout: Any) -> None:
    """It is refused, found by `verify`, or one that nobody reads (room between data sets)."""
    whole, path = tmp_path / "whole.h5", tmp_path / "a.h5"
    packed(whole, layout=layout)
    raw, data = whole.read_bytes(), Sentences()
    outcomes = {"refused": 0, "found": 0, "unread": 0}
    for place in np.random.default_rng(0).integers(0, len(raw), 60).tolist():
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x41]) + raw[place + 1 :])
        try:
            found = open_packed(path)
        except PackedUnreadable:
            outcomes["refused"] += 1
            continue
        if verify(found)[0]:
            outcomes["found"] += 1
            continue
        again = PackedDataset(path)
        for row in range(len(data)):
            assert_same(again[row], data[row])
        outcomes["unread"] += 1
    assert min(outcomes["refused"], outcomes["found"]) > 0, outcomes


def test_damage_is_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    place = opened(path, shard_bytes=2000).files[2].streams["features"]
    [shard] = tmp_path.glob("a-*-00002.h5")
    raw = bytearray(shard.read_bytes())
    assert place.offset is not None
    raw[place.offset + 20] ^= 1
    shard.write_bytes(raw)
    [damage], num_bytes = verify(open_packed(path))
    assert (damage.path, damage.stream) == (shard, "features")
    before = sum(len(file) for file in open_packed(path).files[:2])
    assert damage.rows[0] == before
    assert num_bytes > 0
    assert f"rows {before + 1} to" in str(damage)
