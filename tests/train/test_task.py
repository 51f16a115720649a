"""Stages and hooks of a task: what is called when, with what, and that a run goes on from within any stage."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.config.settings import TrainConfig
from paceline.core.errors import Conflict, TaskContract
from paceline.observe.journal import read
from paceline.optim import schedule
from paceline.train.checkpoint.format import listed, step_of
from paceline.train.loop import train
from paceline.train.task import (
    OPT_IN,
    HasStages,
    NotAttached,
    ReadsWeights,
    SavesState,
    ShowsSamples,
    Stage,
    StepsSchedulers,
    Surroundings,
    Task,
    TaskIncomplete,
    export,
    methods_without_effect,
    overrides,
    read_inputs,
    stages_of,
)
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.ragged import RaggedTask
from tests.train.small import (
    BATCH,
    LR,
    NUM_SAMPLES,
    SmallTask,
    alone,
    assert_same,
    fresh_net,
    opened,
    points,
    raw_steps,
    sgd,
    squares,
    validations_of,
    weights,
)

# -- stages ------------------------------------------------------------------------------------------------------------


class StagedTask(SmallTask, HasStages):
    """Two stages with other data, 2 epochs of 3 steps and 3 of 2."""

    def __init__(self, **second: Any) -> None:
        super().__init__()
        self._second = second

    def stages(self) -> Sequence[Stage]:
        first = Stage("first", points(NUM_SAMPLES, seed=1), epochs=2)
        return [first, Stage("second", lambda: points(12, seed=4), epochs=3, **self._second)]


def test_stages_that_start_anew_are_two_runs_after_each_other(tmp_path: Path) -> None:
    settings = {"schedule": "cosine", "warmup_steps": 2, "min_lr": 0.001}
    task = StagedTask(restart_optimizer=True, restart_schedule=True)
    ours = opened(task, tmp_path / "run", epochs=9, **settings)
    train(ours)
    config = TrainConfig(epochs=1, lr=LR, **settings)
    model = fresh_net()
    losses = list(raw_steps(model, sgd(model), 6, rate=schedule.build(config, 6)))
    losses += raw_steps(model, sgd(model), 6, data=points(12, seed=4), rate=schedule.build(config, 6))
    assert [record["loss"] for record in read(tmp_path / "run" / "metrics.jsonl")] == losses
    assert_same(weights(ours), model.state_dict())


def test_stages_that_do_not_are_one_run(tmp_path: Path) -> None:
    """`steps` are those of a stage, and one schedule spans both."""
    ours = opened(StagedTask(), tmp_path / "run", steps=4, schedule="linear")
    assert train(ours).num_steps == 8
    rate = schedule.build(TrainConfig(epochs=1, lr=LR, schedule="linear"), 8)
    model = fresh_net()
    optimizer = sgd(model)
    losses = list(raw_steps(model, optimizer, 4, rate=rate))
    losses += raw_steps(model, optimizer, 4, data=points(12, seed=4), rate=lambda step: rate(step + 4))
    assert [record["loss"] for record in read(tmp_path / "run" / "metrics.jsonl")] == losses
    assert_same(weights(ours), model.state_dict())


def test_the_schedule_ends_with_the_run_where_epochs_end_first(tmp_path: Path) -> None:
    train(opened(SmallTask(), tmp_path / "run", epochs=1, steps=100, schedule="linear"))
    rates = [record["lr"] for record in read(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([LR, LR * 2 / 3, LR / 3])


class GrowingTask(StagedTask, SavesState):
    """The second stage widens the body, and keeps what was learned; the task has a tensor of its own."""

    def __init__(self, **second: Any) -> None:
        super().__init__(**second)
        self.events: list[str] = []
        self.total = torch.zeros(1, dtype=torch.float64)

    def before_stage(self, model: nn.Module, stage: int) -> None:
        self.events.append(f"before {stage}")
        if stage == 1:
            body, head = nn.Linear(4, 9), nn.Linear(9, 1)
            with torch.no_grad():
                body.weight[:6], head.weight[:, :6] = model.body.weight, model.head.weight
            model.body, model.head = body, head

    def after_step(self, model: nn.Module, step: Any, grains: list[Any]) -> None:
        self.events.append(f"step {step.number}")
        self.total += step.loss

    def after_stage(self, model: nn.Module, stage: int) -> None:
        self.events.append(f"after {stage}")

    def state(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"].clone()


@pytest.mark.parametrize("restart", [True, False])
def test_every_checkpoint_of_a_growing_run_leads_to_the_same_end(tmp_path: Path, restart: bool) -> None:
    """Also those at the end of a stage: there the next one has not begun, and the model not grown."""
    settings = {"epochs": 9, "keep_last": 20, "save_every_steps": 2, "schedule": "cosine", "ema": 0.5}
    restarts = {"restart_optimizer": restart, "restart_schedule": restart}
    task = GrowingTask(**restarts)
    whole = opened(task, tmp_path / "whole", **settings)
    train(whole)
    steps = [f"step {step}" for step in range(12)]
    assert task.events == ["before 0", *steps[:6], "after 0", "before 1", *steps[6:], "after 1"]
    validations = validations_of(tmp_path / "whole")
    paths = listed(tmp_path / "whole" / "checkpoints")
    assert [step_of(path) for path in paths] == [12, 10, 8, 6, 4, 3, 2]
    for path in paths:
        again = GrowingTask(**restarts)
        resumed = opened(again, tmp_path / path.name, resume=path, **settings)
        assert train(resumed).num_steps == 12
        step = step_of(path)
        ends = {"after 0": step < 6, "after 1": step < 12}
        assert [event for event in again.events if "step" not in event] == [
            event for event in ("before 0", "after 0", "before 1", "after 1") if ends.get(event, True)
        ]
        assert_same(weights(resumed), weights(whole))
        assert_same(resumed.stepper.prepared.average.tensors, whole.stepper.prepared.average.tensors)  # type: ignore[union-attr]
        assert torch.equal(again.total, task.total)
        later = validations_of(tmp_path / path.name)
        assert later == [record for record in validations if record["step"] >= step]


class ThawingTask(StagedTask):
    """The second stage trains what the first left alone."""

    def before_stage(self, model: nn.Module, stage: int) -> None:
        model.body.requires_grad_(stage == 1)


def test_weights_thawed_by_a_stage_are_trained() -> None:
    ours = opened(ThawingTask(), None, epochs=1)
    train(ours)
    model = fresh_net()
    list(raw_steps(model, sgd(model.head), 6))
    list(raw_steps(model, sgd(model), 6, data=points(12, seed=4)))
    assert_same(weights(ours), model.state_dict())


# -- hooks -------------------------------------------------------------------------------------------------------------


class WatchingTask(RaggedTask):
    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.consumed: list[list[int]] = []

    def after_backward(self, model: nn.Module) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def after_step(self, model: nn.Module, step: Any, grains: list[Any]) -> None:
        self.consumed.append([sample for grain in grains for sample in grain.samples.tolist()])


def watch(link: Link, settings: dict[str, Any]) -> tuple[list[dict[str, torch.Tensor]], list[list[int]]]:
    task = WatchingTask()
    plain = {"steps": 9, "grains": 4, "global_batch": 24, "order": "random"}
    train(opened(task, None, link, **{**plain, **settings}))
    return task.gradients, task.consumed


def test_hooks_see_whole_gradients_and_all_samples() -> None:
    [(gradients, consumed)] = run_ranks(1, watch, {"precision": "fp64"})
    halves = run_ranks(2, watch, {"precision": "fp64"})
    assert [len(samples) for samples in consumed] == [24] * 8 + [3]
    for number, samples in enumerate(consumed):
        shared = [sample for _, mine in halves for sample in mine[number]]
        assert sorted(shared) == sorted(samples)
    for theirs, _ in halves:
        for ours, other in zip(gradients, theirs, strict=True):
            assert ours.keys() == other.keys()
            assert all(torch.allclose(ours[name], other[name], rtol=1e-12, atol=1e-13) for name in ours)


class WatchingSmallTask(SmallTask):
    gradients: dict[str, torch.Tensor]

    def after_backward(self, model: nn.Module) -> None:
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 1e-3},
        {"precision": "fp16", "loss_scale": 1024.0},
        {"precision": "fp16-master", "loss_scale": 1024.0},
    ],
)
def test_gradients_come_unscaled_and_unclipped(settings: dict[str, Any]) -> None:
    task = WatchingSmallTask()
    train(opened(task, None, steps=1, **{"level": "auto", **settings}))
    model = fresh_net()
    x, y = points(NUM_SAMPLES, seed=1).tensors
    (squares(model, x[:BATCH], y[:BATCH]) / BATCH).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(task.gradients[name].float(), parameter.grad, rtol=5e-3, atol=1e-3), name


# -- what a task may know, say and show --------------------------------------------------------------------------------


class TellingTask(RaggedTask, ShowsSamples):
    """Gathers while it is set up, shows its validation samples, and is judged by its accuracy."""

    monitor = "accuracy"

    def __init__(self) -> None:
        self.gathered: list[tuple[int, str]] = []

    def train_data(self) -> Any:
        self.gathered = self.gather((self.world.rank, f"of {self.world.size}"))
        self.say(f"rank {self.world.rank} speaks for all")
        return super().train_data()

    def samples(self, model: nn.Module, grain: Any) -> Sequence[Mapping[str, str]]:
        assert not model.training
        assert not torch.is_grad_enabled()
        output = model(grain[0])
        return [
            {"sample": str(sample), "heard": f"{float(score):.6f}"}
            for sample, score in zip(grain.samples.tolist(), output.double().mean((1, 2)), strict=True)
        ]


def tell(link: Link, out: Path) -> tuple[list[tuple[int, str]], str, Any, float | None, float]:
    task = TellingTask()
    heard = io.StringIO()
    with redirect_stdout(heard):
        ours = opened(task, out / str(link.world.size), link, epochs=1, grains=3, precision="fp64", monitor_mode="max")
        result = train(ours)
    return task.gathered, heard.getvalue(), ours.validation.samples, result.best_score, result.metrics["dev/accuracy"]


def test_a_task_gathers_says_shows_and_is_judged_alike_on_all_ranks(tmp_path: Path) -> None:
    [(_, _, one, best, _)] = run_ranks(1, tell, tmp_path)
    assert {name: len(samples) for name, samples in one.items()} == {"dev": 2, "tiny": 2}  # grains of 8 / 3 samples
    for size in (2, 3):
        for rank, (gathered, heard, samples, best_there, accuracy) in enumerate(run_ranks(size, tell, tmp_path)):
            assert gathered == [(number, f"of {size}") for number in range(size)]
            assert heard.count("speaks for all") == (rank == 0)
            assert "rank 0 speaks" in heard or rank
            assert samples == one
            assert best_there == accuracy == pytest.approx(best, rel=1e-12)


class WeighingTask(SmallTask, ReadsWeights):
    """Knows files of weights of its own kind."""

    def read_weights(self, path: Path) -> Mapping[str, torch.Tensor] | None:
        return dict(torch.load(path)) if path.suffix == ".pt" else None


def test_weights_come_from_a_task_s_own_kind_of_file_or_from_a_checkpoint(tmp_path: Path) -> None:
    torch.save({"body.weight": torch.full((6, 4), 0.25)}, tmp_path / "own.pt")
    ours = opened(WeighingTask(), None, epochs=1, init_from=tmp_path / "own.pt")
    expected = {**fresh_net().state_dict(), "body.weight": torch.full((6, 4), 0.25)}
    assert_same(weights(ours), expected)
    first = opened(WeighingTask(), tmp_path / "run", steps=1)
    train(first)
    path = listed(tmp_path / "run" / "checkpoints")[0]
    assert_same(weights(opened(WeighingTask(), None, epochs=1, init_from=path, seed=5)), weights(first))


# -- data of its own for every rank ------------------------------------------------------------------------------------


def walk(link: Link) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    task = WatchingTask()
    ours = opened(
        task, None, link, epochs=2, grains=2, global_batch=24, order="random", dataset_distribution="random_seed_offset"
    )
    train(ours)
    return task.consumed, {name: parameter.detach() for name, parameter in ours.stepper.model.named_parameters()}


def test_random_seed_offset_walks_all_data_on_every_rank() -> None:
    (first, weights_of_first), (second, weights_of_second) = run_ranks(2, walk)
    steps = -(-195 // 12)
    for consumed in (first, second):
        assert [len(samples) for samples in consumed] == ([12] * 16 + [3]) * 2
        for epoch in (0, 1):
            walked = sum(consumed[epoch * steps : (epoch + 1) * steps], [])
            assert sorted(walked) == list(range(195))
    assert first != second
    assert_same(weights_of_first, weights_of_second)


class HalvingTask(SmallTask):
    """Changes the gradients that it is shown."""

    def after_backward(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.5


@pytest.mark.parametrize("precision", [None, "fp16-master"])
def test_changed_gradients_are_those_that_are_used(precision: Any) -> None:
    half = opened(HalvingTask(), None, steps=1, precision=precision, level="auto", lr=LR)
    train(half)
    whole = opened(SmallTask(), None, steps=1, precision=precision, level="auto", lr=LR / 2)
    train(whole)
    for ours, other in zip(
        half.stepper.prepared.named_weights().values(), whole.stepper.prepared.named_weights().values(), strict=True
    ):
        assert torch.allclose(ours, other, rtol=1e-3, atol=1e-5)
        assert not torch.equal(ours, fresh_net().state_dict()["body.weight"])


# -- surroundings and protocols ----------------------------------------------------------------------------------------


class Curious(Task):
    """Asks for everything around it."""

    def around(self) -> list[Any]:
        return [self.settings, self.link, self.world, self.say, self.gather]


def test_a_task_has_no_surroundings_before_it_is_attached() -> None:
    task = Curious()
    with pytest.raises(NotAttached, match="task Curious has no `settings` yet: no run has begun") as error:
        task.around()
    assert "not in `__init__`" in error.value.hint
    assert not hasattr(task, "link")
    link, said = alone(), list[str]()
    task.attach(Surroundings(TrainConfig(epochs=3), link, said.append))
    assert task.settings.epochs == 3
    assert (task.link, task.world) == (link, link.world)
    task.say("a line")
    assert said == ["a line"]
    assert task.gather(7) == [7]
    with pytest.raises(TaskContract, match="only available during training"):
        task.evaluating()


class NamedLikeHooks(SmallTask):
    """Methods and attributes with names of base classes that the task does not have."""

    counts = (1, 2)

    def report(self) -> None:
        raise AssertionError

    def state(self) -> dict[str, torch.Tensor]:
        raise AssertionError

    def samples(self, folder: Path) -> list[str]:
        raise AssertionError


def test_methods_without_their_base_class_are_reported_and_not_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = NamedLikeHooks()
    lines = methods_without_effect(task)
    assert lines == [
        "task NamedLikeHooks defines `state`, but does not inherit from `paceline.SavesState`: it has no effect",
        "task NamedLikeHooks defines `report`, but does not inherit from `paceline.Reports`: it has no effect",
    ]
    train(opened(task, tmp_path / "run", epochs=1, progress="lines"))
    assert lines[0] in " ".join(capsys.readouterr().out.split())
    assert methods_without_effect(StagedTask()) == []


def test_every_base_class_is_public() -> None:
    assert {kind.__name__ for kind in OPT_IN} <= set(paceline.__all__)


def test_a_task_without_a_base_class_has_defaults() -> None:
    plain, staged = SmallTask(), StagedTask()
    assert [stage.name for stage in stages_of(plain)] == ["train"]
    assert [stage.name for stage in stages_of(staged)] == ["first", "second"]
    with pytest.raises(TaskContract, match="task SmallTask has no `export`"):
        export(plain, Path("folder"), {}, {})
    with pytest.raises(TaskContract, match=r"task SmallTask cannot read a\.wav b\.wav"):
        read_inputs(plain, ["a.wav", "b.wav"])
    with pytest.raises(TaskIncomplete, match="task Curious has no `loss`") as error:
        Curious().loss(nn.Identity(), None)  # type: ignore[arg-type]
    assert error.value.hint == "add `def loss(self, model, grain):` that returns (sum of losses, how many)"


def test_overrides_are_of_the_class_whether_or_not_every_task_has_the_hook() -> None:
    assert overrides(StagedTask(), "stages")
    assert not overrides(SmallTask(), "stages")
    assert not overrides(Curious(), "after_step")
    assert overrides(SmallTask(), "loss")


class Wide(TrainConfig):
    hidden: int = 7


class OfWide(Task[Wide]):
    def model(self) -> nn.Module:
        return nn.Linear(self.settings.hidden, 1)


class BelowWide(OfWide):
    pass


class Wider(Wide):
    hidden: int = 8


class Chosen(OfWide):
    Settings = Wider


def test_settings_of_a_generic_task() -> None:
    assert [kind.Settings for kind in (OfWide, BelowWide, Chosen, SmallTask)] == [Wide, Wide, Wider, TrainConfig]


class Counting(SmallTask, SavesState):
    """Has a tensor of its own in each checkpoint."""

    def state(self) -> dict[str, torch.Tensor]:
        return {"seen": torch.ones(1)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        assert state["seen"] == 1


class Halved(SmallTask, StepsSchedulers):
    """Steps a scheduler itself."""

    def optimizer(self, groups: Any, config: Any, device: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        self.rates = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer

    def schedulers(self) -> Any:
        return {"rates": self.rates}


class HalvedByList(Halved):
    def schedulers(self) -> Any:
        return [self.rates]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Counting, "has tensors of its task, and the task SmallTask does not inherit from `paceline.SavesState`"),
        (Halved, "has torch schedulers of its task, .* does not inherit from `paceline.StepsSchedulers`"),
        (StagedTask, "has begun stage 2 of its task, and the task SmallTask has 1 stage"),
    ],
)
def test_a_resume_that_would_lose_what_a_task_saved_is_refused(tmp_path: Path, task: type[Task], words: str) -> None:
    train(opened(task(), tmp_path / "run", epochs=1))
    with pytest.raises(Conflict, match=words):
        opened(SmallTask(), tmp_path / "run", epochs=2, resume="auto")
    assert train(opened(task(), tmp_path / "run", epochs=1, resume="auto")).status == "finished"


def test_schedulers_without_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskContract, match="`schedulers` of task HalvedByList returned list"):
        opened(HalvedByList(), tmp_path / "run", epochs=1)
