"""Audio files against the lines of a manifest: length, damage, order of the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.recipes.speech.audio.check import check, check_all
from paceline.recipes.speech.audio.file import probe
from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.manifest.read import read_manifests
from tests.recipes.speech.audio.test_read import cut
from tests.recipes.speech.sounds import tone, write


def test_check_compares_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flac", tone(2.0))
    right = [(2.0, None), (1.91, None), (2.09, None), (2.0, 0.0), (0.5, 0.0), (0.5, 1.5), (0.55, 1.5)]
    assert [check(path, *line) for line in right] == [None] * len(right)
    assert check(path, 1.5) == f'"duration" is 1.5, but {path} lasts 2.00 s'
    assert check(path, 2.5) == f'"duration" is 2.5, but {path} lasts 2.00 s'
    assert check(path, 0.7, 1.5) == f'"duration" is 0.7 and "offset" 1.5, but {path} lasts 2.00 s'
    assert check(path, 0.5, 9.0) is not None
    long = write(tmp_path / "b.flac", tone(30.0))
    assert check(long, 30.25) is None  # a percent
    assert check(long, 30.35) is not None


def test_check_all_names_the_lines_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a.flac", tone(1.0))
    cut(write(tmp_path / "cut.flac", tone(1.0)), 0.7)
    (tmp_path / "empty.wav").touch()
    names = ["a.flac", "cut.flac", "a.flac", "empty.wav", "no.wav"] * 30
    lines = [{"audio_filepath": name, "duration": 1, "text": "la ü"} for name in names]
    lines[2]["duration"] = 3
    lines[7]["offset"] = 0.5
    path = tmp_path / "train.json"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    manifest, _ = read_manifests([path])
    counts: list[int] = []
    bad = check_all(manifest, range(150), threads=4, progress=counts.append)
    expected = [row for row, name in enumerate(names) if name != "a.flac" or row in (2, 7)]
    assert [line.row for line in bad] == expected
    assert [line.line for line in bad] == [row + 1 for row in expected]
    assert counts == sorted(counts)
    assert counts[-1] == 150
    by_row = {line.row: line for line in bad}
    assert by_row[2].what == f'"duration" is 3, but {tmp_path / "a.flac"} lasts 1.00 s'
    assert by_row[2].text == '{"audio_filepath": "a.flac", "duration": 3.0, "text": "la ü"}'
    assert by_row[3].what == f"{tmp_path / 'empty.wav'}: is empty"
    assert str(by_row[4]) == f"{path}:5: {tmp_path / 'no.wav'}: there is no such file"
    assert check_all(manifest, manifest.durations == 3, threads=1) == check_all(manifest, [2], threads=1)
    assert check_all(manifest, np.array([0, 5]), threads=1) == []


def test_check_all_can_be_interrupted(tmp_path: Path) -> None:
    write(tmp_path / "a.flac", tone(0.2))
    path = tmp_path / "train.json"
    path.write_text('{"audio_filepath": "a.flac", "duration": 0.2, "text": "a"}\n' * 3000)
    manifest, _ = read_manifests([path])
    seen: list[int] = []

    def stop(done: int) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_all(manifest, range(3000), threads=2, progress=stop)
    assert len(seen) == 1


SHARED = Path(__file__).parents[5] / "shared" / "data"


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
@pytest.mark.parametrize("name", ["fsdd/test.json", "librispeech/test.json"])
def test_real_manifests_are_sound(name: str) -> None:
    manifest, reading = read_manifests([SHARED / name])
    assert reading.num_bad == 0
    assert check_all(manifest, range(0, len(manifest), 3), threads=2) == []
    for row in range(0, len(manifest), 40):
        rate = probe(manifest.audio(row)).sample_rate
        audio = read_audio(manifest.audio(row), sample_rate=rate, **manifest.segment(row))
        assert len(audio) == round(manifest.durations[row] * rate)
