"""The order of data as a pure function: the samples of each step, cut into grains, on each rank.

A `Plan` is built from numbers alone and never changes, so every rank computes the same one without talking, any step is
found in O(1), and nothing but (epoch, step) has to be stored to go on in mid-epoch, also on another number of ranks.
Two rules keep it the same on every machine: random numbers come from Philox keyed by (seed, epoch, stream), and every
sort is stable, because numpy's other sorts place equal keys differently on different CPUs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.errors import PacelineError
from paceline.core.sum_tree import Starts
from paceline.core.together import Exclusion
from paceline.core.units import counted, plural
from paceline.data.partition import Ids, Numbers, assign, assign_blocks, by_length, cut

ORDERS = ("none", "random", "sorted", "laplace", "bucket")
DEFAULT_BINS = {"laplace": 2, "bucket": 16}
MAX_NUMBER = 2.0**53
"""Lengths and counts stay below it, so that sums and costs of a batch neither overflow nor lose whole numbers."""
PADDING_STEPS = 1000
"""Steps that `Plan.padding` looks at."""
_CHUNK = 1 << 20
_ORDER_KEY = 0x706C616E  # the second word of the Philox key, so that other users of the same seed draw other numbers


class LengthsNeeded(PacelineError):
    """A setting works on the lengths of samples, and there are none."""

    setting: str
    instead: str
    excludes = (
        Exclusion(
            "`--order` sorted, laplace or bucket, `--batch-cost`, `--length-schedule`",
            "data without lengths",
            "mathematics",
            "They are about the lengths of samples.",
        ),
    )
    sentence = "`{setting}` needs the length of every sample, but this data set gives none"
    hint = "give one length per sample (seconds, frames, tokens), or set {instead}"


class BadSampleNumbers(PacelineError):
    """Lengths or counts that no plan can be made of; `index` is the first wrong sample, None if all are wrong."""

    name: str
    why: str
    index: int | None = None
    sentence = "`{name}` cannot be used: {why}"
    hint = "give `{name}` as one number from 0 to 2**53 per sample, in the order of the data set"


class BadPlanSetting(PacelineError):
    """A setting of the data order that cannot work."""

    setting: str
    value: object
    why: str
    advice: str
    sentence = "`{setting}` is {value!r}: {why}"
    hint = "{advice}"


@dataclass(frozen=True)
class BatchRule:
    """Size of one global batch: a cap on samples and, if set, on padded cost (samples x longest length).

    A single sample above `max_cost` is a batch of its own. Samples longer than `max_length` wait for another rule.
    """

    max_samples: int
    max_cost: float | None = None
    max_length: float | None = None

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            why = "a batch has samples"
            raise BadPlanSetting("global_batch", self.max_samples, why, "set `global_batch` above 0")
        if self.max_cost is not None and not 0 < self.max_cost < math.inf:
            why = "the cost of a batch is a number above 0"
            hint = "set `batch_cost` to the total length per step"
            raise BadPlanSetting("batch_cost", self.max_cost, why, hint)


@dataclass(slots=True)  # not frozen: it is made at every step, and freezing costs more than the rest
class Share:
    """The part of one rank in one step: its whole grains, beside the size of the whole step.

    `num_grains`, `num_samples` and `count` are of the global batch, known before the first backward;
    `numbers`, `grains` and `own_count` are this rank's, empty and 0 where there are fewer grains than ranks.
    """

    num_grains: int
    numbers: tuple[int, ...]
    grains: tuple[Ids, ...]
    num_samples: int
    count: int | float
    own_count: int | float
    samples: Ids | None
    """Ids of the global batch; None past the end of a rank's own plan."""
    starts: Starts | None = None
    """First grain of each rank, where ranks hold blocks of grains."""


class Plan:
    """The data of one epoch: global batches of sample ids, each cut into grains that do not depend on the world size.

    `counts` are the denominators of the loss (tokens, frames) and default to one per sample. With `partition_epoch` P,
    epoch e is part e % P of the order of full epoch e // P. `stream` gives another order of the same epoch
    (rank + 1 for `random_seed_offset`). Of `seed`, the low 64 bits count.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        rule: BatchRule,
        grains: int,
        seed: int,
        epoch: int = 0,
        lengths: ArrayLike | None = None,
        counts: ArrayLike | None = None,
        order: str = "random",
        bins: int | None = None,
        partition_epoch: int = 1,
        stream: int = 0,
        in_blocks: bool = False,
        drop_last: bool = False,
        changes: Sequence[tuple[int, BatchRule]] = (),
    ) -> None:
        """With `in_blocks` every rank has grains that follow each other, as sums with one order need it. With
        `drop_last` a batch that is not full is left out. `changes` are rules that take over at a step of the epoch."""
        _check_settings(num_samples, grains, order, bins, partition_epoch)
        rules = [(0, rule), *changes]
        if lengths is None:
            _check_without_lengths(order, [each for _, each in rules])
        sample_lengths = None if lengths is None else _checked("lengths", lengths, num_samples)
        sample_counts = None if counts is None else _checked("counts", counts, num_samples)

        full_epoch, part = divmod(epoch, partition_epoch)
        random = _generator(seed, full_epoch, stream)
        epoch_part = _part(num_samples, partition_epoch, part)
        bins = bins or DEFAULT_BINS.get(order, 1)
        self._order = _arrange(order, num_samples, sample_lengths, bins, epoch_part, random)
        num_arranged, offsets = len(self._order), None
        if changes or rule.max_length is not None:
            drawn = random if order == "bucket" else None
            self._order, offsets = _by_rules(self._order, sample_lengths, rules, drawn, drop_last)
        self.num_left_out: Final[int] = num_arranged - len(self._order)
        """Samples that are too long for the rules of this epoch, or that `drop_last` leaves out of such rules."""
        # Kept in the order of the plan: a step reads one contiguous slice, and the caller's arrays may change.
        self._lengths = None if sample_lengths is None else sample_lengths[self._order]
        self._counts = None if sample_counts is None else sample_counts[self._order]
        self._running = _running_sums(self._counts)
        self._max_samples = rule.max_samples
        self._in_blocks = in_blocks
        self.max_grains: Final[int] = grains
        self.num_samples: Final[int] = len(self._order)
        is_by_rules = offsets is not None
        if offsets is None and self._lengths is not None:
            offsets = _offsets(self._lengths, rule)
        self._offsets = offsets
        num_by_samples = 0 if is_by_rules else _num_batches(self.num_samples, rule.max_samples, drop_last)
        self.num_steps: Final[int] = num_by_samples if offsets is None else len(offsets) - 1
        self._batch_order = random.permutation(self.num_steps) if order == "bucket" and not is_by_rules else None

    def batch(self, step: int) -> Ids:
        """Return the ids of the samples of the global batch."""
        return self._order[self._span(step)].astype(np.int64)

    def grains(self, step: int) -> list[Ids]:
        """Return the global batch cut into grains."""
        span = self._span(step)
        ids = self._order[span].astype(np.int64)
        return [ids[piece] for piece in self._cut(span)]

    def count(self, step: int) -> int | float:
        """Return the denominator of the step's summed loss."""
        return self._count(self._span(step))

    def share(self, step: int, rank: int, size: int) -> Share:
        """Return the grains of one rank out of `size`, balanced over the ranks by padded cost."""
        assert 0 <= rank < size, f"rank {rank} of {size}"
        span = self._span(step)
        ids = self._order[span].astype(np.int64)
        if self.max_grains == 1 and self._lengths is None:  # the common case on one rank, without the arithmetic
            count = self._count(span)
            starts = (0, *[1] * size) if self._in_blocks else None
            if rank == 0:
                return Share(1, (0,), (ids,), len(ids), count, count, ids, starts)
            return Share(1, (), (), len(ids), count, 0, ids, starts)
        pieces = self._cut(span)
        costs = self._costs(span, pieces)
        starts = assign_blocks(costs, size) if self._in_blocks else None
        numbers = assign(costs, size)[rank] if starts is None else range(starts[rank], starts[rank + 1])
        grains = tuple(ids[pieces[number]] for number in numbers)
        own_count = sum(self._piece_count(span, pieces[number]) for number in numbers)
        return Share(len(pieces), tuple(numbers), grains, len(ids), self._count(span), own_count, ids, starts)

    def shapes(self, step: int) -> list[tuple[int, float]]:
        """Return (samples, longest length) of each grain of a step; the length is 0 where there are no lengths."""
        span = self._span(step)
        pieces = self._cut(span)
        if self._lengths is None:
            return [(len(piece), 0.0) for piece in pieces]
        lengths = self._lengths[span]
        return [(len(piece), float(lengths[piece[0]])) for piece in pieces]  # `cut` puts the longest sample first

    def padding(self) -> float:
        """Return the fraction of the padded cost that is padding when each grain is padded to its longest sample.

        Over at most `PADDING_STEPS` steps, spread evenly; 0 without lengths, where samples count the same.
        """
        if self._lengths is None:
            return 0.0
        padded = real = 0.0
        for step in np.unique(np.linspace(0, self.num_steps - 1, PADDING_STEPS).astype(np.int64)):
            span = self._span(int(step))
            padded += sum(self._costs(span, self._cut(span)))
            real += float(self._lengths[span].sum(dtype=np.float64))
        return max(0.0, 1 - real / padded) if padded > 0 else 0.0

    def _span(self, step: int) -> slice:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan of {self.num_steps} steps")
        number = step if self._batch_order is None else int(self._batch_order[step])
        if self._offsets is not None:
            return slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        start = number * self._max_samples
        return slice(start, min(start + self._max_samples, self.num_samples))

    def _cut(self, span: slice) -> list[Ids]:
        return cut(None if self._lengths is None else self._lengths[span], span.stop - span.start, self.max_grains)

    def _costs(self, span: slice, pieces: Sequence[Ids]) -> list[float]:
        if self._lengths is None:
            return [float(len(piece)) for piece in pieces]
        lengths = self._lengths[span]
        return [len(piece) * float(lengths[piece[0]]) for piece in pieces]  # `cut` puts the longest sample first

    def _piece_count(self, span: slice, piece: Ids) -> int | float:
        if self._counts is None:
            return len(piece)
        counts = self._counts[span][piece]
        return float(counts.sum(dtype=np.float64)) if counts.dtype.kind == "f" else int(counts.sum(dtype=np.int64))

    def _count(self, span: slice) -> int | float:
        if self._counts is None:
            return int(span.stop - span.start)
        if self._running is not None:
            return int(self._running[span.stop] - self._running[span.start])
        return float(self._counts[span].sum(dtype=np.float64))


class RankPlan(Plan):
    """The plan of one rank where every rank has an order of its own (`random_seed_offset`): all of it is its share.

    The grains of a step are numbered one rank after the other. Ranks know only their own plan: the sizes of a global
    batch are those of this one times the number of ranks, which is exact unless cost decides.
    """

    def share(self, step: int, rank: int, size: int) -> Share:
        """Return this rank's whole batch, empty past the end of its plan (another rank's is longer)."""
        if step >= self.num_steps:
            return Share(0, (), (), 0, 1.0, 0.0, None)
        whole = super().share(step, 0, 1)
        return Share(
            whole.num_grains * size,
            tuple(number + rank * whole.num_grains for number in whole.numbers),
            whole.grains,
            whole.num_samples * size,
            whole.count * size,
            whole.own_count,
            whole.samples,
        )


def _check_without_lengths(order: str, rules: Sequence[BatchRule]) -> None:
    """Refuse what needs the lengths of samples."""
    if order not in ("none", "random"):
        raise LengthsNeeded(f"order: {order}", "`order: random`")
    if any(rule.max_cost is not None for rule in rules):
        raise LengthsNeeded("batch_cost", "`global_batch` alone")
    if any(rule.max_length is not None for rule in rules):
        raise LengthsNeeded("length_schedule", "`batch_schedule` alone")


def _running_sums(counts: Numbers | None) -> Numbers | None:
    """Return sums of the counts up to each sample, of which a difference is exact; None unless counts are whole."""
    if counts is None or counts.dtype.kind == "f":
        return None
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _check_settings(num_samples: int, grains: int, order: str, bins: int | None, partition_epoch: int) -> None:
    if num_samples < 1:
        why = "there is nothing to train on"
        raise BadPlanSetting("num_samples", num_samples, why, "give data with samples in it")
    if grains < 1:
        why = "a batch is at least one grain"
        raise BadPlanSetting("grains", grains, why, "set `grains` to 1 or more")
    if order not in ORDERS:
        hint = f"set `order` to one of {', '.join(ORDERS)}"
        raise BadPlanSetting("order", order, "no such order of samples", hint)
    if bins is not None and bins < 1:
        why = "samples go into at least one bin"
        raise BadPlanSetting("bins", bins, why, "set `bins` to 1 or more")
    if not 1 <= partition_epoch <= num_samples:
        are = plural(num_samples, "is")
        why = f"there {are} {counted(num_samples, 'sample')} to cut into sub-epochs"
        raise BadPlanSetting("partition_epoch", partition_epoch, why, f"set it between 1 and {num_samples}")


def _num_batches(num_samples: int, size: int, drop_last: bool) -> int:
    """Return the number of batches of a size, with or without one that is not full."""
    if drop_last and num_samples < size:
        why = f"a batch of {size} is never full, with {counted(num_samples, 'sample')}"
        hint = "leave out `drop_last`, or set a smaller `global_batch`"
        raise BadPlanSetting("drop_last", True, why, hint)
    return num_samples // size if drop_last else -(-num_samples // size)


def _checked(name: str, values: ArrayLike, num_samples: int) -> Numbers:
    numbers = np.asarray(values)
    if numbers.shape != (num_samples,):
        raise BadSampleNumbers(
            name, f"shape {numbers.shape}, but there {plural(num_samples, 'is')} {counted(num_samples, 'sample')}"
        )
    if numbers.dtype.kind not in "iuf":
        raise BadSampleNumbers(name, f"values of type {numbers.dtype} are not numbers")
    if not (numbers.min() >= 0 and float(numbers.max()) < MAX_NUMBER):  # NaN fails the first comparison
        wide = numbers.astype(np.float64)
        index = int(np.argmin((wide >= 0) & (wide < MAX_NUMBER)))
        raise BadSampleNumbers(name, f"sample {index} has {numbers[index]}", index)
    return numbers


def _generator(seed: int, full_epoch: int, stream: int) -> np.random.Generator:
    """Return the generator of one order: seed in the key, epoch and stream in the counter, so none ever meet."""
    key = np.array([seed % 2**64, _ORDER_KEY], dtype=np.uint64)
    counter = np.array([0, 0, full_epoch, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _part(total: int, num_parts: int, number: int) -> slice:
    """Return one of `num_parts` contiguous parts whose sizes differ by at most one, with RETURNN's bounds."""
    return slice(total * number // num_parts, total * (number + 1) // num_parts)


def _arrange(
    order: str, num_samples: int, lengths: Numbers | None, bins: int, part: slice, random: np.random.Generator
) -> NDArray[Any]:
    """Return the ids of one part of the epoch, in order."""
    ids = np.arange(num_samples, dtype=np.int32 if num_samples < 2**31 else np.int64)
    if order in ("random", "laplace", "bucket"):
        random.shuffle(ids)
    if order == "bucket":  # buckets of the part, not part of the buckets: each sub-epoch has all lengths
        ids, part = ids[part], slice(None)
    if lengths is not None and order in ("sorted", "bucket"):
        ids = ids[by_length(lengths[ids])]
    if lengths is not None and order in ("laplace", "bucket"):
        for number in range(bins):
            binned = ids[_part(len(ids), bins, number)]  # a view: what is written here is written to `ids`
            if order == "bucket":
                random.shuffle(binned)
            else:
                binned[:] = binned[by_length(lengths[binned], descending=number % 2 == 1)]
    return ids if len(ids[part]) == len(ids) else ids[part].copy()


def _offsets(lengths: Numbers, rule: BatchRule) -> Ids | None:
    """Return the start of each batch, and the end, if cost decides: consecutive samples while number x longest fits.

    A sample of length l lets at most max_cost / l samples share its batch, so a batch may grow up to the least of these
    over its samples. They are computed by numpy; the greedy walk over them is a plain loop, some 60 ns a sample.
    """
    if rule.max_cost is None:
        return None
    offsets = array("q", [0])
    num_held, limit = 0, rule.max_samples
    for start in range(0, len(lengths), _CHUNK):
        allowed_each = _allowed(lengths[start : start + _CHUNK], rule.max_samples, rule.max_cost)
        for position, allowed in enumerate(allowed_each, start):
            if allowed < limit:
                limit = allowed
            if num_held < limit:
                num_held += 1
            else:
                offsets.append(position)
                num_held, limit = 1, allowed
    offsets.append(len(lengths))
    return np.frombuffer(offsets, dtype=np.int64)


def _by_rules(
    order: NDArray[Any],
    lengths: Numbers | None,
    rules: Sequence[tuple[int, BatchRule]],
    random: np.random.Generator | None,
    drop_last: bool,
) -> tuple[NDArray[Any], Ids]:
    """Return (ids in the order of the batches, start of each batch and the end) where rules follow each other.

    Each rule makes batches of what is left and short enough, up to the step of the next one; with `random` it takes
    them in a drawn order (buckets). The epoch ends where a rule has no batch left.
    """
    batches: list[NDArray[Any]] = []
    left = order
    for number, (_, rule) in enumerate(rules):
        short = np.ones(len(left), dtype=bool)
        if lengths is not None and rule.max_length is not None:
            short = lengths[left] <= rule.max_length
        places = np.flatnonzero(short)
        starts = _starts(None if lengths is None else lengths[left[places]], len(places), rule, drop_last)
        num_batches = len(starts) - 1
        drawn = np.arange(num_batches) if random is None else random.permutation(num_batches)
        is_last = number == len(rules) - 1
        wanted = num_batches if is_last else rules[number + 1][0] - len(batches)
        taken = [places[starts[each] : starts[each + 1]] for each in drawn[:wanted]]
        batches += [left[each] for each in taken]
        if is_last or num_batches < wanted:
            break
        keep = np.ones(len(left), dtype=bool)
        for each in taken:
            keep[each] = False
        left = left[keep]
    if not batches:
        raise _no_batch(lengths, order, rules[0][1])
    ends = np.concatenate(([0], np.cumsum([len(batch) for batch in batches], dtype=np.int64)))
    return np.concatenate(batches), ends


def _starts(lengths: Numbers | None, num_samples: int, rule: BatchRule, drop_last: bool) -> Ids:
    """Return the start of each batch, and the end, of samples that one rule cuts."""
    by_cost = None if lengths is None or not num_samples else _offsets(lengths, rule)
    if by_cost is not None:
        return by_cost
    num_full, rest = divmod(num_samples, rule.max_samples)
    starts = np.arange(num_full + 1, dtype=np.int64) * rule.max_samples
    return starts if drop_last or not rest else np.append(starts, num_samples)


def _no_batch(lengths: Numbers | None, order: NDArray[Any], rule: BatchRule) -> BadPlanSetting:
    if lengths is not None and rule.max_length is not None and not (lengths[order] <= rule.max_length).any():
        shortest = float(lengths[order].min())
        why = f"the shortest sample has length {shortest:g}, so nothing is left to train on"
        return BadPlanSetting("length_schedule", rule.max_length, why, f"let it begin with {shortest:g} or more")
    why = f"a batch of {rule.max_samples} is never full"
    return BadPlanSetting("drop_last", True, why, "leave out `drop_last`, or set a smaller `global_batch`")


def _allowed(lengths: Numbers, max_samples: int, max_cost: float) -> list[int]:
    """Return for each sample the most samples of its length that make a batch: at least itself."""
    lengths = lengths.astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        allowed = np.minimum(np.floor(max_cost / lengths), max_samples)
    # The quotient is rounded; the rule is about the product (10 x 0.1 fits into 1.0, and 1.0 // 0.1 is 9).
    allowed += (allowed < max_samples) & ((allowed + 1) * lengths <= max_cost)
    allowed -= allowed * lengths > max_cost
    fits: list[int] = np.maximum(allowed, 1).astype(np.int64).tolist()
    return fits
