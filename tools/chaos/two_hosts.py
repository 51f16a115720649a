"""A machine of two dies, or is cut off: the other goes on and it comes back, or, if it had the store, the run is saved.

Two machines (network namespaces) with two ranks each, under `paceline launch`. Whatever happens, the run ends, at once
or after it was resumed, with the weights, the optimizer, the state and the journal of one undisturbed process.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launchers.hosts import Host, machines, why_not

from tools.chaos.campaign import Outcome, Trial
from tools.chaos.kills import PATIENCE_S, _children
from tools.chaos.network import _ip, enter
from tools.chaos.processes import Nursery, Running, send
from tools.chaos.runs import differences, leftovers, line_differences, read_run, status_of
from tools.chaos.tasks import HOLD, MARKS, PACKED, STEP_S, VARIANTS, Variant

STEPS = 60
AT = 20
"""Steps before it happens."""
_WORDS = ("--global-batch", "16", "--save-every-steps", "15", "--val-every-steps", "40", "-O0", "--workers", "0")
VARIANT = Variant("hosts", (*_WORDS, "--optimizer", "adamw", "--ema", "0.8", "--precision", "fp64"))
TIMEOUT_S = 3.0
END_S = 90.0


@dataclass
class Pair:
    """The launchers of two machines."""

    hosts: Sequence[Host]
    folder: Path
    out: Path
    nursery: Nursery
    port: int
    words: Sequence[str]
    step_s: float = 0.05

    def start(self, rank: int, name: str) -> Running:
        options = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", self.hosts[0].address, "--device", "cpu"]
        options += ["--master-port", str(self.port), "--nproc-per-node", "2", "--start-timeout-s", "40"]
        env = {MARKS: str(self.folder / "marks"), STEP_S: str(self.step_s), PACKED: str(self.folder / "none")}
        env[HOLD] = str(self.folder / "hold")
        words = ["launch", *options, "--", *self.words]
        return self.nursery.start(words, self.folder, f"{name}-node{rank}", env, enter(self.hosts[rank]))

    def go_on_if_whole(self) -> None:
        """Let steps be fast again when the machine that was lost has joined."""
        text = (self.out / "metrics.jsonl").read_text()
        last = [line for line in text.splitlines() if line.startswith('{"kind": "ranks"')][-1:]
        if last and '"joined": [{' in last[0]:
            (self.folder / "hold").unlink(missing_ok=True)

    def num_steps(self) -> int:
        try:
            return (self.folder / "marks").read_text().count("0 step\n")
        except FileNotFoundError:
            return 0

    def wait_for_steps(self, number: int, launchers: Sequence[Running]) -> bool:
        """Wait until rank 0 has done so many steps; return False if the launchers have ended or it takes too long."""
        deadline = time.monotonic() + END_S
        while self.num_steps() < number:
            self.nursery.reap()
            if time.monotonic() > deadline or all(launcher.code is not None for launcher in launchers):
                return False
            time.sleep(0.01)
        return True


def kill_host(pair: Pair, launcher: Running, rank: int) -> None:
    for pid in (launcher.pid, *_children(launcher.pid)[1:]):
        send(pid, signal.SIGKILL)


def cut_off(pair: Pair, launcher: Running, rank: int) -> None:
    _ip("link", "set", pair.hosts[rank].cable, "down")


def kill_launcher(pair: Pair, launcher: Running, rank: int) -> None:
    send(launcher.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Case:
    """What happens to a machine, and what must follow."""

    name: str
    rank: int
    do: Callable[[Pair, Running, int], None]
    goes_on: bool
    """The other machine goes on, and takes this one in when it comes back; else the run ends, saved."""


CASES = (
    Case("the machine with the store dies", 0, kill_host, goes_on=False),
    Case("the other machine dies", 1, kill_host, goes_on=True),
    Case("the other machine is cut off", 1, cut_off, goes_on=True),
    Case("the launcher with the store dies", 0, kill_launcher, goes_on=False),
    Case("the launcher of the other machine dies", 1, kill_launcher, goes_on=True),
)


class TwoHosts:
    """See the module."""

    name = "hosts"
    counts = (1, len(CASES))
    mostly_waits = True

    def why_not(self) -> str | None:
        return why_not()

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        """Nothing is shared."""

    def run(self, trial: Trial) -> Outcome:
        case, began = CASES[trial.index % len(CASES)], time.monotonic()
        undisturbed, out = trial.folder / "undisturbed", trial.folder / "run"
        alone = trial.nursery.start(_words(undisturbed), trial.folder, "alone")
        if not trial.nursery.wait([alone], 200.0) or alone.code:
            return trial.judged([f"undisturbed run: {alone.code} {alone.err[-500:]}"])
        with machines(2) as hosts:
            port = trial.random.randint(20000, 30000)
            pair = Pair(hosts, trial.folder, out, trial.nursery, port, [*_words(out), "--resume", "auto"])
            troubles = self._play(trial, pair, case)
            troubles += [f"left running: {line}" for line in trial.nursery.left(PATIENCE_S)]
            trial.nursery.clear()
        if not troubles:
            troubles += differences(read_run(out), read_run(undisturbed), 0.0)
            troubles += [*line_differences(out, undisturbed), *leftovers(out)]
        return trial.judged([f"{case.name}: {each}" for each in troubles], 1, time.monotonic() - began)

    def _play(self, trial: Trial, pair: Pair, case: Case) -> list[str]:
        launchers = [pair.start(rank, "first") for rank in range(2)]
        if not pair.wait_for_steps(AT, launchers):
            return [f"it did not begin: {[launcher.err[-300:] for launcher in launchers]}"]
        other = launchers[1 - case.rank]
        (pair.folder / "hold").touch()  # the others are not to end before it is back
        case.do(pair, launchers[case.rank], case.rank)
        if case.goes_on:
            return self._come_back(trial, pair, case, launchers, other)
        trial.nursery.wait(launchers, END_S)
        saved = re.findall(r"saved after step (\d+)", "".join(each.err + each.out for each in launchers))
        if not saved or int(saved[-1]) < AT - 5:
            return [f"saved {saved} after {pair.num_steps()} steps: {other.err[-400:]}"]
        if other.code in (None, 0) or status_of(pair.out) != "stopped":
            return [f"exit code {other.code}, status {status_of(pair.out)}: {other.err[-400:]}"]
        (pair.folder / "hold").unlink()
        pair.step_s = 0.0
        again = [pair.start(rank, "again") for rank in range(2)]
        trial.nursery.wait(again, END_S)
        return [] if not any(each.code for each in again) else [f"resumed: {[each.err[-300:] for each in again]}"]

    def _come_back(
        self, trial: Trial, pair: Pair, case: Case, launchers: Sequence[Running], other: Running
    ) -> list[str]:
        lost = launchers[case.rank]
        if not trial.nursery.wait([lost], END_S):
            return ["the launcher of the machine that is lost did not end"]
        _ip("link", "set", pair.hosts[case.rank].cable, "up")
        back = pair.start(case.rank, "back")
        trial.nursery.wait([other, back], END_S, pair.go_on_if_whole)
        if (other.code, back.code) != (0, 0):
            return [f"exit codes {other.code} and {back.code}: {other.err[-300:]}\n{back.err[-300:]}"]
        text = other.out if case.rank else back.out
        return [] if re.search(r"joined: 4 ranks from step \d+ on", text) else [f"nobody joined: {text[-500:]}"]


def _words(out: Path) -> list[str]:
    words = VARIANTS["plain"].command(out)
    fixed = words[: words.index("--grains") + 2]
    waits = ["--timeout-s", str(TIMEOUT_S), "--start-timeout-s", "20"]
    return [*fixed, *VARIANT.words, "--steps", str(STEPS), *waits, "--out", str(out)]
