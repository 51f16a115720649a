"""Steps between checkpoints of `save_every_steps: auto`: chosen once, by a measured one, the same on all ranks.

The first checkpoint of a launch warms up what the second one needs; the second, `MEASURING_SAVES` steps later, says
what one costs, and the steps between the two how long a step takes. The choice is part of the position, so that every
checkpoint after it has it, and a resumed run saves at the same steps.
"""

from __future__ import annotations

from paceline.config.settings import TrainConfig
from paceline.core.failure_rate import parse_failures
from paceline.core.units import counted, duration
from paceline.lab.predict.goodput import DAY_S, auto_steps
from paceline.train.position import Position
from paceline.world.link import Link


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
