"""Lines of manifests that cannot be used: place, reason, and the error that lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.language import phrase
from paceline.core.paths import near
from paceline.core.units import ranges
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
        count = phrase("{total:#bad line} in {files}", total=self.total, files=files)
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
            lines.append(
                f"{margin}{phrase('the same in {path}, lines {numbers}', path=near(group[0].path), numbers=numbers)}"
            )
    if total > MOST_SHOWN:
        lines.append(f"{margin}{phrase('... and {number:,} more', number=total - MOST_SHOWN)}")
    return lines


def beginning(raw: bytes) -> str:
    """Return the beginning of a line, as text that can be printed whatever it holds."""
    text = raw[: 4 * _MOST_CHARACTERS].decode("utf-8", "backslashreplace").strip()
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def _advice(bad: Sequence[BadLine], total: int, is_all: bool) -> str:
    file = near(bad[0].path)
    if total == 1 and bad[0].what.startswith('"duration"'):
        return phrase("add the length in seconds, or let `paceline manifest scan {file}` measure it", file=file)
    values = {"file": file, "these": phrase("it") if total == 1 else phrase("them")}
    if is_packed(bad[0].path):
        if is_all:
            return phrase("pack {file} again from what it was made of: without {these} nothing is left", **values)
        return phrase(
            "pack {file} again from what it was made of, take what is sound of it (`paceline pack {file} sound.h5 "
            "--bad-data skip`), or go on without {these} with `--bad-data skip`",
            **values,
        )
    if is_all:
        return phrase(
            "mend {these} (`paceline manifest scan {file}` measures durations): without {these} nothing is left",
            **values,
        )
    return phrase(
        "mend {these}, let `paceline manifest scan {file}` write a manifest of what is sound, or go on without {these} "
        "with `--bad-data skip`",
        **values,
    )
