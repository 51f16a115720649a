"""Loading decides nothing: the same grains with any number of workers, ranks and starting points."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import paceline.data.loader as loader_module
from paceline.core.errors import PacelineError
from paceline.data.ahead import Seat
from paceline.data.collate import ShapesDiffer, pad_collate, stack_collate
from paceline.data.fetch import Fetch, Request
from paceline.data.grain import Batch, Grain
from paceline.data.loader import Loader, choose_workers
from paceline.data.plan import BatchRule, Plan


class Augmented(Dataset[Any]):
    """Every sample draws from all three generators that people use."""

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return {"x": torch.tensor([index, *noise], dtype=torch.float64), "name": f"sample {index}"}


def make_plan(grains: int = 3, epoch: int = 0) -> Plan:
    return Plan(41, rule=BatchRule(8), grains=grains, seed=5, epoch=epoch)


def flat(batches: list[Batch]) -> list[tuple[int, int, list[int], list[list[float]]]]:
    return [
        (batch.step, grain.number, grain.samples.tolist(), grain.x.tolist())
        for batch in batches
        for grain in batch.grains
    ]


def test_workers_change_nothing() -> None:
    alone = flat(list(Loader(Augmented(), workers=0, seed=1).run(make_plan())))
    loader = Loader(Augmented(), workers=2, seed=1)
    assert flat(list(loader.run(make_plan()))) == alone
    assert flat(list(loader.run(make_plan()))) == alone  # the same workers again
    loader.close()
    assert len(alone) == 5 * 3 + 1  # five batches of 8 in three grains, one of a single sample
    torch.manual_seed(99)
    random.seed(99)
    assert flat(list(Loader(Augmented(), workers=0, seed=1).run(make_plan()))) == alone


def test_epoch_and_seed_key_the_samples() -> None:
    def values(seed: int, epoch: int) -> list[list[float]]:
        batches = list(Loader(Augmented(), workers=0, seed=seed).run(make_plan(), epoch=epoch))
        rows = [row for _, _, _, grain in flat(batches) for row in grain]
        return sorted(rows)

    assert values(1, 0) == values(1, 0)
    assert values(1, 0) != values(1, 1)
    assert values(1, 0) != values(2, 0)


def test_ranks_share_and_any_step_can_be_the_first() -> None:
    whole = flat(list(Loader(Augmented(), workers=0).run(make_plan())))
    shared = []
    for rank in range(4):
        batches = list(Loader(Augmented(), workers=0).run(make_plan(), seat=Seat(rank, 4)))
        assert [batch.step for batch in batches] == list(range(6))  # also where a rank has no grain
        assert [batch.count for batch in batches] == [8, 8, 8, 8, 8, 1]
        shared += flat(batches)
    assert sorted(shared) == sorted(whole)
    tail = flat(list(Loader(Augmented(), workers=0).run(make_plan(), range(3, 6))))
    assert tail == [row for row in whole if row[0] >= 3]


def test_steps_past_the_end_are_empty() -> None:
    batches = list(Loader(Augmented(), workers=0).run(make_plan(), range(4, 8), seat=Seat(plan=1, plans=2)))
    assert [len(batch.grains) for batch in batches] == [3, 1, 0, 0]
    assert [batch.has_next for batch in batches] == [True, True, False, False]
    assert batches[0].grains[0].number == 3  # the second plan's grains follow the first's


def test_tensors_in_memory_are_read_at_once() -> None:
    x = torch.randn(41, 3)
    calls = []

    class Watched(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            calls.append(index)
            return super().__getitem__(index)

    request = Request(0, 0, np.array([4, 2, 9]))
    assert torch.equal(Fetch(TensorDataset(x), None, 0)(request).x, x[[4, 2, 9]])
    assert torch.equal(Fetch(Watched(x), None, 0)(request).x, x[[4, 2, 9]])  # a subclass may do as it likes
    assert calls == [4, 2, 9]


@pytest.mark.parametrize(
    ("asked", "read_s", "cores", "local_size", "on_cpu", "expected"),
    [
        (3, 1.0, 2, 1, True, 3),  # asked for
        ("auto", 0.0001, 64, 1, False, 0),  # cheap to read
        ("auto", 0.1, 64, 8, False, 8),  # a fair share
        ("auto", 0.1, 64, 1, False, 8),  # not more than help
        ("auto", 0.1, 16, 4, True, 3),  # the training needs a core
        ("auto", 0.1, 2, 2, True, 0),  # nothing to spare
        ("auto", 0.1, 2, 2, False, 1),  # the GPU computes meanwhile
    ],
)
def test_choice_of_workers(asked: Any, read_s: float, cores: int, local_size: int, on_cpu: bool, expected: int) -> None:
    assert choose_workers(asked, read_s, cores, local_size, on_cpu) == expected


def test_a_grain_reads_like_its_data() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2)
    pair = Grain((x, y), 0, np.array([7, 8]))
    assert pair.x is x
    assert pair.y is y
    assert [*pair] == [x, y]
    assert len(pair) == 2
    named = Grain({"audio": x, "y": y}, 0, np.array([7, 8]))
    assert named.audio is x
    assert named.y is y
    with pytest.raises(AttributeError, match=r"audio: float32\[2, 3\], y: float32\[2\]\) has no 'text'"):
        _ = named.text


def test_collating() -> None:
    ragged = [(torch.ones(2, 3), 1), (torch.ones(4, 3), 2)]
    with pytest.raises(ShapesDiffer) as caught:
        stack_collate(ragged)
    assert "pad_collate" in caught.value.hint
    x, y, lengths = pad_collate(ragged)
    assert x.shape == (2, 4, 3)
    assert x.sum() == 18
    assert y.tolist() == [1, 2]
    assert lengths.tolist() == [2, 4]
    named = pad_collate([{"x": np.ones(2), "text": "a"}, {"x": np.ones(1), "text": "b"}])
    assert named["x"].tolist() == [[1, 1], [1, 0]]
    assert named["x_lengths"].tolist() == [2, 1]
    assert named["text"] == ["a", "b"]


class OneFile(Dataset[Any]):
    """Opens its file when first read, as packed data sets do, and reads by position."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"".join(number.to_bytes(4, "little") for number in range(400)))
        self._path = path
        self._file: Any = None

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
        assert self._file is not None
        self._file.seek(4 * index)
        return index, int.from_bytes(self._file.read(4), "little")

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


def test_automatic_workers_share_no_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "choose_workers", lambda *facts: 2)
    loader = Loader(OneFile(tmp_path / "data"), workers="auto")
    plan = Plan(400, rule=BatchRule(20), grains=4, seed=0)
    for _ in range(2):
        for batch in loader.run(plan):
            for grain in batch.grains:
                asked, read = grain
                assert torch.equal(asked, read)
    assert loader.workers == 2
    loader.close()


class Unreadable(PacelineError):
    def __init__(self, sample: int, why: str) -> None:
        super().__init__(f"sample {sample}: {why}")


class OneIsBad:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise Unreadable(index, "cut short")
        return torch.tensor(float(index))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_mistake_in_the_data_is_raised_as_it_is(workers: int) -> None:
    plan = Plan(8, rule=BatchRule(2), grains=1, seed=0, order="none")
    with pytest.raises(Unreadable, match="^sample 5: cut short"):
        list(Loader(OneIsBad(), workers=workers).run(plan))


def test_a_program_that_fails_while_workers_read_ends() -> None:
    """The traceback keeps the loader alive until the interpreter ends, which must not wait for the workers."""
    program = """
from tests.data.test_loader import OneIsBad, Loader, Plan, BatchRule
for batch in Loader(OneIsBad(), workers=1).run(Plan(8, rule=BatchRule(2), grains=1, seed=0, order="none")):
    raise ArithmeticError("in the training step")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ArithmeticError: in the training step")
