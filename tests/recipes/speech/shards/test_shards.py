"""Shards of speech: read by us as by the packages that they are made for, in any order, and refused where they are
wrong."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from paceline.core.errors import PacelineError
from paceline.recipes.speech.audio.check import check_all
from paceline.recipes.speech.audio.read import read_audio
from paceline.recipes.speech.audio.recordings import Recordings
from paceline.recipes.speech.manifest.bad_line import BadManifest
from paceline.recipes.speech.manifest.raw_lines import extra_keys
from paceline.recipes.speech.manifest.read import Manifest, read_manifests
from paceline.recipes.speech.manifest.sources import ShardsMisfit
from paceline.recipes.speech.shards.pattern import PatternInvalid, expand
from paceline.recipes.speech.shards.tar_index import ShardUnreadable, tar_index

RATE = 8000


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    monkeypatch.setenv("PACELINE_COPIES", str(folder))
    return folder


def sound(number: int) -> NDArray[np.int16]:
    return (np.random.default_rng(number).standard_normal(1000 + 37 * number) * 3000).astype(np.int16)


def encoded(samples: NDArray[np.int16], kind: str = "FLAC") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format=kind)
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def nemo(folder: Path, number: int = 12, shards: int = 3) -> Path:
    """NeMo's tarred manifest: bare names of members, and the shard of each line."""
    lines = []
    for index in range(number):
        line = {"audio_filepath": f"utt{index}.wav", "duration": len(sound(index)) / RATE, "text": f"text {index}"}
        lines.append(line | {"shard_id": index % shards, "speaker": f"s{index % 2}"})
    for shard in range(shards):
        with tarfile.open(folder / f"audio_{shard}.tar", "w") as tar:
            for index in range(shard, number, shards):
                add(tar, f"utt{index}.wav", encoded(sound(index), "WAV"))
    return write(folder / "tarred_audio_manifest.json", lines)


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def webdataset(folder: Path, number: int = 8, shards: int = 2) -> Path:
    """Shards as the package webdataset writes them."""
    for shard in range(shards):
        with tarfile.open(folder / f"shard-{shard:06d}.tar", "w") as tar:
            for index in range(shard, number, shards):
                key = f"sub.dir/{index:04d}"
                add(tar, f"{key}.flac", encoded(sound(index)))
                if index % 4 < 2:
                    add(tar, f"{key}.txt", f" text {index}\n".encode())
                else:
                    add(tar, f"{key}.json", json.dumps({"text": f"text {index}", "speaker": "x"}).encode())
    return folder / f"shard-{{000000..{shards - 1:06d}}}.tar"


def heard(manifest: Manifest) -> dict[str, NDArray[Any]]:
    recordings = Recordings(manifest, RATE)
    order = np.random.default_rng(0).permutation(len(manifest))
    return {manifest.text(row): recordings.read(row) for row in order.tolist()}


def assert_heard(manifest: Manifest, numbers: Any) -> None:
    audio = heard(manifest)
    assert audio.keys() == {f"text {number}" for number in numbers}
    for number in numbers:
        np.testing.assert_array_equal(audio[f"text {number}"], sound(number))
    assert not check_all(manifest, np.arange(len(manifest)), threads=2, whole=True)


# -- names of several files ----------------------------------------------------------------------------------------


def test_patterns() -> None:
    assert list(expand(Path("a_{8..11}.tar")).values()) == [Path(f"a_{number}.tar") for number in (8, 9, 10, 11)]
    assert expand(Path("x/a_{008..010}.tar")) == {
        8: Path("x/a_008.tar"),
        9: Path("x/a_009.tar"),
        10: Path("x/a_010.tar"),
    }
    assert list(expand(Path("a__OP_0..1_CL_.json")).values()) == [Path("a_0.json"), Path("a_1.json")]
    assert expand(Path("plain.tar")) == {0: Path("plain.tar")}
    for wrong in ("a_{3..1}.tar", "a_{x..y}.tar", "{0..1}_{0..1}.tar", "a_{0..99999999}.tar"):
        with pytest.raises(PatternInvalid, match=r"a_|\{0"):
            expand(Path(wrong))


# -- NeMo's tarred manifests ---------------------------------------------------------------------------------------


def test_nemos_tarred_manifest(tmp_path: Path) -> None:
    path = nemo(tmp_path)
    manifest, _ = read_manifests([path])
    assert manifest.audio(4) == tmp_path / "audio_1.tar" / "utt4.wav"
    assert_heard(manifest, range(12))
    assert json.loads(extra_keys(manifest)[1]) == {"speaker": "s1"}
    for words in (f"{path}@audio_{{0..2}}.tar", f"{path}@{tmp_path}/audio__OP_0..2_CL_.tar"):
        named, _ = read_manifests(words)
        assert named.audio_names.packed.tobytes() == manifest.audio_names.packed.tobytes()
    parts = [[line for line in lines_of(path) if line["shard_id"] == shard] for shard in range(3)]
    for shard, part in enumerate(parts):
        write(tmp_path / f"manifest_{shard}.json", part)
    assert_heard(read_manifests(f"{tmp_path}/manifest_{{0..2}}.json@audio_{{0..2}}.tar")[0], range(12))


def test_lines_without_a_shard_are_found_and_names_as_nemo_compares_them(tmp_path: Path) -> None:
    path = nemo(tmp_path)
    lines = [{key: value for key, value in line.items() if key != "shard_id"} for line in lines_of(path)]
    for line in lines:
        line["audio_filepath"] = f"/old/place/{line['audio_filepath'].replace('.wav', '.flac')}"
    write(path, lines)
    assert_heard(read_manifests(f"{path}@audio_{{0..2}}.tar")[0], range(12))


def test_a_member_may_hold_several_utterances(tmp_path: Path) -> None:
    path = nemo(tmp_path, 1, 1)
    line = lines_of(path)[0]
    half = line["duration"] / 2
    write(path, [line | {"duration": half, "offset": 0.0}, line | {"duration": half, "offset": half, "text": "b"}])
    manifest, _ = read_manifests([path], min_seconds=0.0)
    joined = np.concatenate([Recordings(manifest, RATE).read(row) for row in range(2)])
    np.testing.assert_array_equal(joined, sound(0))


def test_lines_about_shards_that_are_wrong(tmp_path: Path) -> None:
    path = nemo(tmp_path)
    good = lines_of(path)
    odd = [good[1] | {"shard_id": "1"}, good[3] | {"offset": []}]
    write(path, [*good, good[4], good[2] | {"audio_filepath": "none.wav"}, *odd])
    with pytest.raises(BadManifest) as caught:
        read_manifests([path])
    said = str(caught.value)
    assert "names " in said
    assert "audio_1.tar/utt4.wav again, as line 5 does" in said
    assert 'audio_2.tar has no member "none.wav"' in said
    assert '"shard_id" must be a whole number' in said
    assert '"offset" must be a number, not a list' in said
    kept, reading = read_manifests([path], bad_data="skip")
    assert (len(kept), reading.num_bad) == (12, 4)


def test_a_wrong_number_of_shards(tmp_path: Path) -> None:
    path = nemo(tmp_path)
    with pytest.raises(ShardsMisfit, match="names shards 0 to 1, and line 3 is of shard 2"):
        read_manifests(f"{path}@audio_{{0..1}}.tar")
    with tarfile.open(tmp_path / "audio_3.tar", "w") as tar:
        add(tar, "x.wav", encoded(sound(0), "WAV"))
    with pytest.raises(
        ShardsMisfit, match=r"names 4 shards, and .* is about 3 of them: audio_3.tar has no line"
    ) as more:
        read_manifests(f"{path}@audio_{{0..3}}.tar")
    assert "shard_id 0 to 2" in more.value.hint
    (tmp_path / "audio_1.tar").unlink()
    for words in (str(path), f"{path}@audio_{{0..2}}.tar"):
        with pytest.raises(ShardUnreadable, match=r"audio_1.tar: there is no such shard"):
            read_manifests(words)


def test_shards_that_are_cut_or_something_else(tmp_path: Path) -> None:
    path = nemo(tmp_path)
    shard = tmp_path / "audio_0.tar"
    whole = shard.read_bytes()
    index = tar_index(shard)
    last = index.member(len(index) - 1)
    for end in (last.offset + 100, last.offset - 100, last.offset + -(-last.size // 512) * 512):
        shard.write_bytes(whole[:end])
        with pytest.raises(ShardUnreadable, match=rf"audio_0.tar: is truncated: it ends after {end:,} bytes"):
            read_manifests([path])
    shard.write_bytes(gzip.compress(whole))
    with pytest.raises(ShardUnreadable, match="is compressed"):
        read_manifests([path])
    shard.write_bytes(b"no tar at all" * 1000)
    with pytest.raises(ShardUnreadable, match="is no tar file"):
        read_manifests([path])
    shard.write_bytes(whole)
    assert_heard(read_manifests([path])[0], range(12))


def test_members_that_lead_out_of_their_shard(tmp_path: Path) -> None:
    """A name like that of a file elsewhere is the member's; one that climbs is refused."""
    outside = tmp_path / "outside.wav"
    outside.write_bytes(encoded(sound(3), "WAV"))
    shard = tmp_path / "s-0.tar"
    with tarfile.open(shard, "w") as tar:
        add(tar, str(outside), encoded(sound(0), "WAV"))
        add(tar, str(outside.with_suffix(".txt")), b"inside")
    manifest, _ = read_manifests([shard])
    assert manifest.audio(0) == Path(f"{shard}{outside}")
    np.testing.assert_array_equal(read_audio(manifest.audio(0), sample_rate=RATE), sound(0))
    with tarfile.open(shard, "w") as tar:
        add(tar, "../outside.wav", encoded(sound(0), "WAV"))
    with pytest.raises(ShardUnreadable, match=r"has a member '\.\./outside.wav', which is no file in it"):
        read_manifests([shard])


def test_a_shard_is_walked_over_once(tmp_path: Path, cache: Path) -> None:
    path = nemo(tmp_path)
    read_manifests([path])
    made = {file: file.stat().st_mtime_ns for file in (cache / ".shards").iterdir()}
    assert len(made) == 3
    from paceline.recipes.speech.shards import tar_index as module

    module._index.cache_clear()
    read_manifests([path])
    assert {file: file.stat().st_mtime_ns for file in (cache / ".shards").iterdir()} == made
    for file in made:
        content = file.read_bytes()
        for damaged in (content[: len(content) // 2], content[:200] + bytes(100) + content[300:], b"PK\x03\x04", b""):
            module._index.cache_clear()
            file.write_bytes(damaged)
            assert len(read_manifests([path])[0]) == 12
            assert file.read_bytes() == content


def test_more_shards_than_indexes_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.recipes.speech.shards import tar_index as module

    path = nemo(tmp_path, 24, 12)
    lines = lines_of(path)
    write(path, [line | {"audio_filepath": line["audio_filepath"].replace(".wav", ".flac")} for line in lines])
    monkeypatch.setattr(module, "_index", lru_cache(maxsize=1)(module._index.__wrapped__))
    assert_heard(read_manifests([path])[0], range(24))


# -- WebDataset ----------------------------------------------------------------------------------------------------


def test_webdataset_shards_without_a_manifest(tmp_path: Path) -> None:
    manifest, _ = read_manifests([webdataset(tmp_path)])
    assert_heard(manifest, range(8))
    assert manifest.where(0).endswith("shard-000000.tar:1")
    np.testing.assert_allclose(manifest.durations, [len(sound(int(manifest.text(row)[5:]))) / RATE for row in range(8)])
    assert [json.loads(each) if each else None for each in map(extra_keys(manifest).__getitem__, range(8))].count(
        {"speaker": "x"}
    ) == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves shards open
def test_the_package_webdataset_reads_the_same(tmp_path: Path) -> None:
    theirs = pytest.importorskip("webdataset", reason="the package webdataset is not installed")
    pattern = webdataset(tmp_path)
    data = theirs.WebDataset(str(pattern), shardshuffle=False, empty_check=False)
    manifest, _ = read_manifests([pattern])
    recordings = Recordings(manifest, RATE)
    number = -1
    for number, sample in enumerate(data):
        text = sample["txt"].decode() if "txt" in sample else json.loads(sample["json"])["text"]
        assert manifest.text(number) == text.strip()
        assert manifest.audio_names[number] == f"{Path(sample['__url__']).name}/{sample['__key__']}.flac"
        wanted, rate = soundfile.read(io.BytesIO(sample["flac"]), dtype="int16")
        assert rate == RATE
        np.testing.assert_array_equal(recordings.read(number), wanted)
    assert number == len(manifest) - 1 == 7
    with theirs.TarWriter(str(tmp_path / "ours.tar")) as writer:
        for index in range(3):
            writer.write({"__key__": f"k{index}", "flac": encoded(sound(index)), "txt": f"text {index}"})
    assert_heard(read_manifests([tmp_path / "ours.tar"])[0], range(3))


def test_samples_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        add(tar, "good.flac", encoded(sound(1)))
        add(tar, "good.txt", b"text 1")
        add(tar, "mute.txt", b"no audio")
        add(tar, "broken.flac", b"fLaC nothing")
        add(tar, "broken.txt", b"text")
        add(tar, "silent.flac", encoded(sound(2)))
        add(tar, "two.flac", encoded(sound(2)))
        add(tar, "two.wav", encoded(sound(2), "WAV"))
        add(tar, "odd.flac", encoded(sound(2)))
        add(tar, "odd.json", b"{not json")
    with pytest.raises(BadManifest) as caught:
        read_manifests([tmp_path / "s.tar"])
    for said in ("mute has no audio", "broken.flac: is ", '"text" is missing', "two has several audio files", "odd: "):
        assert said in str(caught.value)
    assert_heard(read_manifests([tmp_path / "s.tar"], bad_data="skip")[0], [1])
    with tarfile.open(tmp_path / "none.tar", "w"):
        pass
    with pytest.raises(ShardUnreadable, match="holds no samples"):
        read_manifests([tmp_path / "none.tar"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # libsndfile cannot pass it on
@pytest.mark.parametrize("kind", ["flac", "wav", "txt"])
def test_a_disk_that_fails_once_costs_no_sample(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for number in (1, 2):
            sound_kind = "flac" if kind == "txt" else kind
            add(tar, f"{number}.{sound_kind}", encoded(sound(number), sound_kind.upper()))
            add(tar, f"{number}.txt", f"text {number}".encode())
    member = tar_index(tmp_path / "s.tar").find(f"2.{kind}")
    assert member is not None
    read = os.pread

    def fail(descriptor: int, size: int, offset: int) -> bytes:
        if member.offset <= offset < member.offset + member.size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, size, offset)

    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", fail)
        with pytest.raises(ShardUnreadable, match=r"s\.tar: cannot be read: Input/output error"):
            read_manifests([tmp_path / "s.tar"], bad_data="skip")
    assert_heard(read_manifests([tmp_path / "s.tar"], bad_data="skip")[0], [1, 2])


def test_a_json_beside_audio_names_no_other_files(tmp_path: Path) -> None:
    strange = {"shard_id": 7, "unusable": "no", "audio_filename": "/etc/hostname", "offset": 3, "type": "MonoCut"}
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        add(tar, "1.flac", encoded(sound(1)))
        about = {"text": "text 1", "accent": "x", "supervisions": [], "recording": {}}
        add(tar, "1.json", json.dumps(strange | about).encode())
        add(tar, "2.flac", encoded(sound(2)))
        add(tar, "2.json", json.dumps({"text_filepath": "/etc/hostname"}).encode())
        add(tar, "3.flac", encoded(sound(3)))
        add(tar, "3.json", b"[" * 100_000)
    manifest, reading = read_manifests([tmp_path / "s.tar"], bad_data="skip")
    assert_heard(manifest, [1])
    assert json.loads(extra_keys(manifest)[0]) == {"accent": "x"}
    assert ['"text" is missing' in reading.bad[0].what, "nested" in reading.bad[1].what] == [True, True]


# -- Lhotse --------------------------------------------------------------------------------------------------------


def cut(folder: Path, number: int, **changes: Any) -> dict[str, Any]:
    path = folder / f"r{number}.flac"
    soundfile.write(path, sound(number), RATE)
    seconds = len(sound(number)) / RATE
    recording = {
        "id": f"r{number}",
        "sources": [{"type": "file", "channels": [0], "source": str(path)}],
        "sampling_rate": RATE,
        "num_samples": len(sound(number)),
        "duration": seconds,
        "channel_ids": [0],
    }
    told = {"id": f"s{number}", "recording_id": f"r{number}", "start": 0.0, "duration": seconds, "channel": 0}
    return {
        "id": f"c{number}",
        "start": 0,
        "duration": seconds,
        "channel": 0,
        "supervisions": [told | {"text": f"text {number}", "speaker": "anna"}],
        "recording": recording,
        "type": "MonoCut",
    } | changes


def test_cuts_of_lhotse(tmp_path: Path) -> None:
    cuts = [cut(tmp_path, number) for number in range(4)]
    write(tmp_path / "cuts.jsonl", cuts)
    with gzip.open(tmp_path / "cuts.jsonl.gz", "wb") as file:
        file.write((tmp_path / "cuts.jsonl").read_bytes())
    for name in ("cuts.jsonl", "cuts.jsonl.gz"):
        manifest, _ = read_manifests([tmp_path / name])
        assert_heard(manifest, range(4))
        assert json.loads(extra_keys(manifest)[2]) == {"speaker": "anna", "id": "s2"}


def test_parts_of_recordings_and_several_supervisions(tmp_path: Path) -> None:
    seconds = len(sound(3)) / RATE
    told = [
        {"id": "b", "start": 0.05, "duration": 1.0, "text": "second", "speaker": "b"},
        {"id": "a", "start": -0.01, "duration": 0.03, "text": "first", "speaker": "a"},
    ]
    one = [{"id": "a", "start": 0, "duration": 0.1, "text": "alone"}]
    lines = [
        cut(tmp_path, 3, start=0.02, duration=0.1, supervisions=told),
        cut(tmp_path, 3, start=0.04, duration=0.08, supervisions=one),
    ]
    manifest, _ = read_manifests([write(tmp_path / "cuts.jsonl", lines)], min_seconds=0.0)
    assert [manifest.text(row) for row in range(3)] == ["first", "second", "alone"]
    np.testing.assert_allclose(manifest.offsets, [0.02, 0.07, 0.04])
    np.testing.assert_allclose(manifest.durations, [0.02, 0.05, 0.08])
    assert seconds > 0.12
    assert [json.loads(extra_keys(manifest)[row]).get("speaker") for row in range(3)] == ["a", "b", None]
    np.testing.assert_array_equal(Recordings(manifest, RATE).read(2), sound(3)[320:960])


def test_supervisions_that_begin_together_keep_their_speakers(tmp_path: Path) -> None:
    told = [
        {"id": name, "start": 0.0, "duration": seconds, "text": text, "speaker": name}
        for name, seconds, text in (("a", 0.05, "one"), ("b", 0.08, "one"), ("c", 0.05, "two"), ("d", 0.05, "one"))
    ]
    path = write(tmp_path / "cuts.jsonl", [cut(tmp_path, 3, supervisions=told)] * 2)
    for needs_text in (True, False):
        manifest, _ = read_manifests([path], min_seconds=0.0, needs_text=needs_text)
        assert [json.loads(extra_keys(manifest)[row])["speaker"] for row in range(8)] == list("abcdabcd")


def test_cuts_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    base = cut(tmp_path, 1)
    source = {"type": "command", "channels": [0], "source": "rm -rf /"}
    wrong = {
        "only MonoCut is read": base | {"type": "MixedCut", "tracks": []},
        "channel 1": base | {"channel": 1},
        '"start" of a supervision': base | {"supervisions": [{"start": "1"}, {"start": 0.0, "duration": 0.1}]},
        "of type command": base | {"recording": base["recording"] | {"sources": [source]}},
        "to be transformed": base | {"recording": base["recording"] | {"transforms": [{"name": "Speed"}]}},
        "no audio": {key: value for key, value in base.items() if key != "recording"},
        '"start" must be a number': base | {"start": None},
        '"text" is missing': base | {"supervisions": []},
    }
    for said, line in wrong.items():
        with pytest.raises(BadManifest) as caught:
            read_manifests([write(tmp_path / "cuts.jsonl", [line])])
        assert said in str(caught.value)


def test_the_package_lhotse_writes_and_reads_the_same(tmp_path: Path) -> None:
    lhotse = pytest.importorskip("lhotse", reason="the package lhotse is not installed")
    made = []
    for number in range(3):
        path = tmp_path / f"r{number}.wav"
        soundfile.write(path, sound(number), RATE)
        recording = lhotse.Recording.from_file(path)
        told = lhotse.SupervisionSegment(
            f"s{number}", recording.id, 0.0, recording.duration, text=f"text {number}", speaker="x"
        )
        made.append(lhotse.MonoCut(f"c{number}", 0.0, recording.duration, 0, supervisions=[told], recording=recording))
    lhotse.CutSet.from_cuts(made).to_file(tmp_path / "cuts.jsonl.gz")
    manifest, _ = read_manifests([tmp_path / "cuts.jsonl.gz"])
    assert_heard(manifest, range(3))
    write(tmp_path / "ours.jsonl", [cut(tmp_path, number) for number in range(3)])
    theirs = lhotse.CutSet.from_file(tmp_path / "ours.jsonl")
    for number, each in enumerate(theirs):
        np.testing.assert_allclose(each.load_audio()[0], sound(number) / 32768, atol=1e-6)


# -- all together --------------------------------------------------------------------------------------------------


def test_a_mix_of_all(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("n", "w", "l", "p")]
    for folder in folders:
        folder.mkdir()
    tarred, shards = nemo(folders[0], 3, 1), webdataset(folders[1], 5, 1)
    cuts = write(folders[2] / "cuts.jsonl", [cut(folders[2], 6)])
    soundfile.write(folders[3] / "a.wav", sound(7), RATE)
    plain = write(
        folders[3] / "a.json", [{"audio_filepath": "a.wav", "duration": len(sound(7)) / RATE, "text": "text 7"}]
    )
    manifest, reading = read_manifests(f"{tarred},{shards},{cuts},{plain}")
    assert [file.kept.number for file in reading.files] == [3, 5, 1, 1]
    audio = heard(manifest)
    for text, samples in audio.items():
        np.testing.assert_array_equal(samples, sound(int(text[5:])))


def test_shards_at_an_address(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    path = nemo(tmp_path)
    store = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        store.put(str(file), f"memory://shards/{file.name}")
    try:
        manifest, _ = read_manifests(f"memory://shards/{path.name}@audio_{{0..2}}.tar")
        assert_heard(manifest, range(12))
        assert_heard(read_manifests([f"memory://shards/{path.name}"])[0], range(12))
    finally:
        store.rm("memory://shards", recursive=True)


def test_a_missing_member_is_said_when_it_is_read(tmp_path: Path) -> None:
    manifest, _ = read_manifests([nemo(tmp_path)])
    with tarfile.open(tmp_path / "audio_0.tar", "w") as tar:
        add(tar, "other.wav", encoded(sound(0), "WAV"))
    with pytest.raises(PacelineError, match='has no member "utt0.wav"'):
        Recordings(manifest, RATE).read(0)
