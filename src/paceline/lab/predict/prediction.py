"""Predicted speed by number of ranks, with intervals, and advice. Pure; every formula is in docs/predict.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.failure_rate import FailureRate, parse_failures
from paceline.core.sum_tree import Layout, layout
from paceline.core.units import counted
from paceline.lab.predict import cost, goodput, replay
from paceline.lab.predict.calibration import Calibration, Manner, MeasuredRun, deal, recut, starts_of
from paceline.lab.predict.cost import GLOO, NCCL, Library, Place
from paceline.lab.predict.links import LinkSpeed
from paceline.lab.predict.replay import Replayed
from paceline.lab.predict.simulate import Averages, Gradients, Meeting, Noise, Shards, Simulated, Steps, simulate

NUM_STEPS, NUM_TRIALS, TRIAL_STEPS = 256, 40, 96
"""Steps that a row is simulated for; trials with other numbers, and their steps, for its interval."""
INSIDE = {"cpu": LinkSpeed(1.5e9, 2e-5), "cuda": LinkSpeed(50e9, 5e-6)}
"""Links between ranks of one machine, where they were not measured."""
COPY_S = 2.5e-9
"""Seconds per byte of a flat buffer that is averaged: copies, differences and the update, about ten times through
memory."""
ENCODE_S = {"full": 0.0, "fp16": 3e-9, "bf16": 3e-9, "int8": 12e-9}
"""Seconds per number that is rounded for the wire and back, on a CPU."""
INT8_BYTES = 1 + 4 / 1024
NUM_SMALL = 3
"""Small sums of a step with shards: numbers of grains, losses, marks of gradients."""
PAIR_SHARE = 0.7
"""Share of what gathers of two ranks take beyond the model that those of more ranks take, too: between two, both
directions of one connection carry data, between more each carries one."""
SAVE_S = 0.1
"""Cost of a checkpoint to the steps, where it was not measured: it is written beside them."""
BUSY = 0.1
"""Share of the time without a free core from which on a calibration is doubted."""
LEAST_HALF_WIDTH = 0.06
"""Of an interval, relative: below it are only things that were not modelled."""


class BadRanks(PacelineError):
    """Numbers of ranks and machines that do not go together."""

    why: str
    sentence = "{why}"
    hint = (
        "give numbers of ranks, such as `--ranks 2,4,8`, and with `--nodes` one number of machines for each, or for all"
    )


@dataclass(frozen=True)
class Range:
    """A predicted number with the interval that it should be in nine times out of ten."""

    low: float
    value: float
    high: float

    def scaled(self, factor: float) -> Range:
        return Range(factor * self.low, factor * self.value, factor * self.high)

    def inverse(self, of: float = 1.0) -> Range:
        """Return `of` divided by this number."""
        return Range(of / self.high, of / self.value, of / self.low)


@dataclass(frozen=True)
class Row:
    """Prediction for one number of ranks. Parts of a step are means over the ranks and add up to `step_s`."""

    ranks: int
    nodes: int
    grains: int
    grains_per_rank: int
    """Of the rank that has most."""
    step_s: Range
    compute_s: float
    communication_s: float
    """Exposed: that no computing hides."""
    waiting_s: float
    """For the slowest rank: more grains, longer ones, or a slower machine."""
    data_s: float
    other_s: float
    """Update, logging and what else a step needs."""
    samples_per_s: Range
    speedup: Range
    """Over one rank."""
    efficiency: Range
    """Speed-up per rank."""
    run_s: Range | None = None
    """Until the end of the run, where its length is known; with failures, if they are asked for."""
    goodput: Range | None = None
    """Share of the time that is not lost to failures, recovery and checkpoints."""
    price: Range | None = None


@dataclass(frozen=True)
class Prediction:
    """Answer of `paceline predict`."""

    name: str
    """Runs that it was calibrated on."""
    rows: Sequence[Row]
    staircase: Sequence[tuple[int, int]]
    """(ranks, grains of the busiest rank) at each number of ranks that has fewer than all numbers below it."""
    advice: Sequence[str]
    """Where it stops paying, and what to change."""
    assumptions: Sequence[str]
    unknown: Sequence[str]
    """Influences that it cannot know."""
    manner: Manner
    link: str
    """Link between machines, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Numbers:
    """Numbers that are not known exactly: as measured or assumed, or as one trial draws them."""

    compute: float = 1.0
    """Factor on computing."""
    link: float = 1.0
    """Factor on the time of bytes and messages."""
    host: float = 1.0
    """Factor on calls, and on what meetings take beside the link."""
    fixed: float = 0.05
    """Fixed share of a grain's time, where it has another size than those that were measured."""
    slow_down: float = 1.0
    crowding: float | None = None
    """Of an all-to-all; that of the library if not set."""


@dataclass(frozen=True)
class _Fit:
    """Comparison of the model with a run on several ranks."""

    call_s: float = 0.0
    """What each call took beyond the model."""
    link: float = 1.0
    """Factor on the links, where meetings took less than the model says, or links were not known."""
    spread: float = 0.12
    """Relative uncertainty of the link."""
    host_spread: float = 0.3
    """Relative uncertainty of calls."""


def predict(
    calibration: Calibration,
    *,
    ranks: Sequence[int],
    nodes: Sequence[int] | None = None,
    between: LinkSpeed,
    inside: LinkSpeed | None = None,
    manner: Manner | None = None,
    grains: int | None = None,
    failures: str | None = None,
    price: float | None = None,
    seed: int = 0,
) -> Prediction:
    """Return the prediction; `between` links machines, `inside` the ranks of one (as measured if not set).

    `nodes` has the machines of each number of ranks, or one number for all; if not set, each rank is on a machine of
    its own. `manner` is how ranks come to one model, as in the run if not set. `price` is that of a rank for an hour.
    """
    places = _places(ranks, nodes)
    chosen = manner or calibration.manner
    model = _fitted(_Model(calibration, chosen, grains, between, inside or INSIDE[calibration.device], seed), inside)
    alone = model.simulated(1, 1, _Numbers(), NUM_STEPS).step_s
    rate = None if failures is None else parse_failures(failures)
    rows = [_row(model, size, machines, alone, price, rate) for size, machines in places]
    biggest = max(model.grains(size) for size, _ in places)
    return Prediction(
        calibration.name,
        rows,
        staircase(biggest, max(size for size, _ in places)),
        [*_advice(model, rows, alone)],
        [*_assumptions(model, nodes, places, rate)],
        [*_unknown(model)],
        chosen,
        str(between),
    )


def _places(ranks: Sequence[int], nodes: Sequence[int] | None) -> list[tuple[int, int]]:
    if not ranks or min(ranks) < 1:
        raise BadRanks(f"`--ranks {','.join(map(str, ranks))}`: a run has at least one rank")
    machines = list(ranks) if nodes is None else list(nodes)
    if len(machines) == 1:
        machines *= len(ranks)
    sizes = list(ranks) * len(machines) if len(ranks) == 1 else list(ranks)
    if len(machines) != len(sizes):
        raise BadRanks(f"there are {len(sizes)} numbers of ranks, and {len(machines)} of machines (`--nodes`)")
    for size, number in zip(sizes, machines, strict=True):
        if not 1 <= number <= size:
            raise BadRanks(f"{counted(size, 'rank')} cannot be on {counted(number, 'machine')}")
    return list(zip(sizes, machines, strict=True))


@dataclass(frozen=True)
class _Model:
    """Everything that is the same for all numbers of ranks."""

    calibration: Calibration
    manner: Manner
    asked_grains: int | None
    between: LinkSpeed
    inside: LinkSpeed
    seed: int = 0
    fit: _Fit = _Fit()
    num_steps: int | None = None
    """Steps that a replay buffer is followed for; those of the whole run if not set."""

    @property
    def library(self) -> Library:
        return NCCL if self.calibration.device == "cuda" else GLOO

    @property
    def noise(self) -> Noise:
        return Noise(self.calibration.ratios, self.calibration.hosts)

    @property
    def compute_spread(self) -> float:
        """Relative uncertainty of computing times."""
        ratios = self.calibration.ratios
        steady = max(1.0, len(ratios) / 4)  # neighbouring steps are alike
        return math.hypot(0.02, float(ratios.std()) / math.sqrt(steady))

    def grains(self, ranks: int) -> int:
        """Return the grains of a run on so many ranks."""
        if self.asked_grains is not None:
            return self.asked_grains
        return self.calibration.grains if self.calibration.has_asked_grains else ranks

    # -- a step --------------------------------------------------------------------------------------------------------

    def steps(self, ranks: int, grains: int, numbers: _Numbers) -> tuple[Steps, Sequence[Sequence[float]]]:
        """Return the work of each rank, dealt as the plan does it, and the costs of the grains."""
        known = self.calibration
        costs = [recut(step, known.global_batch, grains) for step in known.costs]
        manner = self.manner
        grain_s, cost_s = known.grain_s, known.cost_s
        measured = sum(map(sum, known.costs)) / max(1, sum(map(len, known.costs)))
        if grains != known.grains and grain_s == 0:  # its fixed part could not be told
            grain_s, cost_s = numbers.fixed * cost_s * measured, (1 - numbers.fixed) * cost_s
        compute, last, amount = [], [], []
        dealt: dict[tuple[float, ...], tuple[Any, Any]] = {}
        for step in costs:
            key = tuple(step)
            if key not in dealt:
                dealt[key] = deal(step, ranks, in_blocks=manner.is_exact)
            number, work = dealt[key]
            seconds = grain_s * number + cost_s * work
            if manner.shard != "none":  # all ranks call the model equally often
                seconds = np.full(ranks, seconds.max())
            compute.append(seconds)
            last.append(known.backward_share * seconds / np.maximum(number, 1))
            amount.append(work / max(1e-30, work.sum()) * known.global_batch)
        update_s = known.update_s / (ranks if manner.shard == "full" else 1)
        steps = Steps(
            numbers.compute * np.array(compute),
            numbers.compute * np.array(last),
            known.data_s * np.array(amount),
            update_s + known.rest_s,
        )
        return steps, costs

    def simulated(
        self, ranks: int, nodes: int, numbers: _Numbers, num_steps: int, seed: int | None = None
    ) -> Simulated:
        """Simulate steps on so many ranks."""
        grains = self.grains(ranks)
        steps, costs = self.steps(ranks, grains, numbers)
        meeting = self.meeting(self.place(ranks, nodes, numbers), steps, costs, numbers)
        return simulate(steps, self.noise, meeting, num_steps, self.seed if seed is None else seed)

    def place(self, ranks: int, nodes: int, numbers: _Numbers) -> Place:
        """Return so many ranks with their links."""
        link = numbers.link * self.fit.link
        crowding = self.library.crowding if numbers.crowding is None else numbers.crowding
        direct = self.library.direct
        if direct is not None and numbers.crowding is not None:
            direct *= crowding / self.library.crowding
        library = replace(self.library, call_s=numbers.host * self.library.call_s, crowding=crowding, direct=direct)
        return Place(ranks, nodes, self.inside.scaled(link), self.between.scaled(link), library)

    def replayed(self, place: Place) -> Replayed:
        """Return what replay buffers take of the link in a step."""
        known = self.calibration
        num_steps = self.num_steps or known.total_steps or known.num_steps
        batch = max(1, round(known.global_batch))
        grains = len(recut(known.costs[0], known.global_batch, self.grains(place.ranks)))
        found = [
            replay.seconds(buffer, place, batch, grains, num_steps, in_blocks=self.manner.is_exact)
            for buffer in replay.buffers(known.profile.replay)
        ]
        travel_s = sum(each.travel_s for each in found)
        late_s = travel_s / known.profile.epoch_steps if known.profile.epoch_steps else 0.0  # none is sent ahead
        return Replayed(travel_s, sum(each.blocking_s for each in found) + late_s)

    def meeting(self, place: Place, steps: Steps, costs: Sequence[Sequence[float]], numbers: _Numbers) -> Meeting:
        manner, known = self.manner, self.calibration
        if place.ranks == 1:
            return Gradients((), ())
        call_s = numbers.host * self.fit.call_s
        replayed = self.replayed(place)
        beside_s = float(steps.last_s.max(axis=1).mean())  # replay travels while the last backward runs
        replayed_s = replayed.blocking_s + max(0.0, replayed.travel_s - beside_s)
        if manner.reduce == "param":
            averages = self._averages(place, steps, call_s)
            return replace(averages, host_s=averages.host_s + averages.interval * replayed_s)
        dealt = layout(starts_of(costs[0], place.ranks)) if manner.is_exact else None
        if manner.shard != "none":
            most = max(1, round(float(np.max(deal(costs[0], place.ranks, in_blocks=manner.is_exact)[0]))))
            num_calls = num_shard_calls(known.profile.blocks, most)
            blocks_s = _shards(place, known.profile.blocks, manner, dealt, most, steps)
            return Shards(blocks_s + num_calls * call_s + replayed_s)
        profile = known.profile
        extra = 4 * (profile.tensors + 4 + profile.buffers)  # losses, counts, marks and statistics ride on the last
        sizes = [float(size) for size in profile.buckets]
        slow_down = numbers.slow_down if known.slow_down is None else known.slow_down
        if dealt is not None:
            sizes[-1] += extra
            seconds = [cost.exact_sum(place, size, dealt) for size in sizes]
        else:
            half = 0.5 if manner.wire in ("fp16", "bf16") else 1.0
            seconds = [cost.all_reduce(place, half * size) for size in sizes]
            seconds[-1] += cost.all_reduce(place, extra)
        ready = list(known.bucket_ready) or [1.0] * len(sizes)
        if replayed.travel_s:  # goes first
            seconds, ready = [replayed.travel_s, *seconds], [0.0, *ready]
        return Gradients(seconds, ready, slow_down, call_s + replayed.blocking_s)

    def _averages(self, place: Place, steps: Steps, call_s: float) -> Averages:
        manner, profile = self.manner, self.calibration.profile
        slowest_s = float((steps.compute_s + steps.data_s).max(axis=1).mean()) + steps.rest_s
        interval = manner.sync_step or 1
        if manner.sync_seconds is not None:
            interval = max(1, int(manner.sync_seconds / slowest_s))
        first, second, host_s = cost.all_reduce(place, 8 * (8 + place.ranks + 2 * interval)), 0.0, call_s
        state = profile.state if manner.sync_state == "average" else 0
        pieces = [
            (profile.weights, manner.wire),
            (profile.moving, manner.wire),
            (profile.buffers, "full"),
            (state, "full" if manner.wire == "full" else "bf16"),
        ]
        for number, wire in pieces:
            if not number:
                continue
            if wire == "full":
                first += cost.all_reduce(place, profile.itemsize * number)
            else:
                size = number * (INT8_BYTES if wire == "int8" else 2.0)
                first += cost.all_to_all(place, size)
                second += cost.all_gather(place, size)
            if self.library is GLOO:
                host_s += number * (COPY_S * profile.itemsize + ENCODE_S[wire])
        return Averages(interval, manner.sync_overlap, first, second, host_s)


def _fitted(model: _Model, inside: LinkSpeed | None) -> _Model:
    """Compare a model with the run on most ranks: what its meetings took beyond it belongs to each meeting.

    `inside` is the link between ranks of one machine, where it was given.
    """
    known = model.calibration
    run, manner = known.runs[-1], model.manner
    if run.ranks == 1:
        return model
    same = run.manner
    if (same.reduce, same.shard, same.wire) != (manner.reduce, manner.shard, manner.wire):
        return model
    link = known.link or INSIDE[known.device]
    plain = _Model(known, same, run.grains, link, link, model.seed, num_steps=known.num_steps)
    nodes = 1 if known.link is None else run.ranks
    modelled = plain.simulated(run.ranks, nodes, _Numbers(), TRIAL_STEPS)
    blocking_s = plain.replayed(plain.place(run.ranks, nodes, _Numbers())).blocking_s  # in the run, part of computing
    measured_s, modelled_s = _exposed(run), modelled.communication_s - blocking_s
    if same.shard != "none":  # there it is part of computing
        measured_s = float(np.mean([rank.compute_s.mean() + rank.communication_s.mean() for rank in run.samples]))
        modelled_s = modelled.compute_s + modelled.communication_s + modelled.waiting_s
    calls = 1.0
    if same.reduce == "param":
        calls = 1.0 / _interval_of(run)
        if not same.sync_overlap:  # at the end of an epoch an average is waited for with overlap, too
            measured_s = run.meeting_s
    elif same.shard != "none":
        calls = num_shard_calls(known.profile.blocks, -(-run.grains // run.ranks))
    residual_s, exposed_s = measured_s - modelled_s, max(modelled.communication_s, 1e-9)
    if known.link is None:
        factor = float(np.clip((exposed_s + residual_s) / exposed_s, 0.2, 20.0))
        measured = replace(link.scaled(factor), is_measured=True)
        return replace(model, inside=inside or measured, fit=_Fit(spread=0.15))
    if residual_s < 0:
        return replace(model, fit=_Fit(0.0, float(np.clip(1 + residual_s / exposed_s, 0.6, 1.0)), 0.07, 0.15))
    if same.shard != "none" and run.ranks == 2:
        residual_s *= PAIR_SHARE
    spread = 0.15 if same.shard == "none" else 0.4
    return replace(model, fit=_Fit(residual_s / calls, 1.0, 0.07, spread))


def _interval_of(run: MeasuredRun) -> int:
    """Return the steps between two averages of a run."""
    if run.manner.sync_seconds is None:
        return run.manner.sync_step or 1
    step_s = max(float(rank.step_s.mean()) for rank in run.samples)
    return max(1, int(run.manner.sync_seconds / step_s))


def _exposed(run: MeasuredRun) -> float:
    """Return what meetings took in a step, without waiting: the last rank to come waits for nobody."""
    waits = np.stack([rank.communication_s for rank in run.samples])  # (ranks, steps)
    if run.manner.reduce == "param" and run.manner.sync_overlap:
        return float(waits.mean(axis=1).min())
    return float(waits.min(axis=0).mean())


def _shards(
    place: Place, blocks: Sequence[int], manner: Manner, dealt: Layout | None, num_grains: int, steps: Steps
) -> float:
    """Return the exposed seconds of a step: every block is gathered in forward, and again in backward but for the
    root; gradients are scattered in the last backward.

    On a CPU nothing is hidden. On a GPU the next block is gathered while one computes.
    """
    sizes = [float(size) for size in blocks[:-1]]
    root = float(blocks[-1]) if blocks else 0.0
    half = 0.5 if manner.wire in ("fp16", "bf16") else 1.0
    inner = place
    if manner.shard == "node" and place.nodes > 1:
        inner = replace(place, ranks=place.per_node, nodes=1)
    gathers = [cost.all_gather(inner, size) for size in sizes]
    root_s = cost.all_gather(inner, root) if root else 0.0
    scatters = []
    for size in [*sizes, *[root] * bool(root)]:
        if dealt is not None and inner is place:
            scatters.append(cost.exact_scatter(inner, size, dealt))
        else:
            scatters.append(cost.reduce_scatter(inner, half * size))
        if inner is not place:
            scatters[-1] += cost.all_reduce(replace(place, ranks=place.nodes), half * size / inner.ranks)
    small = NUM_SMALL * cost.all_reduce(place, 64)
    if not place.library.scatters:
        return num_grains * (root_s + 2 * sum(gathers)) + sum(scatters) + small
    compute_s = float(steps.compute_s.max(axis=1).mean()) / max(1, num_grains)
    shares = [size / (sum(sizes) + root) for size in [root, *sizes]]
    forward = _pipelined([compute_s / 3 * share for share in shares], [root_s, *gathers])
    backward = _pipelined([2 * compute_s / 3 * share for share in shares], [0.0, *gathers])
    behind = max(scatters[-1], sum(scatters) - 2 * compute_s / 3) if scatters else 0.0
    return num_grains * (forward + backward) + behind + small


def num_shard_calls(blocks: Sequence[int], num_grains: int) -> int:
    """Return the collectives of a step: gathers in forward and backward of each grain, scatters, and small ones."""
    has_root = bool(blocks and blocks[-1])
    num_blocks = max(0, len(blocks) - 1)
    return num_grains * (2 * num_blocks + has_root) + num_blocks + has_root + NUM_SMALL


def _pipelined(compute: Sequence[float], gathers: Sequence[float]) -> float:
    """Return what a row of blocks waits for their gathers, of which one is under way ahead."""
    gathered = computed = 0.0
    for block_s, gather_s in zip(compute, gathers, strict=True):
        gathered = gathered + gather_s
        computed = max(computed, gathered) + block_s
    return computed - sum(compute)


# -- rows --------------------------------------------------------------------------------------------------------------


def _row(
    model: _Model, ranks: int, nodes: int, alone_s: float, price: float | None, failures: FailureRate | None
) -> Row:
    grains = model.grains(ranks)
    nominal = model.simulated(ranks, nodes, _Numbers(), NUM_STEPS)
    step_s = _interval(model, nominal.step_s, partial(model.simulated, ranks, nodes))
    known = model.calibration
    speedup = step_s.inverse(alone_s)
    run_s = None if known.total_steps is None else step_s.scaled(known.total_steps)
    useful = None if failures is None else _goodput(model, nodes, step_s.value, failures)
    if run_s is not None and useful is not None:
        run_s = Range(run_s.low / useful.high, run_s.value / useful.value, run_s.high / useful.low)
    busiest = -(-len(recut(known.costs[0], known.global_batch, grains)) // ranks)
    return Row(
        ranks,
        nodes,
        grains,
        busiest,
        step_s,
        nominal.compute_s,
        nominal.communication_s,
        nominal.waiting_s,
        nominal.data_s,
        nominal.rest_s,
        step_s.inverse(known.global_batch),
        speedup,
        speedup.scaled(1 / ranks),
        run_s,
        useful,
        None if price is None or run_s is None else run_s.scaled(price * ranks / 3600),
    )


def _survives(manner: Manner) -> bool:
    """Return True if every rank has the whole state, so that survivors of another go on."""
    return manner.reduce == "grad" and manner.shard == "none"


def _goodput(model: _Model, nodes: int, step_s: float, failures: FailureRate) -> Range:
    """Return the share of useful time: survivors go on where each rank has all of the state, else all start again."""
    known, survives = model.calibration, _survives(model.manner)
    usual_s = goodput.MEASURED_SURVIVAL_S if survives else goodput.MEASURED_RESTART_S
    found = goodput.goodput(
        failures,
        nodes,
        step_s=step_s,
        save_s=SAVE_S if known.save_s is None else known.save_s,
        recovery_s=usual_s if known.recovery_s is None else known.recovery_s,
        repeated_steps=1.0 if survives else None,
    )
    least = 1e-6  # a share of 0 means that it never ends
    return Range(max(least, found.share.low), max(least, found.share.value), max(least, found.share.high))


def _interval(model: _Model, value: float, simulated: Callable[..., Simulated]) -> Range:
    """Return the range of nine tenths of trials with other numbers, each as uncertain as it is."""
    random = np.random.Generator(np.random.Philox(key=(model.seed + 77) % 2**64))
    values = []
    for trial in range(NUM_TRIALS):
        numbers = _Numbers(
            compute=float(np.exp(random.normal(0, model.compute_spread))),
            link=float(np.exp(random.normal(0, model.fit.spread))),
            host=float(np.exp(random.normal(0, model.fit.host_spread))),
            crowding=float(random.uniform(1.1, 1.7)),
            fixed=float(random.uniform(0.0, 0.25)),
            slow_down=1.0 + float(random.exponential(0.05)),
        )
        values.append(simulated(numbers, TRIAL_STEPS, model.seed + trial + 1).step_s)
    low, high = (float(bound) for bound in np.quantile(values, [0.05, 0.95]))
    return Range(min(low, (1 - LEAST_HALF_WIDTH) * value), value, max(high, (1 + LEAST_HALF_WIDTH) * value))


def staircase(grains: int, most_ranks: int) -> list[tuple[int, int]]:
    """Return (ranks, grains of the busiest rank) wherever one more rank makes the busiest one have fewer grains."""
    stairs: list[tuple[int, int]] = []
    for per_rank in sorted({-(-grains // ranks) for ranks in range(1, min(most_ranks, grains) + 1)}, reverse=True):
        stairs.append((-(-grains // per_rank), per_rank))
    return stairs


# -- words -------------------------------------------------------------------------------------------------------------


def _advice(model: _Model, rows: Sequence[Row], alone_s: float) -> Iterator[str]:
    several = [row for row in rows if row.ranks > 1]
    if not several:
        return
    yield from _where_it_ends(several)
    for row in several:
        if row.ranks > row.grains:
            yield (
                f"{counted(row.ranks, 'rank')} on {counted(row.grains, 'grain')}: a rank takes whole grains, so a run "
                f"of more ranks than grains is refused; set `--grains {row.ranks}` or more"
            )
            break
    uneven = next((row for row in reversed(several) if row.ranks < row.grains and row.grains % row.ranks), None)
    if uneven is not None:
        fewer = -(-uneven.grains // uneven.grains_per_rank)
        if fewer < uneven.ranks:
            yield (
                f"{counted(uneven.ranks, 'rank')} are no faster than {fewer}: {counted(uneven.grains, 'grain')} are "
                f"{uneven.grains_per_rank} for the busiest rank of both; `--grains "
                f"{uneven.ranks * max(1, round(uneven.grains / uneven.ranks))}` can be dealt evenly"
            )
    busy = [row for row in several if row.ranks <= row.grains] or several[:1]
    costly = max(busy, key=lambda row: row.communication_s / row.step_s.value)
    if costly.communication_s > 0.15 * costly.step_s.value:
        yield from _lighter(model, costly, alone_s)
    late = max(busy, key=lambda row: row.waiting_s / row.step_s.value)
    if late.waiting_s > 0.1 * late.step_s.value:
        yield _late(model, late)
    slow = next((row for row in several if row.data_s > 0.1 * row.step_s.value), None)
    if slow is not None:
        share = slow.data_s / slow.step_s.value
        yield f"data wait is {100 * share:.0f} % of a step: more `--workers`, or `paceline pack`"


def _late(model: _Model, row: Row) -> str:
    """Say what ranks wait for: others that have more to do, or times that differ from step to step and by machine."""
    steps, _ = model.steps(row.ranks, row.grains, _Numbers())
    uneven_s = float((steps.compute_s.max(axis=1) - steps.compute_s.mean(axis=1)).mean())
    share = 100 * row.waiting_s / row.step_s.value
    text = f"at {counted(row.ranks, 'rank')} the others wait {share:.0f} % of the time for the slowest"
    if uneven_s > 0.5 * row.waiting_s:
        return f"{text}, which has more to do: more `--grains` are dealt more evenly, `--order bucket` makes them alike"
    spread = 100 * float(model.calibration.ratios.std())
    apart = "" if model.calibration.profile.replay else "; with `--reduce param` ranks step apart"  # replay meets
    return f"{text}: times of equal steps differ by {spread:.0f} %, as in the run{apart}"


def _where_it_ends(rows: Sequence[Row]) -> Iterator[str]:
    """Say up to which number of ranks each brings at least half of what the first did."""
    ordered = sorted(rows, key=lambda row: row.ranks)
    best = max(ordered, key=lambda row: row.samples_per_s.value)
    gain = f"{_short(best.speedup.value)} ({_short(best.speedup.low)}-{_short(best.speedup.high)})"
    yield f"{counted(best.ranks, 'rank')} on {counted(best.nodes, 'machine')}: {gain} times as fast as one rank"
    paying = [row for row in ordered if row.efficiency.value >= 0.5]
    if len(paying) == len(ordered):
        last = ordered[-1]
        yield f"it pays up to {counted(last.ranks, 'rank')}: efficiency {100 * last.efficiency.value:.0f} %"
        return
    first = next(row for row in ordered if row.efficiency.value < 0.5)
    parts = {
        "communication": first.communication_s,
        "waiting for the slowest rank": first.waiting_s,
        "the part of a step that does not get shorter (update, logging)": first.other_s,
        "data": first.data_s,
    }
    why = max(parts, key=lambda name: parts[name])
    if first.ranks > first.grains:
        why = "ranks without a grain"
    yield (
        f"it stops paying at {counted(first.ranks, 'rank')}: efficiency {100 * first.efficiency.value:.0f} %, because "
        f"of {why}"
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _lighter(model: _Model, row: Row, alone_s: float) -> Iterator[str]:
    """Say what other ways of coming to one model would bring where communication costs most."""
    manner, share = model.manner, row.communication_s / row.step_s.value
    ways: dict[str, Manner] = {}
    if manner.shard == "full":
        ways["--shard none"] = replace(manner, shard="none")
    elif manner.reduce == "grad":
        if manner.wire == "full":
            ways["--wire bf16"] = replace(manner, wire="bf16")
            if manner.is_exact:
                ways["--sums fast"] = replace(manner, sums="fast")
        if not model.calibration.profile.replay:  # else ranks meet in every step all the same
            seldom = replace(manner, reduce="param", sync_step=100, wire="full")
            ways["--reduce param --sync-step 100"] = seldom
    else:
        if not manner.sync_overlap:
            overlap = min(10, (manner.sync_step or 10))
            ways[f"--sync-overlap {overlap}"] = replace(manner, sync_overlap=overlap)
        if manner.wire != "int8":
            ways["--wire int8"] = replace(manner, wire="int8")
        if manner.sync_step:
            ways[f"--sync-step {4 * manner.sync_step}"] = replace(manner, sync_step=4 * manner.sync_step)
    found = []
    for words, other in ways.items():
        changed = _fitted(replace(model, manner=other, fit=_Fit()), model.inside)
        seconds = changed.simulated(row.ranks, row.nodes, _Numbers(), TRIAL_STEPS).step_s
        if row.step_s.value / seconds > 1.05:
            found.append(f"`{words}` makes it {row.step_s.value / seconds:.1f} times as fast")
    text = f"at {counted(row.ranks, 'rank')} communication is {100 * share:.0f} % of a step"
    yield f"{text}: {'; '.join(found)}" if found else f"{text}: a faster link, or a larger `--global-batch`"


def _assumptions(
    model: _Model, nodes: Sequence[int] | None, places: Sequence[tuple[int, int]], failures: FailureRate | None
) -> Iterator[str]:
    known = model.calibration
    steps = counted(known.num_samples, "sampled step")
    ranks = " and ".join(counted(run.ranks, "rank") for run in known.runs)
    yield f"calibrated on {known.name} ({ranks}, {steps}); every machine computes like those"
    yield from _assumed_links(model, nodes, places)
    yield from _doubts(known)
    if not known.has_asked_grains and model.asked_grains is None:
        yield "a run without `--grains` has one grain per rank: they get smaller with more ranks"
    if failures is not None:
        yield _assumed_failures(model, failures)
    yield from _assumed_replay(model)
    if len(known.hosts) > 1 and known.hosts.max() > known.hosts.min():
        slow = known.hosts.max() / np.median(known.hosts) - 1
        yield f"machines differ as the measured ones did: the slowest by {100 * slow:.0f} %"


def _assumed_links(model: _Model, nodes: Sequence[int] | None, places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Say where ranks are, and what links them."""
    where = "each rank is on a machine of its own" if nodes is None else "ranks are spread evenly over the machines"
    yield f"{where}; machines are linked by {model.between}, each with its own way out"
    if nodes is not None and any(size > number for size, number in places):
        how = "measured" if model.inside.is_measured else "assumed"
        yield f"ranks of one machine are linked by {model.inside} ({how})"


def _doubts(known: Calibration) -> Iterator[str]:
    """Say what the calibration could not tell apart, and which run would."""
    if known.core_wait > BUSY:
        yield (
            f"the runs had no free core for {100 * known.core_wait:.0f} % of their time: what they waited is taken for "
            "computing and its spread; calibrate on a machine with less to do"
        )
    if known.runs[0].manner.shard != "none" and known.runs[0].ranks > 1:
        yield "the gathers and scatters of these runs are taken for computing: give a run on one rank, too"
    if known.runs[-1].ranks == 1:
        yield (
            "nothing was measured on several ranks, so what they cost each other is not known: the answer is better "
            "with a run on 2 ranks, too"
        )
    if known.grain_s == 0:
        yield "a grain takes time in proportion to its cost: a fixed part could not be told from these steps"


def _assumed_failures(model: _Model, failures: FailureRate) -> str:
    """Say how often machines fail, what happens then, and what checkpoints cost."""
    save_s = model.calibration.save_s
    after = "survivors go on" if _survives(model.manner) else "all ranks start again from the last checkpoint"
    save = f"{SAVE_S:g} s (not measured)" if save_s is None else f"{save_s:.3g} s (measured)"
    rates = f"{1e3 * failures.low:.2g} to {1e3 * failures.high:.2g}"
    return (
        f"{rates} failures per 1,000 node-days; {after}; a checkpoint costs the steps {save} and is taken when "
        "that is best (`--save-every-steps auto`)"
    )


def _assumed_replay(model: _Model) -> Iterator[str]:
    """Say which rows replay buffers are assumed to send."""
    for buffer in replay.buffers(model.calibration.profile.replay):
        yield f"a replay buffer of {counted(buffer.capacity, 'item')} ({buffer.mode}) {replay.assumed(buffer)}"
        if model.manner.reduce == "param":
            yield "replay makes ranks meet in every step; that they wait for the slowest in each is left out"


def _unknown(model: _Model) -> Iterator[str]:
    yield "other traffic on the links, and switches that are oversubscribed"
    yield "machines that are slower than all that were measured, or that others use"
    yield "a file system that serves many ranks more slowly than these few"
    if model.calibration.profile.replay is None:
        yield "what a replay buffer sends between ranks: the runs were made before its sizes were noted"
    yield "what a task itself sends between ranks in a step, beside a replay buffer"
    if model.calibration.device == "cuda":
        yield "memory: whether the model and a grain fit"
    yield "whether accuracy stays the same with another batch, or with `--reduce param`"
