"""Written English as it is spoken: numbers, a few abbreviations and signs as words.

Plain cardinals only: years, dates, times and money are read number by number, because which reading is right
depends on what was said, and a wrong guess is worse than a known plain rule.
"""

from __future__ import annotations

import re
from typing import Final

DIGITS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS: Final = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen"),
    *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES: Final = ("", "thousand", "million", "billion", "trillion")
_MAX_CARDINAL_DIGITS: Final = 3 * len(_SCALES)
_ORDINALS: Final = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth"},
    **{"eight": "eighth", "nine": "ninth", "twelve": "twelfth"},
}
_ABBREVIATIONS: Final = {
    **{"mr": "mister", "mrs": "missus", "dr": "doctor", "st": "saint", "prof": "professor", "rev": "reverend"},
    **{"jr": "junior", "sr": "senior", "capt": "captain", "sgt": "sergeant", "lt": "lieutenant", "vs": "versus"},
    "etc": "et cetera",
}
_SIGNS: Final = {"+": "plus", "&": "and", "%": "percent"}

_INTEGER = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_NUMBER: Final = re.compile(
    rf"(?P<minus>(?<![\w.,)])-(?=\.?[0-9]))?"
    rf"(?:(?P<whole>{_INTEGER})(?:(?P<ordinal>st|nd|rd|th)\b|\.(?P<part>[0-9]+))?|(?<!\w)\.(?P<tail>[0-9]+))",
    re.IGNORECASE,
)
_ABBREVIATION: Final = re.compile(r"\b([A-Za-z]{2,4})\.")
_DIGIT: Final = re.compile("[0-9]")


def cardinal(digits: str) -> str:
    """A whole number, given as ASCII digits, in words: without "and", without hyphens.

    A number with leading zeros (007) and one past the trillions is read digit by digit.
    """
    if (len(digits) > 1 and digits[0] == "0") or len(digits) > _MAX_CARDINAL_DIGITS:
        return spelled_out(digits)
    if int(digits) == 0:
        return DIGITS[0]
    padded = digits.zfill(_MAX_CARDINAL_DIGITS)
    groups = [int(padded[start : start + 3]) for start in range(0, len(padded), 3)]
    words: list[str] = []
    for scale, group in zip(reversed(_SCALES), groups, strict=True):
        if group:
            words += [*_below_thousand(group), *([scale] if scale else [])]
    return " ".join(words)


def ordinal(digits: str) -> str:
    """The same as a place in a row: twenty first, one hundredth."""
    *words, last = cardinal(digits).split(" ")
    if last in _ORDINALS:
        last = _ORDINALS[last]
    elif last.endswith("y"):
        last = last[:-1] + "ieth"
    else:
        last += "h" if last.endswith("t") else "th"
    return " ".join([*words, last])


def spelled_out(digits: str) -> str:
    return " ".join(DIGITS[int(digit)] for digit in digits)


def expand(text: str, keep: frozenset[str]) -> str:
    """Numbers, signs and abbreviations of a text as words.

    Characters in `keep` are labels of the model and stay as they are: where digits are labels, numbers stay numbers.
    """
    if "." not in keep and "." in text:
        text = _ABBREVIATION.sub(_abbreviation_in_words, text)
    if _DIGIT.search(text) and keep.isdisjoint("0123456789"):
        text = _NUMBER.sub(_number_in_words, text)
    for sign, word in _SIGNS.items():
        if sign in text and sign not in keep:
            text = text.replace(sign, f" {word} ")
    return text


def _abbreviation_in_words(found: re.Match[str]) -> str:
    word = _ABBREVIATIONS.get(found[1].lower())
    return f"{word} " if word else found[0]


def _number_in_words(found: re.Match[str]) -> str:
    if found["whole"] is None:
        words = f"point {spelled_out(found['tail'])}"
    elif found["ordinal"]:
        words = ordinal(found["whole"].replace(",", ""))
    else:
        words = cardinal(found["whole"].replace(",", ""))
        if found["part"]:
            words += f" point {spelled_out(found['part'])}"
    return f" minus {words} " if found["minus"] else f" {words} "


def _below_thousand(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    words = [DIGITS[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(_TENS[rest // 10])
        rest %= 10
    if rest >= 10:
        words.append(_TEENS[rest - 10])
    elif rest:
        words.append(DIGITS[rest])
    return words
