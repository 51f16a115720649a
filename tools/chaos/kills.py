"""Signals at random moments, in any number and order, then resume: the run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.chaos.campaign import Outcome, Trial, made_once
from tools.chaos.processes import Nursery, Running, descendants, send
from tools.chaos.runs import RunFacts, differences, is_locked, leftovers, read_run, status_of
from tools.chaos.tasks import MARKS, PACKED, VARIANTS, Variant, pack

ROUND_S = 60.0
"""Deadline of a start, disturbed or not; most take a second."""
PATIENCE_S = 6.0
"""Seconds that processes may outlive the command that started them."""
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PLACES = ("model", "stage", "step", "save", "validation", "writing", "record")


@dataclass(frozen=True)
class Shot:
    """A signal: when, to whom, which."""

    place: str
    """`now`, or what must have happened: a mark of the task, a checkpoint being written, the record of the run."""
    number: int
    """How often that has happened since the round began."""
    delay_s: float
    target: str
    """`launcher`, `worker`, `all`, or a rank's number."""
    signal: signal.Signals

    def __str__(self) -> str:
        moment = self.place if self.number == 1 else f"{self.place} {self.number}"
        return f"{self.signal.name} to {self.target} {1000 * self.delay_s:.0f} ms after {moment}"


@dataclass(frozen=True)
class Round:
    """One start, and what is done to it."""

    ranks: int
    by_launcher: bool
    shots: tuple[Shot, ...]

    def __str__(self) -> str:
        how = "--procs" if self.by_launcher else "by hand"
        return f"{self.ranks} ranks {how}: {', '.join(map(str, self.shots)) or 'undisturbed'}"


def draw_rounds(rng: random.Random, variant: Variant) -> list[Round]:
    """Draw one to four disturbed starts; the number of ranks may change where the variant allows it."""
    ranks = rng.choice(list(variant.ranks))
    rounds = []
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        by_launcher = ranks > 1 and rng.random() < 0.7
        rounds.append(Round(ranks, by_launcher, draw_shots(rng, variant, ranks, by_launcher)))
        if variant.may_change_ranks and rng.random() < 0.3:
            ranks = rng.choice(list(variant.ranks))
    return rounds


def draw_shots(rng: random.Random, variant: Variant, ranks: int, by_launcher: bool) -> tuple[Shot, ...]:
    """Draw a kill, a stop, or a storm of signals."""
    targets = [str(rank) for rank in range(ranks)] + (["launcher"] * 2 if by_launcher else ["all"])
    if variant.name == "workers":
        targets += ["worker", "worker"]
    place = rng.choice(("now", *PLACES))
    number = rng.randint(1, 12) if place == "step" else rng.randint(1, 3) if place in ("save", "writing") else 1
    delay_s = rng.random() ** 2 * (0.5 if place == "now" else 0.05)
    first = Shot(place, number, delay_s, rng.choice(targets), rng.choice((signal.SIGKILL, signal.SIGKILL, *STOPS)))
    if first.signal == signal.SIGKILL or rng.random() < 0.4:
        return (first,)
    storm = [first]
    for _ in range(rng.randint(1, 5)):
        delay_s += rng.choice((0.0, 0.001, 0.01, 0.1)) * rng.random()
        last = rng.random() < 0.15
        number_ = signal.SIGKILL if last else rng.choice(STOPS)
        storm.append(Shot(place, number, delay_s, rng.choice([first.target, *targets]), number_))
        if last:
            break
    return tuple(storm)


@dataclass
class Watch:
    """Fires shots when their moment comes."""

    shots: list[Shot]
    marks: Path
    out: Path
    processes: list[Running]
    by_launcher: bool
    num_ranks: int
    fired: list[Shot] = field(default_factory=list)
    trained_before: dict[Shot, bool] = field(default_factory=dict)
    """For each fired shot: every rank had begun to train."""
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    _rank_pids: list[int] = field(default_factory=list)
    _writing: int = 0
    _was_writing: bool = False
    begun: float = field(default_factory=time.monotonic)

    def __call__(self) -> None:
        if not self.shots:
            return
        counts = self._counts()
        now = time.monotonic()
        for shot in list(self.shots):
            if shot.place == "now":
                since = self.begun
            elif counts.get(shot.place, 0) >= shot.number:
                since = self._since.setdefault((shot.place, shot.number), now)
            else:
                continue
            if now - since >= shot.delay_s:
                self.shots.remove(shot)
                self._fire(shot, counts)

    def _counts(self) -> dict[str, int]:
        """Return how often the ranks have reached each place; the furthest rank counts."""
        by_rank: dict[tuple[str, str], int] = {}
        try:
            lines = self.marks.read_text().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            rank, _, place = line.partition(" ")
            by_rank[rank, place] = by_rank.get((rank, place), 0) + 1
        counts: dict[str, int] = {}
        for (_, place), number in by_rank.items():
            counts[place] = max(counts.get(place, 0), number)
        counts["trained"] = len({rank for rank, place in by_rank if place == "step"})
        try:
            writing = any(name.startswith(".writing-") for name in os.listdir(self.out / "checkpoints"))
        except FileNotFoundError:
            writing = False
        self._writing += writing and not self._was_writing
        self._was_writing = writing
        counts["writing"] = self._writing
        counts["record"] = int((self.out / ".lock").exists())
        return counts

    def _fire(self, shot: Shot, counts: dict[str, int]) -> None:
        pids = self._pids(shot.target)
        hit = [send(pid, shot.signal) for pid in pids]
        if any(hit):
            self.fired.append(shot)
            self.trained_before[shot] = counts["trained"] >= self.num_ranks

    def _ranks(self) -> list[int]:
        if not self.by_launcher:
            return [process.pid for process in self.processes]
        # The first child of a launcher is the spare that forks for it. Who has ended keeps its number.
        if len(self._rank_pids) < self.num_ranks:
            self._rank_pids = _children(self.processes[0].pid)[1:]
        return self._rank_pids

    def _pids(self, target: str) -> list[int]:
        running = [process.pid for process in self.processes if process.code is None]
        if target == "launcher":
            return running[:1]
        ranks = self._ranks()
        if target == "all":
            return [pid for pid in ranks if self.by_launcher or pid in running]
        if target == "worker":
            workers = [pid for rank in ranks for pid in descendants(rank)]
            return workers[:1]
        number = int(target)
        return [pid for pid in ranks[number : number + 1] if self.by_launcher or pid in running]


def _children(pid: int) -> list[int]:
    below = descendants(pid)
    inner = {child for each in below for child in descendants(each)}
    return sorted(set(below) - inner)


def start(
    nursery: Nursery,
    variant: Variant,
    plan: Round,
    folder: Path,
    name: str,
    out: Path,
    shared: Path,
    *more: str,
    env: Mapping[str, str] | None = None,
) -> list[Running]:
    """Start the processes of a round: one launcher, or every rank by itself as another launcher would."""
    env = {PACKED: str(shared / "packed.hdf"), **(env or {MARKS: str(folder / f"{name}.marks")})}
    words = variant.command(out, "--resume", "auto", *more)
    if plan.by_launcher:
        return [
            nursery.start([*words, "--procs", str(plan.ranks), "--on-failure", "stop"], folder, f"{name}-launcher", env)
        ]
    meeting = {}
    if plan.ranks > 1:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(plan.ranks)}
    return [
        nursery.start(
            words, folder, f"{name}-rank{rank}", {**env, **meeting, **({"RANK": str(rank)} if meeting else {})}
        )
        for rank in range(plan.ranks)
    ]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class RoundFacts:
    """How a disturbed start ended."""

    codes: tuple[int | None, ...]
    fired: tuple[Shot, ...]
    all_had_trained: bool
    """When the first shot was fired, every rank was training."""
    stderr: str
    status: str
    newest_step: int | None
    last_step: int | None
    """Last step in the journal."""
    troubles: tuple[str, ...]
    """Processes, locks or files that were left."""


def judge_round(facts: RoundFacts) -> list[str]:
    """Return what did not hold in one disturbed start; SIGKILL excuses exit codes and status."""
    troubles = list(facts.troubles)
    numbers = {shot.signal for shot in facts.fired}
    if None in facts.codes:
        return [*troubles, f"still running after {ROUND_S:g} s: {facts.codes}"]
    if "Traceback" in facts.stderr and signal.SIGINT not in numbers and not _is_reported_crash(facts):
        troubles.append("a traceback on stderr")
    killed = signal.SIGKILL in numbers
    if not facts.fired:
        if any(facts.codes):
            troubles.append(f"undisturbed, but exit codes {facts.codes}")
        return troubles
    if not killed and facts.all_had_trained:
        allowed = {0, 130} if signal.SIGINT in numbers else {0}
        if not set(facts.codes) <= allowed:
            troubles.append(f"asked to stop while training: exit codes {facts.codes}, expected {sorted(allowed)}")
        if facts.status not in ("stopped", "finished"):
            troubles.append(f"asked to stop while training: status {facts.status!r}")
        if facts.newest_step is not None and facts.last_step is not None and facts.newest_step != facts.last_step + 1:
            troubles.append(f"left after step {facts.last_step} with a checkpoint of {facts.newest_step} steps")
    if killed and facts.all_had_trained and 2 in facts.codes:  # a rank that never comes is a mistake of the start
        troubles.append(f"exit code 2 after SIGKILL: {facts.codes}")
    return troubles


def _is_reported_crash(facts: RoundFacts) -> bool:
    """A killed loader worker is a crash of its rank; ranks that lose another before they have logs show where."""
    killed = any(shot.signal == signal.SIGKILL or not facts.all_had_trained for shot in facts.fired)
    # Python's own thread in a loader worker that was handing over memory when its rank was killed.
    of_python = "resource_sharer.py" in facts.stderr and facts.stderr.count("Traceback") == 1
    told = of_python or "lost the other ranks" in facts.stderr
    return any(shot.target == "worker" for shot in facts.fired) or (killed and told)


def undisturbed(nursery: Nursery, variant: Variant, ranks: int, shared: Path, *more: str) -> Path:
    """Return a run that nobody disturbs; it is trained when first asked for."""

    def train(out: Path) -> None:
        logs = out.with_name(f"{out.name}-logs")
        logs.mkdir(exist_ok=True)
        processes = start(nursery, variant, Round(ranks, False, ()), logs, "train", out, shared, *more)
        ended, codes = nursery.wait(processes, ROUND_S), [process.code for process in processes]
        if not ended or any(codes):
            raise RuntimeError(f"{variant.name} on {ranks}: {codes}: {[process.err for process in processes]}")

    return made_once(shared / f"undisturbed-{variant.name}-{ranks}", train)


class Kills:
    """See the module."""

    name = "kills"
    counts = (4, 1000)
    mostly_waits = False

    def why_not(self) -> str | None:
        return None

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._shared = folder
        pack(folder / "packed.hdf")

    def expected(self, trial: Trial, variant: Variant, ranks: int) -> RunFacts:
        """Return what the undisturbed run leaves; it is trained when first asked for, by one of the jobs."""
        return read_run(undisturbed(trial.nursery, variant, ranks, self._shared))

    def run(self, trial: Trial) -> Outcome:
        rng = trial.random
        variant = VARIANTS[rng.choice(list(VARIANTS))]
        rounds = draw_rounds(rng, variant)
        out = trial.folder / "run"
        begun = time.monotonic()
        troubles, slowest_s, num_shots = [], 0.0, 0
        expected = self.expected(trial, variant, rounds[0].ranks)
        history = []
        for index, plan in enumerate([*rounds, Round(rounds[-1].ranks, False, ())]):
            round_begun = time.monotonic()
            facts = self._play(trial, variant, plan, f"round{index}", out)
            round_s = time.monotonic() - round_begun
            slowest_s = max(slowest_s, round_s)
            num_shots += len(facts.fired)
            history.append(f"round {index}, {plan} -> {facts.codes} {facts.status} ({round_s:.1f} s)")
            found = judge_round(facts)
            troubles += [f"round {index} ({plan}): {trouble}" for trouble in found]
            if None in facts.codes:
                break
        (trial.folder / "history.txt").write_text(
            "\n".join([variant.name, *history, f"{time.monotonic() - begun:.1f} s"])
        )
        if not troubles:
            tolerance = 0.0 if len({plan.ranks for plan in rounds}) == 1 else variant.tolerance
            troubles += self._compare(out, expected, tolerance)
        troubles = [f"{variant.name}: {trouble}" for trouble in troubles]
        return trial.judged(troubles, max(num_shots, 1), slowest_s)

    @staticmethod
    def _compare(out: Path, expected: RunFacts, tolerance: float) -> list[str]:
        try:
            return [*differences(read_run(out), expected, tolerance), *leftovers(out)]
        except (AssertionError, OSError, ValueError, KeyError) as error:
            return [f"the run cannot be read: {error!r}"]

    def _play(self, trial: Trial, variant: Variant, plan: Round, name: str, out: Path) -> RoundFacts:
        nursery = trial.nursery
        # What a SIGKILL of an earlier round left stays until a run has got past its set-up.
        before = set(leftovers(out)) if out.exists() else set()
        processes = start(nursery, variant, plan, trial.folder, name, out, self._shared)
        watch = Watch(list(plan.shots), trial.folder / f"{name}.marks", out, processes, plan.by_launcher, plan.ranks)
        nursery.wait(processes, ROUND_S, watch)
        codes = tuple(process.code for process in processes)
        troubles = [f"left running: {line}" for line in nursery.left(PATIENCE_S)]
        nursery.clear()
        deadline = time.monotonic() + 1.0  # the first thread of a process may be gone before those that hold its files
        while is_locked(out) and time.monotonic() < deadline:
            time.sleep(0.02)
        if is_locked(out):
            troubles.append("the folder's lock is held")
        # A signal that comes before its handler is there ends a process like SIGKILL: its exit code is negative.
        killed = any(shot.signal == signal.SIGKILL for shot in watch.fired) or any((code or 0) < 0 for code in codes)
        if not killed and out.exists() and None not in codes:
            troubles += [trouble for trouble in leftovers(out) if trouble not in before]
        steps = _steps(out)
        return RoundFacts(
            codes,
            tuple(watch.fired),
            bool(watch.fired) and watch.trained_before[watch.fired[0]],
            "".join(process.err for process in processes),
            status_of(out),
            _newest(out),
            max(steps, default=None),
            tuple(troubles),
        )


def _steps(out: Path) -> Sequence[int]:
    import json

    try:
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]
    except (OSError, ValueError):
        return []


def _newest(out: Path) -> int | None:
    from paceline.train.checkpoint.format import listed, step_of

    paths = listed(out / "checkpoints") if out.exists() else []
    return step_of(paths[0]) if paths else None
