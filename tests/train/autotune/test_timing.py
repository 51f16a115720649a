"""How ways are timed: one disturbed round decides nothing, and ways in turns compute each in its own arithmetic."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.optim import larc
from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.choice import CannotRun
from paceline.speed.autotune.race import FEWEST_ROUNDS
from paceline.speed.precision import Capabilities
from paceline.train.autotune import timing
from paceline.train.autotune.timing import TimedSteps, Workload, in_turns, step_seconds
from paceline.train.feed import Feed, TrainingData
from paceline.train.loss import NonFiniteLoss
from tests.train.small import BATCH, SmallTask, alone

GPU_LIKE = Capabilities("cpu", "this CPU", bf16=True, tf32=True, fp16=True, compiler=False)


@pytest.fixture(autouse=True)
def capable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = precision.resolve(0, None, GPU_LIKE)
    monkeypatch.setattr(precision, "capabilities", lambda device: GPU_LIKE)
    yield
    precision.apply(before)


def workload(task: SmallTask, **settings: Any) -> Workload:
    link, plain = alone(), {"global_batch": BATCH, "order": "none", "optimizer": "sgd", "level": 4, "workers": 0}
    config = TrainConfig(epochs=1, **{**plain, **settings})
    feed = Feed(TrainingData.of(task.train_data()), config, link, grains=1, seed=0)
    return Workload(task, config, link, task.model(), list(feed.read([(0, 0), (2, 0)])))


def test_in_turns_each_in_its_own_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """-O0 and -O1 differ in nothing but a setting of the process: every round must find its own."""
    found: list[tuple[str, str]] = []
    plain = TimedSteps.__call__

    def call(self: TimedSteps) -> None:
        found.append((self._stepper.precision.fp32_matmul, torch.backends.cuda.matmul.fp32_precision))
        plain(self)

    monkeypatch.setattr(TimedSteps, "__call__", call)
    times = in_turns([Candidate(0), Candidate(1)], workload=workload(SmallTask()))
    assert set(times) == {Candidate(0), Candidate(1)}
    assert all(seconds > 0 for seconds in times.values())
    assert all(asked == set_ for asked, set_ in found)
    turns = found[2 * timing.WARM_ROUNDS :]
    both = [("ieee", "ieee"), ("tf32", "tf32")]
    assert turns == [turn for number in range(len(turns) // 2) for turn in (both, both[::-1])[number % 2]]
    assert len(turns) // 2 >= FEWEST_ROUNDS


def test_the_model_and_the_data_stay_as_they_are() -> None:
    made = workload(SmallTask(), clip_norm=1.0, ema=0.9)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    in_turns([Candidate(2), Candidate(0)], workload=made)
    assert step_seconds(Candidate(2), 0.0, workload=made) > 0
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_layer_wise_rates_are_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer attaches them: their time counts."""
    attached: list[str] = []
    monkeypatch.setattr(larc, "attach", lambda optimizer, config: attached.append(config.larc))
    step_seconds(Candidate(0), 1.0, workload=workload(SmallTask(), larc="clip"))
    assert attached == ["clip"]


class Broken(SmallTask):
    """Cannot be computed in bf16."""

    error: type[Exception] | None = None

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        total, count = super().loss(model, grain)
        if not torch.is_autocast_enabled("cpu"):
            return total, count
        if self.error is not None:
            raise self.error("it is so\nand more")
        return total * float("nan"), count


@pytest.mark.parametrize(
    ("error", "why"),
    [(None, "NonFiniteLoss: the loss is nan"), (ValueError, "ValueError: it is so$"), (MemoryError, "MemoryError")],
)
def test_whatever_a_way_runs_into_is_a_reason(error: type[Exception] | None, why: str) -> None:
    task = Broken()
    task.error = error
    with pytest.raises(CannotRun, match=why) as caught:
        step_seconds(Candidate(2), 1.0, workload=workload(task))
    assert isinstance(caught.value.__cause__, error or NonFiniteLoss)
    assert step_seconds(Candidate(0), 1.0, workload=workload(task)) > 0


class Watched(Broken):
    """Knows whether the models that it was given are still there."""

    error = ValueError

    def __init__(self) -> None:
        super().__init__()
        self.models: list[weakref.ref[nn.Module]] = []

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        self.models.append(weakref.ref(model))
        return super().loss(model, grain)


def test_nothing_of_a_way_stays_in_memory() -> None:
    """The next one has it all to itself; of one that failed only the reason is kept."""
    task = Watched()
    made = workload(task)
    step_seconds(Candidate(0), 1.0, workload=made)
    in_turns([Candidate(0), Candidate(1)], workload=made)
    with pytest.raises(CannotRun) as caught:
        step_seconds(Candidate(2), 1.0, workload=made)
    assert caught.value.__cause__ is not None
    assert len(task.models) > 3 * FEWEST_ROUNDS
    assert not any(model() for model in task.models)


def test_out_of_memory_has_its_own_word() -> None:
    class Full(SmallTask):
        def loss(self, model: nn.Module, grain: Grain) -> Mapping[str, Any]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    for measure in (
        lambda made: step_seconds(Candidate(0), 1.0, workload=made),
        lambda made: in_turns([Candidate(0)], workload=made),
    ):
        with pytest.raises(CannotRun, match="^out of memory$"):
            measure(workload(Full()))
