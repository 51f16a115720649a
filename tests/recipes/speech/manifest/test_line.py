"""Ten thousand damaged lines: each one is reported, or means what Python's own `json` says it means."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.recipes.speech.manifest.read import BadManifest, read_manifests

NUMBER = 10_000
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    1e400,
    math.nan,
    10**30,
    "",
    " ",
    "a\0b",
    "1",
    "ü" * 50,
    [],
    [1],
    {},
    {"a": 1},
]
KEYS = ["audio_filepath", "audio_filename", "duration", "text", "text_filepath", "offset", "speaker"]


def entry(draw: random.Random) -> dict[str, Any]:
    made = {
        "audio_filepath": f"clips/{draw.randrange(10**6)}.wav",
        "duration": draw.uniform(0.2, 20),
        "text": "zwölf été",
    }
    return made | ({"offset": draw.randrange(9)} if draw.random() < 0.3 else {})


def damaged(draw: random.Random) -> bytes:
    """A line with something wrong with its values, its keys or its bytes; a few turn out right."""
    made = entry(draw)
    kind = draw.randrange(6)
    if kind == 0:
        made[draw.choice(KEYS)] = draw.choice(VALUES)
    elif kind == 1:
        made.pop(draw.choice(list(made)))
    elif kind == 2:
        name = draw.choice(list(made))
        made[draw.choice([name.upper(), name[:-1], name + "s"])] = made.pop(name)
    raw = bytearray(json.dumps(made, ensure_ascii=draw.random() < 0.5).encode())
    if kind == 3:
        for _ in range(draw.randint(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    elif kind == 4:
        place = draw.randrange(len(raw))
        raw[place : place + draw.randrange(9)] = draw.randbytes(draw.randrange(6))
    elif kind == 5:
        raw = draw.choice([raw[: draw.randrange(len(raw))], raw + b"," + raw, raw + raw, b"[" + raw + b"]", raw[::-1]])
    return bytes(raw).replace(b"\n", b"\r")


def plain_reading(raw: bytes, folder: Path) -> tuple[str, float, str, float] | None:
    """What the rules of manifests make of a line, with `json` alone; None where it is bad."""
    try:
        made = json.loads(raw.decode("utf-8"))
        json.dumps(made, ensure_ascii=False).encode("utf-8")  # a half of a surrogate pair is no text
    except ValueError:
        return None
    if not isinstance(made, dict):
        return None
    audio = made.get("audio_filepath") if made.get("audio_filepath") is not None else made.get("audio_filename")
    duration, text, offset = made.get("duration"), made.get("text"), made.get("offset")
    is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in (duration, offset)]
    if not isinstance(audio, str) or not audio.strip() or "\0" in audio or not isinstance(text, str):
        return None  # there is no text_filepath that leads anywhere
    if not is_number[0] or not 0 < duration <= 1e7:
        return None
    if offset is not None and (not is_number[1] or not 0 <= offset <= 1e7):
        return None
    return str(folder / audio), float(duration), text, float(offset or 0)


def test_ten_thousand_damaged_lines(tmp_path: Path) -> None:
    draw = random.Random(4)
    raws = [json.dumps(entry(draw)).encode() if place % 3 == 0 else damaged(draw) for place in range(NUMBER * 3 // 2)]
    path = tmp_path / "train.json"
    path.write_bytes(b"\n".join(raws))
    expected = {number: plain_reading(raw, tmp_path) for number, raw in enumerate(raws, 1) if raw.strip()}
    good = {number: line for number, line in expected.items() if line is not None}
    bad = [number for number, line in expected.items() if line is None]
    assert len(bad) > NUMBER / 2
    assert len(good) > NUMBER / 2 + 500  # some damaged ones are good

    manifest, reading = read_manifests([path], min_seconds=0.0, bad_data="skip")
    read = {
        manifest.line(row): (
            str(manifest.audio(row)),
            float(manifest.durations[row]),
            manifest.text(row),
            manifest.offset(row),
        )
        for row in range(len(manifest))
    }
    assert read == good
    assert reading.num_bad == len(bad)
    assert [line.line for line in reading.bad] == bad[: len(reading.bad)]
    assert all(line.what.isprintable() and line.text.isprintable() for line in reading.bad)
    with pytest.raises(BadManifest) as caught:
        read_manifests([path])
    assert caught.value.total == len(bad)
    assert [line.line for line in caught.value.bad] == bad[:20]
