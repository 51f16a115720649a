"""A batch per device: global batch and learning rate on a number of ranks."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from paceline.config.settings import DataSettings, OptimSettings
from paceline.core.units import counted

S = TypeVar("S", bound=DataSettings)


def for_ranks(config: S, ranks: int) -> tuple[S, str]:
    """Return settings with the global batch and the learning rate worked out, and the arithmetic in words, if any.

    A run keeps the result, so that resuming on another number of ranks is a change that has to be allowed.
    """
    each = config.batch_per_device
    if each is None:
        return config, ""
    changes: dict[str, Any] = {"batch_per_device": None, "global_batch": each * ranks}
    changes["batch_schedule"] = tuple(_times(text, ranks) for text in config.batch_schedule)
    words = f"batch: {each} per device x {counted(ranks, 'rank')} = {each * ranks}"
    if isinstance(config, OptimSettings):
        factor = {"none": 1.0, "linear": float(ranks), "sqrt": math.sqrt(ranks)}[config.scale_lr]
        changes |= {"scale_lr": "none", "lr": config.lr * factor}
        words += "; learning rate: " + _rate(config, factor, ranks)
    return config.model_copy(update=changes), words


def _times(text: str, ranks: int) -> str:
    """Return a point of a schedule of batches per device as one of the global batch."""
    value, _, place = text.partition("@")
    return f"{float(value) * ranks:.15g}@{place}"


def _rate(config: OptimSettings, factor: float, ranks: int) -> str:
    if config.scale_lr == "none":
        return f"{config.lr:g}, not scaled"
    root = "sqrt of " if config.scale_lr == "sqrt" else ""
    words = f"{config.lr:g} x {factor:g} ({root}{counted(ranks, 'rank')}) = {config.lr * factor:g}"
    if config.warmup_ratio:
        return f"{words} after a warm-up over {100 * config.warmup_ratio:g}% of the steps"
    if config.warmup_steps:
        return f"{words} after a warm-up over {counted(config.warmup_steps, 'step')}"
    return f"{words} from the first step (`--warmup-steps` lets it rise)" if ranks > 1 else words
