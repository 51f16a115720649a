"""Manifests as a source of packing: audio as 16-bit samples or as features, and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import Conflict, InvalidData
from paceline.data.packed.errors import NoSuchStream, is_packed
from paceline.data.packed.layout import About, LeftOut, StreamSpec, Structure, stamp_or_none
from paceline.data.packed.piece import Piece, PieceMaker
from paceline.data.packed.reader import open_packed
from paceline.data.packed.verify import CheckedRows, RowDamaged
from paceline.recipes.speech.audio.file import AudioUnreadable, probe
from paceline.recipes.speech.audio.recordings import Recordings
from paceline.recipes.speech.manifest.columns import Manifest
from paceline.recipes.speech.manifest.packed import no_audio
from paceline.recipes.speech.manifest.raw_lines import extra_keys
from paceline.recipes.speech.shards.tar_index import split_member

PIECE_S = 1000.0
"""Seconds of audio in a piece: 32 MB at 16 kHz."""
AUDIO, FEATURES, TEXT = "audio", "features", "text"


class FrontEnd(Protocol):
    """Feature extraction of a network."""

    about: Mapping[str, Any]
    """Its settings, as JSON."""

    def __call__(self, samples: NDArray[np.int16]) -> NDArray[np.float32]:
        """Return (frames, features) of 16-bit samples."""


class ManifestSource:
    """Rows of a manifest, each with the streams that are wanted."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        sample_rate: int | None = None,
        streams: Sequence[str] | None = None,
        features: FrontEnd | None = None,
        trim: bool = False,
        skip_bad: bool = False,
        bad_lines: LeftOut | None = None,
    ) -> None:
        """`sample_rate`: that of the first recording if not set; all must have it then. `trim`: without the silence at
        both ends, and with the length that is left."""
        self._streams = _streams(streams, [AUDIO if features is None else FEATURES, TEXT])
        has_sound = self._streams != [TEXT]
        self._manifest, self._features, self.skip_bad, self._trim = manifest, features, skip_bad, trim
        if has_sound:
            _check_sources(manifest.sources)
        self._keeps_rate = sample_rate is None
        self._rate = sample_rate or _first_rate(manifest, skip_bad)
        seconds = float(manifest.durations.sum()) if has_sound else 0.0
        self.num_bytes = round(2 * self._rate * seconds) + manifest.texts.nbytes  # features are about as large as audio
        self._recordings: Recordings | None = None
        self._seconds: dict[int, float] = {}
        """Of the piece that is read: what is left of trimmed recordings."""
        self._checked: dict[Path, CheckedRows] = {}
        """By packed source."""
        self._files_of: dict[Path, list[Path]] = {}
        """Files of packed sources, which are not opened for every row."""
        self.about = About(
            Structure("dict", tuple(self._streams)),
            self._rate,
            tuple(path.name for path in manifest.sources),
            None if features is None else features.about,
            bad_lines,
            has_sound and (trim or _are_trimmed(manifest.sources)),
        )
        self._extras = extra_keys(manifest)
        digest = xxhash.xxh3_64()
        for column in (*manifest.content(), self._extras.packed, self._extras.lengths):
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)
        self.fingerprint = f"{digest.hexdigest()}-{self._rate}{'-trimmed' * trim}"

    def __len__(self) -> int:
        return len(self._manifest)

    def cuts(self, most_bytes: int | None) -> list[range]:
        seconds = PIECE_S if most_bytes is None else min(PIECE_S, most_bytes / (2 * self._rate))
        return cut(self._manifest.durations, seconds)

    def stamp(self, rows: range) -> str:
        """Return a digest of sizes and times of change of the recordings; texts are in the fingerprint."""
        if self._streams == [TEXT]:
            return ""
        paths = dict.fromkeys(path for row in rows for path in self._files(row))
        # A file that is missing has no stamp here; reading it reports that.
        return xxhash.xxh3_64_hexdigest(repr([stamp_or_none(path) for path in paths]).encode())

    def read(self, rows: range) -> Piece:
        if self._recordings is None:
            self._recordings = Recordings(self._manifest, self._rate, trim=self._trim)
        maker, packed_rows, skipped = PieceMaker(), [], []
        self._seconds = {}
        for row in rows:
            try:
                self._check(row)
                maker.add(self._tag(row), self._row(row))
                packed_rows.append(row)
            except RowDamaged as damaged:
                if not self.skip_bad:
                    raise
                skipped.append(f"{self._manifest.where(row)}: {damaged.damage.what}")
            except AudioUnreadable as unreadable:
                if not self.skip_bad:
                    raise InvalidData(
                        f"{self._manifest.where(row)}: {unreadable}",
                        hint="mend or remove it, and type the same command to go on; `--bad-data skip` leaves out what "
                        "is broken",
                    ) from None
                skipped.append(f"{self._manifest.where(row)}: {unreadable}")
        extras = [self._extras.raw(row) for row in packed_rows]
        lengths = [self._seconds.get(row, float(self._manifest.durations[row])) for row in packed_rows]
        return maker.finish({"lengths": np.array(lengths, np.float64)}, skipped, extras)

    def _check(self, row: int) -> None:
        """Verify a row of a packed source: its copy would get digests of whatever the row is now."""
        source = self._manifest.source(row)
        if not is_packed(source):
            return
        if source not in self._checked:
            packed = open_packed(source)
            wanted = [packed.of_kind("text" if name == TEXT else "audio") for name in self._streams]
            self._checked[source] = CheckedRows(packed, [stream.name for stream in wanted if stream is not None])
        self._checked[source].require(self._manifest.line(row) - 1)

    def _row(self, row: int) -> list[tuple[StreamSpec, NDArray[Any]]]:
        streams: list[tuple[StreamSpec, NDArray[Any]]] = []
        assert self._recordings is not None
        for name in self._streams:
            if name == TEXT:
                text = np.frombuffer(self._manifest.texts.raw(row), np.uint8)
                streams.append((StreamSpec(TEXT, "text", "uint8"), text))
                continue
            if self._keeps_rate and (rate := _rate_of(self._manifest, row)) != self._rate:
                low, high = sorted((rate, self._rate))
                raise Conflict(
                    f"{self._manifest.where(row)}: its sample rate is {rate} Hz, and {self._rate} Hz before",
                    hint=f"choose the rate of the packed audio: `--sample-rate {low}` or `--sample-rate {high}`",
                )
            samples = self._recordings.read(row)
            if self._trim:
                self._seconds[row] = len(samples) / self._rate
            if self._features is None:
                streams.append((StreamSpec(AUDIO, "audio", "int16"), samples))
            else:
                frames = self._features(samples)
                streams.append((StreamSpec(FEATURES, "features", "float32", frames.shape[1:]), frames))
        return streams

    def _files(self, row: int) -> list[Path]:
        """Return the files that the audio of a row is read from."""
        source = self._manifest.source(row)
        if is_packed(source):
            return self._packed_files(source)
        audio = self._manifest.audio(row)
        inside = split_member(audio)
        return [audio if inside is None else inside[0]]

    def _packed_files(self, source: Path) -> list[Path]:
        if source not in self._files_of:
            self._files_of[source] = [file.path for file in open_packed(source).files]
        return self._files_of[source]

    def _tag(self, row: int) -> str:
        name, manifest = self._manifest.audio_names[row], self._manifest
        return f"{name}#{manifest.offset(row):g}" if manifest.is_part(row) else name


def cut(durations: NDArray[np.float64], most_seconds: float) -> list[range]:
    """Cut rows into ranges of at most this length together; a longer row has a range of its own."""
    ends = np.cumsum(durations)
    ranges, first = [], 0
    while first < len(ends):
        begin = ends[first - 1] if first else 0.0
        end = max(first + 1, int(np.searchsorted(ends, begin + most_seconds, side="right")))
        ranges.append(range(first, end))
        first = end
    return ranges


def _streams(wanted: Sequence[str] | None, available: list[str]) -> list[str]:
    """Return the streams to pack; raises `NoSuchStream`."""
    streams = available if wanted is None else list(wanted)
    for name in streams:
        if name not in available:
            raise NoSuchStream(name, available)
    return streams


def _check_sources(sources: Sequence[Path]) -> None:
    """Raise an error for a packed source without audio: its features would pass for samples."""
    for path in filter(is_packed, sources):
        packed = open_packed(path)
        if packed.of_kind("audio") is None:
            raise no_audio(path, packed)


def _are_trimmed(sources: Sequence[Path]) -> bool:
    """Return True if all are packed and were trimmed then: they stay so, whatever is asked for."""
    return bool(sources) and all(is_packed(path) and open_packed(path).about.is_trimmed for path in sources)


def _first_rate(manifest: Manifest, skip_bad: bool) -> int:
    """Return the sample rate of the first recording, or of the first that can be read."""
    for row in range(len(manifest) - 1) if skip_bad else ():
        try:
            return _rate_of(manifest, row)
        except AudioUnreadable:
            pass
    return _rate_of(manifest, len(manifest) - 1 if skip_bad else 0)


def _rate_of(manifest: Manifest, row: int) -> int:
    """Return the sample rate of a recording as it is."""
    if is_packed(manifest.source(row)):
        return open_packed(manifest.source(row)).sample_rate or 0
    return probe(manifest.audio(row)).sample_rate
