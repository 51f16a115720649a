"""Lines of manifests that cannot be used: place, reason, and the error that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.units import counted, ranges
from paceline.data.packed.errors import is_packed

MOST_SHOWN = 20
"""Bad lines that are shown with their text; the others are only counted."""
_MOST_CHARACTERS = 100
_FEWEST_ALIKE = 4
"""Lines of a file that are wrong in the same way and are shown once."""


@dataclass(frozen=True)
class BadLine:
    """One line, and the reason why it cannot be used."""

    path: Path
    """The manifest, as it was named."""
    line: int
    """Counted from 1."""
    what: str
    text: str = ""
    """Beginning of the line."""
    row: int = -1
    """Row in the `Manifest`, for a line whose audio is at fault."""

    def __str__(self) -> str:
        return f"{near(self.path)}:{self.line}: {self.what}"


class BadManifest(PacelineError):
    """Lines that cannot be used, where none may be left out."""

    bad: tuple[BadLine, ...]
    """The first of them."""
    total: int
    is_all: bool
    """Without them nothing would be left."""
    sentence = "{listed}"
    hint = "{advice}"

    def __init__(self, bad: Sequence[BadLine], total: int | None = None, *, is_all: bool = False) -> None:
        super().__init__(tuple(bad[:MOST_SHOWN]), len(bad) if total is None else total, is_all)

    @property
    def listed(self) -> str:
        if self.total == 1:
            return "\n  ".join(filter(None, [str(self.bad[0]), self.bad[0].text]))
        files = ", ".join(dict.fromkeys(near(line.path) for line in self.bad))
        count = f"{counted(self.total, 'bad line')} in {files}"
        return "\n".join([f"{count}", *shown(self.bad, self.total)])

    @property
    def advice(self) -> str:
        return _advice(self.bad, self.total, self.is_all)


def shown(bad: Sequence[BadLine], total: int, margin: str = "  ") -> list[str]:
    """Return the first bad lines as they are shown, equal ones of a file once, and the number of the others."""
    groups: dict[tuple[Path, str], list[BadLine]] = {}
    for bad_line in bad[:MOST_SHOWN]:
        groups.setdefault((bad_line.path, bad_line.what), []).append(bad_line)
    lines = []
    for group in groups.values():
        alone = group[:1] if len(group) >= _FEWEST_ALIKE else group
        for bad_line in alone:
            lines.append(f"{margin}{bad_line}")
            if bad_line.text:
                lines.append(f"{margin}  {bad_line.text}")
        if len(group) > len(alone):
            numbers = ranges([each.line for each in group[1:]])
            lines.append(f"{margin}the same in {near(group[0].path)}, lines {numbers}")
    if total > MOST_SHOWN:
        lines.append(f"{margin}... and {total - MOST_SHOWN:,} more")
    return lines


def beginning(raw: bytes) -> str:
    """Return the beginning of a line, as text that can be printed whatever it holds."""
    text = raw[: 4 * _MOST_CHARACTERS].decode("utf-8", "backslashreplace").strip()
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def _advice(bad: Sequence[BadLine], total: int, is_all: bool) -> str:
    file = near(bad[0].path)
    if total == 1 and bad[0].what.startswith('"duration"'):
        return f"add the length in seconds, or let `paceline manifest scan {file}` measure it"
    values = {"file": file, "these": "it" if total == 1 else "them"}
    if is_packed(bad[0].path):
        if is_all:
            return "pack {file} again from what it was made of: without {these} nothing is left".format(**values)
        return (
            "pack {file} again from what it was made of, take what is sound of it (`paceline pack {file} sound.h5 "
            "--bad-data skip`), or go on without {these} with `--bad-data skip`"
        ).format(**values)
    if is_all:
        return (
            "mend {these} (`paceline manifest scan {file}` measures durations): without {these} nothing is left".format(
                **values
            )
        )
    return (
        "mend {these}, let `paceline manifest scan {file}` write a manifest of what is sound, or go on without {these} "
        "with `--bad-data skip`"
    ).format(**values)
