"""The random numbers of a grain: keyed for every generator that a model or a loss draws from.

torch's generators are seeded for every grain. Seeding numpy's and Python's costs more than the rest of a step's
bookkeeping and few losses use them, so it is done for losses that do: their states are looked at now and then.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

LOOK_EVERY = 256
"""Steps between two looks."""


class Dice:
    """Seeds what one grain may draw from."""

    def __init__(self, device: torch.device) -> None:
        self._device_generator: torch.Generator | None = None
        if device.type == "cuda":
            self._device_generator = torch.cuda.default_generators[device.index or 0]
        self._seeds_all = False
        self._first_step: int | None = None
        self._seeded: Any = None

    def seed(self, value: int, step: int) -> None:
        """Before a grain's forward."""
        torch.default_generator.manual_seed(value)
        if self._device_generator is not None:
            self._device_generator.manual_seed(value)
        if self._seeds_all or self._first_step is None or step % LOOK_EVERY == 0:
            self._seed_others(value, step)

    def look(self, step: int) -> None:
        """After a grain's forward: was anything drawn from the others?"""
        if self._seeded is None:
            return
        if self._seeded != _others():
            self._seeds_all = True
            if step != self._first_step:
                logging.getLogger("paceline").warning(
                    "the loss draws from numpy's or Python's generator: keyed from step %d on, not before", step
                )
        self._seeded = None

    def _seed_others(self, value: int, step: int) -> None:
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        if self._first_step is None:
            self._first_step = step
        if not self._seeds_all:
            self._seeded = _others()


def _others() -> tuple[Any, ...]:
    """What tells whether numpy's or Python's generator has been drawn from."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2], state[3]
