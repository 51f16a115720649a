"""Arithmetic of training, counted by formula."""

from __future__ import annotations

from paceline.recipes.translation.network.shape import Shape


def training_flops(shape: Shape, vocabulary: int) -> float:
    """Return operations of forward and backward per token of source or target, where both are equally many.

    Two per weight and token forward, four backward; attention's own products, which grow with the sentence, are left
    out.
    """
    width = shape.width
    if shape.kind == "lstm":
        encoder = shape.encoder_layers * 2 * 8 * width * width // 2
        decoder = shape.decoder_layers * (8 + 4) * width * width
    else:
        feed_forward = 2 * width * shape.ffn_width
        encoder = shape.encoder_layers * (4 * width * width + feed_forward)
        decoder = shape.decoder_layers * (8 * width * width + feed_forward)
    return 6.0 * (encoder + decoder + width * vocabulary) / 2
