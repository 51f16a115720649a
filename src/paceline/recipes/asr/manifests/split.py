"""A manifest cut into parts, the same for the same seed in whatever order its lines stand."""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.data.manifest.line import AUDIO_KEYS, parse_object, resolve
from paceline.data.manifest.read import Manifest
from paceline.recipes.asr.manifests.scan import as_line, path_from


class BadParts(PacelineError):
    """Shares that are none."""

    hint = "type names and shares, such as `--parts train=0.8,val=0.1,test=0.1`"

    def __init__(self, text: str, why: str) -> None:
        super().__init__(f"--parts {text}: {why}")


class TooFewGroups(PacelineError):
    """More parts than there is to share out."""

    def __init__(self, groups: int, parts: int, what: str) -> None:
        super().__init__(f"{parts} parts of {counted(groups, what)}: one would be empty")
        self.hint = "ask for fewer parts, or leave out `--by`"


def parse_parts(text: str) -> dict[str, float]:
    """`train=0.9,val=0.1`"""
    parts: dict[str, float] = {}
    for piece in text.split(","):
        name, equals, share = (word.strip() for word in piece.partition("="))
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not name or not equals or not 0 < value <= 1:
            raise BadParts(text, f"{piece.strip()!r} is not a name and a share above 0 and up to 1")
        if name in parts or "/" in name:
            raise BadParts(text, f"{name} is there twice" if name in parts else f"{name!r} is no name for a file")
        parts[name] = value
    if sum(parts.values()) > 1 + 1e-9:
        raise BadParts(text, f"the shares are {sum(parts.values()):g} together, more than 1")
    return parts


def assign(groups: Mapping[str, float], parts: Mapping[str, float], seed: int, what: str) -> dict[str, str | None]:
    """Which part each group goes to, given their sizes; None where the shares leave a rest.

    The groups are walked in an order that the seed and their names decide; each goes where most is lacking.
    """
    if len(groups) < len(parts):
        raise TooFewGroups(len(groups), len(parts), what)
    total = sum(groups.values())
    lacking: dict[str | None, float] = {name: share * total for name, share in parts.items()}
    rest = 1 - sum(parts.values())
    if rest > 1e-9:
        lacking[None] = rest * total
    empty = set(parts)
    walk = sorted(groups, key=lambda group: (_order(seed, group), group))
    chosen: dict[str, str | None] = {}
    for place, group in enumerate(walk):
        candidates = list(lacking)
        if len(walk) - place == len(empty):  # the last ones go where nothing is yet
            candidates = [part for part in lacking if part in empty]
        part = max(candidates, key=lambda name: lacking[name])
        chosen[group] = part
        lacking[part] -= groups[group]
        empty.discard(part or "")
    return chosen


def counted(number: int, what: str) -> str:
    """`1 audio file`, `2 values of speaker`"""
    word, space, rest = what.partition(" of ")
    return f"{number:,} {word}{'s' * (number != 1)}{space}{rest}"


def sizes(names: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    """How long each group is, in the order in which they first appear."""
    found: dict[str, float] = defaultdict(float)
    for name, each in zip(names, seconds, strict=True):
        found[name] += each
    return dict(found)


def _order(seed: int, group: str) -> bytes:
    return hashlib.blake2b(group.encode("utf-8", "surrogateescape"), digest_size=8, key=str(seed).encode()).digest()


def moved_lines(manifest: Manifest, out: Path) -> Iterator[bytes]:
    """The lines of a manifest as they are, but with paths that lead from where they will stand."""
    folder = Path(os.path.abspath(out.parent))
    for row, raw in manifest.raw_lines():
        home = manifest.source(row).parent
        if Path(os.path.abspath(home)) == folder:
            yield raw.strip() + b"\n"
            continue
        entry = parse_object(raw)
        for key in (*AUDIO_KEYS, "text_filepath"):
            if isinstance(entry.get(key), str):
                entry[key] = path_from(out, resolve(home, entry[key]))
        yield as_line(entry)
