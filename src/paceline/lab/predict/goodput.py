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

from paceline.core.failure_rate import FailureRate
from paceline.train.save_interval import DAY_S, best_interval_s

MEASURED_RESTART_S = 21.3
"""All ranks start again: median on two CPU cores (benchmarks/RESULTS.md), most of it imports of torch."""
MEASURED_SURVIVAL_S = 0.6
"""Survivors go on: median beyond the time until a loss is noticed (benchmarks/RESULTS.md)."""


def goodput(
    failures: FailureRate,
    nodes: int,
    *,
    step_s: float,
    save_s: float,
    recovery_s: float,
    repeated_steps: float | None = None,
) -> tuple[float, float, float]:
    """Return the goodput of a job with the best interval of checkpoints, at the high, middle and low failure rate.

    `save_s` is the time that a checkpoint costs the steps. With `repeated_steps`, survivors continue and repeat so
    many steps.
    """
    job = failures.on(nodes)
    every_s = max(step_s, best_interval_s(save_s, DAY_S / job.rate))
    again_s = None if repeated_steps is None else repeated_steps * step_s
    high, middle, low = (
        useful_share(every_s, save_s, recovery_s, DAY_S / rate, again_s) for rate in (job.high, job.rate, job.low)
    )
    return high, middle, low


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
