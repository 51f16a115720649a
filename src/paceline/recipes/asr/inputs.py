"""What somebody wants transcribed: audio files, folders of them, manifests, all as one data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.config.errors import PacelineError
from paceline.data.audio_check import in_threads, measure
from paceline.data.audio_file import SUFFIXES, AudioFacts, AudioUnreadable
from paceline.data.bad_line import MOST_SHOWN
from paceline.data.manifest import read_manifests
from paceline.data.manifest_columns import Manifest
from paceline.data.strings import Strings
from paceline.recipes.asr.text import EncodedTexts
from paceline.recipes.asr.utterances import Utterances

THREADS = 8


class NothingToHear(PacelineError):
    """A word that leads to no audio."""

    hint = "give audio files, folders of them, or manifests (.json, .jsonl)"

    def __init__(self, word: str, why: str) -> None:
        super().__init__(f"{word}: {why}")


class InputsUnreadable(PacelineError):
    """Files that cannot be transcribed, all of them."""

    hint = "mend them, leave them out, or add `--bad-data skip`"

    def __init__(self, errors: Sequence[AudioUnreadable]) -> None:
        lines = [f"  {error}" for error in errors[:MOST_SHOWN]]
        more = [f"  ... and {len(errors) - MOST_SHOWN:,} more"] if len(errors) > MOST_SHOWN else []
        number = f"{len(errors):,} files" if len(errors) > 1 else "1 file"
        super().__init__("\n".join([f"{number} cannot be read", *lines, *more]))


def open_inputs(words: Sequence[str], sample_rate: int, *, skip_bad: bool, say: Callable[[str], None]) -> Utterances:
    """The recordings that the words mean, in their order, without transcripts."""
    parts = [_open(word, skip_bad, say) for word in words]
    manifest = Manifest.concat(parts)
    nothing = EncodedTexts(np.zeros(0, np.uint8), np.zeros(len(manifest) + 1, np.int64))
    return Utterances(manifest, nothing, sample_rate)


def _open(word: str, skip_bad: bool, say: Callable[[str], None]) -> Manifest:
    path = Path(word)
    if path.suffix.lower() in (".json", ".jsonl"):
        return read_manifests([path], min_seconds=0.0, bad_data="skip" if skip_bad else "stop")[0]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise NothingToHear(word, "there is no audio in this folder")
    else:
        files = [path]
    measured = dict(zip(files, in_threads(_measure, files, THREADS), strict=True))
    bad = [found for found in measured.values() if isinstance(found, AudioUnreadable)]
    good = {file: found for file, found in measured.items() if not isinstance(found, AudioUnreadable)}
    if bad and (not skip_bad or not good):
        raise InputsUnreadable(bad)
    for error in bad:
        say(f"skipped {error}")
    return _manifest(good)


def _measure(path: Path) -> AudioFacts | AudioUnreadable:
    try:
        return measure(path)
    except AudioUnreadable as error:
        return error


def _manifest(files: dict[Path, AudioFacts]) -> Manifest:
    number = len(files)
    return Manifest(
        [Path("command line")],
        audio=Strings.pack(str(path).encode("utf-8", "surrogateescape") for path in files),
        texts=Strings.pack(b"" for _ in files),
        durations=np.array([facts.seconds for facts in files.values()]),
        offsets=np.full(number, np.nan),
        source_of=np.zeros(number, np.int32),
        line_of=np.arange(1, number + 1, dtype=np.int32),
    )
