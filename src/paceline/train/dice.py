"""numpy's and Python's random numbers in a loss, keyed like torch's.

The engine seeds torch's generators for every grain. Seeding these two costs as much as the rest of a step's bookkeeping
and few losses draw from them, so it is done for losses that do: at the first step and now and then they are looked at.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np

LOOK_EVERY = 1024
"""Steps between two looks."""


class Dice:
    """Seeds numpy's and Python's generators for the grains of a loss that draws from them."""

    def __init__(self) -> None:
        self._is_used = False
        self._first_step: int | None = None
        self._seeded: Any = None

    def are_due(self, step: int) -> bool:
        """Whether this step's grains are to be seeded and looked at."""
        if self._first_step is None:
            self._first_step = step
        return self._is_used or step == self._first_step or step % LOOK_EVERY == 0

    def seed(self, value: int) -> None:
        """Before a grain's forward."""
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        if not self._is_used:
            self._seeded = _others()

    def look(self, step: int) -> None:
        """After a grain's forward: was anything drawn?"""
        if self._is_used or self._seeded == _others():
            return
        self._is_used = True
        if step != self._first_step:
            logging.getLogger("paceline").warning(
                "the loss draws from numpy's or Python's generator: keyed from step %d on, not before", step
            )


def _others() -> tuple[Any, ...]:
    """What tells whether numpy's or Python's generator has been drawn from."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2], state[3]
