"""Speech so small that it trains in a second: tones for letters, a network of a few hundred weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from paceline.observe.journal import read
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.task import Asr
from paceline.train import loop
from paceline.train.run import Run, open_run
from paceline.world.link import Link
from tests.train.small import alone

RATE = 8000
LABELS = (" ", "a", "b", "c")
HERTZ = {" ": 0.0, "a": 400.0, "b": 1100.0, "c": 2500.0}
LETTER_S, GAP = 0.08, 240
NETWORK: dict[str, Any] = {
    "sample_rate": RATE,
    "labels": list(LABELS),
    "features": {"num_mels": 12, "n_fft": 256},
    "spec_augment": {"freq_masks": 1, "freq_width": 3, "time_masks": 1, "time_width": 5, "rect_masks": 1},
    "blocks": [
        {"filters": 12, "kernel": 5, "stride": 2, "separable": True, "dropout": 0.2},
        {"filters": 12, "kernel": 3, "repeat": 2, "residual": True, "separable": True, "dropout": 0.2},
        {"filters": 10, "kernel": 1},
    ],
}

PLAIN = {
    **NETWORK,
    "spec_augment": {},
    "blocks": [{**block, "dropout": 0.0} for block in NETWORK["blocks"]],
}
"""Nothing hidden or dropped: it learns most letters in 150 steps."""
LEARN: dict[str, Any] = {
    "network": PLAIN,
    "optimizer": "adamw",
    "lr": 0.03,
    "epochs": 25,
    "val_every_epochs": 25,
    "grains": 1,
}


def sound(text: str, random: np.random.Generator) -> NDArray[np.int16]:
    """One tone per letter with gaps between, silence for a space and, of random length, around it all; some noise."""
    pieces = [np.zeros(int(random.integers(200, 900)))]
    for letter in text:
        time = np.arange(round(LETTER_S * RATE)) / RATE
        pieces += [0.3 * np.sin(2 * np.pi * HERTZ[letter] * time), np.zeros(GAP)]
    samples = np.concatenate([*pieces, np.zeros(int(random.integers(200, 900)))])
    return np.rint(32767 * (samples + random.normal(0, 0.003, len(samples)))).astype(np.int16)


def speech(folder: Path, name: str, number: int, seed: int) -> Path:
    """`number` utterances as FLAC, and their manifest `name.json`."""
    random = np.random.default_rng(seed)
    (folder / name).mkdir(parents=True)
    lines = []
    for index in range(number):
        text = "".join(random.choice(LABELS[1:], random.integers(1, 4))) + " " + str(random.choice(LABELS[1:]))
        samples = sound(text, random)
        soundfile.write(folder / name / f"{index}.flac", samples, RATE)
        lines.append({"audio_filepath": f"{name}/{index}.flac", "duration": len(samples) / RATE, "text": text})
    return manifest(folder / f"{name}.json", lines)


def manifest(path: Path, lines: list[Any]) -> Path:
    """JSON lines; a string is a line as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def damaged(path: Path, seconds: float = 6.0) -> dict[str, Any]:
    """A FLAC that is sound at its ends and not between, and what a line says of it."""
    noise = np.random.default_rng(0).integers(-8000, 8000, round(seconds * RATE)).astype(np.int16)
    soundfile.write(path, noise, RATE)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 3000] = bytes(3000)
    path.write_bytes(raw)
    return {"audio_filepath": str(path), "duration": seconds, "text": "abc"}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(folder: Path, **changes: Any) -> AsrSettings:
    """Training on what `speech` has made in a folder, with nothing random but the order."""
    plain: dict[str, Any] = {
        "network": NETWORK,
        "train_manifest": (folder / "train.json",),
        "val_manifest": tuple(str(folder / f"{name}.json") for name in ("dev", "other") if (folder / name).exists()),
        "global_batch": 8,
        "grains": 4,
        "epochs": 1,
        "lr": 0.005,
        "workers": 0,
        "log_every": 1,
        "loggers": (),
        "progress": "none",
        "device": "cpu",
    }
    return AsrSettings(**{**plain, **changes})


def train(config: AsrSettings, link: Link | None = None) -> Run:
    trained = open_run(task(), config, link or alone())
    loop.train(trained)
    return trained


def task() -> Asr:
    made = Asr()
    made.spec = "asr"
    return made


def losses_of(run: Path) -> list[float]:
    return [record["loss"] for record in read(run / "metrics.jsonl")]


def validations_of(run: Path) -> list[dict[str, float]]:
    records = read(run / "metrics.jsonl", "validation")
    return [{name: value for name, value in record.items() if "/" in name} for record in records]
