"""Manifests against a plain reading with `json`, and every rule about lines that cannot be used."""

from __future__ import annotations

import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InvalidData
from paceline.recipes.speech.manifest.raw_lines import raw_lines
from paceline.recipes.speech.manifest.read import BadManifest, Manifest, NotAManifest, NothingKept, read_manifests

GOOD = {"audio_filepath": "a.flac", "duration": 1.5, "text": "seven"}
WORDS = ["one", "zwölf", "три", "四", "🙂", "", "it's", 'a "quoted" \\ word', "tab\tand\nbreak"]


def write(path: Path, *lines: dict[str, Any] | str | bytes) -> Path:
    """A manifest of objects, of text, or of bytes as they are."""
    parts = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(parts) + b"\n")
    return path


def plain(manifest: Manifest) -> list[tuple[str, float, str, float]]:
    return [
        (str(manifest.audio(row)), float(manifest.durations[row]), manifest.text(row), manifest.offset(row))
        for row in range(len(manifest))
    ]


def make_entries(number: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    entries = []
    for place in range(number):
        entry: dict[str, Any] = {
            draw.choice(["audio_filepath", "audio_filename"]): draw.choice(
                [f"clips/{place}.wav", f"/data/ü{place}.flac"]
            ),
            "duration": draw.choice([draw.uniform(0.2, 20), draw.randint(1, 20)]),
            "text": " ".join(draw.choices(WORDS, k=3)),
            "other": [None, {"x": 1}],
        }
        if draw.random() < 0.3:
            entry["offset"] = draw.choice([0, 2.5, None])
        items = list(entry.items())
        draw.shuffle(items)
        entries.append(dict(items))
    return entries


def expected(path: Path, entries: list[dict[str, Any]]) -> list[tuple[str, float, str, float]]:
    return [
        (
            str(path.parent / (entry.get("audio_filepath") or entry["audio_filename"])),
            float(entry["duration"]),
            entry["text"],
            float(entry.get("offset") or 0.0),
        )
        for entry in entries
    ]


def test_columns_hold_what_json_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.recipes.speech.manifest.read._LINES_AT_ONCE", 7)
    (tmp_path / "b").mkdir()
    paths = [tmp_path / "a.json", tmp_path / "b" / "b.json", tmp_path / "c.json"]
    sets = [make_entries(number, seed) for seed, number in enumerate((20, 14, 1))]
    for path, entries in zip(paths, sets, strict=True):
        write(path, *entries)
    right = [row for path, entries in zip(paths, sets, strict=True) for row in expected(path, entries)]
    manifest, reading = read_manifests(", ".join(map(str, paths)))
    assert plain(manifest) == right
    assert plain(read_manifests(paths)[0]) == right
    assert manifest.where(25) == f"{paths[1]}:6"
    assert [file.kept.number for file in reading.files] == [20, 14, 1]
    assert reading.kept.hours == pytest.approx(sum(row[1] for row in right) / 3600)
    assert plain(pickle.loads(pickle.dumps(manifest))) == right
    order = [34, 0, 20, 20, 7]
    assert plain(manifest.take(order)) == [right[row] for row in order]
    assert [manifest.take(order).where(row) for row in range(5)] == [manifest.where(row) for row in order]
    mask = manifest.durations > 5
    assert plain(manifest.take(mask)) == [row for row in right if row[1] > 5]
    joined = Manifest.concat([manifest.take([3]), manifest.take([21])])
    assert plain(joined) == [right[3], right[21]]
    assert [joined.where(0), joined.where(1)] == [manifest.where(3), manifest.where(21)]
    assert manifest.segment(4) == {"offset_s": right[4][3], "duration_s": right[4][1]}


def test_lines_can_be_read_again(tmp_path: Path) -> None:
    entries = [{**GOOD, "speaker": number} for number in range(6)]
    paths = [write(tmp_path / "a.json", b"\xef\xbb\xbf" + json.dumps(entries[0]).encode(), "", *entries[1:3])]
    paths.append(write(tmp_path / "b.json", *entries[3:]))
    manifest = read_manifests(paths)[0].take([5, 1, 0, 3])
    again = {row: json.loads(raw)["speaker"] for row, raw in raw_lines(manifest)}
    assert again == {0: 5, 1: 1, 2: 0, 3: 3}
    write(paths[1], *entries[3:4])
    with pytest.raises(InvalidData, match=r"b\.json has been changed since it was read: line 3 is gone"):
        list(raw_lines(manifest))


def test_a_line_is_no_object_of_its_own(tmp_path: Path) -> None:
    """What a manifest keeps does not grow by an object per line."""
    number = 60_000
    line = '{"audio_filepath": "%d.flac", "duration": 2.0, "text": "text number %d"}\n'
    path = tmp_path / "train.json"
    path.write_text("".join(line % (place, place) for place in range(number)))
    read_manifests(path.as_posix())  # fills the parser's cache of short strings
    before = sys.getallocatedblocks()
    manifest, _ = read_manifests(path.as_posix())
    assert sys.getallocatedblocks() - before < number / 100
    assert manifest.nbytes < 70 * number
    assert len(pickle.dumps(manifest)) < manifest.nbytes + 2000


def test_what_other_programs_write(tmp_path: Path) -> None:
    (tmp_path / "said.txt").write_text("\ufeff from a file \r\n", encoding="utf-8")
    lines: list[str | bytes] = [
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r",
        "",
        "   \r",
        '\t{"audio_filename": "b.wav", "text_filepath": "said.txt", "duration": 2}  ',
        '{"audio_filepath": null, "audio_filename": "c.wav", "text": "", "text_filepath": "no", "duration": 3}',
        '{"audio_filepath": "~/d.wav", "text": "caf\\u00e9", "duration": 1e0, "duration": 4, "offset": 1}',
    ]
    path = write(tmp_path / "train.json", *lines)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # a last line without an end
    manifest, _ = read_manifests([path])
    assert [row[1:] for row in plain(manifest)] == [
        (1.5, "seven", 0.0),
        (2.0, "from a file", 0.0),
        (3.0, "", 0.0),
        (4.0, "café", 1.0),
    ]
    assert [manifest.line(row) for row in range(4)] == [1, 4, 5, 6]
    assert manifest.audio(3) == Path.home() / "d.wav"
    assert [manifest.is_part(row) for row in range(4)] == [False, False, False, True]


BAD_LINES = {
    "{": "is not JSON: the line ends within an object at column 1",
    "seven": "is not JSON: expected value at column 1",
    '{"audio_filepath": "a.flac"} {"duration": 1}': "is not JSON: trailing characters at column 30",
    '{"audio_filepath": "a"}, {"duration": 1}': "is not JSON: trailing characters at column 24",
    "[1, 2]": "is a list, not a JSON object",
    "null": "is null, not a JSON object",
    '"text"': "is text, not a JSON object",
    '{"duration": 1, "text": "a"}': '"audio_filepath" is missing',
    '{"audio_filepath": null, "duration": 1, "text": "a"}': '"audio_filepath" is null',
    '{"audio_filepath": 5, "duration": 1, "text": "a"}': '"audio_filepath" must be text, not a number',
    '{"audio_filename": " ", "duration": 1, "text": "a"}': '"audio_filename" is empty',
    '{"audio_filepath": "a\\u0000", "duration": 1, "text": "a"}': "\"audio_filepath\" is no path: 'a\\x00'",
    '{"audio_filepath": "a", "text": "a"}': '"duration" is missing',
    '{"audio_filepath": "a", "duration": null, "text": "a"}': '"duration" is null',
    '{"audio_filepath": "a", "duration": "1", "text": "a"}': '"duration" must be a number, not text',
    '{"audio_filepath": "a", "duration": true, "text": "a"}': '"duration" must be a number, not true or false',
    '{"audio_filepath": "a", "duration": 0, "text": "a"}': '"duration" is 0, and must be above',
    '{"audio_filepath": "a", "duration": -2, "text": "a"}': '"duration" is -2, and must not be below 0',
    '{"audio_filepath": "a", "duration": NaN, "text": "a"}': '"duration" is nan, which is no number of seconds',
    '{"audio_filepath": "a", "duration": Infinity, "text": "a"}': '"duration" is inf, which is no number of seconds',
    '{"audio_filepath": "a", "duration": 1e999, "text": "a"}': '"duration" is inf, which is no number of seconds',
    f'{{"audio_filepath": "a", "duration": {"9" * 400}, "text": "a"}}': '"duration" is 999999999999..., which is',
    '{"audio_filepath": "a", "duration": 1}': '"text" is missing',
    '{"audio_filepath": "a", "duration": 1, "text": ["a"]}': '"text" must be text, not a list',
    '{"audio_filepath": "a", "duration": 1, "text_filepath": {}}': '"text_filepath" must be a path, not an object',
    '{"audio_filepath": "a", "duration": 1, "text_filepath": "no"}': '"text_filepath": there is no file',
    '{"audio_filepath": "a", "duration": 1, "text_filepath": "."}': '"text_filepath": there is no file',
    '{"audio_filepath": "a", "duration": 1, "text_filepath": "latin1"}': "is not UTF-8",
    '{"audio_filepath": "a", "duration": 1, "text": "a", "offset": -1}': '"offset" is -1, and must not be below 0',
    '{"audio_filepath": "a", "duration": 1, "text": "a", "offset": "0"}': '"offset" must be a number, not text',
    '{"audio_filepath": "a", "duration": 1, "text": "\\ud800"}': "is not JSON: unexpected end of hex escape",
    '{"audio_filepath": "a", "duration": 1, "text": "a\x01"}': "is not JSON: control character",
    "\udcff": "is not UTF-8 at byte 1",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_reported_or_skipped(line: str, tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"\xe4")
    raw = line.encode("utf-8", "surrogateescape")
    path = write(tmp_path / "train.json", GOOD, raw, GOOD)
    with pytest.raises(BadManifest) as caught:
        read_manifests([path])
    assert f"{path}:2: " in str(caught.value)
    assert BAD_LINES[line] in str(caught.value)
    manifest, reading = read_manifests([path], bad_data="skip")
    assert [manifest.line(row) for row in range(len(manifest))] == [1, 3]
    (bad,) = reading.bad
    assert (bad.path, bad.line, reading.num_bad) == (path, 2, 1)
    assert bad.text.isprintable()
    assert "skipped 1 bad line" in reading.lines()[0]
    with pytest.raises(BadManifest):
        read_manifests([write(tmp_path / "only.json", raw)], bad_data="skip")  # nothing is left


def test_lines_that_are_whole_only_together_are_bad(tmp_path: Path) -> None:
    """A reader that joins lines before it parses them would take these for three objects."""
    lines = ['{"audio_filepath": "a"}, {"duration": 1}', '{"a": [{}', "{}]}"]
    path = write(tmp_path / "train.json", GOOD, *lines, GOOD)
    with pytest.raises(BadManifest) as caught:
        read_manifests([path])
    assert [line.line for line in caught.value.bad] == [2, 3, 4]


def test_one_mistake_is_shown_as_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("train.json"), *[GOOD] * 417, '{"audio_filepath": "a.flac", "text": "seven"}')
    with pytest.raises(BadManifest) as caught:
        read_manifests("train.json")
    assert str(caught.value) == (
        'train.json:418: "duration" is missing\n  {"audio_filepath": "a.flac", "text": "seven"}'
    )
    assert caught.value.hint == ("add the length in seconds, or let `paceline manifest scan train.json` measure it")


def test_many_mistakes_are_listed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.json"), *["x" * 300] * 15)
    write(Path("b.json"), GOOD, *["y"] * 1100)
    with pytest.raises(BadManifest) as caught:
        read_manifests("a.json,b.json")
    lines = str(caught.value).splitlines()
    assert lines[0] == "1,115 bad lines in a.json, b.json"
    assert lines[1:3] == ["  a.json:1: is not JSON: expected value at column 1", "    " + "x" * 97 + "..."]
    assert lines[3] == "  the same in a.json, lines 2-15"  # ce01e4b showed each of them
    same = "  the same in b.json, lines 3-6"
    assert lines[4:] == ["  b.json:2: is not JSON: expected value at column 1", "    y", same, "  ... and 1,095 more"]
    assert "--bad-data skip" in caught.value.hint
    _, reading = read_manifests("a.json,b.json", bad_data="skip")
    assert (reading.num_bad, len(reading.bad), [file.num_bad for file in reading.files]) == (1115, 1000, [15, 1100])
    assert reading.lines()[-1] == "  ... and 1,095 more"


def test_filters_count_hours(tmp_path: Path) -> None:
    seconds = [0.05, 0.1, 0.5, 3.0, 16.7, 16.8, 30.0]
    paths = [write(tmp_path / name, *({**GOOD, "duration": each} for each in seconds)) for name in ("a", "b")]
    manifest, reading = read_manifests(paths, max_seconds=16.7)
    assert manifest.durations.tolist() == [0.1, 0.5, 3.0, 16.7] * 2
    assert reading.kept.number == 8
    assert reading.kept.hours == pytest.approx(2 * 20.3 / 3600)
    assert (reading.too_short.number, reading.too_short.hours) == (2, pytest.approx(0.1 / 3600))
    assert (reading.too_long.number, reading.too_long.hours) == (4, pytest.approx(93.6 / 3600))
    assert reading.files[1].too_long == (2, pytest.approx(46.8 / 3600))
    assert reading.lines()[0] == (
        "8 utterances, 40.6 s, dropped 2 (0.1 s) shorter than 0.1 s, dropped 4 (1.6 min) longer than 16.7 s"
    )
    assert reading.lines()[1].startswith(f"  {paths[0]}: 4 utterances, ")
    first, _ = read_manifests(paths, min_seconds=0.2, max_utterances=6)
    assert first.durations.tolist() == [0.5, 3.0, 16.7, 16.8, 30.0, 0.5]
    assert first.where(5) == f"{paths[1]}:3"
    write(paths[1], "not looked at")
    assert len(read_manifests(paths, max_utterances=3)[0]) == 3
    with pytest.raises(NothingKept, match="nothing is left: 0 utterances, 0.0 s, dropped 7"):
        read_manifests(paths[:1], min_seconds=60)


def test_files_that_are_no_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("train.json"), GOOD)
    write(Path("blank.json"), "", " \t ")
    Path("empty.json").touch()
    Path("bom.json").write_bytes(b"\xef\xbb\xbf")
    Path("array.json").write_text(json.dumps([GOOD, GOOD]))
    Path("pretty.json").write_text(json.dumps([GOOD], indent=1))
    Path("windows.json").write_bytes(json.dumps(GOOD).encode("utf-16"))
    Path("train.json.gz").write_bytes(b"\x1f\x8b\x08\0")
    Path("data.bin").write_bytes(b"\x89HDF\r\n\x1a\n")
    Path("folder").mkdir()
    mistakes = {
        "trian.json": ("there is no such file", "did you mean train.json?"),
        "no/train.json": ("there is no such file", "`paceline manifest scan FOLDER` makes a manifest"),
        "folder": ("is a folder", "paceline manifest scan folder"),
        "empty.json": ("is empty", "paceline manifest scan"),
        "blank.json": ("is empty", ""),
        "bom.json": ("is empty", ""),
        "array.json": ("is one JSON array", "< array.json"),
        "pretty.json": ("is one JSON array", ""),
        "windows.json": ("is UTF-16", "UTF-8"),
        "train.json.gz": ("is compressed", "gunzip"),
        "data.bin": ("is HDF5", "let it end in .h5"),
    }
    for name, (what, hint) in mistakes.items():
        with pytest.raises(NotAManifest, match=what) as caught:
            read_manifests(f"train.json,{name}")
        assert str(caught.value).startswith(f"{name}: ")
        assert hint in caught.value.hint
    for nothing in ("", " , ", []):
        with pytest.raises(NotAManifest, match="names no manifest"):
            read_manifests(nothing)


def test_lists_of_numbers_are_arrays(tmp_path: Path) -> None:
    manifest, _ = read_manifests([write(tmp_path / "a.json", GOOD, {**GOOD, "duration": 2})])
    assert manifest.durations.dtype == np.float64
    assert manifest.take([]).durations.shape == (0,)


def test_what_is_only_listened_to_needs_no_transcript(tmp_path: Path) -> None:
    path = tmp_path / "heard.json"
    path.write_text(
        '{"audio_filepath": "a.wav", "duration": 1.5}\n{"audio_filepath": "b.wav", "duration": 2.0, "text": "x"}\n'
    )
    with pytest.raises(BadManifest, match='"text" is missing'):
        read_manifests([path])
    manifest, _ = read_manifests([path], needs_text=False)
    assert [manifest.text(row) for row in range(2)] == ["", "x"]
