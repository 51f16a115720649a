"""Metrics of a validation set, exact on any number of ranks: sums, values for one function, torchmetrics.

Whatever a batch gives is kept by itself and put together in the order of the batches, which are the same on any number
of ranks. So no result depends on which rank had which batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import PacelineError, TaskContract, first_line
from paceline.data.grain import map_tensors
from paceline.world.link import Link


class MetricContract(PacelineError):
    """A metric that is nothing which can be put together over batches."""

    name: str
    value: Any
    sentence = "metric {name!r} is {kind}, not a pair (sum, weight)"
    hint = (
        "return {{'accuracy': (number_correct, number_of_samples)}}; what is no mean over samples (BLEU, AUROC, F1) is "
        "a `paceline.Gathered(function, values, ...)` or a torchmetrics object"
    )

    @property
    def kind(self) -> str:
        return type(self.value).__name__


class Gathered:
    """A metric that one function computes of all values at once: corpus BLEU, AUROC, F1.

        return {"bleu": paceline.Gathered(corpus_bleu, hypotheses, references)}

    Each of `values` is a list or a tensor of this batch. The function is called once, on one rank, with the lists
    joined and the tensors concatenated (on the CPU) over all batches, and returns a number, or a dictionary of numbers.
    """

    __slots__ = ("function", "values")

    def __init__(self, function: Callable[..., Any], *values: Sequence[Any] | Tensor) -> None:
        self.function = function
        self.values = [value.detach() if isinstance(value, Tensor) else list(value) for value in values]


@runtime_checkable
class TorchMetric(Protocol):
    """A `torchmetrics.Metric` that was updated with a batch."""

    @property
    def metric_state(self) -> Mapping[str, Tensor | list[Tensor]]: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


class _Row(NamedTuple):
    """Values of one metric from one batch."""

    step: int
    place: int
    """Among the metrics of the batch."""
    name: str
    kind: str
    content: Any


class Collected:
    """Metrics of this rank's batches of one set."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._sums: list[Tensor] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        self._metrics: dict[str, TorchMetric] = {}

    def add(self, step: int, metrics: Mapping[str, Any], device: torch.device) -> None:
        """Take what a batch gave; nothing waits for the device here."""
        for place, (name, value) in enumerate(_flat(metrics).items()):
            if isinstance(value, Gathered):
                self._functions.setdefault(name, value.function)
                self._rows.append(_Row(step, place, name, "values", value.values))
            elif isinstance(value, TorchMetric):
                if any(kind.__name__ == "Running" for kind in type(value).__mro__):
                    raise TaskContract(
                        f"metric {name!r} is a {type(value).__name__}, which covers the last batches alone, and ranks "
                        "have different batches",
                        hint="return the metric that it wraps: that covers the whole set",
                    )
                self._metrics[name] = value
                self._rows.append(_Row(step, place, name, "state", _state(value)))
            elif isinstance(value, tuple) and len(value) == 2:
                self._rows.append(_Row(step, place, name, "sums", None))
                self._sums += [torch.as_tensor(number, dtype=torch.float64, device=device).detach() for number in value]
            else:
                raise MetricContract(name, value)
        for metric in metrics.values():
            if isinstance(metric, TorchMetric) or _is_collection(metric):
                metric.reset()  # each batch by itself
                for member in _members(metric).values():
                    member.reset()

    def results(self, link: Link) -> dict[str, float]:
        """Return each metric over all batches that have it. All ranks must call it."""
        gathered = link.gather_objects([tuple(row) for row in self._on_host()])
        everyone = [[_Row(*row) for row in of_rank] for of_rank in gathered]
        by_name = _in_order(everyone)
        owners = {
            name: next(rank for rank, of_rank in enumerate(everyone) if any(row.name == name for row in of_rank))
            for name, each in by_name.items()
            if each[0].kind != "sums"
        }
        computed = self._compute(link, by_name, owners) if owners else {}
        return {
            key: number
            for name, each in by_name.items()
            for key, number in (computed[name] if name in owners else {name: _quotient(each)}).items()
        }

    def _on_host(self) -> list[_Row]:
        """Return this rank's rows, with one transfer from the device for all sums."""
        sums = iter(torch.stack(self._sums).view(-1, 2).tolist() if self._sums else [])
        return [
            row._replace(content=next(sums) if row.kind == "sums" else map_tensors(_to_host, row.content))
            for row in self._rows
        ]

    def _compute(
        self, link: Link, by_name: Mapping[str, list[_Row]], owners: Mapping[str, int]
    ) -> dict[str, dict[str, float]]:
        """Let the first rank that has a metric's function compute it, and tell the others."""
        own: dict[str, dict[str, float]] = {}
        failure: tuple[str, str] | None = None
        error: Exception | None = None
        for name, owner in owners.items():
            if owner == link.world.rank and error is None:
                try:
                    own[name] = _numbers(name, self._call(name, [row.content for row in by_name[name]]))
                except Exception as raised:  # all ranks are to end, not only this one
                    error, failure = raised, (name, first_line(raised))
        answers = link.gather_objects((own, failure))
        if error is not None:
            raise error
        for rank, (_, failed) in enumerate(answers):
            if failed is not None:
                raise TaskContract(
                    f"metric {failed[0]!r} failed on rank {rank}: {failed[1]}",
                    hint="look at the traceback of that rank; the function gets the values of all batches, in the "
                    "order of the data",
                )
        return {name: numbers for results, _ in answers for name, numbers in results.items()}

    def _call(self, name: str, contents: list[Any]) -> Any:
        if name in self._functions:
            return self._functions[name](*(_joined(name, column) for column in zip(*contents, strict=True)))
        return _compute_joined(self._metrics[name], contents)


def _in_order(everyone: Sequence[Sequence[_Row]]) -> dict[str, list[_Row]]:
    """Return the rows of all ranks by metric, in the order of the data."""
    rows = sorted((row for of_rank in everyone for row in of_rank), key=lambda row: (row.step, row.place, row.name))
    by_name: dict[str, list[_Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    for name, each in by_name.items():
        if len({row.kind for row in each}) > 1:
            raise TaskContract(
                f"metric {name!r} is not of the same kind in all batches",
                hint="return it as a pair, as `Gathered` or as a torchmetrics object, always the same",
            )
    return by_name


def _flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics by name; those of a torchmetrics `MetricCollection` are `name_metric`."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        members = value.items() if _is_collection(value) else None
        flat |= {name: value} if members is None else {f"{name}_{inner}": metric for inner, metric in members}
    return flat


def _is_collection(value: Any) -> bool:
    """Return True for a `MetricCollection`: a torch module that is a dictionary of metrics."""
    return isinstance(value, torch.nn.ModuleDict) and all(isinstance(each, TorchMetric) for each in value.values())


def _members(metric: Any) -> dict[str, TorchMetric]:
    """Return a metric and those that it is made of (wrappers, `a + b`), by name: each has a state of its own."""
    if not isinstance(metric, torch.nn.Module):
        return {"": metric}
    members: dict[str, TorchMetric] = {}
    for name, module in metric.named_modules():
        if _is_collection(module):
            dict(module.items())  # those that share a state have it from now on
        elif isinstance(module, TorchMetric):
            members[name] = module
    return members


def _state(metric: TorchMetric) -> dict[str, dict[str, Any]]:
    """Return the state of one batch by member, which `reset` does not change any more."""
    return {
        member: {name: list(value) if isinstance(value, list) else value for name, value in each.metric_state.items()}
        for member, each in _members(metric).items()
    }


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _quotient(rows: list[_Row]) -> float:
    """Return sum / weight, added in the order of the batches."""
    total, weight = 0.0, 0.0
    for row in rows:
        total, weight = total + row.content[0], weight + row.content[1]
    return total / weight if weight else math.nan


def _joined(name: str, column: Sequence[Any]) -> Any:
    if isinstance(column[0], Tensor):
        shapes = [tuple(each.shape) for each in column]
        if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
            different = list(dict.fromkeys(map(str, shapes)))
            listed = " and ".join(different[:2]) + (" and others" if len(different) > 2 else "")
            raise TaskContract(
                f"values of metric {name!r} cannot be joined over batches: their shapes are {listed}",
                hint="give values per sample: a list (`list(tensor)`, or of what is not padding), or tensors that "
                "differ in the first dimension alone",
            )
        return torch.cat(list(column))
    return [value for values in column for value in values]


def _compute_joined(metric: TorchMetric, states: list[dict[str, dict[str, Any]]]) -> Any:
    """Return the metric of all batches: their states are put together as torchmetrics does it with those of ranks."""
    with ExitStack() as undo:
        undo.callback(metric.reset)
        for name, member in _members(metric).items():
            undo.enter_context(_with_states(member, [state[name] for state in states]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*``compute`` method of metric", category=UserWarning)
            return metric.compute()


@contextmanager
def _with_states(metric: TorchMetric, states: list[dict[str, Any]]) -> Iterator[None]:
    """Give one metric the states of all batches meanwhile."""
    live: Any = metric
    before = {name: getattr(live, name) for name in live.metric_state}
    is_distributed = live.distributed_available_fn
    # What a state is reduced by has no public name; it is the same in all versions since 0.3.
    for name, reduce in live._reductions.items():
        values = [_on(live.device, state[name]) for state in states]
        joined = [each for value in values for each in value] if isinstance(values[0], list) else torch.stack(values)
        is_empty = isinstance(joined, list) and not joined
        setattr(live, name, joined if reduce is None or is_empty else reduce(joined))
    live.distributed_available_fn = lambda: False  # the states are those of all ranks already
    try:
        yield
    finally:
        live.distributed_available_fn = is_distributed
        for name, value in before.items():
            setattr(live, name, value)
        live.reset()


def _on(device: torch.device, value: Any) -> Any:
    return [each.to(device) for each in value] if isinstance(value, list) else value.to(device)


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return what a metric gave as numbers by name."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):  # by class
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {full: number for key, each in value.items() for full, number in _numbers(f"{name}_{key}", each).items()}
    if isinstance(value, bool | int | float):
        return {name: float(value)}
    raise TaskContract(
        f"the function of metric {name!r} returned {type(value).__name__}, not a number",
        hint="return a float, a tensor with one element, or a dictionary of them",
    )
