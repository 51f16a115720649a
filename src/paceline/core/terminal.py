"""Text on its way to a terminal, which obeys some characters instead of showing them.

File names, manifests and records are written by others. An escape sequence in one of them could clear the screen, hide
a line or type into the shell; so these characters are shown as Python writes them: `\\x1b`.
"""

from __future__ import annotations

import re
import sys

# Control characters but tab and line feed, line separators, and those that change the direction of writing; of bytes
# that are no text (half a surrogate pair in Python) those that are control characters.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\udc80-\udc9f]")
_BREAKS = re.compile("[\t\n]")


def visible(text: str) -> str:
    """Return a text in which every character that a terminal would obey is written out; lines stay lines."""
    return _OBEYED.sub(_written, text)


def one_line(text: str) -> str:
    """Return a text on one line, line breaks and tabs written out, too: for a cell of a table."""
    return _BREAKS.sub(_written, visible(text))


def tell(text: str) -> None:
    """Print a text for people to stdout, as it can be seen."""
    sys.stdout.write(visible(text))


def warn(text: str) -> None:
    """Print a text for people to stderr, as it can be seen."""
    sys.stderr.write(visible(text))


def emit(text: str) -> None:
    """Print data to stdout: as it is into a file or a pipe, as it can be seen on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)


def _written(match: re.Match[str]) -> str:
    letter = match[0]
    return f"\\x{ord(letter) - 0xDC00:02x}" if "\udc80" <= letter <= "\udc9f" else ascii(letter)[1:-1]
