"""Several files by one name: `audio_{0..7}.tar`, or `audio__OP_0..7_CL_.tar` as NeMo writes it where braces have a
meaning of their own."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.core.errors import PacelineError

_RANGE = re.compile(r"(?:\{|_OP_)(\d+)\.\.(\d+)(?:\}|_CL_)")
_OTHER = re.compile(r"\{[^{}]*\}|_OP_.*?_CL_")
MOST_FILES = 1_000_000


class PatternInvalid(PacelineError):
    """A name of several files that means none."""

    name: str
    why: str
    sentence = "{name}: {why}"
    hint = "write a range of numbers: audio_{{0..7}}.tar, audio_{{000..127}}.tar or audio__OP_0..7_CL_.tar"


def expand(path: Path) -> dict[int, Path]:
    """Return the files that a name stands for, by their number; a name without a range stands for itself, number 0."""
    text = str(path)
    match = _RANGE.search(text)
    if match is None:
        if _OTHER.search(path.name) and not path.exists():
            raise PatternInvalid(path.name, "what is in the braces is no range of numbers")
        return {0: path}
    first, last = match[1], match[2]
    if _RANGE.search(text, match.end()):
        raise PatternInvalid(path.name, "there are two ranges in it")
    if int(first) > int(last):
        raise PatternInvalid(path.name, "the range ends before it begins")
    if int(last) - int(first) >= MOST_FILES:
        raise PatternInvalid(path.name, f"the range has more than {MOST_FILES:,} numbers")
    width = len(first) if first.startswith("0") and len(first) > 1 else 1
    begin, end = text[: match.start()], text[match.end() :]
    return {number: Path(f"{begin}{number:0{width}d}{end}") for number in range(int(first), int(last) + 1)}
