"""Utterances of a manifest as a data set: audio is read and perturbed by whoever asks, keyed by the sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from paceline.config.paths import near
from paceline.data.audio import AudioUnreadable, read_audio
from paceline.data.audio_check import bad_audio
from paceline.data.bad_line import BadLine
from paceline.data.manifest import Manifest
from paceline.recipes.asr.perturb import PerturbSettings, max_stretch, perturb
from paceline.recipes.asr.text import EncodedTexts


class Utterance(NamedTuple):
    """One sample, before it is padded."""

    audio: NDArray[np.int16]
    text: NDArray[Any]
    key: int
    """Decides its masks, on any rank and in any batch."""
    bad: BadLine | None = None
    """Why its audio cannot be read: silence stands in its place, and it must not count as heard."""


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
        skip_bad: bool = False,
    ) -> None:
        self._manifest, self._texts, self._sample_rate = manifest, texts, sample_rate
        self._perturb, self._skip_bad = perturb_settings, skip_bad
        stretch = 1.0 if perturb_settings is None else max_stretch(perturb_settings)
        self.lengths: NDArray[np.float64] = manifest.durations * stretch
        """Seconds, as long as a perturbation may make them."""
        self.total_length = float(manifest.durations.sum())
        """Seconds, as they were recorded."""

    @cached_property
    def fingerprint(self) -> str:
        """Of what is read for whom: another file, another text or another order gives another one."""
        digest = xxhash.xxh3_64()
        for column in (*self._manifest.content(), self._texts.ids, self._texts.offsets):
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._manifest)

    def __getitem__(self, index: int) -> Utterance:
        manifest = self._manifest
        # The loader has seeded torch with (seed, epoch, sample): one draw carries that on.
        key = int(torch.randint(2**62, ()))
        try:
            audio = read_audio(manifest.audio(index), sample_rate=self._sample_rate, **manifest.segment(index))
        except AudioUnreadable as unreadable:  # damage that a look at the ends of a file does not show
            return self._bad(index, key, unreadable)
        if self._perturb is not None:
            audio = perturb(audio, self._sample_rate, self._perturb, np.random.default_rng(key))
        return Utterance(audio, self._texts[index], key)

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

    @property
    def most_labels(self) -> int:
        """Of the longest text."""
        return int(self._texts.lengths.max(initial=0))

    @property
    def names(self) -> Sequence[str]:
        """How each utterance is called in what is printed of it."""
        return [near(self._manifest.audio(index)) for index in range(len(self))]


def collate(samples: list[Utterance], audio_multiple: int = 1, text_width: int = 1) -> dict[str, Any]:
    """Pad audio (to a multiple) and texts (to a width at least) of a grain. Lengths are there twice: for the device,
    and for the host, which must not ask."""
    num_samples = [len(sample.audio) for sample in samples]
    num_labels = [len(sample.text) for sample in samples]
    audio = np.zeros((len(samples), -(-max(num_samples) // audio_multiple) * audio_multiple), np.int16)
    text = np.zeros((len(samples), max(text_width, *num_labels)), np.int64)
    for row, sample in enumerate(samples):
        audio[row, : num_samples[row]] = sample.audio
        text[row, : num_labels[row]] = sample.text
    return {
        "audio": torch.from_numpy(audio),
        "lengths": torch.tensor(num_samples),
        "text": torch.from_numpy(text),
        "keys": torch.tensor([sample.key for sample in samples]),
        "num_samples": num_samples,
        "num_labels": num_labels,
        "bad": [sample.bad for sample in samples],
    }
