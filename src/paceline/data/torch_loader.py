"""torch's `DataLoader` where a data set is expected: its data set and its collate function are taken out of it.

Batches, their order and who reads them are decided by the settings, which hold on any number of ranks; a loader that
decides more than they can say is refused with the line to write instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, default_collate

from paceline.config.settings import DataSettings
from paceline.core.errors import Conflict, InvalidData, PacelineError
from paceline.core.units import counted
from paceline.data.dataset import Collate


class LoaderSampler(PacelineError):
    """A `DataLoader` whose own sampler chooses samples."""

    sampler: Any
    sentence = "the DataLoader's {kind} chooses the samples, which no rank but this one would know of"
    hint = "return `loader.dataset` and set `--order`; to weight or filter samples, return a data set that does it"

    @property
    def kind(self) -> str:
        return type(self.sampler).__name__


class Source(NamedTuple):
    """Data set and collate function of a loader."""

    dataset: Any
    collate: Collate | None
    """None where the loader stacks samples, as we do."""


_EACH_ONCE = frozenset(
    {
        "SequentialSampler",
        "RandomSampler",
        "DistributedSampler",
        "StatefulDistributedSampler",
        "_InfiniteConstantSampler",
    }
)
"""Samplers of torch and torchdata that give each sample once, in order or not, as a plan does; the last one is a
placeholder for data of unknown length."""


def take_out(data: Any) -> Source:
    """Return the data set of a `DataLoader` and its collate function; other data as it is."""
    if not isinstance(data, DataLoader):
        return Source(data, None)
    if data.batch_sampler is None:
        raise InvalidData(
            "a DataLoader with `batch_size=None` gives whatever its data set gives, which may be whole batches",
            hint="return the data set of samples itself: `return loader.dataset`; "
            "`global_batch` is the number of samples of a step",
        )
    if not _is_plain_batch(data.batch_sampler):
        raise LoaderSampler(data.batch_sampler)
    # A batch sampler that was made by hand has the sampler, not the loader.
    assert isinstance(data.batch_sampler, BatchSampler)
    sampler = data.batch_sampler.sampler
    if not _gives_each_once(sampler, data.dataset):
        raise LoaderSampler(sampler)
    return Source(data.dataset, None if data.collate_fn is default_collate else data.collate_fn)


def take_out_for_training(data: Any, settings: DataSettings) -> tuple[Source, list[str]]:
    """Return the same, and what there is to tell of it: whose batches these are."""
    source = take_out(data)
    if not isinstance(data, DataLoader):
        return source, []
    assert isinstance(data.batch_sampler, BatchSampler)
    batch_size = data.batch_sampler.batch_size
    is_said = any((settings.global_batch, settings.batch_per_device, settings.batch_cost))
    if not is_said and batch_size != settings.max_samples:
        raise Conflict(
            f"the DataLoader has batches of {batch_size}, "
            f"but a step of this run has {counted(settings.max_samples, 'sample')}",
            hint=f"type `--global-batch {batch_size}` (over all ranks) or `--batch-per-device {batch_size}`",
        )
    lines = ["the DataLoader's data set and collate_fn are used; batches, order and workers are those of the settings"]
    if data.drop_last and not settings.drop_last:
        lines.append(
            "  its `drop_last` is not: set `drop_last` (`--drop-last`) to leave out a last batch that is not full"
        )
    return source, lines


def _is_plain_batch(sampler: Any) -> bool:
    return isinstance(sampler, BatchSampler) and type(sampler).__name__ == "BatchSampler" and _is_of_torch(sampler)


def _gives_each_once(sampler: Any, dataset: Any) -> bool:
    kind = type(sampler).__name__
    if not _is_of_torch(sampler) or kind not in _EACH_ONCE:
        return False
    if kind == "_InfiniteConstantSampler":
        return True
    indexed = sampler.data_source if kind in ("SequentialSampler", "RandomSampler") else sampler.dataset
    if len(indexed) != len(dataset):  # made for a part of the data, or for other data
        return False
    return kind != "RandomSampler" or (not sampler.replacement and sampler.num_samples == len(indexed))


def _is_of_torch(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")
