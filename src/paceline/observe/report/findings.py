"""Findings of all epochs of a run, joined: what held it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.language import translate
from paceline.core.units import ranges, worded
from paceline.observe.records import EpochRecord, Finding, Matter
from paceline.observe.report.runs import ReportedRun
from paceline.observe.verdict import LEAST_SECONDS, LEAST_STEPS, is_judged, verdict


@dataclass(frozen=True)
class Held:
    """Thing that held a run back in some of its epochs."""

    kind: str
    text: str
    """In the last epoch that has it."""
    advice: str
    share: float
    """The largest of all epochs."""
    epochs: tuple[int, ...]
    """Counted from 1."""
    num_epochs: int
    """Of the run."""

    @property
    def when(self) -> str:
        if not self.epochs:
            return ""
        if len(self.epochs) == self.num_epochs:
            return translate("in every epoch") if self.num_epochs > 1 else translate("in the one epoch")
        values = {"some": len(self.epochs), "epochs": self.num_epochs, "which": ranges(self.epochs)}
        return worded(translate("in {some} of {epochs:#epoch} ({which})"), values)


def held_back(run: ReportedRun) -> list[Held]:
    """Join the findings of the epochs, the costliest first."""
    by_matter: dict[Matter, list[tuple[int, Finding]]] = {}
    for number, epoch in enumerate(run.epochs, 1):
        for finding in _findings(epoch):
            by_matter.setdefault(finding.matter, []).append((number, finding))
    joined = []
    for (kind, _), numbered in by_matter.items():
        last = numbered[-1][1]
        share = max(finding.share for _, finding in numbered)
        epochs = tuple(number for number, _ in numbered)
        joined.append(Held(kind, last.text, last.advice, share, epochs, len(run.epochs)))
    return sorted(joined, key=lambda held: -held.share)


def nothing_found(run: ReportedRun) -> tuple[bool, str]:
    """Explain why there is no finding: True if that is good, and the words. Not every epoch is judged."""
    judged = sum(is_judged(epoch) for epoch in run.epochs)
    if not run.epochs:
        return False, translate("No epoch has ended: nothing can be said yet.")
    least = {"steps": LEAST_STEPS, "seconds": f"{LEAST_SECONDS:g}", "epochs": len(run.epochs), "judged": judged}
    if judged == 0:
        one = translate(
            "The one epoch was shorter than {steps} steps or {seconds} second: too little to say what holds the run "
            "back."
        )
        many = translate(
            "All {epochs} epochs were shorter than {steps} steps or {seconds} second: too little to say what holds the "
            "run back."
        )
        return False, worded(one if len(run.epochs) == 1 else many, least)
    if judged == len(run.epochs):
        return True, translate("Nothing that is known to hold runs back was seen.")
    some = translate(
        "Nothing that is known to hold runs back was seen in {judged} of {epochs:#epoch}; the others were shorter than "
        "{steps} steps or {seconds} second, and were not judged."
    )
    return True, worded(some, least)


def _findings(epoch: EpochRecord) -> Sequence[Finding]:
    """Return the findings as recorded; of a run that is older than verdicts, as they would be."""
    return verdict(epoch) if epoch.findings is None else epoch.findings
