"""Ranks die or freeze at random moments of one run; the others go on, replacements join, and it ends as undisturbed.

A case is one run under `--on-failure continue`: its ranks are killed (SIGKILL) or frozen (SIGSTOP), rank 0 too, one or
two at once, in a step, in a checkpoint, in a validation, during the recovery from the death before, while a replacement
starts or joins. Afterwards the journal has each step, validation and epoch once, and weights, optimizer, buffers and
the task's own state are those of an undisturbed run.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.chaos.campaign import Outcome, Trial, made_once
from tools.chaos.kills import PATIENCE_S, _children
from tools.chaos.processes import Nursery, Running, send
from tools.chaos.runs import RunFacts, differences, leftovers, read_run, tensor_differences
from tools.chaos.tasks import MARKS, PACKED, STEP_S, VARIANTS, Variant, pack

RUN_S = 120.0
TIMEOUT_S = 3.0
ROUNDING = 0.0
"""Largest difference from the undisturbed run, where the number of ranks has changed."""
WHOLE = ("plain", "ema", "newbob", "packed", "replay")
"""Variants whose state every rank has whole."""
SHORT = ("plain", "replay", "ema")
"""Variants of the first cases, which are all that CI runs."""
PARTLY = ("shards", "gathered", "average", "mirrored", "node", "averages")
"""Variants of which a rank has only pieces: they go back to the newest checkpoint, or have a mirror."""
AVERAGES = "averages"
"""Variant whose result depends on the ranks: it is that of a run which is resumed with them, round by round."""


@dataclass(frozen=True)
class Shot:
    """A signal to one or two ranks."""

    place: str
    """What must happen first: `step`, `save`, `validation`, `model` (a recovery is being set up), `join`."""
    number: int
    """How often, since the shot before."""
    delay_s: float
    targets: tuple[int, ...]
    """Places among the processes that run, modulo their number."""
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.signal.name} to {self.targets} {1000 * self.delay_s:.0f} ms after {self.place} {self.number}"


def draw_shots(rng: random.Random, ranks: int, count: int) -> list[Shot]:
    """Draw so many attacks."""
    shots = []
    for _ in range(count):
        place = rng.choice(("step", "step", "step", "save", "validation", "model", "model"))
        number = rng.randint(1, 25) if place == "step" else rng.randint(1, 3)
        how = signal.SIGSTOP if rng.random() < 0.15 else signal.SIGKILL
        targets = [rng.randrange(ranks) for _ in range(2 if ranks > 2 and rng.random() < 0.2 else 1)]
        shots.append(Shot(place, number, rng.random() ** 2 * 0.03, tuple(dict.fromkeys(targets)), how))
    return shots


@dataclass
class Attack:
    """Fires shots one after the other, each when its moment has come."""

    shots: list[Shot]
    marks: Path
    launcher: Running
    least_left: int
    """Processes that are never attacked at a time, so that somebody survives."""
    fired: list[str] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=dict)
    _since: float | None = None
    _read: int = 0
    _counts: dict[str, int] = field(default_factory=dict)

    def __call__(self) -> None:
        if not self.shots:
            return
        self._count()
        shot = self.shots[0]
        if self._counts.get(shot.place, 0) - self._seen.get(shot.place, 0) < shot.number:
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < shot.delay_s:
            return
        running = _children(self.launcher.pid)[1:]  # the first child of a launcher is the spare that forks for it
        spared = max(0, min(len(shot.targets), len(running) - self.least_left))
        hit = [running[target % len(running)] for target in shot.targets[:spared]] if running else []
        if not hit:
            return
        self.shots.pop(0)
        self._since, self._seen = None, dict(self._counts)
        for pid in hit:
            if send(pid, shot.signal):
                self.fired.append(f"{shot} (pid {pid})")

    def _count(self) -> None:
        try:
            with self.marks.open() as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        complete = text[: text.rfind("\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            place = line.partition(" ")[2]
            self._counts[place] = self._counts.get(place, 0) + 1


def judge(out: Path, expected: RunFacts, tolerance: float) -> list[str]:
    """Return how the run differs from the undisturbed one."""
    try:
        return [*differences(read_run(out), expected, tolerance), *leftovers(out)]
    except (AssertionError, OSError, ValueError, KeyError) as error:
        return [f"the run cannot be read: {error!r}"]


def rounds_in(out: Path) -> list[dict[str, Any]]:
    """Return the journal's lines on ranks."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "ranks"]


def recoveries(out: Path) -> list[dict[str, Any]]:
    """Return the journal's lines on lost ranks."""
    return [line for line in rounds_in(out) if line["lost"]]


def rounds_of(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, int | None]]:
    """Return the ranks of each round whose steps count, and the number of steps at its end; None for the last one.

    A line has the last step that was done when its round began. A round whose steps were all repeated does not count.
    Ranks that average have no copy of the first step, so that 0 is the beginning.
    """
    begun: list[tuple[int, int]] = []
    for line in lines:
        step = line["step"] + 1 if line["step"] else 0
        while begun and begun[-1][1] >= step:
            begun.pop()
        begun.append((line["ranks"], step))
    ends: list[int | None] = [step for _, step in begun[1:]]
    return [(ranks, end) for (ranks, _), end in zip(begun, [*ends, None], strict=True)]


class Survivors:
    """See the module."""

    name = "survivors"
    counts = (len(SHORT), 300)
    mostly_waits = False

    def why_not(self) -> str | None:
        return None

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._shared = folder
        pack(folder / "packed.hdf")

    def run(self, trial: Trial) -> Outcome:
        rng = trial.random
        is_whole = rng.random() < 0.75 or trial.index < len(SHORT)
        variant = VARIANTS[rng.choice(WHOLE if is_whole else PARTLY)]
        ranks = rng.choice((2, 4) if variant.name in ("average", "gathered") else (2, 3, 4))
        if trial.index < len(SHORT):
            variant, ranks = VARIANTS[SHORT[trial.index]], 3
        shots = draw_shots(rng, ranks, rng.randint(1, 5))
        begun = time.monotonic()
        expected = None if variant.name == AVERAGES else self.expected(trial, variant, 1 if is_whole else ranks)
        out = trial.folder / "run"
        words = ["--max-restarts", "20", "--procs", str(ranks)]
        marks = trial.folder / "marks"
        env = {MARKS: str(marks), PACKED: str(self._shared / "packed.hdf"), STEP_S: "0.004"}
        process = trial.nursery.start(self._words(variant, out, *words), trial.folder, "launcher", env)
        attack = Attack(shots, marks, process, least_left=1 if is_whole else 0)
        trial.nursery.wait([process], RUN_S, attack)
        took_s = time.monotonic() - begun
        troubles = [f"left running: {line}" for line in trial.nursery.left(PATIENCE_S)]
        trial.nursery.clear()
        if process.code != 0:
            troubles.append(f"exit code {process.code}: {process.err[-300:]}")
        tolerance = 0.0 if variant.name == "average" else ROUNDING
        if not troubles and expected is None:
            troubles += self._judge_averages(trial, variant, out)
        elif not troubles and expected is not None:
            troubles += judge(out, expected, tolerance)
        history = [variant.name, f"{ranks} ranks", *attack.fired, f"{took_s:.1f} s", process.err]
        (trial.folder / "history.txt").write_text("\n".join(history))
        self._keep_times(variant, ranks, out, history)
        return trial.judged([f"{variant.name}, {ranks} ranks: {each}" for each in troubles], 1, took_s)

    def _judge_averages(self, trial: Trial, variant: Variant, out: Path) -> list[str]:
        """Return how a run differs from one that was resumed with the ranks that each of its rounds had."""
        again = trial.folder / "again"
        for ranks, end in rounds_of(rounds_in(out)):
            limit = [] if end is None else ["--steps", str(end)]
            words = ["--procs", str(ranks), "--on-failure", "stop", "--resume", "auto", *limit]
            process = trial.nursery.start(self._words(variant, again, *words), trial.folder, f"again-{end}")
            if not trial.nursery.wait([process], RUN_S) or process.code:
                return [f"resumed with {ranks} ranks: {process.code}: {process.err[-300:]}"]
        run, meant = read_run(out), read_run(again)
        losses, wanted = ([(step["step"], step["loss"]) for step in each.steps] for each in (run, meant))
        troubles = [] if losses == wanted else ["its steps are not those of a run with the same ranks"]
        return troubles + tensor_differences(run.parts, meant.parts, 0.0)

    def _keep_times(self, variant: Variant, ranks: int, out: Path, history: list[str]) -> None:
        """Add what each recovery took to a file beside the cases."""
        try:
            found = [{name: line[name] for name in ("ranks", "seconds", "repeated")} for line in recoveries(out)]
        except (OSError, ValueError, KeyError):
            found = []
        line = {"variant": variant.name, "ranks": ranks, "recoveries": found, "history": history}
        with (self._shared / "recoveries.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _words(self, variant: Variant, out: Path, *more: str) -> list[str]:
        words = variant.command(out, *more)
        for name, value in (("--epochs", "12"), ("--timeout-s", str(TIMEOUT_S))):
            if name in words:
                words[words.index(name) + 1] = value
        # Rounding that depends on the ranks grows with every step: in fp32 it would hide a step that was done twice.
        return words if "--precision" in words else [*words, "--precision", "fp64"]

    def expected(self, trial: Trial, variant: Variant, ranks: int) -> RunFacts:
        """Return what the undisturbed run leaves; it is trained when first asked for, by one of the jobs."""

        def train(out: Path) -> None:
            logs = out.with_name(f"{out.name}-logs")
            logs.mkdir(exist_ok=True)
            env = {PACKED: str(self._shared / "packed.hdf")}
            several = ["--procs", str(ranks)] if ranks > 1 else []
            process = trial.nursery.start(self._words(variant, out, *several), logs, "undisturbed", env)
            if not trial.nursery.wait([process], RUN_S) or process.code:
                raise RuntimeError(f"undisturbed run failed {process.code}: {process.err}")

        return read_run(made_once(self._shared / f"undisturbed-{variant.name}-{ranks}", train))
