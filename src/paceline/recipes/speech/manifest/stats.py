"""Statistics of a manifest: hours, lengths, words, characters, doubles and speakers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.units import counted
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.line import parse_object
from paceline.recipes.speech.manifest.raw_lines import raw_lines
from paceline.recipes.speech.text.labels import ENGLISH

PERCENTILES = (5, 25, 50, 75, 95, 99)
_BINS = 12
_BAR = 40
_EXTREMES = 3
_MOST_SPEAKERS = 20
_MOST_DOUBLES = 5


class Extreme(NamedTuple):
    """One of the shortest or longest utterances."""

    where: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Stats:
    """Numbers of a data set; lengths in seconds."""

    utterances: int
    hours: float
    shortest_s: float
    mean_s: float
    longest_s: float
    percentiles_s: dict[str, float]
    histogram: list[tuple[float, float, int]]
    """(from, to, utterances)"""
    words: int
    distinct_words: int
    empty_texts: int
    characters: dict[str, int]
    """Most frequent first."""
    outside_labels: list[str]
    """Characters that are not among the 28 labels of English."""
    shortest: list[Extreme]
    longest: list[Extreme]
    repeated_audio: list[str]
    """Places of lines that repeat the audio and offset of an earlier line."""
    repeated_texts: int
    """Number of utterances that repeat the text of an earlier one."""
    hours_by_speaker: dict[str, float]
    """Longest first; empty if no line names a speaker."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "shortest": [extreme._asdict() for extreme in self.shortest],
            "longest": [extreme._asdict() for extreme in self.longest],
        }


def stats(manifest: Manifest) -> Stats:
    """Compute the statistics of a manifest."""
    seconds = manifest.durations
    counts, edges = np.histogram(seconds, bins=_BINS)
    texts = [manifest.texts.raw(row) for row in range(len(manifest))]
    words = Counter(word for text in texts for word in text.decode().split())
    characters = count_characters(manifest.texts.packed)
    return Stats(
        utterances=len(manifest),
        hours=float(seconds.sum()) / 3600,
        shortest_s=float(seconds.min()),
        mean_s=float(seconds.mean()),
        longest_s=float(seconds.max()),
        percentiles_s={str(share): float(np.percentile(seconds, share)) for share in PERCENTILES},
        histogram=[
            (float(low), float(high), int(count))
            for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        ],
        words=sum(words.values()),
        distinct_words=len(words),
        empty_texts=sum(not text.strip() for text in texts),
        characters=characters,
        outside_labels=[letter for letter in characters if letter not in ENGLISH.characters],
        shortest=_extremes(manifest, np.argsort(seconds, kind="stable")[:_EXTREMES]),
        longest=_extremes(manifest, np.argsort(-seconds, kind="stable")[:_EXTREMES]),
        repeated_audio=_repeated_audio(manifest),
        repeated_texts=len(texts) - len(set(texts)),
        hours_by_speaker=_hours_by_speaker(manifest),
    )


def count_characters(packed: NDArray[np.uint8]) -> dict[str, int]:
    """Return the number of each character in UTF-8 text, the most frequent first."""
    codes = np.frombuffer(packed.tobytes().decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
    letters, counts = np.unique(codes, return_counts=True)
    order = np.lexsort((letters, -counts))
    return {chr(letters[place]): int(counts[place]) for place in order}


def show(stats: Stats) -> list[str]:
    """Return the statistics as lines of text."""
    lines = [
        f"{counted(stats.utterances, 'utterance')}, {stats.hours:,.2f} h",
        "",
        f"seconds       shortest {stats.shortest_s:.2f}, mean {stats.mean_s:.2f}, longest {stats.longest_s:.2f}",
        "percentiles   " + ", ".join(f"{share} % {value:.2f}" for share, value in stats.percentiles_s.items()),
        *_histogram(stats.histogram),
        "",
        f"words         {stats.words:,}, {stats.distinct_words:,} different"
        + (f"; {stats.empty_texts:,} empty texts" if stats.empty_texts else ""),
        f"characters    {_characters(stats.characters)}",
    ]
    # A run writes capitals as small letters by itself.
    outside = {
        letter: stats.characters[letter] for letter in stats.outside_labels if letter.lower() not in ENGLISH.characters
    }
    if outside:
        lines.append(f"outside the 28 labels of English: {_characters(outside)}")
    lines += ["", "shortest", *_rows(stats.shortest), "longest", *_rows(stats.longest)]
    if stats.repeated_texts:
        lines.append(f"texts that an earlier line has: {stats.repeated_texts:,}")
    if stats.repeated_audio:
        lines.append(f"audio that an earlier line has: {len(stats.repeated_audio):,}")
        lines += [f"  {where}" for where in stats.repeated_audio[:_MOST_DOUBLES]]
    if stats.hours_by_speaker:
        lines += ["", f"speakers      {len(stats.hours_by_speaker):,}"]
        shown = list(stats.hours_by_speaker.items())[:_MOST_SPEAKERS]
        lines += [f"  {hours:8.2f} h  {speaker}" for speaker, hours in shown]
        if len(stats.hours_by_speaker) > len(shown):
            lines.append(f"  ... and {len(stats.hours_by_speaker) - len(shown):,} more")
    return lines


def _histogram(bins: list[tuple[float, float, int]]) -> Iterable[str]:
    most = max(count for _, _, count in bins)
    for low, high, count in bins:
        bar = "█" * -(-_BAR * count // most)  # a bin with anything in it shows something
        yield f"  {low:7.2f} to {high:7.2f}  {count:9,}  {bar}".rstrip()


def _characters(counts: dict[str, int]) -> str:
    return " ".join(f"{_visible(letter)}:{count:,}" for letter, count in counts.items())


def _visible(letter: str) -> str:
    return "space" if letter == " " else letter if letter.isprintable() else f"U+{ord(letter):04X}"


def _rows(extremes: list[Extreme]) -> list[str]:
    return [f"  {each.seconds:8.2f} s  {each.where}  {each.text[:60]}".rstrip() for each in extremes]


def _extremes(manifest: Manifest, rows: NDArray[np.int64]) -> list[Extreme]:
    return [Extreme(manifest.where(row), float(manifest.durations[row]), manifest.text(row)) for row in rows.tolist()]


def _repeated_audio(manifest: Manifest) -> list[str]:
    audio_so_far, repeated = set(), []
    for row in range(len(manifest)):
        audio = (manifest.source(row).parent, manifest.audio_names[row], manifest.offset(row))
        if audio in audio_so_far:
            repeated.append(manifest.where(row))
        audio_so_far.add(audio)
    return repeated


def _hours_by_speaker(manifest: Manifest) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for row, raw in raw_lines(manifest):
        speaker = parse_object(raw).get("speaker") if b'"speaker"' in raw else None
        if speaker is not None:
            seconds[str(speaker)] += float(manifest.durations[row])
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return {speaker: value / 3600 for speaker, value in longest_first}
