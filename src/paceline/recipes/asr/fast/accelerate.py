"""The faster way to train an encoder: our kernels, or else the library's in the layout that they want."""

from __future__ import annotations

from paceline.recipes.asr.fast import channels_last, fused
from paceline.recipes.asr.network.encoder import Encoder


def accelerate(encoder: Encoder) -> list[str]:
    """From now on train that way; says what is not done by our kernels, and why."""
    reasons = fused.accelerate(encoder)
    if not reasons:
        return []
    channels_last.accelerate(encoder)
    others = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return [f"{reasons[0]}{others}; the library's convolutions instead, with channels last in memory"]
