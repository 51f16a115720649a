"""Goodput: the share of a run's time that is left after checkpoints, failures and recoveries, and how often to save.

Failures come at random, at a constant rate 1/M (M: mean time between those of the whole job). A checkpoint after every
`tau` seconds of work costs the steps `C`; a failure costs the recovery `R`, and what was done since the last
checkpoint, which is done again. Failures may hit a checkpoint and a recovery, too. The expected time of `tau` of work:

    E = M exp(R/M) (exp((tau + C)/M) - 1)                               (Daly 2006)

which is exact, and the best `tau` solves (1 - tau/M) exp(tau/M) = exp(-C/M), whatever R is. For C much smaller than M
that is Young's sqrt(2 C M), and the lost share is C/tau + (R + tau/2)/M.

Where survivors of a lost rank go on from copies in memory, a failure costs the recovery and a few steps, and a
checkpoint is for the rest: what is lost then does not depend on `tau`. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.failure_rate import FailureRate

DAY_S = 86_400.0
MEASURED_RESTART_S = 21.3
"""All ranks start again: median on two CPU cores (benchmarks/RESULTS.md), most of it imports of torch."""
MEASURED_SURVIVAL_S = 0.6
"""Survivors go on: median beyond the time until a loss is noticed (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class Share:
    """A share of the time, with its range over the rates of failures."""

    low: float
    value: float
    high: float


@dataclass(frozen=True)
class Goodput:
    """Useful time of a run, and what the rest went to, at the middle rate."""

    share: Share
    save_every_s: float
    """Seconds of work between checkpoints: the best ones, unless others were asked for."""
    save_every_steps: int
    failure_every_s: float
    """Mean time between failures of the whole job."""
    saving: float
    """Share of the time that checkpoints take."""
    repeating: float
    """Share of the time in which steps are done again."""
    recovering: float
    """Share of the time until steps go on after a failure."""


def goodput(
    failures: FailureRate,
    nodes: int,
    *,
    step_s: float,
    save_s: float,
    recovery_s: float,
    save_every_s: float | None = None,
    repeated_steps: float | None = None,
) -> Goodput:
    """Return the goodput of a job; checkpoints come when that is best if `save_every_s` is not given.

    `save_s` is what a checkpoint costs the steps. With `repeated_steps` survivors go on, and do so many again.
    """
    job = failures.on(nodes)
    every_s = best_interval_s(save_s, DAY_S / job.rate) if save_every_s is None else save_every_s
    steps = max(1, round(every_s / step_s))
    every_s = steps * step_s
    again_s = None if repeated_steps is None else repeated_steps * step_s
    shares = [
        useful_share(every_s, save_s, recovery_s, DAY_S / rate, again_s) for rate in (job.high, job.rate, job.low)
    ]
    mean_s = DAY_S / job.rate
    saving = shares[1] * save_s / every_s
    # The share of moments with a failure within the last R seconds.
    recovering = min(1.0 - shares[1] - saving, -math.expm1(-recovery_s / mean_s))
    repeating = max(0.0, 1.0 - shares[1] - saving - recovering)
    return Goodput(Share(*shares), every_s, steps, mean_s, saving, repeating, recovering)


def best_interval_s(save_s: float, failure_every_s: float) -> float:
    """Return the work between checkpoints that makes the expected time shortest: Daly's optimum, solved exactly."""
    if save_s <= 0:
        return 0.0
    ratio = save_s / failure_every_s
    if ratio < 1e-6:  # too small for the difference to 1 below: Daly's series
        root = math.sqrt(ratio / 2)
        return young_interval_s(save_s, failure_every_s) * (1 + root / 3 + root * root / 9) - save_s
    target = math.exp(-ratio)  # (1 - u) exp(u) falls from 1 at 0 to 0 at 1
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if (1 - middle) * math.exp(middle) > target:
            low = middle
        else:
            high = middle
    return high * failure_every_s


def young_interval_s(save_s: float, failure_every_s: float) -> float:
    """Return Young's first-order optimum, sqrt(2 C M)."""
    return math.sqrt(2 * save_s * failure_every_s)


def useful_share(
    every_s: float, save_s: float, recovery_s: float, failure_every_s: float, again_s: float | None = None
) -> float:
    """Return the share of the time that is work done once.

    `again_s` is what a failure makes undone where survivors go on; None: everything since the last checkpoint.
    """
    if again_s is not None:
        # What is lost to a failure is lost whether or not another one comes: shares of the time add up.
        return max(0.0, 1.0 - (recovery_s + again_s) / failure_every_s) * every_s / (every_s + save_s)
    exponent = (every_s + save_s) / failure_every_s
    if exponent + recovery_s / failure_every_s > 700:  # it never gets there
        return 0.0
    expected = failure_every_s * math.exp(recovery_s / failure_every_s) * math.expm1(exponent)
    return every_s / expected


def auto_steps(failures: FailureRate, nodes: int, *, step_s: float, save_s: float, write_s: float = 0.0) -> int:
    """Return the steps between checkpoints of `save_every_steps: auto`, from one that was measured.

    Not more often than one can be written (`write_s`): the next would wait for it.
    """
    best_s = best_interval_s(save_s, DAY_S / failures.on(nodes).rate)
    return max(1, math.ceil(max(best_s, write_s) / max(step_s, 1e-6)))
