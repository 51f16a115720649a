"""Predicted speed by number of ranks, with intervals, and advice. Pure; every formula is in docs/predict.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from paceline.core.errors import Conflict, InvalidSetting
from paceline.core.failure_rate import FailureRate, parse_failures
from paceline.core.sum_tree import layout
from paceline.core.units import counted
from paceline.lab.predict import goodput
from paceline.lab.predict.calibration import Array, Calibration, MeasuredRun, Reduction, deal, recut, starts_of
from paceline.lab.predict.communication import Group, LinkSpeed

INSIDE = {"cpu": LinkSpeed(1.5e9, 2e-5), "cuda": LinkSpeed(50e9, 5e-6)}
"""Links between ranks of one machine where they were not measured."""
WIRE_BYTES = {"fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / 1024}
BACKWARD = 2 / 3
"""Share of the backward pass in the time of a grain; gradients become complete in proportion to their bytes."""
SAVE_S = 0.1
"""Time that a checkpoint costs the steps where it was not measured: it is written while training continues."""
BUSY = 0.1
"""Share of the time without a free core above which a calibration is doubted."""
MIN_HALF_WIDTH, COMPUTE_SPREAD, MEASURED_SPREAD, ASSUMED_SPREAD = 0.06, 0.02, 0.15, 0.35
"""Relative uncertainties: of a step at least (half-width of its interval); of computing; of communication that was
compared with a run on several ranks, and that was not."""
IN_INTERVAL = 1.64
"""Standard deviations on each side of an interval that holds nine times out of ten."""


@dataclass(frozen=True)
class Range:
    """A predicted number with the interval that should contain it nine times out of ten."""

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
    """Not hidden by computing."""
    waiting_s: float
    """For the slowest rank: more grains, longer ones, or a slower step."""
    data_s: float
    other_s: float
    """Update, logging and what else a step needs."""
    samples_per_s: Range
    speedup: Range
    """Over one rank."""
    efficiency: Range
    """Speed-up per rank."""
    run_s: Range | None = None
    """Until the end of the run, where its length is known; with failures, if `failures` was given."""
    goodput: Range | None = None
    """Share of the time that is not lost to failures, recovery and checkpoints."""
    price: Range | None = None


@dataclass(frozen=True)
class Prediction:
    """Answer of `paceline predict`."""

    name: str
    """Runs of the calibration."""
    rows: Sequence[Row]
    staircase: Sequence[tuple[int, int]]
    """(ranks, grains of the busiest rank) at each number of ranks that has fewer than all smaller numbers."""
    advice: Sequence[str]
    """Where more ranks stop paying, and what to change."""
    assumptions: Sequence[str]
    unknown: Sequence[str]
    """Influences that are not modelled."""
    reduction: Reduction
    link: str
    """Link between machines, in words."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def predict(
    calibration: Calibration,
    *,
    ranks: Sequence[int],
    nodes: Sequence[int] | None = None,
    between: LinkSpeed,
    reduction: Reduction | None = None,
    grains: int | None = None,
    failures: str | None = None,
    price: float | None = None,
) -> Prediction:
    """Return the prediction; `between` is the link between machines.

    `nodes` is the number of machines for each number of ranks, or one number for all; by default, each rank has a
    machine of its own. `reduction` is that of the run by default. `price` is the price of a rank for an hour.
    """
    chosen = reduction or calibration.runs[-1].reduction
    if chosen.shard == "node":
        raise Conflict(
            "`--shard node` cannot be predicted: its communication was never compared with a measurement",
            hint="predict for `--shard full` (an upper bound of the communication) or `--shard none`",
        )
    model = _fitted(_Model(calibration, chosen, grains, INSIDE[calibration.profile.device], between))
    places = _places(ranks, nodes)
    alone_s = model.parts(1, 1).step_s
    rate = None if failures is None else parse_failures(failures)
    rows = [_row(model, size, machines, alone_s, price, rate) for size, machines in places]
    return Prediction(
        calibration.name,
        rows,
        staircase(max(model.grains(size) for size, _ in places), max(size for size, _ in places)),
        [*_advice(model, [row for row in rows if row.ranks > 1])],
        [*_assumptions(model, nodes, rate)],
        [*_unknown(model)],
        chosen,
        str(between),
    )


def _places(ranks: Sequence[int], nodes: Sequence[int] | None) -> list[tuple[int, int]]:
    hint = "give numbers of ranks, such as `--ranks 2,4,8`, and `--nodes` with one number for each of them, or for all"
    if not ranks or min(ranks) < 1:
        raise InvalidSetting(f"`--ranks {','.join(map(str, ranks))}`: a run has at least one rank", hint=hint)
    machines = list(ranks) if nodes is None else list(nodes)
    if len(machines) == 1:
        machines *= len(ranks)
    sizes = list(ranks) * len(machines) if len(ranks) == 1 else list(ranks)
    if len(machines) != len(sizes):
        text = f"{len(sizes)} numbers of ranks are given, and {len(machines)} numbers of machines (`--nodes`)"
        raise InvalidSetting(text, hint=hint)
    for size, number in zip(sizes, machines, strict=True):
        if not 1 <= number <= size:
            raise InvalidSetting(f"{counted(size, 'rank')} cannot be on {counted(number, 'machine')}", hint=hint)
    return list(zip(sizes, machines, strict=True))


# -- a step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    compute_s: float
    waiting_s: float
    communication_s: float
    data_s: float
    other_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.waiting_s + self.communication_s + self.data_s + self.other_s


@dataclass(frozen=True)
class _Model:
    """What is the same for all numbers of ranks."""

    calibration: Calibration
    reduction: Reduction
    asked_grains: int | None
    inside: LinkSpeed
    between: LinkSpeed
    extra_s: float = 0.0
    """Measured time of each meeting beyond the formulas."""
    factor: float = 1.0
    """Measured time of the links divided by that of the formulas."""
    is_fitted: bool = False

    def grains(self, ranks: int) -> int:
        known = self.calibration
        return self.asked_grains or (known.runs[0].grains if known.has_asked_grains else ranks)

    def parts(self, ranks: int, nodes: int) -> _Parts:
        """Return the parts of a step on these ranks, means over the ranks."""
        known, reduction = self.calibration, self.reduction
        base = known.runs[0]
        costs = [recut(step, known.global_batch, self.grains(ranks)) for step in base.costs]
        shares = _deal_all(costs, ranks, in_blocks=reduction.is_exact)
        compute_s = np.array([known.grain_s * grains + known.cost_s * work for grains, work in shares])
        if reduction.shard != "none":  # all ranks call the model equally often
            compute_s = np.repeat(compute_s.max(axis=1, keepdims=True), ranks, axis=1)
        data_s = float(base.data_s.mean()) * base.ranks / ranks
        update_s = float(np.median(base.update_s)) / (ranks if reduction.shard == "full" else 1)
        other_s = float(base.other_s.mean()) + update_s
        interval = 1
        if reduction.reduce == "param":
            interval = reduction.sync_step or 1
            if reduction.sync_seconds is not None:
                longest_s = float(compute_s.max(axis=1).mean()) + data_s + other_s
                interval = max(1, int(reduction.sync_seconds / longest_s))
            compute_s = compute_s.mean(axis=0, keepdims=True)  # ranks step independently and meet once per interval
        busy = compute_s.sum(axis=1) / compute_s.max(axis=1)  # ranks that are as busy as the busiest
        late = [1 + (largest(known.ratios, number) - 1) / math.sqrt(interval) for number in busy]
        mean_s, computed_s = float(compute_s.mean()), float((compute_s.max(axis=1) * late).mean())
        communication_s = 0.0
        if ranks > 1:
            group = Group(
                ranks,
                nodes,
                self.inside.scaled(self.factor),
                self.between.scaled(self.factor),
                known.profile.device == "cuda",
            )
            ahead_s = computed_s + data_s + other_s
            communication_s = self._communication_s(
                group, costs[0], float(shares[0][0].max()), computed_s, interval, ahead_s
            )
        return _Parts(mean_s, computed_s - mean_s, communication_s, data_s, other_s)

    def _communication_s(
        self, group: Group, costs: Sequence[float], most: float, computed_s: float, interval: int, step_s: float
    ) -> float:
        """Return the seconds of a step in which communication is not hidden by computing."""
        reduction, profile = self.reduction, self.calibration.profile
        if reduction.reduce == "param":
            hidden_s = reduction.sync_overlap * step_s
            return (max(0.0, self._average_s(group, interval) - hidden_s) + self.extra_s) / interval
        tree = layout(starts_of(costs, group.ranks)) if reduction.is_exact else None
        wire = WIRE_BYTES.get(reduction.wire, 4.0) / 4.0
        if reduction.shard == "full":
            blocks = [size for size in profile.blocks if size]
            gathers = [group.all_gather(size) for size in blocks]
            # Every block is gathered in forward and backward of each grain; the rest of the model only in forward.
            root_s = gathers[-1] if profile.blocks and profile.blocks[-1] else 0.0
            scatters = [
                group.reduce_scatter(wire * size) if tree is None else group.exact_scatter(size, tree)
                for size in blocks
            ]
            num_calls = (2 * most + 1) * len(blocks)
            return most * (2 * sum(gathers) - root_s) + sum(scatters) + num_calls * self.extra_s
        sizes = [float(size) for size in profile.buckets]
        seconds = [group.all_reduce(wire * size) if tree is None else group.exact_sum(size, tree) for size in sizes]
        backward_s = BACKWARD * computed_s / max(1.0, most)
        free_s, complete = 0.0, np.cumsum(sizes) / sum(sizes)
        for link_s, share in zip(seconds, complete, strict=True):  # times from the start of the last backward pass
            free_s = max(free_s, share * backward_s) + link_s
        return free_s - backward_s + self.extra_s

    def _average_s(self, group: Group, interval: int) -> float:
        """Return the seconds of an average of parameters on the links."""
        reduction, profile = self.reduction, self.calibration.profile
        state = profile.state if reduction.sync_state == "average" else 0
        state_wire = "full" if reduction.wire == "full" else "bf16"
        seconds = 0.0
        for number, wire in (
            (profile.weights + profile.moving, reduction.wire),
            (profile.buffers, "full"),
            (state, state_wire),
        ):
            if number and wire == "full":
                seconds += group.all_reduce(profile.itemsize * number)
            elif number:
                seconds += group.exchange(WIRE_BYTES[wire] * number) + group.all_gather(WIRE_BYTES[wire] * number)
        return seconds


def _deal_all(costs: Sequence[Sequence[float]], ranks: int, *, in_blocks: bool) -> list[tuple[Array, Array]]:
    dealt = {key: deal(key, ranks, in_blocks=in_blocks) for key in {tuple(step) for step in costs}}
    return [dealt[tuple(step)] for step in costs]


def largest(ratios: Array, number: float) -> float:
    """Return the expected largest of `number` values that are drawn from `ratios`."""
    steps = np.arange(len(ratios) + 1) / len(ratios)
    return float((np.sort(ratios) * np.diff(steps**number)).sum())


def _fitted(model: _Model) -> _Model:
    """Compare the formulas with the run on most ranks, and correct them by the difference.

    Over a link that is known, communication that takes longer than the formulas belongs to each meeting, and
    communication that takes less to the link. Otherwise the difference gives the link inside a machine.
    """
    known, asked = model.calibration, model.reduction
    run = known.runs[-1]
    same = run.reduction
    if run.ranks == 1 or (same.reduce, same.shard, same.wire) != (asked.reduce, asked.shard, asked.wire):
        return model
    link = known.link or model.inside
    plain = replace(model, reduction=same, asked_grains=run.grains, inside=link, between=link)
    parts = plain.parts(run.ranks, 1 if known.link is None else run.ranks)
    modelled_s = parts.communication_s
    if same.shard == "none":
        difference_s = _measured_s(run) - modelled_s
    else:  # there communication is part of the measured computing
        total_s = float((run.compute_s + run.communication_s).mean())
        difference_s = total_s - (parts.compute_s + parts.waiting_s + modelled_s)
    if known.link is None:
        factor = float(np.clip(1 + difference_s / max(modelled_s, 1e-9), 0.2, 20.0))
        return replace(model, inside=replace(link.scaled(factor), is_measured=True), is_fitted=True)
    if difference_s < 0:
        return replace(model, factor=float(np.clip(1 + difference_s / modelled_s, 0.6, 1.0)), is_fitted=True)
    meetings = 1.0 / _interval(run)
    if same.shard != "none":
        blocks = sum(1 for size in known.profile.blocks if size)
        meetings = (2 * -(-run.grains // run.ranks) + 1) * blocks
    return replace(model, extra_s=difference_s / meetings, is_fitted=True)


def _interval(run: MeasuredRun) -> int:
    """Return the steps between two averages of a run; 1 for sums of gradients."""
    if run.reduction.reduce != "param":
        return 1
    if run.reduction.sync_seconds is None:
        return run.reduction.sync_step or 1
    return max(1, int(run.reduction.sync_seconds / float(run.step_s.mean(axis=1).max())))


def _measured_s(run: MeasuredRun) -> float:
    """Return the communication of a step without waiting for other ranks: the last rank to arrive does not wait."""
    if run.reduction.reduce == "grad":
        return float(run.communication_s.min(axis=0).mean())
    return float(run.communication_s.mean(axis=1).min()) if run.reduction.sync_overlap else run.meeting_s


# -- rows --------------------------------------------------------------------------------------------------------------


def _row(
    model: _Model, ranks: int, nodes: int, alone_s: float, price: float | None, failures: FailureRate | None
) -> Row:
    known, grains, parts = model.calibration, model.grains(ranks), model.parts(ranks, nodes)
    step_s = _interval_of(model, parts)
    speedup = step_s.inverse(alone_s)
    run_s = None if known.total_steps is None else step_s.scaled(known.total_steps)
    useful = None if failures is None else _goodput(model, nodes, step_s.value, failures)
    if run_s is not None and useful is not None:
        run_s = Range(run_s.low / useful.high, run_s.value / useful.value, run_s.high / useful.low)
    return Row(
        ranks,
        nodes,
        grains,
        -(-len(recut(known.runs[0].costs[0], known.global_batch, grains)) // ranks),
        step_s,
        parts.compute_s,
        parts.communication_s,
        parts.waiting_s,
        parts.data_s,
        parts.other_s,
        step_s.inverse(known.global_batch),
        speedup,
        speedup.scaled(1 / ranks),
        run_s,
        useful,
        None if price is None or run_s is None else run_s.scaled(price * ranks / 3600),
    )


def _interval_of(model: _Model, parts: _Parts) -> Range:
    """Return the step time with the interval from the uncertainties of computing and communication."""
    ratios = model.calibration.ratios
    compute = math.hypot(COMPUTE_SPREAD, float(ratios.std()) / math.sqrt(max(1.0, len(ratios) / 4)))
    link = MEASURED_SPREAD if model.is_fitted else ASSUMED_SPREAD
    spread_s = math.hypot(compute * (parts.compute_s + parts.waiting_s), link * parts.communication_s)
    half = max(MIN_HALF_WIDTH, IN_INTERVAL * spread_s / parts.step_s)
    return Range(parts.step_s * max(0.05, 1 - half), parts.step_s, parts.step_s * (1 + half))


def _survives(reduction: Reduction) -> bool:
    """Return True if every rank has the whole state, so that the others continue without a lost one."""
    return reduction.reduce == "grad" and reduction.shard == "none"


def _goodput(model: _Model, nodes: int, step_s: float, failures: FailureRate) -> Range:
    known, survives = model.calibration, _survives(model.reduction)
    usual_s = goodput.MEASURED_SURVIVAL_S if survives else goodput.MEASURED_RESTART_S
    shares = goodput.goodput(
        failures,
        nodes,
        step_s=step_s,
        save_s=SAVE_S if known.save_s is None else known.save_s,
        recovery_s=usual_s if known.recovery_s is None else known.recovery_s,
        repeated_steps=1.0 if survives else None,
    )
    return Range(*(max(1e-6, share) for share in shares))  # a share of 0 means that the run never ends


def staircase(grains: int, max_ranks: int) -> list[tuple[int, int]]:
    """Return (ranks, grains of the busiest rank) wherever one more rank gives the busiest one fewer grains."""
    heights = sorted({-(-grains // ranks) for ranks in range(1, min(max_ranks, grains) + 1)}, reverse=True)
    return [(-(-grains // height), height) for height in heights]


# -- words -------------------------------------------------------------------------------------------------------------


def _advice(model: _Model, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    best = max(rows, key=lambda row: row.samples_per_s.value)
    gain = f"{best.speedup.value:.3g} ({best.speedup.low:.3g}-{best.speedup.high:.3g})"
    yield f"{counted(best.ranks, 'rank')} on {counted(best.nodes, 'machine')}: {gain} times as fast as one rank"
    yield _where_it_ends(rows)
    for row in rows:
        if row.ranks > row.grains:
            yield (
                f"{counted(row.ranks, 'rank')} on {counted(row.grains, 'grain')}: a rank takes whole grains, so a run "
                f"of more ranks than grains is refused; set `--grains {row.ranks}` or more"
            )
            break
    for row in rows:
        fewer = -(-row.grains // row.grains_per_rank)
        if fewer < row.ranks < row.grains:
            even = row.ranks * max(1, round(row.grains / row.ranks))
            yield (
                f"{counted(row.ranks, 'rank')} are no faster than {fewer}: the busiest rank has {row.grains_per_rank} "
                f"of {counted(row.grains, 'grain')} with either; `--grains {even}` can be dealt evenly"
            )
            break
    used = [row for row in rows if row.ranks <= row.grains] or rows[:1]
    costly = max(used, key=lambda row: row.communication_s / row.step_s.value)
    if (share := costly.communication_s / costly.step_s.value) > 0.15:
        options = "`--wire bf16`, `--sums fast`, `--reduce param --sync-step 100`"
        if model.reduction.reduce == "param":
            options = "a larger `--sync-step`, `--sync-overlap`, `--wire int8`"
        yield (
            f"at {counted(costly.ranks, 'rank')} communication is {100 * share:.0f} % of a step: predict again with "
            f"{options}, a faster `--link`, or set a larger `--global-batch`"
        )
    late = max(used, key=lambda row: row.waiting_s / row.step_s.value)
    if (share := late.waiting_s / late.step_s.value) > 0.1:
        yield (
            f"at {counted(late.ranks, 'rank')} the others wait {100 * share:.0f} % of the time for the slowest: more "
            "`--grains` are dealt more evenly, `--order bucket` makes them alike"
        )
    slow = max(rows, key=lambda row: row.data_s / row.step_s.value)
    if (share := slow.data_s / slow.step_s.value) > 0.1:
        yield f"data wait is {100 * share:.0f} % of a step: more `--workers`, or `paceline pack`"


def _where_it_ends(rows: Sequence[Row]) -> str:
    """Say from which number of ranks the efficiency is below one half, and why."""
    row = next((row for row in rows if row.efficiency.value < 0.5), None)
    if row is None:
        return f"it pays up to {counted(rows[-1].ranks, 'rank')}: efficiency {100 * rows[-1].efficiency.value:.0f} %"
    parts = {
        "communication": row.communication_s,
        "waiting for the slowest rank": row.waiting_s,
        "the part of a step that does not get shorter (update, logging)": row.other_s,
        "data": row.data_s,
    }
    why = "ranks without a grain" if row.ranks > row.grains else max(parts, key=lambda name: parts[name])
    percent = 100 * row.efficiency.value
    return f"it stops paying at {counted(row.ranks, 'rank')}: efficiency {percent:.0f} %, because of {why}"


def _assumptions(model: _Model, nodes: Sequence[int] | None, failures: FailureRate | None) -> Iterator[str]:
    known = model.calibration
    steps = counted(sum(run.compute_s.size for run in known.runs), "sampled step")
    ranks = " and ".join(counted(run.ranks, "rank") for run in known.runs)
    yield f"calibrated on {known.name} ({ranks}, {steps}); every machine computes like those"
    where = "each rank is on a machine of its own" if nodes is None else "ranks are spread evenly over the machines"
    yield f"{where}; machines are linked by {model.between}, each with its own link"
    if nodes is not None:
        how = "measured" if model.inside.is_measured else "assumed"
        yield f"ranks of one machine are linked by {model.inside} ({how})"
    yield "the last backward pass is two thirds of a grain, and gradients become complete in proportion to their bytes"
    if known.grain_s == 0:
        yield "a grain takes time in proportion to its cost: a fixed part could not be separated in these steps"
    if model.reduction.shard != "none":
        yield "computing hides no communication of shards: on GPUs this is an upper bound"
    if not known.has_asked_grains and model.asked_grains is None:
        yield "a run without `--grains` has one grain per rank: they get smaller with more ranks"
    if failures is not None:
        after = "survivors continue" if _survives(model.reduction) else "all ranks restart from the last checkpoint"
        save = f"{SAVE_S:g} s (assumed)" if known.save_s is None else f"{known.save_s:.3g} s (measured)"
        yield (
            f"{1e3 * failures.low:.2g} to {1e3 * failures.high:.2g} failures per 1,000 node-days; {after}; a "
            f"checkpoint costs the steps {save} and is saved at the best interval (`--save-every-steps auto`)"
        )


def _unknown(model: _Model) -> Iterator[str]:
    known = model.calibration
    if not model.is_fitted:
        yield (
            "calls, threads and copies of communication: no run on several ranks with this reduction was given, so "
            "only latency and bandwidth are counted; the answer is better with a run on 2 ranks, too"
        )
    if known.core_wait > BUSY:
        yield (
            f"computing on free cores: the runs had none for {100 * known.core_wait:.0f} % of their time; calibrate on "
            "a machine with less to do"
        )
    if known.runs[0].reduction.shard != "none" and known.runs[0].ranks > 1:
        yield "computing without shards: communication of these runs counts as computing; give a run on one rank, too"
    yield "other traffic on the links, and switches that are oversubscribed"
    yield "machines that are slower than all that were measured, or that others use"
    yield "a file system that serves many ranks more slowly than these few"
    yield "what a replay buffer, or the task itself, sends between ranks in a step"
    if known.profile.device == "cuda":
        yield "memory: whether the model and a grain fit; what GPUs of a machine share (power, memory, host)"
    yield "accuracy with another batch, or with `--reduce param`"
