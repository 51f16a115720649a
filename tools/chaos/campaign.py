"""Campaigns, their cases and the table of their results."""

from __future__ import annotations

import json
import os
import random
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from tools.chaos.processes import Nursery


@dataclass(frozen=True)
class Bad:
    """A case that did not hold."""

    reason: str
    repeat: str
    """Command that repeats it alone."""
    evidence: str
    """Folder or file with what it left."""


@dataclass(frozen=True)
class Outcome:
    """Result of one draw: usually one case, for some campaigns several."""

    num_cases: int = 1
    bad: tuple[Bad, ...] = ()
    slowest_s: float = 0.0


@dataclass(frozen=True)
class Trial:
    """What a campaign gets to draw and run one case."""

    campaign: str
    seed: int
    index: int
    folder: Path
    """Empty; removed afterwards if the case held, else kept as evidence."""
    nursery: Nursery

    @property
    def random(self) -> random.Random:
        """A new generator, the same for every repetition of the case."""
        return random.Random(f"{self.campaign}/{self.seed}/{self.index}")

    @property
    def repeat(self) -> str:
        return f"python -m tools.chaos {self.campaign} --seed {self.seed} --only {self.index}"

    def judged(self, troubles: Sequence[str], num_cases: int = 1, slowest_s: float = 0.0) -> Outcome:
        """Return the outcome of a case with this list of what did not hold."""
        if not troubles:
            return Outcome(num_cases, (), slowest_s)
        (self.folder / "troubles.txt").write_text("\n".join([*troubles, "", self.repeat, ""]), encoding="utf-8")
        return Outcome(num_cases, (Bad("; ".join(troubles)[:600], self.repeat, str(self.folder)),), slowest_s)


class Campaign(Protocol):
    """A kind of attack. Cases are independent of each other: each is drawn from the seed and its number alone."""

    name: str
    counts: tuple[int, int]
    """Cases of a run in CI and of a long run."""
    mostly_waits: bool
    """Its cases are waits for time-outs more than work: it may run beside another campaign."""

    def why_not(self) -> str | None:
        """Return why the campaign cannot run on this machine, None where it can."""
        ...

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        """Make what all cases share; called once, before work is split. What only some need is `made_once`."""
        ...

    def run(self, trial: Trial) -> Outcome:
        """Draw a case, run it and judge it."""
        ...


@dataclass
class Row:
    """A line of the table."""

    campaign: str
    cases: int = 0
    bad: list[Bad] = field(default_factory=list)
    slowest_s: float = 0.0
    seconds: float = 0.0
    skipped: str = ""

    def add(self, outcome: Outcome, seconds: float) -> None:
        self.cases += outcome.num_cases
        self.bad += outcome.bad
        self.slowest_s = max(self.slowest_s, outcome.slowest_s or seconds)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Row:
        values = json.loads(text)
        return cls(**{**values, "bad": [Bad(**bad) for bad in values["bad"]]})


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return a file or folder that several cases share, made by the first that asks for it, of whatever job.

    `make` gets the name to make it under; jobs that make it at the same time use the one that was ready first.
    """
    if not path.exists():
        aside = path.with_name(f"{path.name}-{os.getpid()}")
        make(aside)
        try:
            aside.rename(path)
        except OSError:
            assert path.exists()
    return path


def join(rows: Iterable[Row]) -> Row:
    """Return one row for the parts of a campaign that ran side by side."""
    parts = list(rows)
    return Row(
        parts[0].campaign,
        sum(row.cases for row in parts),
        [bad for row in parts for bad in row.bad],
        max(row.slowest_s for row in parts),
        max(row.seconds for row in parts),
        parts[0].skipped,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the results as text: one line per campaign."""
    lines = [f"{'campaign':<12}{'cases':>8}{'good':>8}{'bad':>6}{'slowest':>10}{'duration':>10}"]
    for row in rows:
        if row.skipped:
            lines.append(f"{row.campaign:<12}skipped: {row.skipped}")
            continue
        good = row.cases - len(row.bad)
        lines.append(
            f"{row.campaign:<12}{row.cases:>8,}{good:>8,}{len(row.bad):>6}{row.slowest_s:>8.1f} s{row.seconds:>8.0f} s"
        )
    return "\n".join(lines) + "\n"


def work(
    campaign: Campaign, seed: int, indices: Iterable[int], count: int, until: float, folder: Path, nursery: Nursery
) -> Row:
    """Run cases until there are `count` of them, or the time `until` (of `time.monotonic`) has come."""
    row = Row(campaign.name)
    start = time.monotonic()
    for index in indices:
        if row.cases >= count or time.monotonic() >= until:
            break
        begun = time.monotonic()
        trial = Trial(campaign.name, seed, index, folder / f"{campaign.name}-{seed}-{index}", nursery)
        row.add(run_trial(campaign, trial), time.monotonic() - begun)
    row.seconds = time.monotonic() - start
    return row


def run_trial(campaign: Campaign, trial: Trial) -> Outcome:
    """Run one case; a mistake in the campaign itself is a bad case, too. Nothing of a good case stays."""
    trial.nursery.clear()
    remove(trial.folder)
    trial.folder.mkdir(parents=True)
    try:
        outcome = campaign.run(trial)
    except Exception:
        outcome = trial.judged([f"the campaign itself failed:\n{traceback.format_exc()}"])
    finally:
        trial.nursery.clear()
    if not outcome.bad:
        remove(trial.folder)
    return outcome


def remove(folder: Path) -> None:
    """Delete a folder whatever the rights of its content."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
