"""Collating samples into the data of one grain: stacked, or padded where lengths differ."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from paceline.core.errors import PacelineError


class ShapesDiffer(PacelineError):
    """Samples of one grain cannot be stacked."""

    reason: str
    sentence = "the samples of one grain differ in shape and cannot be stacked: {reason}"
    hint = "give your task `collate = staticmethod(paceline.pad_collate)`, or a collate of its own"


def stack_collate(samples: list[Any]) -> Any:
    """Stack tensors, arrays and numbers along a new first axis, as PyTorch's loader does."""
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if "equal size" not in str(error) and "resizable" not in str(error):
            raise
        raise ShapesDiffer(str(error)) from error


def pad_collate(samples: list[Any]) -> Any:
    """Stack, but pad with zeros along the first axis where lengths differ.

    In dictionaries each padded entry `name` gains its true lengths as `name_lengths`; in tuples they follow at the end.
    """
    first = samples[0]
    if isinstance(first, dict):
        data: dict[str, Any] = {}
        for name in first:
            data[name], lengths = _column([sample[name] for sample in samples])
            if lengths is not None:
                data[f"{name}_lengths"] = lengths
        return data
    columns = [_column(list(column)) for column in zip(*samples, strict=True)]
    return (*(column for column, _ in columns), *(lengths for _, lengths in columns if lengths is not None))


def _column(values: list[Any]) -> tuple[Any, torch.Tensor | None]:
    tensors = [torch.as_tensor(value) for value in values] if not isinstance(values[0], str) else values
    if isinstance(tensors[0], torch.Tensor) and tensors[0].dim() > 0:
        lengths = torch.tensor([tensor.shape[0] for tensor in tensors], device="cpu")
        return pad_sequence(tensors, batch_first=True), lengths
    return default_collate(values), None
