"""SentencePiece's `tokenizer.model`: the pieces, their scores, and how texts are brought to them.

The file is one message in Protocol Buffers' wire format, of which few fields matter here; all others are skipped. What
is written is read by the package `sentencepiece`, and by NeMo.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

MAX_BYTES = 2**26


class Damaged(ValueError):
    """Bytes that are no SentencePiece model."""


class PieceKind(IntEnum):
    """Kind of a piece, with its number in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """A piece, and how much it is worth."""

    text: str
    score: float = 0.0
    kind: PieceKind = PieceKind.NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """Fields of a model that decide how a text is cut; the names are those of SentencePiece."""

    pieces: tuple[Piece, ...]
    model_type: int = 1
    """1: unigram, 2: BPE; 3 (words) and 4 (characters) are not for speech."""
    byte_fallback: bool = False
    treat_whitespace_as_suffix: bool = False
    normalizer: str = ""
    """Name of its rules, for people."""
    precompiled_charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def parse_model(data: bytes) -> SentencePieceModel:
    """Read a model. Raises `Damaged`."""
    pieces: list[Piece] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int] = {3: 1, 4: 1, 5: 1}
    name, charsmap = "", b""
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_message(value)))
        elif number == 2:
            trainer |= {field: each for field, each in _fields(_message(value)) if isinstance(each, int)}
        elif number == 3:
            for field, each in _fields(_message(value)):
                if isinstance(each, int):
                    normalizer[field] = each
                elif field == 1:
                    name = each.decode("utf-8", "replace")
                elif field == 2:
                    charsmap = each
    if not pieces:
        raise Damaged("there are no pieces in it")
    return SentencePieceModel(
        tuple(pieces),
        model_type=trainer.get(3, 1),
        byte_fallback=bool(trainer.get(35, 0)),
        treat_whitespace_as_suffix=bool(trainer.get(24, 0)),
        normalizer=name,
        precompiled_charsmap=charsmap,
        add_dummy_prefix=bool(normalizer[3]),
        remove_extra_whitespaces=bool(normalizer[4]),
        escape_whitespaces=bool(normalizer[5]),
    )


def write_bpe_model(pieces: Sequence[Piece]) -> bytes:
    """Return a model of these pieces that takes texts as they are: BPE by score, without rules of normalisation."""
    written = [
        _bytes(1, _bytes(1, piece.text.encode()) + _float(2, piece.score) + _int(3, piece.kind)) for piece in pieces
    ]
    trainer = _int(3, 2) + _int(4, len(pieces)) + _int(40, 0) + _int(41, -1) + _int(42, -1) + _int(43, -1)
    normalizer = _bytes(1, b"identity") + _int(3, 1) + _int(4, 1) + _int(5, 1)
    return b"".join(written) + _bytes(2, trainer) + _bytes(3, normalizer)


# -- wire format -------------------------------------------------------------------------------------------------------

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field: numbers as int, all else as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise Damaged(f"byte {at} begins no field")
        if number == 0 or at + length > len(data):
            raise Damaged(f"a field ends behind the end of the file, at byte {at}")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise Damaged(f"a number at byte {at} has no end")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise Damaged("a number stands where a message must")
    return value


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, PieceKind.NORMAL
    for number, value in _fields(data):
        try:
            if number == 1:
                text = _message(value).decode("utf-8")
            elif number == 2:
                (score,) = struct.unpack("<f", _message(value))
            elif number == 3 and isinstance(value, int):
                kind = PieceKind(value)
        except (UnicodeDecodeError, struct.error, ValueError) as error:
            raise Damaged(f"a piece cannot be read: {error}") from None
    return Piece(text, score, kind)


def _tag(number: int, wire: int) -> bytes:
    return _as_varint(number << 3 | wire)


def _as_varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers have ten bytes
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _int(number: int, value: int) -> bytes:
    return _tag(number, _VARINT) + _as_varint(value)


def _float(number: int, value: float) -> bytes:
    return _tag(number, _FIXED32) + struct.pack("<f", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _tag(number, _BYTES) + _as_varint(len(value)) + value
