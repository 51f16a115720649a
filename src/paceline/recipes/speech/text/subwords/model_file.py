"""Writer of `tokenizer.model`, SentencePiece's file, for subwords that were learned here.

SentencePiece cannot write a model of given pieces without the package `protobuf`, so the few fields that it needs are
written in Protocol Buffers' wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_NORMAL, _UNKNOWN = 1, 2
"""Kinds of a piece."""
_BPE: Final = 2
"""Type of a model."""


def write_bpe_model(unknown: str, pieces: Sequence[str]) -> bytes:
    """Return a BPE model that takes texts as they are: piece 0 is the unknown one, then `pieces`, best first."""
    written = [
        _piece(unknown, 0.0, _UNKNOWN),
        *(_piece(text, -float(rank), _NORMAL) for rank, text in enumerate(pieces)),
    ]
    trainer = _int(3, _BPE) + _int(4, len(written)) + _int(40, 0) + _int(41, -1) + _int(42, -1) + _int(43, -1)
    normalizer = _bytes(1, b"identity") + _int(3, 1) + _int(4, 1) + _int(5, 1)
    return b"".join(written) + _bytes(2, trainer) + _bytes(3, normalizer)


def _piece(text: str, score: float, kind: int) -> bytes:
    score_field = _varint(2 << 3 | _FIXED32) + struct.pack("<f", score)
    return _bytes(1, _bytes(1, text.encode()) + score_field + _int(3, kind))


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers have ten bytes
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
