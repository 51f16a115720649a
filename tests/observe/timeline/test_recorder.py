"""Timelines: the right steps, all ranks on one axis, torch's own events where our phases say they are."""

from __future__ import annotations

import os
import pickle
import signal
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.settings import TrainConfig
from paceline.config.step_range import StepRange
from paceline.core.errors import InvalidSetting
from paceline.observe.timeline.recorder import (
    AUTO_AFTER,
    AUTO_STEPS,
    clock_offset,
    offset,
    trace,
    window,
)
from paceline.train.loop import train
from paceline.world.discover.environment import discover
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import ranks, run_ranks
from tests.train.small import SmallTask, alone, assert_same, opened, weights

APART_NS = 5_000_000_000
SLACK_US = 1000.0
"""torch's clock and ours are read one after the other: a process may lose its core between the two."""


# -- decisions -----------------------------------------------------------------------------------------------------


def test_steps_are_counted_as_in_logs() -> None:
    assert list(StepRange.parse("20:23").steps) == [20, 21, 22]
    assert list(StepRange.parse("7").steps) == [7]
    assert window("20:25", now=100) == range(20, 25)
    assert window("auto", now=100) == range(100 + AUTO_AFTER, 100 + AUTO_AFTER + AUTO_STEPS)


@pytest.mark.parametrize("text", ["5:5", "9:3", "a:b", "-1:3", "1:2:3", "", "asr"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="20:25"):
        TrainConfig(epochs=1, profile=text)


# -- one axis ------------------------------------------------------------------------------------------------------


def profiled(link: Link, out: Path, settings: dict[str, Any]) -> list[float]:
    trained = opened(SmallTask(), out, link, epochs=3, progress="none", loggers=(), rank_logs=False, **settings)
    train(trained)
    assert not trained.clock.is_followed
    return [float(value) for tensor in weights(trained).values() for value in tensor.flatten()]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps on two ranks, of which steps 2 to 4 are recorded; validation is between epochs (3 steps)."""
    out = tmp_path_factory.mktemp("timeline")
    common = {"grains": 2, "save_every_steps": 4}
    with_it = run_ranks(2, profiled, out / "with", {**common, "profile": "2:5", "profile_memory": True})
    without = run_ranks(2, profiled, out / "without", common)
    assert with_it == without, "being looked at changes nothing"
    assert not (out / "without" / "profile").exists()
    return out / "with" / "profile" / "steps-2-4.json.gz"


def _of(events: list[trace.Event], rank: int, category: str) -> list[trace.Event]:
    return [event for event in events if event.get("cat") == category and trace.rank_of(event) == rank]


def test_every_rank_has_its_steps_and_phases(two_ranks: Path) -> None:
    events = trace.read(two_ranks)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1"]
    for rank in range(2):
        steps, phases = _of(events, rank, trace.STEP), _of(events, rank, trace.PHASE)
        assert [step["name"] for step in steps] == ["step 2", "step 3", "step 4"]
        assert {"data", "compute", "communication", "optimizer", "validation", "checkpoint"} <= {
            phase["name"] for phase in phases
        }
        for before, after in pairwise(phases):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-3), "no moment is without a name"
        assert phases[0]["ts"] >= 0
        assert phases[0]["ts"] <= steps[0]["ts"] <= steps[0]["ts"] + steps[0]["dur"] <= steps[1]["ts"] + 1e-3


def test_the_axis_begins_with_the_first_event(two_ranks: Path) -> None:
    """Perfetto drops what lies before 0. torch sees the ranks wait for each other just before the first step."""
    events = trace.read(two_ranks)["traceEvents"]
    moments = [event["ts"] for event in events if event["ph"] != "M"]
    assert min(moments) == 0.0
    assert not any("ts" in event for event in events if event["ph"] == "M"), "a name has no time"
    ours = [event["ts"] for rank in range(2) for event in _of(events, rank, trace.PHASE)]
    assert min(ours) > 0.0, "the wait is seen"


def test_torch_agrees_when_the_optimizer_stepped(two_ranks: Path) -> None:
    """torch.profiler has its own clock: on our axis, its optimizer steps lie in our phases of that name."""
    events = trace.read(two_ranks)["traceEvents"]
    for rank in range(2):
        phases = [phase for phase in _of(events, rank, trace.PHASE) if phase["name"] == "optimizer"]
        theirs = [event for event in _of(events, rank, "user_annotation") if event["name"].startswith("Optimizer.step")]
        assert len(theirs) == len(phases) == 3
        for phase, event in zip(phases, sorted(theirs, key=lambda each: each["ts"]), strict=True):
            assert phase["ts"] - SLACK_US <= event["ts"]
            assert event["ts"] + event["dur"] <= phase["ts"] + phase["dur"] + SLACK_US


def test_no_rank_leaves_a_reduction_before_the_other_has_come(two_ranks: Path) -> None:
    """What holds in the world holds on the axis, if it is one: a sum needs all ranks."""
    events = trace.read(two_ranks)["traceEvents"]
    first: list[list[trace.Event]] = []  # by rank, of each step: waiting for the sum of gradients
    for rank in range(2):
        waits = [phase for phase in _of(events, rank, trace.PHASE) if phase["name"] == "communication"]
        steps = _of(events, rank, trace.STEP)
        first.append([next(wait for wait in waits if wait["ts"] >= step["ts"]) for step in steps])
    for ours, theirs in zip(*first, strict=True):
        assert max(ours["ts"], theirs["ts"]) <= min(ours["ts"] + ours["dur"], theirs["ts"] + theirs["dur"])


def test_memory_is_a_curve(two_ranks: Path) -> None:
    events = trace.read(two_ranks)["traceEvents"]
    curves = {(trace.rank_of(event), event["name"]) for event in events if event["ph"] == "C"}
    assert curves == {(rank, name) for rank in range(2) for name in ("host memory", "torch memory, cpu")}
    resident = [event["args"]["bytes"] for event in events if event["name"] == "host memory"]
    assert min(resident) > 10_000_000, "a process with torch in it"


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same while ranks step apart, with averages under way when the recording begins and ends."""
    out = tmp_path_factory.mktemp("apart")
    common = {"grains": 2, "reduce": "param", "sync_step": 2, "sync_overlap": 1}
    with_it = run_ranks(2, profiled, out / "with", {**common, "profile": "2:5", "profile_ranks": (1,)})
    assert with_it == run_ranks(2, profiled, out / "without", common)
    return out / "with" / "profile" / "steps-2-4.json.gz"


def test_ranks_that_step_apart_are_recorded_too(apart: Path) -> None:
    events = trace.read(apart)["traceEvents"]
    for rank in range(2):
        assert [step["name"] for step in _of(events, rank, trace.STEP)] == ["step 2", "step 3", "step 4"]
    assert {trace.rank_of(event) for event in events if event.get("cat") == "cpu_op"} == {1}, "as `profile_ranks` says"


@given(
    true_ns=st.integers(-(10**15), 10**15),
    delays=st.lists(st.tuples(*[st.integers(0, 10**7)] * 4), min_size=1, max_size=16),
)
def test_the_true_offset_of_two_clocks_is_within_the_uncertainty(
    true_ns: int, delays: list[tuple[int, int, int, int]]
) -> None:
    now, first, other = 0, [], []
    for entry, other_entry, exit_, other_exit in delays:
        met = now + max(entry, other_entry)
        first.append((now + entry, met + exit_))
        other.append((now + other_entry - true_ns, met + other_exit - true_ns))
        now = met + exit_ + other_exit + 1
    measured_ns, uncertainty_ns = offset(first, other)
    assert abs(measured_ns - true_ns) <= uncertainty_ns
    assert uncertainty_ns <= min(map(sum, delays)) // 2 + 1


@ranks(4)
def test_clocks_of_machines_are_measured(link: Link) -> None:
    """Ranks 0 and 1 share a machine; each other one has a clock that is seconds ahead."""
    rank = link.world.rank
    ahead_ns = 0 if rank < 2 else rank * APART_NS
    measured_ns, uncertainty_ns = clock_offset(link, f"machine {max(1, rank)}", lambda: perf_counter_ns() + ahead_ns)
    if rank < 2:
        assert (measured_ns, uncertainty_ns) == (0, 0), "one clock"
    else:
        assert abs(measured_ns + ahead_ns) <= uncertainty_ns < APART_NS // 2


# -- what a user may ask for ---------------------------------------------------------------------------------------


def fit_said(out: Path, **settings: Any) -> list[str]:
    said: list[str] = []
    trained = opened(SmallTask(), out, epochs=2, progress="none", loggers=(), **settings)
    trained.progress.say = said.append  # type: ignore[method-assign]
    trained.timeline._say = said.append
    train(trained)
    return said


def test_steps_that_never_came_are_said(tmp_path: Path) -> None:
    said = fit_said(tmp_path / "a", profile="auto")
    assert [line for line in said if "profile" in line] == [
        "`profile`: the run ended before step 10, nothing is recorded: `--profile 0:5`"
    ]
    assert not (tmp_path / "a" / "profile").exists()


def test_a_window_that_the_run_cuts_short_is_written(tmp_path: Path) -> None:
    said = fit_said(tmp_path / "a", profile="4:100")
    file = tmp_path / "a" / "profile" / "steps-4-5.json.gz"
    assert any(str(file) in line for line in said)
    assert [event["name"] for event in _of(trace.read(file)["traceEvents"], 0, trace.STEP)] == ["step 4", "step 5"]


class Unlucky(SmallTask):
    def after_step(self, model: Any, step: Any, grains: Any) -> None:
        if step.number == 3:
            raise RuntimeError("out of luck")


def test_after_a_failure_the_next_run_can_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        train(opened(Unlucky(), tmp_path / "a", epochs=2, profile="2:5", progress="none", loggers=()))
    assert not (tmp_path / "a" / "profile").exists()
    fit_said(tmp_path / "b", profile="2:5")
    assert (tmp_path / "b" / "profile" / "steps-2-4.json.gz").exists()


def test_a_timeline_that_cannot_be_written_is_said_and_training_goes_on(tmp_path: Path) -> None:
    class Full(SmallTask):
        def after_step(self, model: Any, step: Any, grains: Any) -> None:
            (tmp_path / "a" / "profile").touch()  # where the folder should be

    said: list[str] = []
    trained = opened(Full(), tmp_path / "a", epochs=2, profile="2:5", progress="none", loggers=())
    trained.timeline._say = said.append
    assert train(trained).status == "finished"
    (line,) = said
    assert line.startswith("the timeline could not be written: ")


class Stopped(SmallTask):
    def after_step(self, model: Any, step: Any, grains: Any) -> None:
        if step.number == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_stopped_keeps_what_was_recorded(tmp_path: Path) -> None:
    assert (
        train(opened(Stopped(), tmp_path / "a", epochs=2, profile="2:6", progress="none", loggers=())).status
        == "stopped"
    )
    (file,) = (tmp_path / "a" / "profile").iterdir()
    assert file.name == "steps-2-3.json.gz"
    assert [event["name"] for event in _of(trace.read(file)["traceEvents"], 0, trace.STEP)] == ["step 2", "step 3"]


def test_a_resumed_run_says_that_the_steps_are_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(opened(SmallTask(), tmp_path / "a", epochs=1, progress="none", loggers=()))
    more = {"epochs": 2, "resume": "auto", "allow_change": True, "progress": "none", "loggers": ()}
    train(opened(SmallTask(), tmp_path / "a", profile="0:2", **more))
    said = "`profile`: steps 0 to 1 are done already, nothing is recorded: `--profile auto`"
    assert said in capsys.readouterr().out.splitlines()
    assert not (tmp_path / "a" / "profile").exists()


def test_without_a_run_folder_it_has_no_effect_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trained = opened(SmallTask(), None, epochs=1, profile="0:2", profile_ranks=(0,), loggers=())
    batches = iter([1, 2])
    assert trained.timeline.follow(batches) is batches
    train(trained)
    assert "`profile` has no effect without a run folder" in capsys.readouterr().out


def test_a_rank_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="ranks of this run are 0 to 0"):
        opened(SmallTask(), tmp_path / "a", epochs=1, profile="0:2", profile_ranks=(3,))
    assert not (tmp_path / "a").exists()


def test_the_model_is_the_same_whether_or_not_it_is_looked_at(tmp_path: Path) -> None:
    looked = opened(SmallTask(), tmp_path / "a", alone(), epochs=2, profile="1:3", progress="none", loggers=())
    other = opened(SmallTask(), tmp_path / "b", alone(), epochs=2, progress="none", loggers=())
    train(looked)
    train(other)
    assert_same(weights(looked), weights(other))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_kernels_lie_where_our_steps_are_and_memory_has_a_history(tmp_path: Path) -> None:
    link = start(discover({}), device="cuda")
    profiled(link, tmp_path / "a", {"profile": "2:5", "profile_memory": True})
    events = trace.read(tmp_path / "a" / "profile" / "steps-2-4.json.gz")["traceEvents"]
    steps = _of(events, 0, trace.STEP)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels
    assert {event["pid"] for event in kernels}.isdisjoint({step["pid"] for step in steps})
    inside = [steps[0]["ts"] - SLACK_US <= kernel["ts"] <= steps[-1]["ts"] + 1e6 for kernel in kernels]
    assert all(inside)
    with (tmp_path / "a" / "profile" / "steps-2-4-memory-rank-0.pickle").open("rb") as file:
        history = pickle.load(file)
    assert history["device_traces"][0], "allocations were seen"
