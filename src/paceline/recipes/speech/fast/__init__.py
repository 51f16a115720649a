"""Faster ways to train an encoder, by layout and by kernels."""

from __future__ import annotations

from paceline.recipes.speech.network.acoustic_encoder import AcousticEncoder
from paceline.recipes.speech.network.conformer.encoder import ConformerEncoder
from paceline.recipes.speech.network.encoder import Encoder


def accelerate(encoder: AcousticEncoder) -> list[str]:
    """Train through our kernels from now on, or else through the library's convolutions in the layout that they want.

    Return what is left as it was, and why: a compiler may still make it faster.
    """
    from paceline.recipes.speech.fast import channels_last, conformer, fused  # which need Triton

    if isinstance(encoder, ConformerEncoder):
        return conformer.accelerate(encoder)
    assert isinstance(encoder, Encoder)
    reasons = fused.accelerate(encoder)
    if not reasons:
        return []
    channels_last.accelerate(encoder)
    if not channels_last.leaves_some(encoder):
        return []
    others = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return [f"{reasons[0]}{others}; the library's convolutions instead, with channels last in memory"]
