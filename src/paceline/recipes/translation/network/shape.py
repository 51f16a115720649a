"""Sizes of a network: named ones, and what is set by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["transformer", "lstm"]
Size = Literal["tiny", "small", "base", "big"]


@dataclass(frozen=True)
class Shape:
    """Everything that a network is built from, beside its vocabulary."""

    kind: Kind = "transformer"
    width: int = 512
    ffn_width: int = 2048
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    norm: Literal["pre", "post"] = "pre"
    share: Literal["all", "target", "none"] = "all"
    """Embeddings of source, target and last layer as one; of target and last layer; or each its own."""


SIZES: dict[tuple[Kind, Size], Shape] = {
    # Wu et al. 2021, for Multi30k.
    ("transformer", "tiny"): Shape(width=128, ffn_width=256, heads=4, encoder_layers=4, decoder_layers=4, dropout=0.3),
    # Learns Multi30k on two cores in minutes.
    ("transformer", "small"): Shape(width=256, ffn_width=1024, heads=4, encoder_layers=3, decoder_layers=3),
    # Vaswani et al. 2017.
    ("transformer", "base"): Shape(),
    ("transformer", "big"): Shape(width=1024, ffn_width=4096, heads=16, dropout=0.3),
    ("lstm", "tiny"): Shape("lstm", width=128, heads=1, encoder_layers=1, decoder_layers=1),
    ("lstm", "small"): Shape("lstm", width=256, heads=1, encoder_layers=1, decoder_layers=2, dropout=0.2),
    ("lstm", "base"): Shape("lstm", width=512, heads=1, encoder_layers=2, decoder_layers=2, dropout=0.2),
    # RETURNN's WMT 2017 recipe: six bidirectional layers, one in the decoder.
    ("lstm", "big"): Shape("lstm", width=1024, heads=1, encoder_layers=6, decoder_layers=1, dropout=0.3),
}
