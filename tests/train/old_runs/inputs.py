"""Data of the runs in this folder, the same bytes on every machine: only integers are computed with."""

from __future__ import annotations

import json
import random
import wave
from array import array
from pathlib import Path

RATE = 8000
PERIODS = {"a": 20, "b": 7, "c": 3}
WORDS = ("one", "two", "three", "four", "five", "six")


def write(folder: Path) -> None:
    """Write speech (manifests of WAV files) and parallel text, both as `train` and `dev`."""
    folder.mkdir(parents=True)
    for seed, (name, number) in enumerate({"train": 22, "dev": 6}.items()):
        draw = random.Random(seed)
        lines = [_utterance(folder / f"{name}-{index}.wav", draw) for index in range(number)]
        (folder / f"{name}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        sentences = [[WORDS[draw.randrange(6)] for _ in range(draw.randint(1, 5))] for _ in range(2 * number)]
        (folder / f"{name}.en").write_text("".join(" ".join(words) + "\n" for words in sentences))
        (folder / f"{name}.de").write_text("".join(" ".join(reversed(words)) + "\n" for words in sentences))


def _utterance(path: Path, draw: random.Random) -> dict[str, object]:
    """Write two words, a triangle wave per letter, with noise; return the line of the manifest."""
    words = ["".join("abc"[draw.randrange(3)] for _ in range(draw.randint(1, 3))) for _ in range(2)]
    samples = [0] * draw.randint(200, 600)
    for letter in " ".join(words):
        samples += [_wave(time, PERIODS[letter]) if letter != " " else 0 for time in range(480)] + [0] * 160
    noisy = array("h", [sample + draw.randint(-90, 90) for sample in samples])
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(noisy.tobytes())
    return {"audio_filepath": path.name, "duration": len(noisy) / RATE, "text": " ".join(words)}


def _wave(time: int, period: int) -> int:
    return 9000 * (abs(4 * (time % period) - 2 * period) - period) // period
