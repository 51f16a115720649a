"""What every rank knows of the buffer, whoever holds the payload: which item is in which slot, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NOWHERE = -1


class SlotTable:
    """Slots 0..n-1 are in use. `row` is this rank's own: where it holds the payload, or `NOWHERE`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_stored = 0
        self.index = np.full(capacity, NOWHERE)
        self.label = np.full(capacity, NOWHERE)
        self.score = np.zeros(capacity, np.float64)
        self.owner = np.full(capacity, NOWHERE)
        self.row = np.full(capacity, NOWHERE)
        self._free = np.zeros(0, np.int64)
        self.num_rows = 0
        """Rows of payload that this rank has ever needed."""

    def put(
        self,
        slots: Integers,
        index: Integers,
        owner: Integers,
        is_held: NDArray[np.bool_],
        label: Integers | None = None,
        score: NDArray[Any] | None = None,
    ) -> Integers:
        """Put items into slots, each named once; the rows for those of them that this rank holds."""
        rows = self._rows(slots, int(is_held.sum()))
        self.row[slots[is_held]] = rows
        self.index[slots] = index
        self.owner[slots] = owner
        if label is not None:
            self.label[slots] = label
        if score is not None:
            self.score[slots] = score
        self.num_stored = max(self.num_stored, int(slots.max()) + 1)
        return rows

    def keep(self, slots: Integers) -> None:
        """Let go of all other slots; those kept become 0..n-1 in this order."""
        gone = np.ones(self.capacity, np.bool_)
        gone[slots] = False
        freed = self.row[gone]
        self._free = np.concatenate([self._free, freed[freed != NOWHERE]])
        num_kept = len(slots)
        for values in (self.index, self.label, self.score, self.owner, self.row):
            values[:num_kept] = values[slots]
        for values in (self.index, self.label, self.owner, self.row):
            values[num_kept:] = NOWHERE
        self.score[num_kept:] = 0.0
        self.num_stored = num_kept

    def _rows(self, slots: Integers, num_needed: int) -> Integers:
        """Rows for new payload: those of what it replaces, then free ones, then new ones."""
        freed = self.row[slots]
        self.row[slots] = NOWHERE
        known = np.concatenate([freed[freed != NOWHERE], self._free])
        num_new = max(0, num_needed - len(known))
        rows = np.concatenate([known, np.arange(self.num_rows, self.num_rows + num_new)])
        self.num_rows += num_new
        self._free = rows[num_needed:]
        return rows[:num_needed]
