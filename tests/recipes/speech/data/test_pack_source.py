"""Packing of manifests: which rows a recording becomes, what is broken, what is read again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.disk import DiskFull
from paceline.core.errors import Conflict, InvalidData
from paceline.data.packed.pack import pack
from paceline.data.packed.reader import open_packed
from paceline.recipes.speech.data import pack_source as from_manifest
from paceline.recipes.speech.data.pack_source import ManifestSource, cut
from paceline.recipes.speech.manifest.read import read_manifests
from tests.recipes.speech import tiny
from tests.recipes.speech.sounds import tone, write


def speech(folder: Path, *lines: Any) -> ManifestSource:
    path = folder / "all.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ManifestSource(read_manifests([path])[0])


def test_a_packing_may_go_on_without_what_stopped_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was left out is not taken for whole by one that may leave out nothing."""
    monkeypatch.setattr(from_manifest, "PIECE_S", 0.4)
    write(tmp_path / "good.wav", tone(0.5))
    (tmp_path / "bad.wav").write_text("no")
    names = ["good", "good", "good", "bad"]
    speech(tmp_path, *({"audio_filepath": f"{name}.wav", "duration": 0.5, "text": "a"} for name in names))
    manifest, _ = read_manifests([tmp_path / "all.json"])
    with pytest.raises(InvalidData, match="all.json:4"):
        pack(ManifestSource(manifest), tmp_path / "a.h5")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *words: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(DiskFull):
            pack(ManifestSource(manifest, skip_bad=True), tmp_path / "a.h5")
    with pytest.raises(InvalidData, match="all.json:4"):
        pack(ManifestSource(manifest), tmp_path / "a.h5")
    done = pack(ManifestSource(manifest, skip_bad=True), tmp_path / "a.h5")
    assert (done.num_rows, done.num_resumed, len(done.skipped)) == (3, 4, 1)


def test_parts_of_a_recording_are_rows(tmp_path: Path) -> None:
    samples = tone(2.0)
    write(tmp_path / "a.wav", samples)
    rate = soundfile.info(tmp_path / "a.wav").samplerate
    parts = [{"audio_filepath": "a.wav", "offset": at, "duration": 0.25, "text": f"{at}"} for at in (0, 0.5, 1.5)]
    pack(speech(tmp_path, *parts, {"audio_filepath": "a.wav", "duration": 2.0, "text": "all"}), tmp_path / "a.h5")
    found = open_packed(tmp_path / "a.h5")
    assert [found.tags[row] for row in range(4)] == ["a.wav#0", "a.wav#0.5", "a.wav#1.5", "a.wav"]
    whole, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    for row, at in enumerate((0, 0.5, 1.5)):
        begin = round(at * rate)
        np.testing.assert_array_equal(found.stream("audio").view(row), whole[begin : begin + rate // 4])
    np.testing.assert_array_equal(found.stream("audio").view(3), whole)
    assert found.columns["lengths"].tolist() == [0.25, 0.25, 0.25, 2.0]
    assert (found.sample_rate, found.stream("text").text(1)) == (rate, "0.5")


def test_several_sample_rates(tmp_path: Path) -> None:
    lines = []
    for rate in (8000, 16000):
        soundfile.write(tmp_path / f"{rate}.wav", np.arange(rate // 2, dtype=np.int16), rate)
        lines.append({"audio_filepath": f"{rate}.wav", "duration": 0.5, "text": "a"})
    with pytest.raises(Conflict, match="all.json:2: its sample rate is 16000 Hz, and 8000 Hz before") as caught:
        pack(speech(tmp_path, *lines), tmp_path / "a.h5")
    assert "`--sample-rate 8000` or `--sample-rate 16000`" in caught.value.hint
    manifest, _ = read_manifests([tmp_path / "all.json"])
    pack(ManifestSource(manifest, sample_rate=8000), tmp_path / "b.h5")
    assert open_packed(tmp_path / "b.h5").stream("audio").lengths.tolist() == [4000, 4000]


def test_broken_recordings(tmp_path: Path) -> None:
    tiny.speech(tmp_path, "good", 6, seed=0)
    bad = tiny.damaged(tmp_path / "bad.flac")
    lines = tiny.lines_of(tmp_path / "good.json")
    source = speech(tmp_path, *lines[:3], bad, *lines[3:])
    with pytest.raises(InvalidData, match="all.json:4: .*bad.flac: is truncated or damaged") as caught:
        pack(source, tmp_path / "a.h5")
    assert "--bad-data skip" in caught.value.hint
    manifest, _ = read_manifests([tmp_path / "all.json"])
    done = pack(ManifestSource(manifest, skip_bad=True), tmp_path / "b.h5")
    assert (done.num_rows, len(done.skipped)) == (6, 1)
    assert "all.json:4" in done.skipped[0]
    only = ManifestSource(manifest.take([3]), sample_rate=tiny.RATE, skip_bad=True)
    with pytest.raises(InvalidData, match="all.json:4"):
        pack(only, tmp_path / "c.h5")


@pytest.mark.parametrize("shard_bytes", [None, 10_000])
def test_a_recording_that_has_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int | None
) -> None:
    """One that was broken and is mended: the others stay. One that was packed already: not as it was then."""
    monkeypatch.setattr(from_manifest, "PIECE_S", 0.4)
    sounds = [tone(0.5, hertz=100.0 * (number + 1)) for number in range(6)]
    paths = [write(tmp_path / f"{number}.wav", sound) for number, sound in enumerate(sounds)]
    paths[5].write_bytes(paths[5].read_bytes()[:5000])
    lines = [{"audio_filepath": path.name, "duration": 0.5, "text": "a"} for path in paths]
    with pytest.raises(InvalidData, match="all.json:6"):
        pack(speech(tmp_path, *lines), tmp_path / "a.h5", shard_bytes=shard_bytes)
    write(paths[5], sounds[5])
    sounds[1] = sounds[1][::-1].copy()
    write(paths[1], sounds[1])
    os.utime(paths[1], (1.0, 1.0))
    done = pack(speech(tmp_path, *lines), tmp_path / "a.h5", shard_bytes=shard_bytes)
    if shard_bytes is None:
        assert done.num_resumed == 4
    else:
        assert 1 <= done.num_resumed < 4, "of shards those before it"
    found = open_packed(tmp_path / "a.h5").stream("audio")
    for row, sound in enumerate(sounds):
        np.testing.assert_array_equal(found.view(row), sound)


def test_a_packed_source_that_has_changed_is_read_again(tmp_path: Path) -> None:
    def source() -> ManifestSource:
        return ManifestSource(read_manifests([tmp_path / "a.h5"])[0])

    write(tmp_path / "0.wav", tone(0.5))
    line = {"audio_filepath": "0.wav", "duration": 0.5, "text": "a"}
    pack(speech(tmp_path, line), tmp_path / "a.h5")
    before = source().stamp(range(1))
    assert source().stamp(range(1)) == before
    os.utime(tmp_path / "a.h5", (1.0, 1.0))
    assert source().stamp(range(1)) != before


def test_bad_rows_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pieces have none but bad ones: at the beginning, between and at the end."""
    monkeypatch.setattr(from_manifest, "PIECE_S", 0.4)
    write(tmp_path / "good.wav", tone(0.5))
    (tmp_path / "bad.wav").write_text("no")
    names = ["good", "bad", "bad", "bad", "good", "good", "bad", "bad"]
    lines = [{"audio_filepath": f"{name}.wav", "duration": 0.5, "text": "a"} for name in names]
    speech(tmp_path, *lines)
    manifest, _ = read_manifests([tmp_path / "all.json"])
    for first in (0, 1):
        rows = range(first, len(names))
        source = ManifestSource(manifest.take(rows), sample_rate=16000, skip_bad=True)
        done = pack(source, tmp_path / f"{first}.h5", shard_bytes=1000)
        bad = [row for row in rows if names[row] == "bad"]
        assert [int(line.split(":")[1]) for line in done.skipped] == [row + 1 for row in bad]
        assert open_packed(tmp_path / f"{first}.h5").skipped == done.skipped
        assert done.num_rows == len(rows) - len(bad)


@given(st.lists(st.floats(0.1, 400), min_size=1, max_size=60), st.floats(1e-3, 1000))
def test_pieces_are_all_rows_once(seconds: list[float], limit: float) -> None:
    cuts = cut(np.array(seconds), limit)
    assert [row for rows in cuts for row in rows] == list(range(len(seconds)))
    assert all(sum(seconds[row] for row in rows) <= limit * (1 + 1e-9) for rows in cuts if len(rows) > 1)
