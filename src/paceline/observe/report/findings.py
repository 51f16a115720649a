"""What held a run back, over all of its epochs: what each epoch's verdict found, joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.callback import Record
from paceline.observe.records import EpochRecord
from paceline.observe.report.runs import RunRecord
from paceline.observe.verdict import LEAST_SECONDS, LEAST_STEPS, is_judged, verdict


@dataclass(frozen=True)
class Held:
    """One thing that held a run back."""

    kind: str
    text: str
    """As the last epoch in which it spoke has it."""
    advice: str
    share: float
    """The most, of all epochs."""
    epochs: tuple[int, ...]
    """Counted from 1."""
    num_epochs: int
    """Of the run."""

    @property
    def when(self) -> str:
        if len(self.epochs) == self.num_epochs:
            return "in every epoch" if self.num_epochs > 1 else "in the one epoch"
        return f"in {len(self.epochs)} of {self.num_epochs} epochs ({ranges(self.epochs)})"


def held_back(run: RunRecord) -> list[Held]:
    """What the epochs' verdicts say, the costliest first."""
    found: dict[tuple[str, int | None], list[tuple[int, Record]]] = {}
    for number, epoch in enumerate(run.epochs, 1):
        for finding in _findings(epoch):
            found.setdefault((finding["kind"], finding.get("rank")), []).append((number, finding))
    joined = []
    for (kind, _), told in found.items():
        last = told[-1][1]
        share = max(float(finding.get("share") or 0.0) for _, finding in told)
        epochs = tuple(number for number, _ in told)
        joined.append(Held(kind, str(last["text"]), str(last["advice"]), share, epochs, len(run.epochs)))
    return sorted(joined, key=lambda held: -held.share)


def nothing_found(run: RunRecord) -> tuple[bool, str]:
    """What no finding means: whether that is good, and in words. An epoch that was not judged says nothing."""
    judged = sum(is_judged(EpochRecord.from_json(epoch)) for epoch in run.epochs)
    if not run.epochs:
        return False, "No epoch has ended: nothing can be said yet."
    too_short = f"shorter than {LEAST_STEPS} steps or {LEAST_SECONDS:g} second"
    if judged == 0:
        which = "The one epoch was" if len(run.epochs) == 1 else f"All {len(run.epochs)} epochs were"
        return False, f"{which} {too_short}: too little to say what holds the run back."
    seen = "Nothing that is known to hold runs back was seen"
    if judged == len(run.epochs):
        return True, f"{seen}."
    return True, f"{seen} in {judged} of {len(run.epochs)} epochs; the others were {too_short}, and were not judged."


def _findings(epoch: Record) -> Sequence[dict[str, Any]]:
    """As written down; of a run that is older than verdicts, as they would be."""
    if "findings" in epoch:
        return list(epoch["findings"] or [])
    return [finding.to_json() for finding in verdict(EpochRecord.from_json(epoch))] if epoch.get("seconds") else []


def ranges(numbers: Sequence[int]) -> str:
    """`1-3, 7`"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
