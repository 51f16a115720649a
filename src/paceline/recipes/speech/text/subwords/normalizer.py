"""SentencePiece's normalisation of a text: rules from a table in the model, then spaces as `▁`.

The table is a double-array trie over UTF-8 (Yata et al. 2007, "A compact static double-array keeping character codes"),
followed by the texts that its values point into.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from paceline.recipes.speech.text.pieces import WORD_START
from paceline.recipes.speech.text.subwords.model_file import Damaged, SentencePieceModel

_ASCII = range(0x20, 0x7F)
_VALUE = 0x7FFFFFFF


class Charsmap:
    """Rules of a normaliser: the longest rule that fits at a place is applied."""

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or not size or size % 4 or 4 + size > len(data):
            raise Damaged("its table of characters is cut off")
        units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
        self._units: list[int] = units.tolist()
        self._texts = data[4 + size :]
        ends = np.flatnonzero((units >> 31 == 0) & (units >> 8 & 1 == 1))  # of rules
        leaves = ends ^ (units[ends] >> 10 << ((units[ends] & 1 << 9) >> 6))
        is_inside = bool(np.all(leaves < len(units)))
        if is_inside and len(leaves):
            is_inside = self._texts.endswith(b"\0") and bool(np.all(units[leaves] & _VALUE < len(self._texts)))
        if not is_inside:
            raise Damaged("its table of characters points outside of itself")

    def longest(self, text: bytes, at: int) -> tuple[int, bytes] | None:
        """Return the length of the longest rule that fits at a place, and what it puts there."""
        node, found = self._offset(0), None
        for place in range(at, len(text)):
            node = self._child(node, text[place])
            if node < 0:
                break
            unit = self._units[node]
            node ^= _offset(unit)
            if unit >> 8 & 1:  # a rule ends here
                found = place + 1 - at, self._units[node] & _VALUE
        if found is None:
            return None
        length, value = found
        return length, self._texts[value : self._texts.index(b"\0", value)]

    def _offset(self, node: int) -> int:
        return node ^ _offset(self._units[node])

    def _child(self, node: int, byte: int) -> int:
        child = node ^ byte
        return child if child < len(self._units) and self._units[child] & 0x800000FF == byte else -1

    @cached_property
    def plain_ascii(self) -> str:
        """ASCII characters that no rule begins with, alone or with another of them behind it."""
        plain = []
        for byte in _ASCII:
            node = self._child(self._offset(0), byte)
            if node >= 0:
                unit = self._units[node]
                goes_on = any(self._child(node ^ _offset(unit), after) >= 0 for after in _ASCII)
                if unit >> 8 & 1 or goes_on:
                    continue
            plain.append(chr(byte))
        return "".join(plain)


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


class SpNormalizer:
    """Brings a text to the form in which pieces are looked for."""

    def __init__(self, model: SentencePieceModel, user_defined: Sequence[str]) -> None:
        self._model = model
        self._rules = Charsmap(model.precompiled_charsmap) if model.precompiled_charsmap else None
        longest_first = sorted(user_defined, key=len, reverse=True)
        self._kept = re.compile("|".join(map(re.escape, longest_first)) if longest_first else "(?!)")
        self._space = WORD_START if model.escape_whitespaces else " "
        plain = "".join(map(chr, _ASCII)) if self._rules is None else self._rules.plain_ascii
        self._is_plain = re.compile(f"[{re.escape(plain)}]*")

    def __call__(self, text: str) -> str:
        model, space = self._model, self._space
        text = text if self._is_plain.fullmatch(text) else self._mapped(text)
        if model.remove_extra_whitespaces:
            text = " ".join(filter(None, text.split(" ")))
        if not text:
            return ""
        if model.add_dummy_prefix:
            text = f" {text}"
        return text.replace(" ", space)

    def _mapped(self, text: str) -> str:
        """Apply the rules; user-defined pieces stay as they are."""
        if self._rules is None:
            return text
        out: list[bytes] = []
        at = 0
        for kept in self._kept.finditer(text):
            out += [self._by_rules(text[at : kept.start()].encode("utf-8", "replace")), kept[0].encode()]
            at = kept.end()
        out.append(self._by_rules(text[at:].encode("utf-8", "replace")))
        return b"".join(out).decode("utf-8", "replace")

    def _by_rules(self, text: bytes) -> bytes:
        assert self._rules is not None
        out: list[bytes] = []
        at = 0
        while at < len(text):
            rule = self._rules.longest(text, at)
            if rule is None:
                length = _char_bytes(text[at])
                out.append(text[at : at + length])
            else:
                length, put = rule
                out.append(put)
            at += length
        return b"".join(out)


def _char_bytes(lead: int) -> int:
    """Return the number of bytes of a character that begins with this one."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
