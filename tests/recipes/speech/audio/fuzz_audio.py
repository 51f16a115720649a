"""Reads damaged audio files; a process of its own, as a fault in native code could take the tests with it.

`python -m tests.recipes.speech.audio.fuzz_audio FOLDER NUMBER SEED` ends with one line of JSON: files by outcome.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from paceline.recipes.speech.audio.check import check, check_all
from paceline.recipes.speech.audio.file import AudioUnreadable, probe
from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.manifest.read import read_manifests
from tests.recipes.speech.sounds import FORMATS, tone, write

RATE = 16000
SECONDS = 1.0


def damaged(raw: bytes, draw: random.Random) -> tuple[str, bytes]:
    """How a file is damaged; a name in capitals is damage that must be noticed."""
    kind = draw.choice(["EMPTY", "CUT", "CUT", "NOISE", "HEAD", "bytes", "bytes", "header", "insert", "delete", "swap"])
    changed = bytearray(raw)
    place = draw.randrange(len(raw))
    if kind == "EMPTY":
        changed = bytearray()
    elif kind == "CUT":
        changed = changed[: draw.randrange(1, int(0.8 * len(raw)))]
    elif kind == "NOISE":
        changed = bytearray(draw.randbytes(len(raw)))
    elif kind == "HEAD":
        changed[:64] = bytes(64)
        changed = changed if not raw.startswith((b"\xff", b"ID3")) else bytearray(64)  # MP3 may begin anywhere
    elif kind in ("bytes", "header"):
        end = len(raw) if kind == "bytes" else min(128, len(raw))
        for _ in range(draw.randint(1, 12)):
            changed[draw.randrange(end)] = draw.randrange(256)
    elif kind == "insert":
        changed[place:place] = draw.randbytes(draw.randrange(1, 2000))
    elif kind == "delete":
        del changed[place : place + draw.randrange(1, 500)]
    else:
        other = draw.randrange(len(raw))
        changed[place : place + 300], changed[other : other + 300] = (
            changed[other : other + 300],
            changed[place : place + 300],
        )
    return kind, bytes(changed)


def look(path: Path, kind: str) -> str:
    """What became of a file; whatever is neither audio nor `AudioUnreadable` ends the process."""
    said, said_of_whole = check(path, SECONDS), check(path, SECONDS, whole=True)
    assert said is None or said.isprintable()
    assert said is None or said_of_whole is not None
    fate = "read"
    for part in ({}, {"duration_s": SECONDS}, {"offset_s": 0.25, "duration_s": 0.5}):
        for rate in (RATE, 8000):
            try:
                audio = read_audio(path, sample_rate=rate, **part)
            except AudioUnreadable as unreadable:
                assert unreadable.why.isprintable()
                fate = "refused"
                # What training would stumble over is found by a look at the whole file, if not by one at its ends.
                assert said_of_whole is not None or part.get("duration_s") != SECONDS, f"{path}: {unreadable.why}"
                continue
            assert audio.dtype == np.int16
            assert audio.ndim == 1
            promised = part.get("duration_s") or probe(path).seconds
            assert len(audio) >= rate * (promised - max(0.11, 0.011 * promised)), (len(audio), rate, promised)
    if kind.isupper():
        assert said is not None, f"{kind} of {path.suffix} was not noticed"
        assert fate == "refused"
    return fate if said is None else f"reported, {fate}"


def main(folder: Path, number: int, seed: int) -> None:
    draw = random.Random(seed)
    sound = tone(SECONDS)
    sources = {kind: write(folder / f"good.{kind}", sound) for kind in FORMATS}
    whole = {kind: path.read_bytes() for kind, path in sources.items()}
    first = {kind: read_audio(path, sample_rate=RATE) for kind, path in sources.items()}
    fates: Counter[str] = Counter()
    lines, expected = [], []
    for place in range(number):
        kind = draw.choice(list(FORMATS))
        how, raw = damaged(whole[kind], draw)
        path = folder / f"{place}.{kind}"
        path.write_bytes(raw)
        fates[f"{kind} {how}: {look(path, how)}"] += 1
        lines += [{"audio_filepath": name, "duration": SECONDS, "text": how} for name in (path.name, f"good.{kind}")]
        expected.append(tuple(check(path, SECONDS, whole=whole) is not None for whole in (False, True)))
    for kind, path in sources.items():
        assert np.array_equal(read_audio(path, sample_rate=RATE), first[kind]), f"good.{kind} has changed"
    (folder / "all.json").write_text("\n".join(map(json.dumps, lines)))
    manifest, _ = read_manifests([folder / "all.json"])
    for whole in (False, True):
        bad = check_all(manifest, range(len(manifest)), threads=2, whole=whole)
        assert [line.row for line in bad] == [2 * place for place, is_bad in enumerate(expected) if is_bad[whole]]
    assert sum(is_bad != (True, True) and is_bad[1] for is_bad in expected) > 0  # some are sound at their ends
    print(json.dumps(fates))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
