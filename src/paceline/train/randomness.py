"""Random generators that a loss may draw from, seeded for each grain by (seed, step, grain).

torch's generators are seeded for every grain. Seeding those of numpy and Python costs as much as the rest of a step's
bookkeeping and few losses draw from them, so it is done for losses that do: the first step and every `CHECK_EVERY`th
find out.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from paceline.core.keys import key

CHECK_EVERY = 1024
"""Steps between two checks for draws from numpy's or Python's generator."""


class GrainRandomness:
    """The generators of this process, on the host and on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._step = seed, 0
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._first_step: int | None = None
        self._is_other_used = False  # numpy's or Python's
        self._seeds_other = False  # in this step
        self._seeded: Any = None

    def begin_step(self, step: int) -> None:
        if self._first_step is None:
            self._first_step = step
        self._step = step
        self._seeds_other = self._is_other_used or step == self._first_step or step % CHECK_EVERY == 0

    def before_grain(self, number: int) -> None:
        """Seed the generators for the forward of grain `number`."""
        value = key(self._seed, self._step, number)
        for generator in self._generators:
            generator.manual_seed(value)
        if self._seeds_other:
            random.seed(value)
            np.random.seed(value & 0xFFFFFFFF)
            if not self._is_other_used:
                self._seeded = _other_states()

    def after_forward(self) -> None:
        """Check whether the forward drew from numpy's or Python's generator."""
        if not self._seeds_other or self._is_other_used or self._seeded == _other_states():
            return
        self._is_other_used = True
        if self._step != self._first_step:
            logging.getLogger("paceline").warning(
                "the loss draws from numpy's or Python's generator: keyed from step %d on, not before", self._step
            )


def _other_states() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators, comparable."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2], state[3]
