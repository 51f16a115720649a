"""Warm-up, stable, decay: the learning rate stays, and falls to `min_lr` in the last fifth of the run."""

from __future__ import annotations

from paceline.plugins import Schedule, Span

DECAY = 0.2


def rate(span: Span, step: int) -> float:
    """Return the learning rate of a step; the warm-up before is Paceline's own."""
    left = (1.0 - span.progress(step)) / DECAY
    return span.between(min(1.0, left))


SCHEDULE = Schedule(rate, options=frozenset({"min_lr"}), needs_end=True)
