"""Utterances decoded per second and core, from FLAC and WAV, beside a plain DataLoader over soundfile.

Both run in torch's DataLoader with one worker and hand over padded batches of 32. `plain` reads float32 with
`soundfile.read` from a list of paths and leaves the conversion at that; `paceline` reads a manifest, checks every file
against its line and hands over int16. Rounds of the two are interleaved and the median is shown. Files lie in the page
cache: what is measured is decoding, not the disk. The sound is noise shaped like speech, which FLAC packs to about
half its size, as it does speech.

With `--device cuda` also the front end's speed: hours of audio turned into features per second, batches of 64 x 16.7 s.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from table import Row, parser, show
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.manifest.read import Manifest, read_manifests

RATE = 16000
BATCH = 32
LENGTHS_S = {"short": 1.0, "long": 16.7}
FRONT_END_BATCH = 64


class Plain(Dataset[Tensor]):
    """What one writes first."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        samples, _ = soundfile.read(self.paths[index], dtype="float32")
        return torch.from_numpy(samples)


class Ours(Dataset[Tensor]):
    """A manifest, read as training reads it."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> Tensor:
        path = self.manifest.audio(index)
        return torch.from_numpy(read_audio(path, sample_rate=RATE, **self.manifest.segment(index)))


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Padded with zeros, and the lengths."""
    lengths = [len(sample) for sample in samples]
    batch = samples[0].new_zeros(len(samples), max(lengths))
    for row, sample in zip(batch, samples, strict=True):
        row[: len(sample)] = sample
    return batch, torch.tensor(lengths)


def speech_like(seconds: float, draw: np.random.Generator) -> NDArray[np.int16]:
    """Noise that falls with frequency and comes in syllables."""
    length = round(seconds * RATE)
    spectrum = np.fft.rfft(draw.normal(size=length)) / (1 + np.fft.rfftfreq(length, 1 / RATE) / 200) ** 1.5
    noise = np.fft.irfft(spectrum, length)
    syllables = 0.05 + np.abs(np.sin(np.pi * 2.5 * np.arange(length) / RATE + draw.uniform(0, 3))) ** 3
    sound = noise / np.abs(noise).max() * syllables
    return np.rint(9000 * sound).astype(np.int16)


def make(folder: Path, number: int, seconds: float, suffix: str) -> tuple[list[str], Manifest]:
    """Files, and a manifest of them."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    distinct = [speech_like(seconds, draw) for _ in range(8)]
    lines = []
    for place in range(number):
        name = f"{place}.{suffix}"
        soundfile.write(folder / name, np.roll(distinct[place % 8], 97 * place), RATE, subtype="PCM_16")
        lines.append(json.dumps({"audio_filepath": name, "duration": seconds, "text": "noise"}))
    (folder / "all.json").write_text("\n".join(lines))
    manifest, _ = read_manifests([folder / "all.json"])
    return [str(manifest.audio(row)) for row in range(number)], manifest


def loader(dataset: Dataset[Tensor]) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH, num_workers=1, collate_fn=collate, persistent_workers=True)


def utterances_per_s(batches: DataLoader[Any], passes: int) -> float:
    began, number = time.perf_counter(), 0
    for _ in range(passes):
        for batch, _ in batches:
            number += len(batch)
    return number / (time.perf_counter() - began)


def decoding(folder: Path, seconds: float, suffix: str, options: Any) -> dict[str, float]:
    """Utterances per second of both, the median of rounds that take turns."""
    number = max(BATCH, round(options.hours * 3600 / seconds) // BATCH * BATCH)
    number = min(number, options.most_files)
    paths, manifest = make(folder, number, seconds, suffix)
    loaders = {"plain": loader(Plain(paths)), "paceline": loader(Ours(manifest))}
    figures: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(options.rounds + 1):
        for name, batches in loaders.items():
            speed = utterances_per_s(batches, options.passes)
            if turn:  # the first starts the workers
                figures[name].append(speed)
    return {name: statistics.median(each) for name, each in figures.items()}


def front_end_rows(device: str, rounds: int) -> list[Row]:
    """Features of a batch that lies on the device already, and the copy of int16 beside it."""
    from paceline.recipes.speech.sound.features import FeatureSettings, LogMel

    front_end = LogMel(FeatureSettings(), RATE).to(device).eval()
    draw = np.random.default_rng(0)
    seconds = LENGTHS_S["long"]
    host = torch.from_numpy(np.stack([speech_like(seconds, draw) for _ in range(FRONT_END_BATCH)])).pin_memory()
    lengths = torch.full((FRONT_END_BATCH,), host.shape[1], device=device)
    audio = host.to(device)
    hours = FRONT_END_BATCH * seconds / 3600

    def timed(action: Callable[[], object]) -> float:
        action()
        torch.cuda.synchronize()
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(10):
                action()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - began) / 10)
        return statistics.median(found)

    with torch.no_grad():
        features_s = timed(lambda: front_end(audio, lengths))
        both_s = timed(lambda: front_end(host.to(device, non_blocking=True), lengths))
    return [
        Row("front end", "features", hours / features_s, "hours of audio/s"),
        Row("front end", "copy + features", hours / both_s, "hours of audio/s"),
        Row("front end", "batch", 1000 * features_s, "ms"),
        Row("front end", "real-time factor", features_s / (hours * 3600), "s/s"),
    ]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--hours", type=float, default=0.5, help="of audio per case")
    arguments.add_argument("--most-files", type=int, default=1024)
    arguments.add_argument("--passes", type=int, default=3, help="over all files in one round")
    arguments.add_argument("--rounds", type=int, default=5, help="measured, after one that is not; medians are shown")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the front end, too")
    options = arguments.parse_args()
    torch.set_num_threads(1)

    rows = []
    with tempfile.TemporaryDirectory(prefix="audio-input-") as folder:
        for suffix in ("flac", "wav"):
            for length, seconds in LENGTHS_S.items():
                speeds = decoding(Path(folder, f"{length}-{suffix}"), seconds, suffix, options)
                ratio = speeds["paceline"] / speeds["plain"]
                case = f"{suffix} {seconds:g} s"
                rows.append(Row(case, "plain soundfile", speeds["plain"], "utterances/s/core"))
                rows.append(Row(case, "paceline", speeds["paceline"], "utterances/s/core", "plain soundfile", ratio))
                rows.append(Row(case, "paceline", speeds["paceline"] * seconds / 3600, "hours/s/core"))
    if options.device == "cuda":
        rows += front_end_rows(options.device, options.rounds)
    show(rows, f"decoding with one worker, median of {options.rounds} interleaved rounds", options.json)


if __name__ == "__main__":
    main()
