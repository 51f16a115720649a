"""Loading decides nothing: the same grains with any number of workers, ranks and starting points."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import paceline.data.loader as loader_module
from paceline.core.errors import PacelineError
from paceline.data.collate import ShapesDiffer, pad_collate, stack_collate
from paceline.data.fetch import Fetch, Request
from paceline.data.grain import Batch, Grain
from paceline.data.loader import BatchRow, EpochSteps, Loader, choose_workers
from paceline.data.plan import BatchRule, Plan, RankPlan
from paceline.world.link import Link
from tests.crash import _context, run_until_death


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


_held: list[Any] = []


def leave_a_worker_behind(link: Link) -> None:
    """As a run does that ends with a traceback which holds its frames, or before a slow worker has answered."""
    batches = Loader(Augmented(), workers=1, seed=1).run(make_plan())
    next(batches)
    _held.append(batches)


def test_a_process_of_multiprocessing_ends_although_a_worker_is_left() -> None:
    assert run_until_death(1, leave_a_worker_behind) == [0]


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
        batches = list(Loader(Augmented(), workers=0).run(make_plan(), rank=rank, size=4))
        assert [batch.step for batch in batches] == list(range(6))  # also where a rank has no grain
        assert [batch.count for batch in batches] == [8, 8, 8, 8, 8, 1]
        shared += flat(batches)
    assert sorted(shared) == sorted(whole)
    tail = flat(list(Loader(Augmented(), workers=0).run(make_plan(), range(3, 6))))
    assert tail == [row for row in whole if row[0] >= 3]


def test_steps_past_the_end_are_empty() -> None:
    plan = RankPlan(41, rule=BatchRule(8), grains=3, seed=5)
    batches = list(Loader(Augmented(), workers=0).run(plan, range(4, 8), rank=1, size=2))
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


class Endless(Dataset[Any]):
    """Says which processes read it, and never answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        (self._folder / str(os.getpid())).touch()
        time.sleep(600)


def read_endless(folder: str, method: str) -> None:
    multiprocessing.set_start_method(method, force=True)
    plan = Plan(8, rule=BatchRule(2), grains=1, seed=0)
    list(Loader(Endless(Path(folder)), workers=2).run(plan))


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Whatever they do; elsewhere they look for their parent when they next wait for a request."""
    process = _context().Process(target=read_endless, args=(str(tmp_path), "fork"))
    process.start()
    deadline = time.monotonic() + 60
    while len(pids := list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    deadline = time.monotonic() + 20
    try:
        while any(is_running(int(path.name)) for path in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for path in pids:
            with suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


# -- the row of batches that goes on from epoch to epoch ------------------------------------------------------------

EPOCHS = 4


def planned(rank: int = 0, size: int = 1) -> list[EpochSteps]:
    plans = [make_plan(epoch=epoch) for epoch in range(EPOCHS)]
    return [EpochSteps(epoch, plan, range(plan.num_steps), rank, size) for epoch, plan in enumerate(plans)]


def one_by_one(epochs: list[EpochSteps]) -> list[Any]:
    loader = Loader(Augmented(), workers=0, seed=1)
    return [flat(list(loader.row([epoch]).next_epoch())) for epoch in epochs]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (2, 4)])
def test_workers_that_read_on_change_nothing(rank: int, size: int) -> None:
    epochs = planned(rank, size)
    loader = Loader(Augmented(), workers=2, seed=1)
    row = loader.row(epochs)
    read = []
    for epoch in epochs:
        read.append(flat(list(row.next_epoch())))
        assert row.position == ((epoch.epoch + 1, 0) if epoch.epoch + 1 < EPOCHS else None)
    assert read == one_by_one(epochs)
    loader.close()


def test_another_row_may_begin_anywhere() -> None:
    """An epoch broken off, another order, steps from the middle: read anew, as if nothing had been read on."""
    epochs = planned()
    expected = one_by_one(epochs)
    loader = Loader(Augmented(), workers=2, seed=1)
    broken_off = loader.row(epochs)
    next(broken_off.next_epoch())
    assert broken_off.position is None
    row = loader.row(epochs[1:])
    assert flat(list(row.next_epoch())) == expected[1]
    assert row.position == (2, 0)
    assert flat(list(loader.row(epochs[3:]).next_epoch())) == expected[3]
    part = loader.row([epochs[2]._replace(steps=range(2, 5)), epochs[3]])
    assert flat(list(part.next_epoch())) == [row for row in expected[2] if 2 <= row[0] < 5]
    assert flat(list(part.next_epoch())) == expected[3]
    loader.close()


def test_requests_go_on_before_an_epoch_is_used_up() -> None:
    """A reader that is 20 requests ahead never stops between two epochs."""
    requested: list[tuple[int, int]] = []
    handed: list[tuple[int, int]] = []

    def read(requests: Iterator[Request]) -> Iterator[Grain]:
        waiting: list[Request] = []
        for request in requests:
            requested.append((request.epoch, len(handed)))
            waiting.append(request)
            if len(waiting) == 20:
                first = waiting.pop(0)
                yield Grain(first.epoch, first.number, first.samples)
        for rest in waiting:
            yield Grain(rest.epoch, rest.number, rest.samples)

    row = BatchRow(planned(), read)
    for epoch in range(EPOCHS):
        for batch in row.next_epoch():
            assert all(grain.data == epoch for grain in batch.grains)
            handed.append((batch.epoch, batch.step))
            assert batch.is_last == (batch.step == 5)
        assert row.position == ((epoch + 1, 0) if epoch + 1 < EPOCHS else None)
    assert handed == [(epoch, step) for epoch in range(EPOCHS) for step in range(6)]
    # Every epoch but the first was requested before the one before it had been handed out whole.
    for epoch in range(1, EPOCHS):
        first = next(done for number, done in requested if number == epoch)
        assert first < epoch * 6


def test_a_batch_is_delivered_before_its_epoch_begins() -> None:
    """One batch ahead, the first of an epoch is on its way when the last of the one before is handed out."""
    events: list[tuple[str, int, int]] = []

    def one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
        waiting: Batch | None = None
        for batch in batches:
            events.append(("started", batch.epoch, batch.step))
            if waiting is not None:
                yield waiting
            waiting = batch
        if waiting is not None:
            yield waiting

    def read(requests: Iterator[Request]) -> Iterator[Grain]:
        return (Grain(request.epoch, request.number, request.samples) for request in requests)

    row = BatchRow(planned(), read, one_ahead)
    for epoch in range(EPOCHS):
        for batch in row.next_epoch():
            assert all(grain.data == epoch for grain in batch.grains)
            events.append(("handed out", batch.epoch, batch.step))
        assert row.position == ((epoch + 1, 0) if epoch + 1 < EPOCHS else None)
    assert [event[1:] for event in events if event[0] == "handed out"] == [
        (epoch, step) for epoch in range(EPOCHS) for step in range(6)
    ]
    for epoch in range(1, EPOCHS):
        assert events.index(("started", epoch, 0)) < events.index(("handed out", epoch - 1, 5))


def test_a_rank_without_a_grain_in_the_last_step() -> None:
    epochs = planned(rank=2, size=4)  # the last batch of an epoch has one grain
    loader = Loader(Augmented(), workers=1, seed=1)
    row = loader.row(epochs)
    for epoch in epochs:
        batches = list(row.next_epoch())
        assert [batch.step for batch in batches] == list(range(6))
        assert batches[-1].grains == []
        assert all(
            np.isin(grain.samples, epoch.plan.batch(batch.step)).all() for batch in batches for grain in batch.grains
        )
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_never_has_a_grain_plans_one_epoch_at_a_time(workers: int) -> None:
    plan = Plan(4, rule=BatchRule(4), grains=2, seed=0)
    asked: list[int] = []

    def endless() -> Iterator[EpochSteps]:
        while True:
            asked.append(len(asked))
            yield EpochSteps(len(asked), plan, range(1), rank=2, size=3)

    loader = Loader(Augmented(), workers=workers)
    [batch] = loader.row(endless()).next_epoch()
    assert batch.grains == []
    assert batch.is_last
    assert asked == [0]
    loader.close()


def test_only_workers_read_on() -> None:
    def run(loader: Loader) -> list[int]:
        asked: list[int] = []

        def epochs() -> Iterator[EpochSteps]:
            for epoch in planned():
                asked.append(epoch.epoch)
                yield epoch

        list(loader.row(epochs()).next_epoch())
        return asked

    assert run(Loader(Augmented(), workers=0, seed=1)) == [0]
    loader = Loader(Augmented(), workers=1, seed=1)
    assert run(loader) == [0, 1]
    loader.close()


class Ids:
    """Samples that are their own ids, with a number that the loader's seed of the sample gives."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[Plan], int, int, int]:
    """A data set's size, the plans of some epochs, a rank, the number of ranks and the step to begin with."""
    num_samples = draw(st.integers(1, 40))
    lengths = np.array(draw(st.lists(st.integers(1, 9), min_size=num_samples, max_size=num_samples)))
    size = draw(st.integers(1, 4))
    rank = draw(st.integers(0, size - 1))
    kind = draw(st.sampled_from([Plan, RankPlan]))
    common: dict[str, Any] = {
        "rule": BatchRule(draw(st.integers(1, 12)), draw(st.none() | st.integers(5, 60))),
        "grains": draw(st.integers(1, 5)),
        "seed": 3,
        "lengths": lengths,
        "counts": draw(st.none() | st.just(lengths)),
        "order": draw(st.sampled_from(["none", "random", "sorted", "laplace", "bucket"])),
    }
    plans = [kind(num_samples, epoch=epoch, **common) for epoch in range(draw(st.integers(1, 4)))]
    return num_samples, plans, rank, size, draw(st.integers(0, plans[0].num_steps - 1))


def expected(plans: list[Plan], rank: int, size: int, start: int) -> list[Any]:
    """Every step as its plan says, without a loader."""
    rows = []
    for epoch, plan in enumerate(plans):
        for step in range(start if epoch == 0 else 0, plan.num_steps):
            share = plan.share(step, rank, size)
            grains = [(number, ids.tolist()) for number, ids in zip(share.numbers, share.grains, strict=True)]
            sizes = (share.num_grains, share.num_samples, share.count, share.own_count)
            assert share.samples is not None
            rows.append((epoch, step, sizes, share.samples.tolist(), grains, step == plan.num_steps - 1))
    return rows


def handed_out(row: BatchRow, num_epochs: int) -> tuple[list[Any], list[float]]:
    """All batches in the form of `expected`, and what was drawn for each sample."""
    rows, drawn = [], []
    for _ in range(num_epochs):
        for batch in row.next_epoch():
            grains = [(grain.number, grain.x.tolist()) for grain in batch.grains]
            sizes = (batch.num_grains, batch.num_samples, batch.count, batch.own_count)
            assert batch.samples is not None
            assert batch.has_next == (not batch.is_last)
            rows.append((batch.epoch, batch.step, sizes, batch.samples.tolist(), grains, batch.is_last))
            drawn += [value for grain in batch.grains for value in grain.y.tolist()]
    return rows, drawn


def epochs_of(plans: list[Plan], rank: int, size: int, start: int) -> list[EpochSteps]:
    starts = [start] + [0] * (len(plans) - 1)
    return [
        EpochSteps(epoch, plan, range(first, plan.num_steps), rank, size)
        for epoch, (plan, first) in enumerate(zip(plans, starts, strict=True))
    ]


@given(runs())
@settings(max_examples=60)
def test_batches_are_what_the_plan_says(run: tuple[int, list[Plan], int, int, int]) -> None:
    num_samples, plans, rank, size, start = run
    loader = Loader(Ids(num_samples), workers=0, seed=7)
    for epoch in epochs_of(plans, rank, size, start):
        rows, _ = handed_out(loader.row([epoch]), 1)
        assert rows == [row for row in expected(plans, rank, size, start) if row[0] == epoch.epoch]


@given(runs(), st.integers(1, 2))
@settings(max_examples=6)
def test_workers_hand_out_what_the_plan_says(run: tuple[int, list[Plan], int, int, int], workers: int) -> None:
    num_samples, plans, rank, size, start = run
    epochs = epochs_of(plans, rank, size, start)
    inline = Loader(Ids(num_samples), workers=0, seed=7)
    drawn_inline = [value for epoch in epochs for value in handed_out(inline.row([epoch]), 1)[1]]
    loader = Loader(Ids(num_samples), workers=workers, seed=7)
    row, rows, drawn = loader.row(epochs), [], []
    for epoch in epochs:
        if epoch.epoch > 0 and row.position != (epoch.epoch, 0):  # a rank without grains is not read on for
            row = loader.row(epochs[epoch.epoch :])
        some, values = handed_out(row, 1)
        rows += some
        drawn += values
    loader.close()
    assert rows == expected(plans, rank, size, start)
    assert drawn == drawn_inline
