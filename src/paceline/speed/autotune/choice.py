"""The choice of `-O4`: from candidates and a clock to the fastest one.

`choose` is pure but for what measuring does. cache.py keeps its choices for the machine; a run keeps its own, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.errors import Failed, PacelineError
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.autotune.proof import is_faster

HOPELESS = 2.0
"""A candidate that is this many times slower than the best in each of its first rounds is not timed further."""
NEAR = 1.2
"""Candidates within this factor of the best are timed again, in turns."""
TIE = 0.03
"""Candidates within this share of the fastest count as equally fast: less than that is noise."""
MOST_BY_COMPILING = 4.0
"""Compiling takes minutes: it is not tried where the same at -O2 is this many times slower than the best."""
MOST_BESIDE_KERNELS = 1.4
"""The same where the best has kernels that leave nothing as it was: they have fused what a compiler would. (What it won
on an H200 without them: QuartzNet 15x5 1.13 times, Jasper 10x5dr 1.19 times.)"""

MOST_BY_FP32 = 2.0
"""-O0 takes what -O1 does and multiplies fp32 whole, which costs a large network a minute to time on a GPU: it is not
tried beside kernels or graphs where -O1 is this many times slower than the best."""
CONTEST_S = 60.0
"""No further candidate begins after so many seconds, once one has been measured: likely winners have come first, and a
large network takes a minute for each of the others."""
COMPILING_S = 30.0
"""The same for one that has to be compiled, which takes a large network two minutes, where kernels lead."""


class CannotRun(PacelineError):
    """A candidate that does not work here, and why."""

    why: str
    advice: str = ""
    sentence = "{why}"
    hint = "{advice}"


@dataclass(frozen=True)
class Choice:
    """The fastest candidate, and what it was chosen from."""

    candidate: Candidate
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """By the candidate's name: those timed in turns first, the fastest of them in front."""
    notes: tuple[str, ...] = ()
    """Candidates that could not run or were not tried, and why."""

    def record(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        return {"way": self.candidate.record(), "step_ms": dict(self.step_ms), "notes": list(self.notes)}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Choice:
        """Return the choice that `record` was made of."""
        times = {str(name): float(value) for name, value in record["step_ms"].items()}
        return cls(Candidate.read(record["way"]), times, tuple(map(str, record["notes"])))

    def line(self, source: str, asked: str = "-O4") -> str:
        """`-O4 is -O2 + kernels: 29.1 ms a step, measured; -O2 322 ms, -O1 470 ms`"""
        name = self.candidate.name
        others = [f"{other} {_short(ms)}" for other, ms in self.step_ms.items() if other != name]
        first = f"{_short(self.step_ms[name])} a step, {source}" if name in self.step_ms else source
        return f"{asked} is {name}: {'; '.join([first, *([', '.join(others)] if others else [])])}"


def choose(
    candidates: Sequence[Candidate],
    measure: Callable[[Candidate, float], float],
    in_turns: Callable[[Sequence[Candidate]], Mapping[Candidate, float]],
    spent_s: Callable[[], float] = lambda: 0.0,
) -> Choice:
    """Return the fastest candidate; of those that are as fast, the one that changes least.

    Args:
        candidates: Likely winners first.
        measure: `measure(candidate, limit_s)` gives seconds per step, or raises `CannotRun`; it may stop early and
            return what it has once steps take longer than `limit_s`. Whatever else the machine does meanwhile counts
            against that candidate alone.
        in_turns: Gives seconds per step of several, measured in a race. Only that decides between those which may win.
        spent_s: Gives the seconds since the contest began.
    """
    seconds: dict[Candidate, float] = {}
    failures: dict[Candidate, CannotRun] = {}
    notes: list[str] = []
    for candidate in candidates:
        best = min(seconds.values(), default=float("inf"))
        most = _most_by_compiling(candidates, seconds)
        why = _not_worth_compiling(candidate, seconds, best, most) if candidate.is_compiled else None
        why = why or _not_worth_fp32(candidate, seconds, best) or _too_late(candidate, seconds, spent_s())
        if why is not None:
            notes.append(f"{candidate.name} was not tried: {why}")
            continue
        try:
            seconds[candidate] = measure(candidate, HOPELESS * best)
        except CannotRun as error:
            failures[candidate] = error
    if not seconds:
        raise _nothing_runs(failures)
    last = finalists(seconds)
    if len(last) > 1:
        try:
            seconds.update(in_turns(last))
        except CannotRun as error:
            notes.append(f"{', '.join(each.name for each in last)} were timed one after the other only: {error}")
    last.sort(key=lambda candidate: seconds[candidate])
    # Of few rounds the median is all that is known: it stands for them as one.
    tied = [each for each in last if not is_faster([seconds[each] / seconds[last[0]]], TIE)]
    others = sorted(seconds.keys() - set(last), key=lambda candidate: seconds[candidate])
    times = {each.name: round(1e3 * seconds[each], 4) for each in [*last, *others]}
    failed = [f"{candidate.name} cannot run here: {why}" for candidate, why in failures.items()]
    return Choice(min(tied, key=lambda candidate: candidate.change), times, (*failed, *notes))


def _most_by_compiling(candidates: Sequence[Candidate], seconds: Mapping[Candidate, float]) -> float:
    """Return the factor by which compiling may make a candidate faster, as far as it is known."""
    leaves_some = any(each.kernels and each.is_compiled for each in candidates)  # see `candidates`
    best = min(seconds, key=lambda candidate: seconds[candidate], default=None)
    covers = best is not None and best.kernels and not leaves_some
    return MOST_BESIDE_KERNELS if covers else MOST_BY_COMPILING


def _not_worth_compiling(
    candidate: Candidate, seconds: Mapping[Candidate, float], best: float, most: float
) -> str | None:
    """Return why compiling, which takes minutes, cannot win here, or None."""
    recorded, plain = replace(candidate, graphs=True), replace(candidate, level=2)
    if recorded in seconds:
        return f"{recorded.name} runs the same kernels without gaps between them"
    slower = seconds.get(plain, best) / best
    return f"{plain.name} is {slower:.1f} times slower than the best" if slower > most else None


def _not_worth_fp32(candidate: Candidate, seconds: Mapping[Candidate, float], best: float) -> str | None:
    """Return why plain fp32 cannot win here, or None."""
    rounded = Candidate(1)
    if candidate != Candidate(0) or rounded not in seconds:
        return None
    leader = min(seconds, key=lambda each: seconds[each])
    slower = seconds[rounded] / best
    if not (leader.kernels or leader.graphs) or slower <= MOST_BY_FP32:
        return None
    return f"{rounded.name} is {slower:.1f} times slower than the best"


def _too_late(candidate: Candidate, seconds: Mapping[Candidate, float], spent_s: float) -> str | None:
    """Return that the contest has taken long enough, or None."""
    if not seconds:
        return None
    leader = min(seconds, key=lambda each: seconds[each])
    if spent_s <= (COMPILING_S if candidate.is_compiled and leader.kernels else CONTEST_S):
        return None
    return f"the contest had taken {spent_s:.0f} s"


def finalists(seconds: Mapping[Candidate, float]) -> list[Candidate]:
    """Return those that may still turn out to be the fastest: near the best, and the second unless it is hopeless."""
    ranked = sorted(seconds, key=lambda candidate: seconds[candidate])
    best = seconds[ranked[0]]
    return [
        candidate
        for place, candidate in enumerate(ranked)
        if seconds[candidate] <= NEAR * best or (place == 1 and seconds[candidate] <= HOPELESS * best)
    ]


def _nothing_runs(failures: Mapping[Candidate, CannotRun]) -> BaseException:
    """Return the failure of the plainest candidate: it says best what is wrong with the task itself."""
    plainest = failures[min(failures, key=lambda candidate: candidate.change)]
    lines = "".join(f"\n  {candidate.name}: {why}" for candidate, why in failures.items())
    return plainest.__cause__ or Failed(
        f"no way to compute a step works here:{lines}", hint="run with `-O0`, which shows the failure as it is"
    )


def _short(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms:,.0f} ms"
