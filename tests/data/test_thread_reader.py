"""Threads read what one process reads, in the same order, in memory that is used again only once it is free."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.data.dataset import Collate, DatasetTraits, Room
from paceline.data.fetch import Fetch, Request
from paceline.data.grain import Grain, map_tensors
from paceline.data.loader import BatchRow, EpochSteps, Loader, choose_threads
from paceline.data.plan import BatchRule, Plan
from paceline.data.thread_reader import SPARE_SLOTS, Largest, Slot, ThreadReader


class Unreadable(PacelineError):
    """A row that cannot be read."""

    row: int
    sentence = "row {row} cannot be read"
    hint = "mend it"


class Rows:
    """Row n is n times n, padded; later rows of a grain are read sooner, so that threads finish out of order."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad, self.threads = bad, set[str]()

    def __len__(self) -> int:
        return 41

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("grains are read as a whole")

    def reads_in_threads(self, collate: Collate) -> bool:
        return True

    def read_grain_into(self, samples: NDArray[np.int64], seeds: Sequence[int], collate: Collate, room: Room) -> Any:
        self.threads.add(threading.current_thread().name)
        if self.bad in samples:
            raise Unreadable(int(samples[0]))
        x = room((len(samples), int(samples.max()) + 1), np.int16)
        x[:] = 0
        for place, sample in enumerate(samples):
            x[place, :sample] = sample
        time.sleep(0.002 * (int(samples[0]) % 3 == 0))
        return {"x": torch.from_numpy(x), "seeds": torch.tensor([seed % 1000 for seed in seeds])}


def plan(epoch: int) -> Plan:
    return Plan(41, rule=BatchRule(8), grains=3, seed=5, epoch=epoch)


def epochs(first: int = 0, begin: int = 0) -> Iterator[EpochSteps]:
    for epoch in range(first, 4):
        steps = plan(epoch).num_steps
        yield EpochSteps(epoch, plan(epoch), range(begin if epoch == first else 0, steps))


def flat(batches: Any) -> list[Any]:
    return [
        (batch.epoch, batch.step, grain.number, grain.samples.tolist(), grain["x"].tolist(), grain["seeds"].tolist())
        for batch in batches
        for grain in batch.grains
    ]


def inline(requests: Iterator[Request]) -> Iterator[Grain]:
    fetch = Fetch(Rows(), None, seed=1)
    return (fetch.read_into(request, np.empty) for request in requests)


class FakeUploads:
    """Reads from the original only when the upload ends, as a busy device would."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []
        self._started: list[tuple[Grain, Grain]] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.num_bytes.append(num_bytes)
        return torch.full((num_bytes,), 7, dtype=torch.uint8)

    def pinned(self, grain: Grain) -> Grain:
        return grain

    def start(self, grain: Grain) -> Grain:
        copy = Grain(map_tensors(torch.zeros_like, grain.data), grain.number, grain.samples)
        self._started.append((grain, copy))
        return copy

    def finish(self, grain: Grain) -> Grain:
        return grain

    def mark(self) -> Any:
        started, self._started = self._started, []
        lock = threading.Lock()

        class End:
            def synchronize(self) -> None:
                with lock:
                    while started:
                        grain, copy = started.pop()
                        for name in ("x", "seeds"):
                            copy[name].copy_(grain[name])

        self.last = End()
        return self.last


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    """The batches of all epochs, read on from one to the next; twice with the same threads."""
    expected = flat([batch for epoch in range(4) for batch in BatchRow([next(epochs(epoch))], inline).next_epoch()])
    rows = Rows()
    reader = ThreadReader(Fetch(rows, None, seed=1), threads)
    for _ in range(2):
        row = BatchRow(epochs(), reader.read)
        assert flat([batch for _ in range(4) for batch in row.next_epoch()]) == expected
    assert len(rows.threads) == threads
    reader.close()
    assert not any(thread.name.startswith("paceline-reader") for thread in threading.enumerate())


def test_threads_read_on_into_the_next_epoch() -> None:
    reader = ThreadReader(Fetch(Rows(), None, seed=1), 2)
    row = BatchRow(epochs(), reader.read)
    list(row.next_epoch())
    while row.position is None:  # a thread asks the plan for it
        time.sleep(0.001)
    assert row.position == (1, 0)
    reader.close()


def test_the_plan_is_asked_by_the_threads() -> None:
    """The training process has other things to do, such as keeping a GPU busy."""
    asked = set()

    def noted() -> Iterator[Request]:
        for number in range(20):
            asked.add(threading.current_thread().name.rpartition("_")[0])
            yield Request(0, number, np.arange(3))

    reader = ThreadReader(Fetch(Rows(), None, seed=1), 3)
    assert [grain.number for grain in reader.read(noted())] == list(range(20))
    assert asked == {"paceline-reader"}
    reader.close()


def test_a_plan_that_fails_fails_after_the_grains_before_it() -> None:
    def failing() -> Iterator[Request]:
        yield from (Request(0, number, np.arange(3)) for number in range(7))
        raise Unreadable(7)

    reader = ThreadReader(Fetch(Rows(), None, seed=1), 3)
    read = reader.read(failing())
    assert [next(read).number for _ in range(7)] == list(range(7))
    with pytest.raises(Unreadable):
        next(read)
    assert not any(thread.name.startswith("paceline-reader") for thread in threading.enumerate())


def test_another_row_may_begin_anywhere() -> None:
    """As after a resume; the earlier row, left in the middle, ends."""
    reader = ThreadReader(Fetch(Rows(), None, seed=1), 2)
    earlier = BatchRow(epochs(), reader.read).next_epoch()
    next(earlier)
    expected = flat(BatchRow([next(epochs(1, 2))], inline).next_epoch())
    assert flat(BatchRow(epochs(1, 2), reader.read).next_epoch()) == expected
    assert list(earlier) == []
    reader.close()
    assert flat(BatchRow(epochs(1, 2), reader.read).next_epoch()) == expected  # started anew
    reader.close()


def test_slots_are_filled_anew_only_after_their_upload() -> None:
    uploads = FakeUploads()
    reader = ThreadReader(Fetch(Rows(), None, seed=1), 2, uploads)
    requests = [Request(0, number, np.arange(number, number + 4)) for number in range(30)]
    grains = list(reader.read(iter(requests)))
    expected = list(inline(iter(requests)))
    reader.close()  # waits for the last uploads
    for grain, other in zip(grains, expected, strict=True):
        assert torch.equal(grain["x"], other["x"])
        assert torch.equal(grain["seeds"], other["seeds"])


def test_memory_is_bounded() -> None:
    """A slot allocates when a grain is larger than all that it has held, a power of two: for equal sizes once."""
    uploads = FakeUploads()
    reader = ThreadReader(Fetch(Rows(), None, seed=1), 2, uploads)
    assert len(list(reader.read(Request(0, 0, np.array([20, 3])) for _ in range(100)))) == 100
    assert uploads.num_bytes == [128] * (2 + SPARE_SLOTS)  # for 2 rows of 21 numbers of 2 bytes
    reader.close()


def test_slots_grow_for_the_largest_grain_of_all() -> None:
    """Not one by one, whenever the largest comes to them: that would stop a GPU now and then for many epochs."""
    uploads, largest = FakeUploads(), Largest()
    slots = [Slot(uploads.allocate, largest) for _ in range(3)]
    slots[0].room((1000,), np.uint8)
    for slot in slots[1:]:
        slot.room((10,), np.uint8)
    for _ in range(5):
        for slot in slots:
            slot.clear()
            slot.room((1000,), np.uint8)
    assert uploads.num_bytes == [1024] * 3


def test_a_slot_has_room_for_several_arrays() -> None:
    """Of the second grain on, which finds as much memory as the first has asked for in all."""
    uploads = FakeUploads()
    slot = Slot(uploads.allocate)
    first = slot.room((10, 3), np.int64)
    more = slot.room((2,), np.float32)  # no room left: elsewhere
    first[:], more[:] = 1, 2
    assert first.all()
    slot.clear()
    for _ in range(3):
        again, beside = slot.room((10, 3), np.int64), slot.room((2,), np.float32)
        assert beside.ctypes.data == again.ctypes.data + 256
        assert uploads.num_bytes == [256, 512]  # for 240, and for 256 + 8
        slot.clear()
    smaller, beside = slot.room((4, 2), np.int64), slot.room((3,), np.float32)
    assert smaller.ctypes.data == again.ctypes.data
    assert beside.ctypes.data == smaller.ctypes.data + 64


class Halves(Rows):
    """Leaves a part of the work to the device."""

    def read_grain_into(self, samples: NDArray[np.int64], seeds: Sequence[int], collate: Collate, room: Room) -> Any:
        return {**super().read_grain_into(samples, seeds, collate, room), "is_raw": True}

    def finish_grain(self, data: Any) -> Any:
        if "is_raw" not in data:
            return data
        return {"x": data["x"] * 2, "seeds": data["seeds"]}


class Copies(FakeUploads):
    """Copies at once, and finishes."""

    def __init__(self, finish: Any) -> None:
        super().__init__()
        self.finish = finish

    def start(self, grain: Grain) -> Grain:
        return Grain(map_tensors(torch.clone, grain.data), grain.number, grain.samples)


def test_what_is_left_to_the_device_is_done_there_once() -> None:
    requests = [Request(0, number, np.arange(number, number + 4)) for number in range(9)]
    fetch = Fetch(Halves(), None, seed=1)
    assert fetch.finisher is not None
    assert Fetch(Rows(), None, seed=1).finisher is None
    reader = ThreadReader(fetch, 2, Copies(fetch.finisher))
    for grain, other in zip(reader.read(iter(requests)), inline(iter(requests)), strict=True):
        for each in (grain, fetch.finisher(grain)):
            assert set(each.data) == {"x", "seeds"}
            assert torch.equal(each["x"], 2 * other["x"])
    reader.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_in_a_thread_is_raised_as_it_is(threads: int) -> None:
    """When its grain is asked for, not before; then the threads have ended, and can be started again."""
    rows, before = Rows(bad=9), set(threading.enumerate())  # those of readers of other tests may still end
    reader = ThreadReader(Fetch(rows, None, seed=1), threads)
    requests = [Request(0, 0, np.arange(begin, begin + 4)) for begin in range(0, 40, 4)]
    grains = reader.read(iter(requests))
    assert [next(grains).samples[0] for _ in range(2)] == [0, 4]
    with pytest.raises(Unreadable, match="row 8 cannot be read"):
        next(grains)
    started = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("paceline-reader") for thread in started)
    rows.bad = None
    assert len(list(reader.read(iter(requests)))) == 10
    reader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", ["auto", 3])
def test_batches_on_a_gpu_that_lags_behind(workers: Any) -> None:
    """Nothing is overwritten while it is uploaded or used; the host is some steps ahead."""
    device = torch.device("cuda")
    expected = flat([batch for epoch in range(4) for batch in BatchRow([next(epochs(epoch))], inline).next_epoch()])
    loader = Loader(Rows(), seed=1, device=device, workers=workers)
    row = loader.row(epochs())
    batches = []
    for _ in range(4):
        for batch in row.next_epoch():
            torch.cuda._sleep(10_000_000)  # some milliseconds
            batch.grains = [
                Grain(map_tensors(torch.clone, each.data), each.number, each.samples) for each in batch.grains
            ]
            batches.append(batch)
    loader.close()
    assert loader.workers
    assert all(grain["x"].is_cuda for batch in batches for grain in batch.grains)
    assert flat(batches) == expected


def test_data_that_threads_may_read() -> None:
    assert Fetch(Rows(), None, 0).reads_in_threads
    assert not Fetch([1, 2], None, 0).reads_in_threads
    assert DatasetTraits(Rows()).thread_reader(list) is not None


@pytest.mark.parametrize(
    ("setting", "cores", "local_size", "expected"),
    [("auto", 16, 1, 4), ("auto", 16, 8, 1), ("auto", 1, 1, 1), (6, 2, 1, 6)],
)
def test_choice_of_threads(setting: Any, cores: int, local_size: int, expected: int) -> None:
    assert choose_threads(setting, cores, local_size, are_busy=False) == expected


def test_threads_that_compute_are_more() -> None:
    assert choose_threads("auto", 16, 1, are_busy=True) == 12
    assert choose_threads("auto", 16, 2, are_busy=True) == 7
    assert DatasetTraits(Halves()).threads_are_busy is False
