"""Ranks that step apart: against gradient reduction, against local SGD written by hand, and over a crash."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.observe.journal import read
from paceline.train.checkpoint.format import listed, step_of
from paceline.train.checkpoint.state import RanksHaveTheirOwn
from paceline.train.engine import Engine
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.ranks import RanksFailed, ranks, run_ranks
from tests.train.apart import BATCH, NUM_SAMPLES, Net, WeightedTask, config, fit, local_steps, mean_over_ranks
from tests.train.small import assert_same

EPOCH = NUM_SAMPLES // BATCH


def assert_alike(states: list[dict[str, Any]]) -> None:
    for state in states:
        assert_same(state["state"], states[0]["state"])


# -- the same as gradient reduction ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), (None, 1e-6)])
def test_one_step_between_averages_is_gradient_reduction(
    tmp_path: Path, size: int, momentum: float, precision: Any, bound: float
) -> None:
    """With samples that count differently, so that ranks weigh differently."""
    common = {"steps": 20, "momentum": momentum, "precision": precision, "grains": 4}
    task = {"is_even": False}
    grad = run_ranks(size, fit, task, {**common, "out": str(tmp_path / "grad")})
    param = run_ranks(size, fit, task, {**common, "out": str(tmp_path / "param"), "reduce": "param", "sync_step": 1})
    assert_alike(param)
    for name, tensor in grad[0]["state"].items():
        assert torch.allclose(param[0]["state"][name], tensor, rtol=bound, atol=bound), name
    losses = [[record["loss"] for record in read(tmp_path / run / "metrics.jsonl")] for run in ("grad", "param")]
    assert losses[1] == pytest.approx(losses[0], rel=bound)
    assert len(losses[0]) == 20


# -- the same as a loop by hand ----------------------------------------------------------------------------------------


def by_hand(
    link: Link, num_steps: int, every: int, momentum: float, state: str, epoch: int = EPOCH
) -> dict[str, torch.Tensor]:
    """Local SGD; epochs end with an average, too."""
    since = 0

    @torch.no_grad()
    def after(step: int, model: Any, optimizer: Any) -> None:
        nonlocal since
        since += 1
        if since == every or (step + 1) % epoch == 0 or step + 1 == num_steps:
            since = 0
            mean_over_ranks([parameter.data for parameter in model.parameters()])
            buffers = [entry["momentum_buffer"] for entry in optimizer.state.values() if momentum]
            if state == "average" and buffers:
                mean_over_ranks(buffers)
            elif state == "reset":
                for buffer in buffers:
                    buffer.zero_()

    model = local_steps(link, num_steps, momentum, after, epoch * BATCH)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("momentum", "state"), [(0.0, "average"), (0.9, "average"), (0.9, "keep"), (0.9, "reset")])
@pytest.mark.parametrize("every", [4, 8])
def test_bitwise_local_sgd(size: int, momentum: float, state: str, every: int) -> None:
    """At 8 the end of the epoch (6 steps) comes first; at 4 both come."""
    steps = 2 * EPOCH + 3
    settings = {"steps": steps, "momentum": momentum, "reduce": "param", "sync_step": every, "sync_state": state}
    ours = run_ranks(size, fit, {}, settings)
    theirs = run_ranks(size, by_hand, steps, every, momentum, state)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine["state"], other)
    assert_alike(ours)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("momentum", "state"), [(0.0, "average"), (0.9, "average"), (0.9, "keep")])
def test_bitwise_local_sgd_over_whole_intervals(size: int, momentum: float, state: str) -> None:
    """Averages after 8 and 16 steps, at the end of the epoch (20), after 28, and at the end."""
    steps, epoch = 36, 20
    settings = {"steps": steps, "momentum": momentum, "reduce": "param", "sync_step": 8, "sync_state": state}
    ours = run_ranks(size, fit, {"num_samples": epoch * BATCH}, settings)
    theirs = run_ranks(size, by_hand, steps, 8, momentum, state, epoch)
    assert ours[0]["averages"] == 5
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine["state"], other)
    assert_alike(ours)


def overlapped_by_hand(
    link: Link, num_steps: int, every: int, overlap: int, epoch: int = EPOCH
) -> dict[str, torch.Tensor]:
    """The definition: the average of the weights at t reaches each rank at t + overlap, as a correction."""
    since, flying, sent, average = 0, -1, [], []

    @torch.no_grad()
    def after(step: int, model: Any, optimizer: Any) -> None:
        nonlocal since, flying, sent, average
        weights = [parameter.data for parameter in model.parameters()]

        def land() -> None:
            nonlocal flying
            if flying >= 0:
                for weight, before, mean in zip(weights, sent, average, strict=True):
                    weight.copy_(mean if since == 0 else weight + (mean - before))
                flying = -1

        since += 1
        flying += flying >= 0
        if flying >= overlap:
            land()
        is_last = (step + 1) % epoch == 0 or step + 1 == num_steps
        if since == every or is_last:
            land()
            sent = [weight.clone() for weight in weights]
            average = [weight.clone() for weight in weights]
            mean_over_ranks(average)  # in the loop by hand it is there at once, and only applied later
            since, flying = 0, 0
        if is_last:  # an epoch ends with all ranks together
            land()

    model = local_steps(link, num_steps, 0.0, after, epoch * BATCH)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("overlap", [1, 3, 8])
def test_overlapped_is_its_definition_over_whole_intervals(size: int, overlap: int) -> None:
    steps, epoch = 36, 20
    settings = {"steps": steps, "momentum": 0.0, "reduce": "param", "sync_step": 8, "sync_overlap": overlap}
    ours = run_ranks(size, fit, {"num_samples": epoch * BATCH}, settings)
    theirs = run_ranks(size, overlapped_by_hand, steps, 8, overlap, epoch)
    assert ours[0]["averages"] == 5
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine["state"], other)


@pytest.mark.parametrize(("every", "overlap"), [(2, 1), (3, 3), (2, 9)])
def test_overlapped_is_its_definition(every: int, overlap: int) -> None:
    steps = 2 * EPOCH + 5
    settings = {"steps": steps, "momentum": 0.0, "reduce": "param", "sync_step": every, "sync_overlap": overlap}
    ours = run_ranks(2, fit, {}, settings)
    theirs = run_ranks(2, overlapped_by_hand, steps, every, overlap)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine["state"], other)


# -- on the wire -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "overlap"),
    [
        *(("bf16", 0), ("int8", 3)),
        *(pytest.param(wire, 3, marks=pytest.mark.long) for wire in ("fp16", "bf16")),
        *(pytest.param(wire, 0, marks=pytest.mark.long) for wire in ("fp16", "int8")),
    ],
)
@pytest.mark.parametrize("optimizer", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}], ids=["sgd", "adam"])
def test_rounded_on_the_wire_reaches_the_same_loss(wire: str, overlap: int, optimizer: dict[str, Any]) -> None:
    common = {"epochs": 25, **optimizer, "reduce": "param", "sync_step": 3, "sync_overlap": overlap}
    common["save_every_epochs"] = None
    full = run_ranks(2, fit, {}, {**common})
    rounded = run_ranks(2, fit, {}, {**common, "wire": wire})
    assert_alike(rounded)
    assert not torch.equal(rounded[0]["state"]["body.weight"], full[0]["state"]["body.weight"])
    assert rounded[0]["loss"] == pytest.approx(full[0]["loss"], rel=0.01)


# -- buffers, time, data -----------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_batch_norm_agrees_in_the_end(link: Link) -> None:
    for overlap in (0, 2):
        settings = {"epochs": 2, "reduce": "param", "sync_step": 4, "sync_overlap": overlap}
        state = fit(link, {"has_norm": True}, settings)["state"]
        everyone = link.gather_objects({name: tensor.tolist() for name, tensor in state.items()})
        assert everyone == [everyone[0]] * link.world.size
        assert state["norm.num_batches_tracked"] == 2 * EPOCH * link.world.size  # one grain per rank and step
        assert float(state["norm.running_var"].min()) > 0


@pytest.mark.parametrize("overlap", [0, 4])
def test_by_seconds_with_a_slow_rank(overlap: int) -> None:
    settings = {"epochs": 3, "reduce": "param", "sync_seconds": 0.01, "sync_overlap": overlap}
    done = run_ranks(2, fit, {"slow_rank": 1}, settings)
    assert_alike(done)
    assert [each["steps"] for each in done] == [3 * EPOCH] * 2
    assert sorted(sample for each in done for sample in each["seen"]) == sorted([*range(NUM_SAMPLES)] * 3)
    assert 3 <= done[0]["averages"] == done[1]["averages"] <= 3 * EPOCH
    assert 1 <= done[0]["interval"] == done[1]["interval"] <= 3  # at least 3 ms a step, however busy the machine


@pytest.mark.parametrize("every", [1, 5])
def test_losses_of_all_ranks_are_logged_for_every_step(tmp_path: Path, every: int) -> None:
    out = tmp_path / "run"
    run_ranks(2, fit, {}, {"epochs": 2, "reduce": "param", "sync_step": every, "out": str(out), "log_every": 3})
    records = read(out / "metrics.jsonl")
    assert [(record["step"], record["epoch"]) for record in records] == [(n, n // EPOCH + 1) for n in range(2 * EPOCH)]
    spreads = [record["spread"] for record in records if "spread" in record]
    assert len(spreads) == (2 * EPOCH if every == 1 else 4) - 1
    assert all(0 < spread < 1 for spread in spreads)


# -- going on ----------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "keep": {"sync_state": "keep"},
    "reset": {"sync_state": "reset"},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "overlapped": {"sync_overlap": 2},
    "int8": {"wire": "int8"},
    "int8-overlapped-adam": {"wire": "int8", "sync_overlap": 2, "optimizer": "adam", "lr": 0.01},
    "bf16-nesterov": {"wire": "bf16", "outer": "nesterov"},
    "momentum-keep": {"outer": "momentum", "sync_state": "keep", "optimizer": "adam", "lr": 0.01},
    "ema": {"ema": 0.9},
}


@pytest.mark.parametrize("way", WAYS)
def test_resume_is_bitwise(tmp_path: Path, way: str) -> None:
    settings = {"epochs": 3, "reduce": "param", "sync_step": 4, "save_every_steps": 3, "keep_last": 20, **WAYS[way]}
    settings |= {"val_every_epochs": None}
    task = {"has_norm": True, "is_even": False}
    whole = run_ranks(2, fit, task, {**settings, "out": str(tmp_path / "whole")})
    steps = [step_of(path) for path in listed(tmp_path / "whole" / "checkpoints")]
    # Due after 3, 6, 9, ... steps, saved when the ranks are together: after 4 and 6 steps of each epoch.
    assert sorted(steps) == [4, 6, 10, 12, 16, 18]
    for step in (4, 10):
        path = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        again = run_ranks(2, fit, task, {**settings, "out": str(tmp_path / f"from-{step}"), "resume": path})
        for mine, other in zip(again, whole, strict=True):
            assert_same(mine["state"], other["state"])
        expected = [record for record in read(tmp_path / "whole" / "metrics.jsonl") if record["step"] >= step]
        assert read(tmp_path / f"from-{step}" / "metrics.jsonl") == expected


def test_states_that_ranks_keep_need_as_many_ranks(tmp_path: Path) -> None:
    settings = {"epochs": 1, "reduce": "param", "sync_step": 4, "sync_state": "keep", "grains": 4}
    run_ranks(4, fit, {}, {**settings, "out": str(tmp_path / "run")})
    more = {**settings, "epochs": 2, "out": str(tmp_path / "run"), "resume": "auto"}
    for now in (2, 1):  # one rank does not average, and must not go on with the first one's state
        with pytest.raises((RanksFailed, RanksHaveTheirOwn), match=rf"optimizer states of 4 ranks .* here are {now}"):
            run_ranks(now, fit, {}, more)
    done = run_ranks(2, fit, {}, {**more, "sync_state": "average", "allow_change": True})
    assert done[0]["steps"] == 2 * EPOCH
    assert_alike(done)


def test_another_number_of_ranks_goes_on_where_nothing_was_kept(tmp_path: Path) -> None:
    settings = {"reduce": "param", "sync_step": 4, "grains": 4, "wire": "int8", "out": str(tmp_path / "run")}
    run_ranks(4, fit, {}, {**settings, "epochs": 1})
    done = run_ranks(2, fit, {}, {**settings, "epochs": 2, "resume": "auto"})
    assert done[0]["steps"] == 2 * EPOCH
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


# -- stops, streams, loops of one's own --------------------------------------------------------------------------------


class Interrupted(WeightedTask):
    """One rank is told to stop in the middle of a step; the others learn of it with the next average."""

    def loss(self, model: Any, grain: Any) -> Any:
        if self.world.rank == 1 and len(self.seen) == 8 * 8:  # in its 9th step
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, grain)


def interrupted(link: Link, out: str, overlap: int) -> tuple[str, int]:
    settings = {"epochs": 4, "reduce": "param", "sync_step": 4, "sync_overlap": overlap, "out": Path(out)}
    result = train(open_run(Interrupted(), config(**settings), link))
    return result.status, result.num_steps


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_stop_comes_with_an_average(tmp_path: Path, overlap: int) -> None:
    out = str(tmp_path / "run")
    # Averages are taken after 6, 10 and 12 steps; the one after 10 says so, and arrives 2 steps later if it flies.
    assert run_ranks(2, interrupted, out, overlap) == [("stopped", 10 if overlap == 0 else 12)] * 2
    settings = {"epochs": 4, "reduce": "param", "sync_step": 4, "sync_overlap": overlap}
    whole = run_ranks(2, fit, {}, {**settings, "out": str(tmp_path / "whole")})
    resumed = run_ranks(2, fit, {}, {**settings, "out": out, "resume": "auto"})
    for mine, other in zip(resumed, whole, strict=True):
        assert_same(mine["state"], other["state"])


class Numbers(torch.utils.data.IterableDataset[Any]):
    """Each rank has its own numbers, some more than others."""

    def __init__(self, mine: range = range(0)) -> None:
        self._mine = mine

    def shard(self, rank: int, size: int) -> Numbers:
        return Numbers(range(rank, 40 + 30 * rank, size))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in self._mine:
            yield torch.full((5,), number / 50), torch.tensor(float(number))


def stream_loop(link: Link, every: int, overlap: int) -> tuple[list[float], list[list[float]]]:
    """An engine in a loop of its own, two epochs of a stream that ends earlier on rank 0."""
    torch.manual_seed(link.world.rank)  # `prepare` gives all ranks the first one's weights
    engine = Engine(level=0, reduce="param", sync_step=every, sync_overlap=overlap, link=link, device="cpu")
    model = Net()
    model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    seen: list[float] = []

    def loss(grain: Any) -> Any:
        seen.extend(grain.y.tolist())
        return (model(grain.x) - grain.y / 50).square().sum(), len(grain)

    for batch in engine.batches(Numbers(), global_batch=8, epochs=2):
        engine.step(loss, batch)
    with engine.evaluating():
        looked = [parameter.flatten().tolist() for parameter in model.parameters()]
    engine.close()
    return seen, looked


@pytest.mark.parametrize(("every", "overlap"), [(1, 0), (3, 0), (3, 2)])
def test_streams_end_when_no_rank_has_more(every: int, overlap: int) -> None:
    done = run_ranks(2, stream_loop, every, overlap)
    for rank, (seen, looked) in enumerate(done):
        assert seen == [float(number) for number in range(rank, 40 + 30 * rank, 2)] * 2
        assert looked == done[0][1]
