"""Which way of computing is the fastest here: measured once, kept for the machine and with the run.

`choose` decides and is pure but for what measuring does; `Cache` keeps what was found in a folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.core.disk import replacing
from paceline.core.errors import PacelineError
from paceline.speed.autotune.candidates import Candidate

HOPELESS = 2.0
"""A way that is so many times slower than the best in each of its first rounds is not timed further."""
NEAR = 1.2
"""Ways within this factor of the best are timed again, in turns."""
TIE = 1.03
"""Ways within this factor of the fastest count as equally fast: less than that is noise."""
MOST_BY_COMPILING = 4.0
"""Where the same at -O2 is so many times slower than the best, compiling it, which takes minutes, is not tried."""


class CannotRun(Exception):
    """A way that does not work here, and why."""


class NothingRuns(PacelineError):
    """Every way failed, the plain ones too."""

    hint = "run with `-O0`, which shows the failure as it is"

    def __init__(self, failures: Mapping[str, str]) -> None:
        lines = "\n".join(f"  {name}: {why}" for name, why in failures.items())
        super().__init__(f"no way to compute a step works here:\n{lines}")
        self.failures = dict(failures)


@dataclass(frozen=True)
class Choice:
    """The fastest way, and what it was chosen from."""

    way: Candidate
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """By the name of the way: those timed in turns first, the fastest of them in front."""
    notes: tuple[str, ...] = ()
    """What could not run or was not tried, and why."""

    def record(self) -> dict[str, Any]:
        """As plain values, for a file."""
        return {"way": self.way.record(), "step_ms": dict(self.step_ms), "notes": list(self.notes)}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Choice:
        """The counterpart of `record`."""
        times = {str(name): float(value) for name, value in record["step_ms"].items()}
        return cls(Candidate.read(record["way"]), times, tuple(map(str, record["notes"])))

    def line(self, source: str) -> str:
        """`-O4 is -O2 + kernels: 29.1 ms a step, measured; -O2 322 ms, -O1 470 ms`"""
        others = [f"{name} {_short(ms)}" for name, ms in self.step_ms.items() if name != self.way.name]
        own = self.step_ms.get(self.way.name)
        found = source if own is None else f"{_short(own)} a step, {source}"
        return f"-O4 is {self.way.name}: {'; '.join([found, *([', '.join(others)] if others else [])])}"


def choose(
    ways: Sequence[Candidate],
    measure: Callable[[Candidate, float], float],
    in_turns: Callable[[Sequence[Candidate]], Mapping[Candidate, float]],
) -> Choice:
    """The fastest of `ways`; of those that are as fast, the one that changes least.

    `measure(way, limit_s)` gives seconds per step, or raises `CannotRun`; it may stop early and return what it has once
    steps take longer than `limit_s`. What else the machine does while a way is measured counts against that way alone:
    so those that may still win are measured again by `in_turns`, which hits all alike, and only that decides.
    """
    seconds: dict[Candidate, float] = {}
    failures: dict[Candidate, CannotRun] = {}
    notes: list[str] = []
    for way in ways:
        best = min(seconds.values(), default=float("inf"))
        why = _not_worth_compiling(way, seconds, best) if way.is_compiled else None
        if why is not None:
            notes.append(f"{way.name} was not tried: {why}")
            continue
        try:
            seconds[way] = measure(way, HOPELESS * best)
        except CannotRun as error:
            failures[way] = error
    if not seconds:
        raise _nothing_runs(failures)
    last = finalists(seconds)
    if len(last) > 1:
        try:
            seconds.update(in_turns(last))
        except CannotRun as error:
            notes.append(f"{', '.join(way.name for way in last)} were timed one after the other only: {error}")
    last.sort(key=lambda way: seconds[way])
    tied = [way for way in last if seconds[way] <= TIE * seconds[last[0]]]
    others = sorted(seconds.keys() - set(last), key=lambda way: seconds[way])
    times = {way.name: round(1e3 * seconds[way], 4) for way in [*last, *others]}
    failed = [f"{way.name} cannot run here: {why}" for way, why in failures.items()]
    return Choice(min(tied, key=change), times, (*failed, *notes))


def _not_worth_compiling(way: Candidate, seconds: Mapping[Candidate, float], best: float) -> str | None:
    """Compiling takes minutes: why it cannot win, or None."""
    recorded, plain = replace(way, graphs=True), replace(way, level=2)
    if recorded in seconds:
        return f"{recorded.name} runs the same kernels without gaps between them"
    slower = seconds.get(plain, best) / best
    return f"{plain.name} is {slower:.1f} times slower than the best" if slower > MOST_BY_COMPILING else None


def finalists(seconds: Mapping[Candidate, float]) -> list[Candidate]:
    """Those that may still turn out to be the fastest: near the best, and the second where it is not hopeless."""
    ranked = sorted(seconds, key=lambda way: seconds[way])
    best = seconds[ranked[0]]
    return [
        way
        for place, way in enumerate(ranked)
        if seconds[way] <= NEAR * best or (place == 1 and seconds[way] <= HOPELESS * best)
    ]


def change(way: Candidate) -> tuple[int, bool, bool]:
    """How far a way is from `-O0`, for comparison: the level first, then kernels, which round otherwise than torch's;
    a graph changes no number."""
    return way.level, way.kernels, way.graphs


def _nothing_runs(failures: Mapping[Candidate, CannotRun]) -> BaseException:
    """What is wrong with the task itself is best said by what the plainest way ran into."""
    plainest = failures[min(failures, key=change)]
    return plainest.__cause__ or NothingRuns({way.name: str(why) for way, why in failures.items()})


class Cache:
    """Choices in a folder, one small file each, named by what they depend on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, facts: Mapping[str, Any]) -> Choice | None:
        """What was chosen under the very same facts; a file that cannot be read counts as none."""
        try:
            stored = json.loads(self._file(facts).read_text(encoding="utf-8"))
            return Choice.read(stored["choice"]) if stored["facts"] == _plain(facts) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, facts: Mapping[str, Any], choice: Choice) -> str | None:
        """Remember a choice; why it could not be, where that is so: the run does not depend on it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._file(facts)) as file:
                json.dump({"facts": _plain(facts), "choice": choice.record()}, file, indent=1)
        except OSError as error:
            return f"the choice is not kept in {self._folder} ({error.strerror}): the next run measures again"
        return None

    def _file(self, facts: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(_plain(facts), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where this user's programs keep what can be had again (XDG base directories)."""
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(base) / "paceline" / "ways"


def _plain(facts: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(facts)))


def _short(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms:,.0f} ms"
