"""Strategies of a single rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from paceline.core.sum_tree import Schedule, schedule
from paceline.core.torch_private import foreach_add_, foreach_copy_, foreach_zero_
from paceline.parallel.step import RankNumbers, Sums, Tally
from paceline.parallel.strategy import GlobalBatch, Strategy
from paceline.parallel.tree.step_tree import fold_numbers, tally_dtype

EXACT_COUNT = 2**24
"""Integers below it are exact in every dtype that counts are added in."""


class Alone(Strategy):
    """One rank with `sums: fast`: autograd accumulates the grains, and nothing is reduced."""

    def begin(self, batch: GlobalBatch) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def last_backward(self) -> None:
        pass

    def reduce(self, numbers: RankNumbers) -> Sums:
        tally = numbers.in_turn()
        return Sums(Tally(tally.loss_sum, tally.count))


class AloneInTree(Alone):
    """One rank with `sums: exact`: grains are added in the order in which several ranks add them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters)
        self._dtype = tally_dtype(self.parameters)
        self._schedule: Schedule = schedule(0, 0, 0)
        self._num_done = 0
        self._further: dict[int, list[Tensor | None]] = {}
        """Sums that wait for others, by the number of their buffer in the schedule."""
        self._is_fixed = False
        """True if gradients must keep their addresses, because recorded backwards add to them."""
        self._order_s = 0.0

    @property
    def order_s(self) -> float:
        return self._order_s

    def begin(self, batch: GlobalBatch) -> None:
        super().begin(batch)
        num_grains = len(batch.grains)
        self._schedule, self._num_done = schedule(num_grains, 0, num_grains), 0

    def gradient_groups(self) -> Sequence[Mapping[Tensor, Tensor]]:
        self._is_fixed = True
        return ()

    def end_grain(self) -> None:
        move = self._schedule.moves[self._num_done]
        self._num_done += 1
        if not move.adds and not move.clears:
            return
        began = perf_counter()
        gradients = [parameter.grad for parameter in self.parameters]
        for to, source in move.adds:
            if to == 0:
                for parameter, total in zip(self.parameters, _added(gradients, self._further[source]), strict=True):
                    parameter.grad = total
                gradients = [parameter.grad for parameter in self.parameters]
            else:
                self._further[to] = _added(self._further[to], self._further[source] if source else gradients)
        if move.copies_to is not None:
            self._further[move.copies_to] = self._copied(gradients, move.copies_to) if self._is_fixed else gradients
        if move.clears:
            self._clear(gradients)
        self._order_s += perf_counter() - began

    def _copied(self, gradients: Sequence[Tensor | None], number: int) -> list[Tensor | None]:
        old = self._further.get(number) or [None] * len(gradients)
        copies = [
            torch.empty_like(gradient) if copy is None and gradient is not None else copy
            for gradient, copy in zip(gradients, old, strict=True)
        ]
        known = [copy for copy in copies if copy is not None]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(known):  # parameters that this grain does not use, but an earlier one did
            foreach_zero_(known)
        if present:
            pairs = zip(copies, gradients, strict=True)
            foreach_copy_([copy for copy, each in pairs if copy is not None and each is not None], present)
        return copies

    def _clear(self, gradients: Sequence[Tensor | None]) -> None:
        if not self._is_fixed:
            for parameter in self.parameters:
                parameter.grad = None
        elif present := [gradient for gradient in gradients if gradient is not None]:
            foreach_zero_(present)

    def reduce(self, numbers: RankNumbers) -> Sums:
        if not self._is_fixed:
            self._further.clear()
        num_grains = len(numbers.grains)
        if num_grains == 0:
            return Sums(Tally(0.0, 0))
        if num_grains == 1 and not isinstance(numbers.grains[0].count, Tensor):  # the usual step: nothing to add
            loss, count, statistics = numbers.grains[0]
            if -EXACT_COUNT < count < EXACT_COUNT and count == int(count):
                return Sums(Tally(loss.to(self._dtype), count), statistics)
        ((loss, count, statistics),) = fold_numbers(numbers, num_grains, 0, self._dtype)
        whole = numbers.in_turn().count
        if not isinstance(count, Tensor):
            count = whole if count == whole else float(count)
        return Sums(Tally(loss, count), statistics)


def _added(to: Sequence[Tensor | None], source: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add gradients in place; where one of two is missing, return the other."""
    pairs = [(a, b) for a, b in zip(to, source, strict=True) if a is not None and b is not None]
    if pairs:
        foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(to, source, strict=True)]
