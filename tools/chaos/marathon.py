"""One long run whose ranks are killed, frozen or cut off again and again, and replaced: it ends as if undisturbed.

Four machines (network namespaces) with a rank each, under `paceline launch`. A rank is killed (SIGKILL) or frozen
(SIGSTOP), rank 0 too; or its machine loses its cable, is given up by the others, and comes back with a new launcher.
The moments are random: in backward and the reduction behind it, between steps, in a checkpoint, in a validation, while
the others recover from the loss before; sometimes two at once. Afterwards weights, optimizer, buffers, the task's own
state and every line of the journal, times and rates aside, are bit for bit those of one process that nobody disturbed.

    python -m tools.chaos marathon --only 1        # 2,000 steps, 100 losses
    python -m tools.chaos marathon --long --jobs 1 # with accumulation and continual learning, too

`losses.jsonl` beside the cases has each loss: seconds until the next finished step, and steps that were repeated.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.launchers.hosts import Host, machines, why_not

from paceline.world.launch.heartbeat import SILENT_S
from tools.chaos.campaign import Outcome, Trial
from tools.chaos.kills import PATIENCE_S, _children
from tools.chaos.network import _ip, enter
from tools.chaos.processes import Nursery, Running, send
from tools.chaos.runs import differences, leftovers, line_differences, read_run
from tools.chaos.tasks import HOLD, HOLD_S, MARKS, PACKED, STEP_S, TIMES, VARIANTS, Variant

TIMEOUT_S = 3.0
DETECTION_S = {"killed": 0.0, "frozen": TIMEOUT_S, "cut off": SILENT_S}
"""Seconds until a loss is known, by nature: a heart that does not beat, a launcher that is not heard."""
WAIT_S = 90.0
"""How long a run may take to have all its ranks again."""
_LOOP = ("--global-batch", "16", "--save-every-steps", "25", "--val-every-steps", "40", "-O0", "--workers", "0")
_SGD = ("--optimizer", "sgd", "--lr", "0.01", "--precision", "fp64")
_STREAM = (
    "--num-tasks",
    "3",
    "--global-batch",
    "12",
    "--precision",
    "fp64",
    "--workers",
    "0",
    "--save-every-steps",
    "25",
    "--epochs",
    "6",
    "--val-every-steps",
    "20",
)
_REPLAY = ("--method", "derpp", "--buffer-size", "31")


@dataclass(frozen=True)
class Course:
    """A run and the number of its losses."""

    variant: Variant
    steps: int
    losses: int
    stages: int = 1
    """Stages of `steps` each."""
    grains: int = 4

    @property
    def num_steps(self) -> int:
        return self.steps * self.stages


_PLAIN = Variant("plain", (*_LOOP, *_SGD, "--ema", "0.9", "--clip-norm", "1.0"))
COURSES = (
    Course(replace(_PLAIN, name="short"), 60, 2),
    Course(_PLAIN, 2000, 100),
    Course(replace(_PLAIN, name="accumulated"), 600, 30, grains=8),
    Course(replace(VARIANTS["replay"], words=(*_STREAM, *_REPLAY)), 200, 30, stages=3),
)
"""A short run, which is all that CI runs; the long one; the same with two grains on a rank; continual learning."""


@dataclass(frozen=True)
class Loss:
    """What happens to one or two ranks."""

    how: str
    place: str
    """What must happen first: `step`, `backward`, `save`, `validation`, `model` (a recovery is being set up)."""
    delay_s: float
    ranks: tuple[int, ...]
    step: int
    """Not before so many steps."""


def draw(rng: random.Random, course: Course) -> list[Loss]:
    """Draw the losses of a run, spread over two thirds of its steps: each waits for its moment, while the others go on.

    Machine 0 has the store: it is not cut off.
    """
    every = 2 * course.num_steps // (3 * (course.losses + 1))
    made = []
    for number in range(course.losses):
        how = rng.choice((*6 * ("killed",), "frozen", "frozen", "frozen", "cut off")) if number else "cut off"
        ranks = tuple(rng.sample(range(1, 4) if how == "cut off" else range(4), 2 if rng.random() < 0.15 else 1))
        place = rng.choice(("step", "backward", "backward", "save", "validation", "model"))
        made.append(Loss(how, place, rng.random() ** 2 * 0.02, ranks, every * (number + 1)))
    return made


@dataclass
class Race:
    """A run over four machines while it is attacked."""

    hosts: Sequence[Host]
    folder: Path
    out: Path
    words: Sequence[str]
    nursery: Nursery
    port: int
    losses: list[Loss]
    launchers: dict[int, Running] = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)
    ended: list[Running] = field(default_factory=list)
    """Launchers of machines that were cut off."""
    _counts: Counter[str] = field(default_factory=Counter)
    _seen: Counter[str] = field(default_factory=Counter)
    _read: int = 0
    _since: float | None = None
    _back: dict[int, float] = field(default_factory=dict)
    """Machines without a cable, and when they were cut off."""

    def start(self, rank: int) -> None:
        """Start the launcher of a machine."""
        number = sum(process.name.startswith(f"node{rank}-") for process in [*self.ended, *self.launchers.values()])
        options = ["--nnodes", "4", "--node-rank", str(rank), "--master-addr", self.hosts[0].address, "--device", "cpu"]
        options += ["--master-port", str(self.port), "--nproc-per-node", "1", "--max-restarts", "1000"]
        env = {MARKS: str(self.marks), TIMES: str(self.folder / "times"), STEP_S: "0.01"}
        env |= {HOLD: str(self.hold), HOLD_S: "0.5", PACKED: str(self.folder / "none")}
        words = ["launch", *options, "--start-timeout-s", "40", "--", *self.words]
        self.launchers[rank] = self.nursery.start(
            words, self.folder, f"node{rank}-{number}", env, enter(self.hosts[rank])
        )

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    @property
    def hold(self) -> Path:
        return self.folder / "hold"

    def __call__(self) -> None:
        """Look what is due; called all the time."""
        self._count()
        self._bring_back()
        is_whole = self._is_whole()
        if is_whole or not self.losses:
            self.hold.unlink(missing_ok=True)
        elif self.done and not self.hold.exists():
            self.hold.touch()  # the run is not to end before all has happened to it
        if not self.losses:
            return
        loss, now = self.losses[0], time.monotonic()
        place = "step" if loss.place == "model" and not self.done else loss.place
        is_time = place == "model" or (is_whole and self._num_steps() >= loss.step)
        if not is_time or self._counts[place] == self._seen[place]:
            return
        self._since = self._since or now
        if now - self._since >= loss.delay_s:
            self._attack(loss)

    def _attack(self, loss: Loss) -> None:
        found = {rank: self._rank_pid(rank) for rank in loss.ranks if rank not in self._back}
        hit = {rank: pid for rank, pid in found.items() if pid is not None}
        if len(hit) < len(loss.ranks):
            return
        self.losses.pop(0)
        self._since, self._seen = None, Counter(self._counts)
        for rank, pid in hit.items():
            if loss.how == "cut off":
                _ip("link", "set", self.hosts[rank].cable, "down")
                self._back[rank] = time.monotonic()
            else:
                send(pid, signal.SIGKILL if loss.how == "killed" else signal.SIGSTOP)
        self.done.append({"how": loss.how, "place": loss.place, "ranks": list(hit), "time": time.time()})
        self.hold.touch()  # who waits because of it goes on: it must leave the round

    def _bring_back(self) -> None:
        """Plug the cable of a machine in that the others have given up, and start its launcher anew."""
        for rank in list(self._back):
            launcher = self.launchers[rank]
            if launcher.code is None:
                continue  # it does not know yet
            _ip("link", "set", self.hosts[rank].cable, "up")
            self.ended.append(launcher)
            del self._back[rank]
            self.start(rank)

    def _rank_pid(self, rank: int) -> int | None:
        launcher = self.launchers[rank]
        running = _children(launcher.pid)[1:] if launcher.code is None else []  # the first one forks for it
        return running[-1] if running else None

    def _is_whole(self) -> bool:
        """Return True if all four ranks train."""
        if self._back:
            return False
        try:
            text = self.out.joinpath("metrics.jsonl").read_text()
            lines = [line for line in text.splitlines() if line.startswith('{"kind": "ranks"')]
            return bool(lines) and int(json.loads(lines[-1])["ranks"]) == 4
        except (OSError, ValueError, KeyError):
            return False

    def _num_steps(self) -> int:
        try:
            with self.out.joinpath("metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 4000))
                lines = file.read().decode().splitlines()
            return max((json.loads(line)["step"] for line in lines if line.startswith('{"kind": "step"')), default=0)
        except (OSError, ValueError, KeyError):
            return 0

    def _count(self) -> None:
        try:
            with self.marks.open() as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        complete = text[: text.rfind("\n") + 1]
        self._read += len(complete)
        self._counts.update(line.partition(" ")[2] for line in complete.splitlines())


@dataclass(frozen=True)
class Cost:
    """What a loss cost."""

    how: str
    place: str
    seconds: float
    """Until the next finished step of those that went on."""
    beyond_s: float
    """The same, without the time until the loss could be known."""
    repeated: int


def costs(done: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]], steps: Sequence[float]) -> list[Cost]:
    """Return the cost of each loss, from the journal's lines on ranks and the moments of finished steps.

    A loss that comes while others recover from the one before is counted from its own moment. Nobody goes on before the
    last of those that came before the next finished step could be known. A process that had not joined yet costs the
    others nothing, and has no line.
    """
    matched = []
    for number, loss in enumerate(done):
        again = next((later["time"] for later in done[number + 1 :] if set(later["ranks"]) & set(loss["ranks"])), None)
        line = next((line for line in rounds if line["time"] > loss["time"] and _names(line, loss)), None)
        if line is not None and (again is None or line["time"] < again + DETECTION_S[loss["how"]]):
            matched.append((loss, line))
    found = []
    for loss, line in matched:
        finished = next((moment for moment in steps if moment > line["time"]), None)
        if finished is None:
            continue
        others = [other for other, its in matched if line["time"] <= its["time"] < finished]
        known = max(other["time"] + DETECTION_S[other["how"]] for other in others)
        seconds, beyond_s = finished - loss["time"], max(0.0, finished - known)
        found.append(Cost(loss["how"], loss["place"], seconds, beyond_s, line["repeated"]))
    return found


def _names(line: dict[str, Any], loss: dict[str, Any]) -> bool:
    """Return True if a line on ranks says that one of these was lost; machines have numbers from 1."""
    return not {f"plh{rank + 1}" for rank in loss["ranks"]}.isdisjoint(lost["host"] for lost in line["lost"])


def table(costs: Sequence[Cost]) -> str:
    """Return the costs by kind of loss, as text."""
    lines = [
        f"{'loss':<10}{'number':>8}{'median s':>10}{'worst s':>9}{'beyond, median':>16}{'worst':>7}{'repeated':>10}"
    ]
    for how in DETECTION_S:
        of = [cost for cost in costs if cost.how == how]
        if of:
            middle, beyond = (
                statistics.median(values) for values in ([c.seconds for c in of], [c.beyond_s for c in of])
            )
            worst, worst_beyond = max(cost.seconds for cost in of), max(cost.beyond_s for cost in of)
            again = f"{statistics.median(cost.repeated for cost in of):g}/{max(cost.repeated for cost in of)}"
            lines.append(
                f"{how:<10}{len(of):>8}{middle:>10.2f}{worst:>9.2f}{beyond:>16.2f}{worst_beyond:>7.2f}{again:>10}"
            )
    return "\n".join(lines) + "\n"


class Marathon:
    """See the module."""

    name = "marathon"
    counts = (1, len(COURSES))
    mostly_waits = True

    def why_not(self) -> str | None:
        return why_not()

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._shared = folder

    def run(self, trial: Trial) -> Outcome:
        course = COURSES[trial.index % len(COURSES)]
        losses = draw(trial.random, course)
        began = time.monotonic()
        words = ("--steps", str(course.steps), "--timeout-s", str(TIMEOUT_S), "--grains", str(course.grains))
        undisturbed, out = trial.folder / "undisturbed", trial.folder / "run"
        alone = trial.nursery.start(self._words(course, undisturbed, words), trial.folder, "alone")
        if not trial.nursery.wait([alone], 600.0) or alone.code:
            return trial.judged([f"undisturbed run: {alone.code} {alone.err[-500:]}"])
        with machines(4) as hosts:
            rng = trial.random
            race = Race(
                hosts,
                trial.folder,
                out,
                self._words(course, out, words),
                trial.nursery,
                rng.randint(20000, 30000),
                losses,
            )
            for rank in range(4):
                race.start(rank)
            first = race.launchers[0]
            limit_s = 120.0 + 40.0 * course.losses
            trial.nursery.wait([first], limit_s, race)
            others = [process for rank, process in race.launchers.items() if rank]
            trial.nursery.wait(others, 30.0, race)
            took_s = time.monotonic() - began
            troubles = [f"left running: {line}" for line in trial.nursery.left(PATIENCE_S)]
            trial.nursery.clear()
        if first.code != 0:
            troubles.append(f"exit code {first.code}: {first.err[-600:]}")
        if race.losses:
            troubles.append(f"{len(race.losses)} of {course.losses} losses have not happened, next {race.losses[0]}")
        if not troubles:
            troubles += differences(read_run(out), read_run(undisturbed), 0.0)
            troubles += [*line_differences(out, undisturbed), *leftovers(out)]
        self._keep(trial, course, race, took_s, first.err)
        return trial.judged([f"{course.variant.name}: {each}" for each in troubles], 1, took_s)

    def _keep(self, trial: Trial, course: Course, race: Race, took_s: float, text: str) -> None:
        """Write down what each loss cost, beside the cases."""
        try:
            lines = map(json.loads, race.out.joinpath("metrics.jsonl").read_text().splitlines())
            rounds = [line for line in lines if line["kind"] == "ranks"]
            steps = sorted(map(float, race.folder.joinpath("times").read_text().split()))
        except (OSError, ValueError):
            return
        found = costs(race.done, rounds, steps)
        facts = {
            "variant": course.variant.name,
            "steps": course.num_steps,
            "seconds": round(took_s),
            "losses": len(race.done),
            "before they had joined": len(race.done) - len(found),
        }
        with (self._shared / "losses.jsonl").open("a") as file:
            file.write(json.dumps({**facts, "costs": [vars(cost) for cost in found]}) + "\n")
        heading = f"{facts}\n{table(found)}"
        changes = "\n".join(map(json.dumps, rounds))
        history = f"{heading}\n{json.dumps(race.done, indent=1)}\n{changes}\n{text}"
        (self._shared / f"{course.variant.name}.txt").write_text(history)
        (trial.folder / "history.txt").write_text(history)

    @staticmethod
    def _words(course: Course, out: Path, more: Sequence[str]) -> list[str]:
        words = course.variant.command(out)
        for name, value in zip(more[::2], more[1::2], strict=True):
            if name in words:
                words[words.index(name) + 1] = value
            else:
                words += [name, value]
        return words
