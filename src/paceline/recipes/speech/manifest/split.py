"""A manifest cut into parts, the same for the same seed in whatever order its lines are."""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import InvalidSetting, NotFound, PacelineError
from paceline.core.units import counted, plural
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.line import AUDIO_KEYS, parse_object, resolve
from paceline.recipes.speech.manifest.raw_lines import raw_lines
from paceline.recipes.speech.manifest.scan import as_line, path_from, write_lines
from paceline.recipes.speech.manifest.sources import NEMO_SHARDS


class BadParts(PacelineError):
    """Shares that cannot be parsed."""

    text: str
    why: str
    sentence = "--parts {text}: {why}"
    hint = "type names and shares, such as `--parts train=0.8,val=0.1,test=0.1`"


@dataclass(frozen=True)
class Part:
    """One part of a manifest that was split."""

    path: Path
    rows: Manifest
    groups: str
    """Number of groups in it, in words."""

    def __str__(self) -> str:
        hours = float(self.rows.durations.sum()) / 3600
        return f"{self.path}: {counted(len(self.rows), 'utterance')}, {hours:,.2f} h, {self.groups}"

    def write(self) -> None:
        write_lines(self.path, moved_lines(self.rows, self.path))


def split(
    manifest: Manifest, shares: Mapping[str, float], outs: Mapping[str, Path], *, seed: int, by: str | None
) -> Iterator[Part]:
    """Yield each part of a manifest; rows of one group stay together.

    A group is an audio file, or all lines of one value of the key `by`.
    """
    groups = groups_of(manifest, by)
    what = f"value of {by}" if by else "audio file"
    part_of_group = assign(sizes(groups, manifest.durations.tolist()), shares, seed, what)
    for part, out in outs.items():
        rows = [row for row, group in enumerate(groups) if part_of_group[group] == part]
        yield Part(out, manifest.take(rows), counted(len({groups[row] for row in rows}), what))


def groups_of(manifest: Manifest, by: str | None) -> list[str]:
    """Return the group of each row."""
    if by is None:
        return [manifest.audio_names[row] for row in range(len(manifest))]
    groups, missing = [""] * len(manifest), []
    for row, raw in raw_lines(manifest):
        value = parse_object(raw).get(by)
        if value is None:
            missing.append(row)
        groups[row] = str(value)
    if missing:
        more = len(missing) - 1
        others = f", nor {plural(more, 'does')} {counted(more, 'more line')}" if more > 0 else ""
        raise NotFound(
            f'{manifest.where(missing[0])} has no "{by}"{others}',
            hint="name a key that all lines have; without `--by` each audio file is a group",
        )
    return groups


def parse_parts(text: str) -> dict[str, float]:
    """Parse names and shares: `train=0.9,val=0.1`."""
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
    """Return the part of each group, given their sizes; None where the shares leave a rest.

    The groups are visited in an order given by the seed and their names; each goes to the part that lacks most.
    """
    if len(groups) < len(parts):
        raise InvalidSetting(
            f"{len(parts)} parts of {counted(len(groups), what)}: one would be empty",
            hint="ask for fewer parts, or leave out `--by`",
        )
    total = sum(groups.values())
    lacking: dict[str | None, float] = {name: share * total for name, share in parts.items()}
    rest = 1 - sum(parts.values())
    if rest > 1e-9:
        lacking[None] = rest * total
    empty = set(parts)
    order = sorted(groups, key=lambda group: (_order(seed, group), group))
    chosen: dict[str, str | None] = {}
    for place, group in enumerate(order):
        candidates = list(lacking)
        if len(order) - place == len(empty):  # the last ones go where nothing is yet
            candidates = [part for part in lacking if part in empty]
        part = max(candidates, key=lambda name: lacking[name])
        chosen[group] = part
        lacking[part] -= groups[group]
        empty.discard(part or "")
    return chosen


def sizes(names: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    """Return the length of each group, in the order in which they first appear."""
    lengths: dict[str, float] = defaultdict(float)
    for name, length in zip(names, seconds, strict=True):
        lengths[name] += length
    return dict(lengths)


def _order(seed: int, group: str) -> bytes:
    return hashlib.blake2b(group.encode("utf-8", "surrogateescape"), digest_size=8, key=str(seed).encode()).digest()


def moved_lines(manifest: Manifest, out: Path) -> Iterator[bytes]:
    """Yield the lines of a manifest, with paths relative to the place where they will be.

    A member of a shard that is not found by its `shard_id` there is named by its path, which needs no pattern.
    """
    folder = Path(os.path.abspath(out.parent))
    for row, raw in raw_lines(manifest):
        home, name = manifest.source(row).parent, manifest.audio_names[row]
        entry = parse_object(raw)
        key = next(key for key in AUDIO_KEYS if entry.get(key) is not None)
        is_found = entry[key] == name or name.startswith(f"{NEMO_SHARDS.format(entry.get('shard_id'))}/")
        if is_found and Path(os.path.abspath(home)) == folder:
            yield raw.strip() + b"\n"
            continue
        entry[key] = path_from(out, manifest.audio(row))
        entry.pop("shard_id", None)
        if isinstance(entry.get("text_filepath"), str):
            entry["text_filepath"] = path_from(out, resolve(home, entry["text_filepath"]))
        yield as_line(entry)
