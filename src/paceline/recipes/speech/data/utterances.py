"""Utterances of a manifest as a data set: audio is read by whoever asks, and perturbed there or on the device; what is
random is keyed by the sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.data.dataset import Room
from paceline.recipes.speech.audio.check import bad_audio
from paceline.recipes.speech.audio.file import AudioUnreadable
from paceline.recipes.speech.audio.recordings import PackedRows, Recordings
from paceline.recipes.speech.data.padding import Collate, Utterance, collate
from paceline.recipes.speech.manifest.bad_line import BadLine
from paceline.recipes.speech.manifest.line import LineInvalid, parse_object
from paceline.recipes.speech.manifest.raw_lines import raw_lines
from paceline.recipes.speech.manifest.read import Manifest
from paceline.recipes.speech.sound.augment import Augmentation, pending
from paceline.recipes.speech.sound.perturb import PerturbSettings, draw, is_active, max_stretch, perturb
from paceline.recipes.speech.text.labels import EncodedTexts

__all__ = ["Utterance", "Utterances", "collate"]


class Utterances:
    """Map-style: no Python object per line, so that workers share one copy of it."""

    reads_leave_nothing_open = True

    def __init__(
        self,
        manifest: Manifest,
        texts: EncodedTexts,
        sample_rate: int,
        perturb_settings: PerturbSettings | None = None,
        *,
        trim: bool = False,
        skip_bad: bool = False,
        on_device: bool = False,
    ) -> None:
        """`trim`: recordings without the silence at their ends. `on_device`: grains are read as they are, and
        `finish_grain` perturbs them; only where `are_mapped`."""
        self._manifest, self._texts, self._sample_rate = manifest, texts, sample_rate
        is_perturbed = perturb_settings is not None and is_active(perturb_settings)
        self._perturb, self._skip_bad = perturb_settings if is_perturbed else None, skip_bad
        self._recordings = Recordings(manifest, sample_rate, trim=trim)
        self._augmentation = Augmentation.of(self._perturb) if self._perturb is not None and on_device else None
        self.stretch = 1.0 if perturb_settings is None else max_stretch(perturb_settings)
        """Factor by which a perturbation may make an utterance longer."""
        self.lengths: NDArray[np.float64] = manifest.durations * self.stretch
        """Seconds, as long as a perturbation may make them, and before silence is cut off: no recording is longer."""
        self.total_length = float(manifest.durations.sum())
        """Seconds, as they were recorded."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of files, texts and order: another file, another text or another order gives another one."""
        digest = xxhash.xxh3_64()
        for column in (*self._manifest.content(), self._texts.ids, self._texts.offsets):
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._manifest)

    def __getitem__(self, index: int) -> Utterance:
        # The loader has seeded torch with (seed, epoch, sample): one draw carries that on.
        key = int(torch.randint(2**62, (), device="cpu"))
        try:
            audio, cut = self._recordings.read_cut(index)
        except AudioUnreadable as unreadable:  # damage that a look at the ends of a file does not show
            return self._bad(index, key, unreadable)
        if self._perturb is not None:
            audio = perturb(audio, self._sample_rate, self._perturb, np.random.default_rng(key))
        return Utterance(audio, self._texts[index], key, begin=cut / self._sample_rate)

    def _bad(self, index: int, key: int, unreadable: AudioUnreadable) -> Utterance:
        manifest = self._manifest
        if not self._skip_bad:
            found = AudioUnreadable(unreadable.path, unreadable.why, manifest.where(index))
            if manifest.source(index).is_file():
                check = f"`paceline manifest stats {near(manifest.source(index))} --check` finds all such files"
                found.hint = f"{check}, `--bad-data skip` goes on without them"
            raise found from None
        silence = np.zeros(max(1, round(float(manifest.durations[index]) * self._sample_rate)), np.int16)
        return Utterance(silence, self._texts[index], key, bad_audio(manifest, index, unreadable.why))

    def read_grain(self, samples: NDArray[np.int64], seeds: Sequence[int], collate: Any) -> dict[str, Any] | None:
        """Return what `collate` makes of these samples; None where they must be read one by one.

        Packed audio that nothing changes here is copied from the file into the batch, without an object per utterance.
        """
        if not self._is_copied or not isinstance(collate, Collate):
            return None
        packed = self._recordings.packed(samples)
        return None if packed is None else self._read_packed(packed, samples, seeds, collate, np.empty)

    @property
    def _is_copied(self) -> bool:
        """True if nothing is done to the audio before it is padded."""
        return self._perturb is None or self._augmentation is not None

    @property
    def are_mapped(self) -> bool:
        """True for packed audio that is copied into the batch as it lies in its files."""
        return self._recordings.are_mapped

    def reads_in_threads(self, collate: Any) -> bool:
        return self._is_copied and isinstance(collate, Collate) and self.are_mapped

    @property
    def threads_are_busy(self) -> bool:
        """True if noise is read or drawn for the device."""
        augmentation = self._augmentation
        return augmentation is not None and (augmentation.adds_noise or augmentation.adds_white_noise)

    def read_grain_into(
        self, samples: NDArray[np.int64], seeds: Sequence[int], collate: Collate, room: Room
    ) -> dict[str, Any]:
        """Return what `collate` makes of these samples, all of them packed, with the audio in `room`."""
        packed = self._recordings.packed(samples)
        assert packed is not None
        return self._read_packed(packed, samples, seeds, collate, room)

    def _read_packed(
        self,
        packed: list[PackedRows],
        samples: NDArray[np.int64],
        seeds: Sequence[int],
        collate: Collate,
        room: Room,
    ) -> dict[str, Any]:
        first = packed[0]
        if len(packed) == 1:  # rows in their order, without a look at each
            lengths = first.stream.lengths[first.rows]
        else:
            lengths = np.empty(len(samples), np.int64)
            for stream, rows, places in packed:
                lengths[places] = stream.lengths[rows]
        audio = room((len(samples), collate.width(lengths), *first.stream.shape), first.stream.dtype)
        for stream, rows, places in packed:
            own = audio if len(packed) == 1 else [audio[place] for place in places.tolist()]
            stream.fill(rows, own, audio.shape[1])
        keys = _keys(seeds)
        texts = [self._texts[sample] for sample in samples.tolist()]
        no_bad: list[BadLine | None] = [None] * len(samples)
        if self._perturb is None or self._augmentation is None:
            return collate.grain(audio, lengths, texts, keys, no_bad)
        drawn = [
            draw(length, self._sample_rate, self._perturb, np.random.default_rng(key))
            for length, key in zip(lengths.tolist(), keys.tolist(), strict=True)
        ]
        played = np.array([each.length for each in drawn])
        shape = len(samples), collate.room_for(lengths, played)
        noise = room(shape, np.int16) if self._augmentation.adds_noise else None
        white_noise = room(shape, np.float32) if self._augmentation.adds_white_noise else None
        changes = pending(drawn, shape[1], noise, white_noise)
        return {**collate.grain(audio, played, texts, keys, no_bad), "pending": changes}

    def finish_grain(self, data: dict[str, Any]) -> dict[str, Any]:
        """Perturb the rows of a grain that lies on the device."""
        return data if self._augmentation is None else self._augmentation.finish(data)

    @property
    def holds_features(self) -> bool:
        """True if `audio` is features, computed when the file was packed."""
        return self._recordings.holds_features

    @property
    def is_packed(self) -> bool:
        """A run that waits for this data is not advised to pack it."""
        return self._recordings.are_packed

    @property
    def most_labels(self) -> int:
        """Number of labels of the longest text."""
        return int(self._texts.lengths.max(initial=0))

    @cached_property
    def speakers(self) -> dict[int, str]:
        """Speaker of each utterance whose line names one; of lines that cannot be read again, none."""
        try:
            lines = [(row, parse_object(raw)) for row, raw in raw_lines(self._manifest) if b'"speaker' in raw]
        except (OSError, PacelineError, LineInvalid):
            return {}
        named = ((row, entry.get("speaker", entry.get("speaker_id"))) for row, entry in lines)
        return {row: str(speaker) for row, speaker in named if isinstance(speaker, str | int)}

    @property
    def names(self) -> Sequence[str]:
        """Name of each utterance, for printing."""
        return [self.name(index) for index in range(len(self))]

    def name(self, index: int) -> str:
        """Name of an utterance, for printing."""
        return near(self._manifest.audio(index))


def _keys(seeds: Sequence[int]) -> NDArray[np.int64]:
    """Return the key of each sample: as the loader seeds it, and `__getitem__` then draws."""
    keys = np.empty(len(seeds), np.int64)
    generator = torch.Generator("cpu")  # of its own: other threads read, too
    drawn = torch.empty((), dtype=torch.int64, device="cpu")
    for place, seed in enumerate(seeds):
        generator.manual_seed(seed)
        keys[place] = drawn.random_(2**62, generator=generator).item()  # what `randint` draws, in less time
    return keys
