"""Races: several commands on the same folder or file at nearly the same moment. One wins, nothing is overwritten."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tools.chaos import healthy
from tools.chaos.campaign import Outcome, Trial
from tools.chaos.processes import Nursery, Running, send
from tools.chaos.runs import RunFacts, differences, leftovers, read_run, status_of
from tools.chaos.tasks import MARKS, VARIANTS

DEADLINE_S = 60.0
PLAIN = VARIANTS["plain"]
KINDS = ("starts", "slow start", "resumes", "resume while running", "watched", "packs", "same name", "start and resume")


def judge_starts(codes: list[int | None], errors: list[str], winner_status: str) -> list[str]:
    """Return what did not hold when several started a run in one folder: one trains, the others are refused."""
    troubles = []
    if codes.count(0) != 1:
        troubles.append(f"{codes.count(0)} of {len(codes)} won: exit codes {codes}")
    for code, error in zip(codes, errors, strict=True):
        if code not in (0, 2):
            troubles.append(f"exit code {code}")
        if "Traceback" in error:
            troubles.append(f"a traceback: {error.strip().splitlines()[-1][:200]}")
        if code == 2 and "error" not in error:
            troubles.append("refused without a message")
    if winner_status != "finished":
        troubles.append(f"status {winner_status!r} instead of 'finished'")
    return troubles


class Races:
    """See the module."""

    name = "races"
    counts = (4, 20)
    mostly_waits = False

    def why_not(self) -> str | None:
        return None

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._healthy = healthy.make(folder.parent / "healthy", nursery)
        self._shared = folder
        whole = folder / "undisturbed"
        if not whole.exists():
            process = nursery.start(PLAIN.command(whole), folder, "undisturbed")
            nursery.wait([process], DEADLINE_S)
            if process.code != 0:
                raise RuntimeError(process.err)
        self._expected: RunFacts = read_run(whole)

    def run(self, trial: Trial) -> Outcome:
        kind = KINDS[trial.index % len(KINDS)]
        begun = time.monotonic()
        play = {
            "starts": self._starts,
            "slow start": self._slow_start,
            "resumes": self._resumes,
            "resume while running": self._resume_while_running,
            "watched": self._watched,
            "packs": self._packs,
            "same name": self._same_name,
            "start and resume": self._start_and_resume,
        }[kind]
        troubles = play(trial)
        troubles += [f"left running: {line}" for line in trial.nursery.left(5.0)]
        return trial.judged([f"{kind}: {trouble}" for trouble in troubles], 1, time.monotonic() - begun)

    def _race(self, trial: Trial, commands: list[list[str]], marked: bool = True) -> list[Running]:
        """Start commands within a few milliseconds of each other, or within the time that a start takes."""
        rng = trial.random
        pause_s = rng.choice((0.0, 0.0, 0.003, 0.03, 0.15))
        running = []
        for number, words in enumerate(commands):
            env = {MARKS: str(trial.folder / f"marks{number}")} if marked else {}
            running.append(trial.nursery.start(words, trial.folder, f"racer{number}", env))
            time.sleep(pause_s * rng.random())
        trial.nursery.wait(running, DEADLINE_S)
        return running

    def _judge(self, trial: Trial, running: list[Running], out: Path) -> list[str]:
        codes, errors = [each.code for each in running], [each.err for each in running]
        troubles = judge_starts(codes, errors, status_of(out))
        return troubles or [*differences(read_run(out), self._expected, 0.0), *leftovers(out)]

    def _starts(self, trial: Trial) -> list[str]:
        out = trial.folder / "run"
        running = self._race(trial, [PLAIN.command(out)] * trial.random.choice((2, 3, 4)))
        return self._judge(trial, running, out)

    def _slow_start(self, trial: Trial) -> list[str]:
        """One that looked at the folder when it was free comes back when another has trained there."""
        out, rng = trial.folder / "run", trial.random
        slow = trial.nursery.start(PLAIN.command(out), trial.folder, "slow", {MARKS: str(trial.folder / "marks")})
        if rng.random() < 0.5:  # where the model is made: after the first look, before anything is written
            begun = time.monotonic()
            while not (trial.folder / "marks").exists() and time.monotonic() - begun < DEADLINE_S:
                time.sleep(0.0005)
        else:
            time.sleep(0.3 * rng.random())
        send(slow.pid, signal.SIGSTOP)
        quick = trial.nursery.start(PLAIN.command(out), trial.folder, "quick")
        trial.nursery.wait([quick], DEADLINE_S)
        send(slow.pid, signal.SIGCONT)
        trial.nursery.wait([slow, quick], DEADLINE_S)
        return self._judge(trial, [slow, quick], out)

    def _start_and_resume(self, trial: Trial) -> list[str]:
        """`--resume auto` may come when the other has ended: then both are right, and the run is still the same."""
        out = trial.folder / "run"
        commands = [PLAIN.command(out), PLAIN.command(out, "--resume", "auto")]
        running = self._race(trial, commands if trial.random.random() < 0.5 else commands[::-1])
        codes = [each.code for each in running]
        if codes == [0, 0]:
            return differences(read_run(out), self._expected, 0.0)
        return self._judge(trial, running, out)

    def _resumes(self, trial: Trial) -> list[str]:
        """Several resume a run that was cut short."""
        out = trial.folder / "run"
        self._finish(trial, PLAIN.command(out, "--steps", "9"))
        running = self._race(trial, [PLAIN.command(out, "--resume", "auto")] * 3)
        # Who comes when another has finished finds nothing left to do: that is no harm.
        codes = [each.code for each in running]
        if codes.count(0) > 1 and set(codes) <= {0, 2}:
            return differences(read_run(out), self._expected, 0.0)
        return self._judge(trial, running, out)

    def _resume_while_running(self, trial: Trial) -> list[str]:
        out, marks = trial.folder / "run", trial.folder / "marks"
        first = trial.nursery.start(PLAIN.command(out), trial.folder, "first", {MARKS: str(marks)})
        begun = time.monotonic()
        while not (marks.exists() and "step" in marks.read_text()):
            if time.monotonic() - begun > DEADLINE_S:
                return ["the first never trained"]
            time.sleep(0.005)
        words = PLAIN.command(
            out, *trial.random.choice((["--resume", "auto"], [], ["--resume", "auto", "--allow-change"]))
        )
        second = trial.nursery.start(words, trial.folder, "second")
        trial.nursery.wait([first, second], DEADLINE_S)
        if [first.code, second.code] == [0, 0] and "--resume" in words:
            return differences(read_run(out), self._expected, 0.0)
        return self._judge(trial, [first, second], out)

    def _watched(self, trial: Trial) -> list[str]:
        """Others look at a run while it trains; neither they nor the run are harmed."""
        out, marks = trial.folder / "run", trial.folder / "marks"
        first = trial.nursery.start(PLAIN.command(out), trial.folder, "first", {MARKS: str(marks)})
        looking = [
            ["runs", str(trial.folder)],
            ["report", str(out), "--out", str(trial.folder / "page.html")],
            ["eval", str(out), "--checkpoint", "last", "--device", "cpu"],
            ["infer", str(out), "--checkpoint", "last", "--device", "cpu", "--out", str(trial.folder / "predictions")],
            ["diff", str(out), str(self._shared / "undisturbed")],
        ]
        troubles, number = [], 0
        while first.code is None and number < 40:
            words = trial.random.choice(looking) if number else looking[0]
            watcher = trial.nursery.start(words, trial.folder, f"watcher{number}", {MARKS: str(trial.folder / "m")})
            if not trial.nursery.wait([watcher], DEADLINE_S):
                return [f"{words[0]} hangs"]
            if watcher.code not in (0, 2, *([1] if words[0] == "diff" else [])) or "Traceback" in watcher.err:
                troubles.append(f"{words[0]}: exit code {watcher.code}: {watcher.err[-200:]}")
            number += 1
            looking = looking[1:] + looking[:1]
        trial.nursery.wait([first], DEADLINE_S)
        return troubles + self._judge(trial, [first], out)

    def _packs(self, trial: Trial) -> list[str]:
        """Two packs of one file: the file is one of them, whole, and whoever was too late is told."""
        out = trial.folder / "out.h5"
        source = [str(self._healthy / name) for name in ("train.json", "dev.json")]
        commands = [["pack", source[number % 2], str(out), "--processes", "1"] for number in range(3)]
        running = self._race(trial, commands, marked=False)
        codes = [each.code for each in running]
        troubles = [f"a traceback: {each.err[-200:]}" for each in running if "Traceback" in each.err]
        if 0 not in codes or not set(codes) <= {0, 2}:
            troubles.append(f"exit codes {codes}")
        check = trial.nursery.start(["pack", "--verify", str(out)], trial.folder, "verify")
        trial.nursery.wait([check], DEADLINE_S)
        if check.code != 0:
            troubles.append(f"the file is damaged: {check.out}{check.err}")
        aside = [path.name for path in trial.folder.iterdir() if "writing" in path.name or path.name.startswith(".")]
        return troubles + [f"{name} is left" for name in aside if not name.endswith(".lock")]

    def _same_name(self, trial: Trial) -> list[str]:
        """`--exp-name` numbers folders: all win, each in its own."""
        words = PLAIN.command(trial.folder / "unused")
        at = words.index("--out")
        words = [*words[:at], *words[at + 2 :], "--exp-name", "same", "--runs-dir", str(trial.folder / "runs")]
        running = self._race(trial, [words] * 3)
        codes = [each.code for each in running]
        outs = sorted((trial.folder / "runs").iterdir())
        troubles = [f"a traceback: {each.err[-200:]}" for each in running if "Traceback" in each.err]
        if not set(codes) <= {0, 2} or codes.count(0) != len(outs):
            troubles.append(f"exit codes {codes}, folders {[out.name for out in outs]}")
        for out in outs:
            troubles += differences(read_run(out), self._expected, 0.0)
        return troubles

    @staticmethod
    def _finish(trial: Trial, words: list[str]) -> None:
        process = trial.nursery.start(words, trial.folder, "before")
        trial.nursery.wait([process], DEADLINE_S)
        if process.code != 0:
            raise RuntimeError(process.err)
