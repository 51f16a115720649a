"""Steps between checkpoints of `save_every_steps: auto`: chosen once, by a measured one, the same on all ranks.

The first checkpoint of a launch warms up what the second one needs; the second, `MEASURING_SAVES` steps later, says
what one costs, and the steps between the two how long a step takes. The choice is part of the position, so that every
checkpoint after it has it, and a resumed run saves at the same steps.

Failures come at random, at a constant rate 1/M (M: mean time between those of the whole job). The expected time of
`tau` of work, with a checkpoint of cost `C` after it, is shortest where (1 - tau/M) exp(tau/M) = exp(-C/M) (Daly 2006).
For C much smaller than M that is Young's sqrt(2 C M).
"""

from __future__ import annotations

import math

from paceline.config.settings import TrainConfig
from paceline.core.failure_rate import FailureRate, parse_failures
from paceline.core.units import counted, duration
from paceline.train.position import Position
from paceline.world.link import Link

DAY_S = 86_400.0


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


def auto_steps(failures: FailureRate, nodes: int, *, step_s: float, save_s: float, write_s: float = 0.0) -> int:
    """Return the steps between checkpoints of `save_every_steps: auto`, from one that was measured.

    Not more often than one can be written (`write_s`): the next would wait for it.
    """
    best_s = best_interval_s(save_s, DAY_S / failures.on(nodes).rate)
    return max(1, math.ceil(max(best_s, write_s) / max(step_s, 1e-6)))


class SaveInterval:
    """Chooses when it has seen two checkpoints."""

    def __init__(self, config: TrainConfig, link: Link) -> None:
        self._is_asked = config.save_every_steps == "auto" and config.out is not None
        self._failures, self._link = parse_failures(config.failures), link
        self._before: tuple[int, float] | None = None

    def saved(self, position: Position, began_s: float, ended_s: float, write_s: float) -> tuple[int, str] | None:
        """Note a checkpoint; return the interval and a line on it if this one has decided. All ranks must call it.

        `write_s` is how long the one before took until it was on disk.
        """
        before = self._before
        if not self._is_asked or position.save_every is not None:
            return None
        self._before = position.num_steps, ended_s
        if before is None or position.num_steps <= before[0]:
            return None
        steps, since_s = before
        own = ended_s - began_s, (began_s - since_s) / (position.num_steps - steps), write_s
        save_s, step_s, write_s = (max(each) for each in zip(*self._link.gather_objects(own), strict=True))
        nodes = self._link.world.nodes
        every = auto_steps(self._failures, nodes, step_s=step_s, save_s=save_s, write_s=write_s)
        fails_s = DAY_S / self._failures.on(nodes).rate
        line = (
            f"a checkpoint every {counted(every, 'step')} ({duration(every * step_s)}): one takes "
            f"{1e3 * save_s:.3g} ms, and {counted(nodes, 'node')} may fail every {duration(fails_s)}"
        )
        return every, line
