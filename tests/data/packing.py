"""Data to pack, and what killed processes pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.from_samples import SampleSource
from paceline.data.packed.pack import PackResult, pack
from paceline.data.packed.reader import Packed, open_packed
from paceline.data.packed.verify import verify

NUMBER = 40


class Sentences:
    """Samples of all kinds of values; `dies` is called for each that is read."""

    def __init__(self, number: int = NUMBER, dies: Callable[[int], None] | None = None) -> None:
        draw = np.random.default_rng(0)
        self.lengths = draw.integers(1, 30, number)
        self.tags = [f"corpus/sentence-{row}" for row in range(number)]
        self._dies = dies

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self._dies is not None:
            self._dies(row)
        draw = np.random.default_rng(row)
        length = int(self.lengths[row])
        return {
            "features": torch.from_numpy(draw.normal(size=(length, 5)).astype(np.float32)),
            "classes": torch.from_numpy(draw.integers(0, 17, length // 2)),
            "mean": torch.tensor(row / 7, dtype=torch.float64),
            "speaker": row % 3,
            "text": f"häuser {row}" if row % 5 else "",
            "half": draw.normal(size=(2, 3)).astype(np.float16),
        }


def packed(out: Path, data: Any = None, **options: Any) -> PackResult:
    """Pack a data set with options of either."""
    chosen = Sentences() if data is None else data
    own = {name: options.pop(name) for name in ("streams", "epoch", "seed") if name in options}
    rows = options.pop("rows", range(len(chosen)))
    return pack(SampleSource(chosen, rows, name="test", **own), out, **options)


def opened(out: Path, data: Any = None, **options: Any) -> Packed:
    packed(out, data, **options)
    return open_packed(out)


def assert_same(left: Any, right: Any) -> None:
    """Values, types and shapes."""
    assert type(left) is type(right) or isinstance(right, np.ndarray)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            assert_same(left[name], right[name])
    elif isinstance(left, torch.Tensor):
        other = torch.as_tensor(right)
        assert left.dtype == other.dtype
        assert torch.equal(left, other)
    else:
        assert left == right


def assert_whole(out: Path, data: Any) -> None:
    found = PackedDataset(out)
    assert len(found) == len(data)
    for row in range(len(data)):
        assert_same(found[row], data[row])
    assert verify(open_packed(out))[0] == []
    assert not out.with_name(f"{out.name}.parts").exists()
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def needs_returnn() -> Any:
    """RETURNN's module of HDF data, or a reason to skip."""
    pytest.importorskip("tree", reason="RETURNN needs dm-tree, which is not installed (`.ci/run` installs it)")
    return pytest.importorskip("returnn.datasets.hdf", reason="RETURNN is not installed (`.ci/run` installs it)")
