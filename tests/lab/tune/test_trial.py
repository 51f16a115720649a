"""Trials: what is counted, and what becomes of those that memory, a signal or a bug ends."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from paceline.config.settings import TrainConfig
from paceline.lab.tune import trial as tune_trial
from paceline.lab.tune.knobs import Facts
from paceline.lab.tune.process import POLL_S, SPEED, Spec, judge, kind_of, run_trial, started, write_end
from paceline.lab.tune.race import FilePace, run_race
from paceline.lab.tune.search import Failure, Speed
from paceline.lab.tune.trial import LEAST_PARTS, NUM_PARTS, Part, is_settled, join, steps_per_part, trial
from paceline.speed import precision
from paceline.train.loss import LossContract, OutOfMemory
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.train.ragged import RaggedTask
from tests.train.small import SmallTask, alone

SPEC = Spec("task", {}, 1, 1.0)


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"global_batch": 24, "grains": 3, "level": 0, "workers": 0, "epochs": 1, **settings})


# -- what is counted -------------------------------------------------------------------------------------------------


def test_the_speed_is_samples_over_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes 0.25 s per look: a part is one look to the next, whatever is in it."""
    ticks = itertools.count()
    monkeypatch.setattr(tune_trial, "time", SimpleNamespace(perf_counter=lambda: 0.25 * next(ticks)))
    told: list[Facts] = []
    plain = config(global_batch=4, grains=1, out=tmp_path / "run", epochs=7)
    speed = trial(SmallTask(), plain, alone(), 3.5, told.append)
    steps = steps_per_part(0.25, 3.5)
    assert steps == 2
    assert speed.samples_per_s == pytest.approx(2 * 4 / 0.25)  # 20 samples: five whole batches an epoch
    assert speed.spread == 0
    assert speed.workers == 0
    assert 1 << 20 < speed.memory_bytes < 1 << 36
    (facts,) = told
    assert (facts.ranks, facts.grains, facts.num_samples, facts.has_lengths) == (1, 1, 20, False)
    assert {level.level for level in facts.levels} >= {0, 1}
    assert facts.computes == next(level.computes for level in facts.levels if level.level == 0)
    assert Facts.read(json.loads(json.dumps(facts, default=vars))) == facts
    assert list(tmp_path.iterdir()) == []


def test_levels_that_the_settings_do_not_know_are_not_offered() -> None:
    class Fewer(TrainConfig):
        level: Literal["auto", 0, 2] = 0

    told: list[Facts] = []
    trial(SmallTask(), Fewer(global_batch=4, grains=1, workers=0, epochs=1), alone(), 0.01, told.append)
    has_bf16 = precision.capabilities(torch.device("cpu")).bf16
    assert [level.level for level in told[0].levels] == ([0, 2] if has_bf16 else [0])


def measure(link: Link) -> Speed:
    return trial(RaggedTask(), config(), link, 0.02)


def test_all_ranks_find_the_same() -> None:
    first, second = run_ranks(2, measure)
    assert first == second
    assert first.samples_per_s > 0
    assert 0 <= first.data_share < 1


def test_lengths_weigh_samples() -> None:
    fast, slow = [Part(1.0, 10, 30.0)], [Part(2.0, 20, 10.0)]
    assert join([fast, slow], None) == [15.0]
    assert join([fast, slow], 2.0) == [40.0 / 2.0 / 2.0]
    assert join([[Part(2.0, 8, None)]], 2.0) == [4.0]


def test_warm_up_lasts_until_steps_are_alike() -> None:
    assert not is_settled([1.0, 0.1, 0.1, 0.1])
    assert is_settled([30.0, 0.1, 0.1, 0.1, 0.1])
    assert not is_settled([30.0, 0.1, 0.1, 0.1, 0.1, 8.0])  # compiled once more
    assert is_settled([1.0, 9.0] * 10)  # never alike: the data is not
    assert steps_per_part(1.0, NUM_PARTS * 3.0) == 3
    assert steps_per_part(100.0, 1.0) == 2


def test_a_busy_machine_makes_do_with_fewer_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take long after a fast warm-up do not take the whole budget."""
    now, looks = [0.0], itertools.count()

    def perf_counter() -> float:
        now[0] += 0.001 if next(looks) < 8 else 5.0
        return now[0]

    monkeypatch.setattr(tune_trial, "time", SimpleNamespace(perf_counter=perf_counter))
    gathered: list[int] = []

    def gather_objects(self: Link, value: Any) -> list[Any]:
        gathered.append(len(value) if isinstance(value, list) else 0)
        return [value]

    monkeypatch.setattr(Link, "gather_objects", gather_objects)
    trial(SmallTask(), config(global_batch=4, grains=1), alone(), 0.01)
    assert max(gathered) == LEAST_PARTS


# -- two side by side --------------------------------------------------------------------------------------------------


class Counted:
    """Wants three parts."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def may_go(self, number: int) -> bool:
        assert number == len(self.rates)
        return number < 3

    def passed(self, number: int, samples_per_s: float) -> None:
        self.rates.append(samples_per_s)


def test_a_trial_keeps_the_pace_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(tune_trial, "time", SimpleNamespace(perf_counter=lambda: 0.25 * next(ticks)))
    pace = Counted()
    speed = trial(SmallTask(), config(global_batch=4, grains=1), alone(), 3.5, pace=pace)
    assert pace.rates == pytest.approx([32.0] * 3)
    assert speed.samples_per_s == pytest.approx(32.0)


def paced(link: Link) -> tuple[Speed, list[float]]:
    pace = Counted()
    return trial(RaggedTask(), config(), link, 0.02, pace=pace), pace.rates


def test_ranks_keep_the_pace_of_the_first() -> None:
    (first, rates), (second, nothing) = run_ranks(2, paced)
    assert first == second
    assert len(rates) == 3
    assert first.samples_per_s == sorted(rates)[1]
    assert nothing == []


RUNNER = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "ready-0").touch()
for number in range(100):
    while not (folder / f"go-{number}").exists():
        if (folder / "enough").exists():
            sys.exit(0)
        time.sleep(0.001)
    if folder.name == "dies" and number == 3:
        sys.exit(1)
    with (folder.parent / "order").open("a") as order:
        order.write(folder.name[0])
    (folder / "aside").write_text(str(number + 10 * (folder.name[0] == "b")))
    (folder / "aside").rename(folder / f"part-{number}")
"""


def after(number: int) -> Callable[[Sequence[tuple[float, ...]]], bool]:
    return lambda rounds: len(rounds) == number


def test_runners_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNER]
    found = run_race(
        command, [(tmp_path / "a", SPEC), (tmp_path / "b", SPEC)], 60.0, lambda: None, lambda rounds: len(rounds) == 4
    )
    assert found == [(0.0, 10.0), (1.0, 11.0), (2.0, 12.0), (3.0, 13.0)]
    assert (tmp_path / "order").read_text() == "abbaabba"
    found = run_race(
        command,
        [(tmp_path / "c", SPEC), (tmp_path / "dies", SPEC)],
        60.0,
        lambda: None,
        lambda rounds: len(rounds) == 9,
    )
    assert len(found) == 3  # what was done before one died
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert (
        run_race(
            silent, [(tmp_path / "e", SPEC), (tmp_path / "f", SPEC)], 0.5, lambda: None, lambda rounds: len(rounds) == 4
        )
        == []
    )


def test_an_interrupted_race_lets_its_runners_leave(tmp_path: Path) -> None:
    """Those that wait for their turn hear no signal; they are told, and not killed after seconds."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    said = RUNNER.replace("sys.exit(0)", "sys.exit((folder / 'left').touch())")

    def tick() -> None:
        if (tmp_path / "b" / "ready-0").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_race(
            [sys.executable, "-c", deaf + said],
            [(tmp_path / "a", SPEC), (tmp_path / "b", SPEC)],
            60.0,
            tick,
            lambda rounds: len(rounds) == 99,
        )
    assert (tmp_path / "a" / "left").exists()
    assert (tmp_path / "b" / "left").exists()


def test_the_word_to_go_is_a_file(tmp_path: Path) -> None:
    pace = FilePace(tmp_path)
    (tmp_path / "go-0").touch()
    assert pace.may_go(0)
    pace.passed(0, 12.5)
    assert json.loads((tmp_path / "part-0").read_text()) == 12.5
    (tmp_path / "enough").touch()
    assert not pace.may_go(1)
    assert (tmp_path / "ready-1").exists()


# -- what ends badly -------------------------------------------------------------------------------------------------


def failed_allocation() -> BaseException:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    return error.value


def test_errors_are_told_apart() -> None:
    assert kind_of(failed_allocation()) == "memory"
    assert kind_of(OutOfMemory("float32[3]", 3, 1, "CUDA out of memory")) == "memory"
    assert kind_of(MemoryError()) == "memory"
    assert kind_of(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")) == "killed"
    assert kind_of(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed")) == "lost"
    assert kind_of(LossContract("returned a single tensor")) == "refused"
    assert kind_of(ValueError("a bug")) == "failed"


def test_what_the_ranks_left_is_judged(tmp_path: Path) -> None:
    def ended(name: str, code: int, *ends: BaseException | None, output: str = "") -> Speed | Failure:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "output.txt").write_text(output)
        for rank, error in enumerate(ends):
            if error is not None:
                write_end(folder, rank, error)
        return judge(folder, code, len(ends))

    lost = RuntimeError("gloo/transport: Connection closed by peer")
    found = ended("memory on one rank", 2, lost, failed_allocation())
    assert isinstance(found, Failure)
    assert found.kind == "memory"
    said = "rank 0 on here lost the other ranks: rank 1 on here ended without a word"
    assert ended("one killed", 1, lost, None, output=said) == Failure(
        "killed", "rank 1 ended without a word, as when memory runs out"
    )
    mistake = ended("mistake", 2, LossContract("is a mean"))
    assert isinstance(mistake, Failure)
    assert mistake.kind == "refused"
    assert "the loss function is a mean" in mistake.what
    assert "return (sum, count)" in mistake.what
    assert ended("bug", 1, lost, ValueError("a bug")) == Failure("failed", "ValueError('a bug')")
    assert ended("no word", 3, None, output="ImportError: no torch\n") == Failure("failed", "ImportError: no torch")
    assert ended("segfault", -signal.SIGSEGV, None) == Failure("failed", "ended by SIGSEGV")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / SPEED).write_text(json.dumps({"samples_per_s": 5.0}))
    assert judge(tmp_path / "whole", 0, 1) == Speed(5.0)


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", "SIGKILL"),
        ("print('boom'); raise SystemExit(7)", "failed", "boom"),
        ("import time; time.sleep(600)", "time", "not measured within 1 s"),
    ],
)
def test_a_process_that_ends_badly_is_survived(tmp_path: Path, program: str, kind: str, words: str) -> None:
    ticks: list[None] = []
    outcome, facts = run_trial(
        [sys.executable, "-c", program],
        tmp_path / "trial",
        SPEC,
        1.0 if kind == "time" else 60.0,
        lambda: ticks.append(None),
    )
    assert isinstance(outcome, Failure)
    assert outcome.kind == kind
    assert words in outcome.what
    assert facts is None
    assert ticks


DEAF_RANK = """
import pathlib, subprocess, sys, time
ready = pathlib.Path(sys.argv[1]) / "ready"
deaf = "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
deaf += "; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
rank = subprocess.Popen([sys.executable, "-c", deaf, str(ready)])
ready.with_name("pid").write_text(str(rank.pid))
while not ready.exists():
    time.sleep(0.01)
time.sleep(END)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a process that is not its own child")
@pytest.mark.parametrize("leader", ["ends by itself", "is told to"])
def test_a_rank_that_does_not_listen_ends_with_its_trial(tmp_path: Path, leader: str) -> None:
    program = DEAF_RANK.replace("END", "0" if leader == "ends by itself" else "600")
    is_ready = tmp_path / "trial" / "ready"
    with started([sys.executable, "-c", program], tmp_path / "trial", SPEC) as process:
        while not is_ready.exists() and process.poll() is None:
            time.sleep(POLL_S)
        if leader == "ends by itself":
            process.wait(60)
    try:
        rank = os.pidfd_open(int((tmp_path / "trial" / "pid").read_text()))
    except ProcessLookupError:
        return  # gone and forgotten
    waiting = select.poll()  # `select` takes no descriptor past 1024
    waiting.register(rank, select.POLLIN)
    ended = waiting.poll(20_000)
    if not ended:
        signal.pidfd_send_signal(rank, signal.SIGKILL)
    os.close(rank)
    assert ended, "it outlived its trial"
