"""Files that the words of a data set name: manifests, packed files, shards, patterns of several of them.

- `train.json`, `cuts.jsonl.gz`: lines of NeMo's or Lhotse's.
- `manifest_{0..7}.json`: several, by one name.
- `shard-{000..127}.tar`: WebDataset shards, whose samples are their lines.
- `train.json@audio_{0..7}.tar`: lines about members of shards. Without `@`, lines with a `shard_id` are about
  `audio_<shard_id>.tar` beside their manifest, as NeMo writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.core.cloud.address import local_path
from paceline.core.cloud.file_copy import bring
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.units import counted
from paceline.recipes.speech.manifest.line import LineInvalid, audio_of, offset_of
from paceline.recipes.speech.shards.pattern import expand
from paceline.recipes.speech.shards.tar_index import SUFFIX, ShardUnreadable, TarIndex, tar_index

_WITH_SHARDS = re.compile(r"(?P<manifest>.+?)@(?P<shards>.+\.tar)", re.DOTALL)
NEMO_SHARDS = "audio_{}.tar"


class ShardsMisfit(PacelineError):
    """Shards that are not those of a manifest."""

    path: Path
    why: str
    advice: str
    sentence = "{place}: {why}"
    hint = "{advice}"

    @property
    def place(self) -> str:
        return near(self.path)


@dataclass(frozen=True)
class Source:
    """One file of lines, and the shards that they are about, if any."""

    path: Path
    shards: Shards | None = None

    @property
    def are_samples(self) -> bool:
        """True for a WebDataset shard, which has samples instead of lines."""
        return self.path.suffix == SUFFIX


def sources_of(words: Sequence[Path | str]) -> list[Source]:
    """Return the files of all words, in their order; what is at an address is brought here."""
    found: list[Source] = []
    for word in words:
        match = _WITH_SHARDS.fullmatch(str(word))
        if match is None or Path(str(word)).exists():
            found += [Source(path) for path in expand(local_path(word)).values()]
            continue
        manifests = expand(local_path(match["manifest"]))
        named = next(iter(manifests.values())).parent / match["shards"]
        shards = Shards(named, expand(local_path(str(named))), is_named=True)
        found += [Source(path, shards) for path in manifests.values()]
    for source in found:
        bring(source.path)
    return found


@dataclass
class Shards:
    """Tar files that lines name members of."""

    pattern: Path
    """As it was named."""
    files: dict[int, Path]
    """By number."""
    is_named: bool = False
    """They were named by the user; else they are looked for beside the manifest."""
    _used: set[int] = field(default_factory=set)
    _first_line: dict[tuple[str, float], int] = field(default_factory=dict)

    def locate(self, entry: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
        """Return a line with the path of its member instead of the bare name; raises `LineInvalid`."""
        name, shard_id, offset = audio_of(entry), entry.get("shard_id"), offset_of(entry)
        if shard_id is not None and type(shard_id) is not int:
            raise LineInvalid('"shard_id" must be a whole number')
        if shard_id is None:
            place, member = self._search(name)
        else:
            found = self._member(self._index(shard_id, number), name)
            place, member = shard_id, found or ""
            if found is None:
                raise LineInvalid(f'{near(self.files[place])} has no member "{PurePosixPath(name).name}"')
        self._used.add(place)
        path = self.files[place] / member
        line = self._first_line.setdefault((str(path), -1.0 if math.isnan(offset) else offset), number)
        if line != number:
            raise LineInvalid(f"names {near(path)} again, as line {line} does")
        inside = path.relative_to(folder) if path.is_relative_to(folder) else path
        return {**entry, "audio_filepath": str(inside)}

    def check_all_used(self, manifests: Sequence[Path]) -> None:
        """Refuse a pattern that names more shards than the lines are about."""
        idle = [number for number in self.files if number not in self._used]
        if not self.is_named or not idle or not self._used:
            return
        why = (
            f"names {counted(len(self.files), 'shard')}, and "
            f"{', '.join(near(path) for path in manifests[:3])} is about {len(self._used)} of them: "
            f"{self.files[idle[0]].name} has no line"
        )
        first, last = min(self._used), max(self._used)
        advice = f"lines have shard_id {first} to {last}: name those shards"
        raise ShardsMisfit(self.pattern, why, advice)

    def _index(self, shard_id: int, number: int) -> TarIndex:
        if shard_id not in self.files:
            if self.is_named:
                names = f"shards {min(self.files)} to {max(self.files)}"
                advice = "name as many shards as there are"
                why = f"names {names}, and line {number} is of shard {shard_id}"
                raise ShardsMisfit(self.pattern, why, advice)
            self.files[shard_id] = self.pattern.parent / NEMO_SHARDS.format(shard_id)
        path = self.files[shard_id]
        if not self.is_named and not path.exists():
            bring(path)
            if not path.exists():
                advice = "name the shards: `MANIFEST@FOLDER/audio_{0..7}.tar`"
                raise ShardUnreadable(path, f"there is no such shard, and line {number} is of it", advice)
        return tar_index(path)

    def _member(self, index: TarIndex, name: str) -> str | None:
        for candidate in dict.fromkeys((name, PurePosixPath(name).name)):
            if index.find(candidate) is not None:
                return candidate
        return index.by_stem.get(PurePosixPath(name).stem)

    def _search(self, name: str) -> tuple[int, str]:
        """Return shard and member of a line that does not say its shard."""
        hits = [(place, found) for place, path in self.files.items() if (found := self._member(tar_index(path), name))]
        if len(hits) == 1:
            return hits[0]
        if hits:
            shards = ", ".join(self.files[place].name for place, _ in hits[:3])
            raise LineInvalid(f'"{name}" is in several shards: {shards}')
        what = f'no shard of {near(self.pattern)} has a member "{name}"'
        raise LineInvalid(what)


def beside(manifest: Path) -> Shards:
    """Return the shards that NeMo's lines with a `shard_id` are about."""
    return Shards(manifest.parent / NEMO_SHARDS.format("{...}"), {})
