"""`paceline manifest`: what corpora look like on disk becomes what is true of them."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.main import main
from paceline.recipes.speech.manifest.read import read_manifests
from tests.recipes.speech.sounds import tone, write
from tests.recipes.speech.tiny import damaged

Shown = pytest.CaptureFixture[str]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sounds(folder: Path, *names: str) -> None:
    """Files of 0.2, 0.3, ... seconds."""
    for place, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, tone(0.2 + place / 10))


def manifest(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


# -- scan ----------------------------------------------------------------------------------------------------------


def test_text_beside_each_file(tmp_path: Path, capsys: Shown) -> None:
    sounds(tmp_path, "a.wav", "b/c.flac", "b/d.opus", "e.mp3", "._f.wav")
    (tmp_path / "a.txt").write_text("\ufeffseven \r\n eight\n", encoding="utf-8")
    (tmp_path / "b" / "c.txt").write_text("zwölf")
    (tmp_path / "b" / "d.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "LICENCE.txt").write_text("free")
    raw = (tmp_path / "b" / "c.flac").read_bytes()
    (tmp_path / "b" / "cut.flac").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "b" / "cut.txt").write_text("lost")
    assert main(["manifest", "scan", str(tmp_path)]) == 0
    assert lines(tmp_path / "manifest.json") == [
        {"audio_filepath": "a.wav", "duration": 0.2, "text": "seven eight"},
        {"audio_filepath": "b/c.flac", "duration": 0.3, "text": "zwölf"},
    ]
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines()[:7] == [
        "audio without a transcript: 2",
        f"  {tmp_path}/b/d.opus",
        f"  {tmp_path}/e.mp3",
        "transcripts that cannot be read: 1",
        f"  {tmp_path}/b/d.txt: is not UTF-8",
        "audio that is broken: 1",
        shown.out.splitlines()[6],
    ]
    assert shown.out.splitlines()[6].startswith(f"  {tmp_path}/b/cut.flac: is truncated")
    assert shown.out.endswith(f"{tmp_path}/manifest.json: 2 utterances, 0.00 h\n")
    read, _ = read_manifests([tmp_path / "manifest.json"])
    assert [read.audio(row).exists() for row in range(2)] == [True, True]


def test_nothing_is_overwritten_by_accident(tmp_path: Path, capsys: Shown) -> None:
    sounds(tmp_path, "a.wav")
    (tmp_path / "a.txt").write_text("one")
    out = tmp_path / "out" / "all.json"
    words = ["manifest", "scan", str(tmp_path), "--out", str(out)]
    assert main(words) == 0
    assert lines(out)[0]["audio_filepath"] == str(tmp_path / "a.wav")  # not below the manifest
    out.write_text("precious")
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {out} exists\n  `--force` replaces it, `--out` names another\n"
    assert out.read_text() == "precious"
    assert main([*words, "--force", "--threads", "1"]) == 0
    assert lines(out)[0]["text"] == "one"
    assert os.listdir(out.parent) == ["all.json"]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("transcripts.tsv", 'a.wav\tone, "two\nsub/b.flac\tthree\n\nno.wav\tfour\n'),
        ("transcripts.csv", 'a.wav,"one, ""two"\nsub/b.flac,three\nno.wav,four\n'),
        ("transcripts.csv", 'a.wav,one, "two\nb,three\nno.wav,four\n'),
        ("transcripts.csv", 'text,file\n"one, ""two",a\nthree,sub/b\nfour,no.wav\n'),
        ("transcripts.txt", 'a one, "two\nsub/b.flac three\nno.wav four\n'),
        ("transcripts.txt", 'a.wav\tone, "two\r\nb.flac\tthree\r\nno.wav\tfour\r\n'),
    ],
)
def test_a_table_of_transcripts(name: str, table: str, tmp_path: Path, capsys: Shown) -> None:
    sounds(tmp_path, "a.wav", "sub/b.flac")
    (tmp_path / name).write_bytes(table.encode())
    assert main(["manifest", "scan", str(tmp_path)]) == 0
    assert [(line["audio_filepath"], line["text"]) for line in lines(tmp_path / "manifest.json")] == [
        ("a.wav", 'one, "two'),
        ("sub/b.flac", "three"),
    ]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "transcripts without audio: 1"
    assert shown[1].startswith(f"  {tmp_path / name}:")
    assert shown[1].endswith(": no.wav")


def test_librispeech(tmp_path: Path, capsys: Shown) -> None:
    chapter = tmp_path / "dev-clean" / "84" / "121123"
    sounds(chapter, "84-121123-0000.flac", "84-121123-0001.flac")
    (chapter / "84-121123.trans.txt").write_text(
        "84-121123-0000 GO DO YOU HEAR\n84-121123-0001 BUT IT'S LATE\n84-121123-0002 GONE\n"
    )
    assert main(["manifest", "scan", str(tmp_path)]) == 0
    assert lines(tmp_path / "manifest.json") == [
        {
            "audio_filepath": f"dev-clean/84/121123/84-121123-000{number}.flac",
            "duration": seconds,
            "text": text,
            "speaker": "84",
        }
        for number, seconds, text in [(0, 0.2, "go do you hear"), (1, 0.3, "but it's late")]
    ]
    assert "84-121123.trans.txt:3: 84-121123-0002" in capsys.readouterr().out


def test_common_voice(tmp_path: Path, capsys: Shown) -> None:
    sounds(tmp_path, "clips/x1.mp3", "clips/x2.mp3")
    head = "client_id\tpath\tsentence_id\tsentence\tlocale\n"
    (tmp_path / "train.tsv").write_text(f'{head}7f\tx2.mp3\t1\t"Guten Tag\tde\n8a\tx1.mp3\t2\tJa.\tde\n8a\tshort\n')
    assert main(["manifest", "scan", str(tmp_path / "train.tsv")]) == 0
    assert [(line["audio_filepath"], line["text"], line["speaker"]) for line in lines(tmp_path / "train.json")] == [
        ("clips/x2.mp3", '"Guten Tag', "7f"),
        ("clips/x1.mp3", "Ja.", "8a"),
    ]
    assert "train.tsv:4: has 2 columns" in capsys.readouterr().out
    (tmp_path / "test.tsv").write_text(head)
    assert main(["manifest", "scan", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "holds several tables of transcripts: test.tsv, train.tsv" in shown
    assert f"`paceline manifest scan {tmp_path}/test.tsv`" in shown


def test_a_manifest_is_measured_anew(tmp_path: Path, capsys: Shown) -> None:
    sounds(tmp_path, "a.wav", "b.flac")
    (tmp_path / "said.txt").write_text("from a file")
    path = manifest(
        tmp_path / "train.json",
        {"audio_filepath": "a.wav", "text": "one", "speaker": "x"},
        {"text": "two", "duration": 99, "audio_filename": "b.flac", "lang": "en"},
        {"audio_filepath": "b.flac", "duration": 0.1, "offset": 0.05, "text": "part"},
        {"audio_filepath": "b.flac", "duration": 99, "offset": 0.1, "text": "to the end"},
        {"audio_filepath": "b.flac", "duration": 1, "offset": 5, "text": "behind it"},
        {"audio_filepath": "no.wav", "duration": 1, "text": "three"},
        {"audio_filepath": "a.wav", "duration": 1},
        {"audio_filepath": "a.wav", "text_filepath": "said.txt"},
    )
    before = path.read_bytes()
    out = tmp_path / "new" / "train.json"
    assert main(["manifest", "scan", str(path), "--out", str(out)]) == 0
    assert path.read_bytes() == before
    shown = capsys.readouterr().out
    assert f'{path}:7: "text" is missing' in shown
    assert f'{path}:5: "offset" is 5, but {tmp_path}/b.flac lasts 0.30 s' in shown
    assert f"{path}:6: {tmp_path}/no.wav: there is no such file" in shown
    b = str(tmp_path / "b.flac")
    assert lines(out) == [
        {"audio_filepath": str(tmp_path / "a.wav"), "duration": 0.2, "text": "one", "speaker": "x"},
        {"audio_filename": b, "duration": 0.3, "text": "two", "lang": "en"},
        {"audio_filepath": b, "duration": 0.1, "offset": 0.05, "text": "part"},
        {"audio_filepath": b, "duration": 0.2, "offset": 0.1, "text": "to the end"},
        {"audio_filepath": str(tmp_path / "a.wav"), "duration": 0.2, "text_filepath": str(tmp_path / "said.txt")},
    ]
    assert main(["manifest", "scan", str(path)]) == 0  # beside it
    assert lines(tmp_path / "train.measured.json")[1]["audio_filename"] == "b.flac"
    assert main(["manifest", "stats", str(tmp_path / "train.measured.json"), "--check"]) == 0


def test_scan_of_cuts(tmp_path: Path) -> None:
    """Each supervision is an utterance with its text; a name in .gz is compressed."""
    sounds(tmp_path, "a.wav", "b.wav")

    def cut(name: str, *supervisions: tuple[float, str]) -> dict[str, Any]:
        spoken = [{"id": text, "start": start, "duration": 0.1, "text": text} for start, text in supervisions]
        source = {"type": "file", "channels": [0], "source": name}
        return {
            **{"type": "MonoCut", "id": name, "start": 0.1, "duration": 0.2, "channel": 0},
            **{"supervisions": spoken, "recording": {"id": name, "sources": [source], "sampling_rate": 16000}},
        }

    path = manifest(tmp_path / "cuts.jsonl", cut("b.wav", (0.0, "one"), (0.1, "two")), cut("b.wav", (0.0, "three")))
    wanted = [("one", 0.1, 0.1), ("two", 0.2, 0.1), ("three", 0.1, 0.2)]
    assert main(["manifest", "scan", str(path)]) == 0
    found = lines(tmp_path / "cuts.measured.jsonl")
    assert [(line["text"], line["offset"], line["duration"]) for line in found] == wanted
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for action in (["scan"], ["split", "--parts", "all=1"]):
        assert main(["manifest", action[0], f"{path}.gz", *action[1:]]) == 0
    for name in ("cuts.measured.jsonl.gz", "cuts-all.jsonl.gz"):
        again, _ = read_manifests(str(tmp_path / name))
        assert [again.text(row) for row in range(3)] == ["one", "two", "three"]


def test_scan_of_what_is_not_there(tmp_path: Path, capsys: Shown) -> None:
    assert main(["manifest", "scan", str(tmp_path / "no")]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err
    sounds(tmp_path, "a.wav")
    assert main(["manifest", "scan", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "there is nothing to make a manifest of\n  audio without a transcript: 1\n" in shown
    assert "LibriSpeech" in shown
    assert os.listdir(tmp_path) == ["a.wav"]


# -- stats ---------------------------------------------------------------------------------------------------------


def test_stats_are_counted(tmp_path: Path, capsys: Shown) -> None:
    texts = ["one two", "One, two", "zwölf", "", "one two"]
    seconds = [1.0, 2.5, 2.0, 4.0, 8.0]
    entries = [
        {"audio_filepath": f"{place % 4}.wav", "duration": each, "text": text, "speaker": "ab"[place % 2]}
        for place, (each, text) in enumerate(zip(seconds, texts, strict=True))
    ]
    path = manifest(tmp_path / "train.json", *entries)
    assert main(["manifest", "stats", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["utterances"] == 5
    assert found["hours"] == pytest.approx(17.5 / 3600)
    assert (found["shortest_s"], found["mean_s"], found["longest_s"]) == (1.0, 3.5, 8.0)
    assert found["percentiles_s"]["50"] == 2.5
    assert found["percentiles_s"]["95"] == pytest.approx(float(np.percentile(seconds, 95)))
    assert sum(count for _, _, count in found["histogram"]) == 5
    assert (found["words"], found["distinct_words"], found["empty_texts"]) == (7, 4, 1)
    assert found["characters"] == Counter("".join(texts))
    assert found["outside_labels"] == [",", "O", "ö"]
    assert found["shortest"][0] == {"where": f"{path}:1", "seconds": 1.0, "text": "one two"}
    assert [extreme["seconds"] for extreme in found["longest"]] == [8.0, 4.0, 2.5]
    assert found["repeated_audio"] == [f"{path}:5"]
    assert found["repeated_texts"] == 1
    assert found["hours_by_speaker"] == {"a": pytest.approx(11 / 3600), "b": pytest.approx(6.5 / 3600)}
    assert found["bad"] == []
    assert main(["manifest", "stats", str(path)]) == 0
    shown = capsys.readouterr().out
    for text in ("5 utterances, 0.00 h", "outside the 28 labels of English: ,:1 ö:1", "speakers      2", "█"):
        assert text in shown


def test_stats_say_what_is_wrong(tmp_path: Path, capsys: Shown) -> None:
    sounds(tmp_path, "a.wav")
    path = manifest(
        tmp_path / "train.json",
        {"audio_filepath": "a.wav", "duration": 0.2, "text": "one"},
        {"audio_filepath": "b.wav", "duration": 0.2, "text": "two"},
        {"audio_filepath": "a.wav", "duration": "long", "text": "three"},
    )
    assert main(["manifest", "stats", str(path)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f'bad lines: 1\n  {path}:3: "duration" must be a number, not text\n')
    assert main(["manifest", "stats", str(path), "--check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["num_bad"] == 2
    assert [(bad["line"], bad["row"]) for bad in found["bad"]] == [(3, -1), (2, 1)]
    assert found["bad"][1]["what"] == f"{tmp_path}/b.wav: there is no such file"
    assert main(["manifest", "stats", str(tmp_path / "none.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_stats_decode_what_they_check(tmp_path: Path, capsys: Shown) -> None:
    """Damage between sound ends, which a look before training does not see."""
    path = manifest(tmp_path / "train.json", damaged(tmp_path / "mid.flac"))
    assert main(["manifest", "stats", str(path)]) == 0
    assert main(["manifest", "stats", str(path), "--check"]) == 1
    assert f"{path}:1: {tmp_path / 'mid.flac'}: is truncated or damaged" in capsys.readouterr().out


# -- the command ---------------------------------------------------------------------------------------------------


def test_help_and_wrong_words(capsys: Shown) -> None:
    assert main(["manifest"]) == 2
    assert main(["manifest", "--help"]) == 0
    assert main(["manifest", "split", "--help"]) == 0
    assert "usage: paceline manifest split" in capsys.readouterr().out
    assert main(["manifest", "stat", "a.json"]) == 2
    assert "did you mean `paceline manifest stats`?" in capsys.readouterr().err
    assert main(["manifest", "pack"]) == 2
    assert main(["manifest", "scan"]) == 2
    assert "PATH: is missing" in capsys.readouterr().err
    assert main(["manifest", "stats", "a.json", "--chek"]) == 2
    assert "did you mean --check?" in capsys.readouterr().err


def test_a_manifest_needs_no_torch(tmp_path: Path) -> None:
    sounds(tmp_path, "a.wav")
    path = manifest(tmp_path / "a.json", {"audio_filepath": "a.wav", "duration": 0.2, "text": "one"})
    code = (
        "import sys; from paceline.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    words = ["manifest", "stats", "--check", str(path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, "")


# -- names of files ------------------------------------------------------------------------------------------------


def test_names_that_are_no_utf8(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """From the folder to the manifest, through it to the audio, and to what is printed."""
    sounds(tmp_path, "a.wav", "b.wav")
    name = os.fsdecode(b"b\xff\xe4.wav")
    (tmp_path / "b.wav").rename(tmp_path / name)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / os.fsdecode(b"b\xff\xe4.txt")).write_text("two")
    assert main(["manifest", "scan", str(tmp_path)]) == 0
    path = tmp_path / "manifest.json"
    assert b"\\udcff\\udce4" in path.read_bytes()
    found, _ = read_manifests([path])
    assert [found.audio(row).name for row in range(2)] == ["a.wav", name]
    assert main(["manifest", "stats", str(path), "--check"]) == 0
    assert main(["manifest", "split", str(path), "--parts", "x=0.5,y=0.5", "--out", str(tmp_path / "parts")]) == 0
    pieces, _ = read_manifests([tmp_path / "parts" / f"manifest-{part}.json" for part in "xy"])
    assert sorted(pieces.audio(row).name for row in range(2)) == sorted(["a.wav", name])
    (tmp_path / name).unlink()
    capfdbinary.readouterr()
    assert main(["manifest", "stats", str(path), "--check"]) == 1
    assert b"b\xff\xe4.wav: there is no such file" in capfdbinary.readouterr().out
    assert main(["manifest", "stats", str(path), "--check", "--json"]) == 1
    assert name in json.loads(capfdbinary.readouterr().out)["bad"][0]["what"]
    half = '{"audio_filepath": "a.wav", "duration": 0.2, "text": "\\udcff"}\n'
    (tmp_path / "half.json").write_text(half)
    assert main(["manifest", "stats", str(tmp_path / "half.json")]) == 2
    assert b'"text" holds a half of a surrogate pair' in capfdbinary.readouterr().err


def test_names_that_cannot_be(tmp_path: Path, capsys: Shown) -> None:
    sounds(tmp_path, "a.wav")
    path = manifest(tmp_path / "a.json", {"audio_filepath": "a.wav", "duration": 0.2, "text": "one"})
    long = "a" * 300
    for words in (["stats", long], ["stats", f"{tmp_path}/{long}.json"], ["split", long], ["scan", long]):
        assert main(["manifest", *words]) == 2
        assert re.search(": (File name|is) too long", capsys.readouterr().err)
    assert main(["manifest", "scan", str(path), "--out", f"{tmp_path}/{long}.json"]) == 2
    assert "is too long: a name has at most 255 bytes" in capsys.readouterr().err
    for out in ("/proc/none/a.json", f"{path}/in/a/file.json"):
        assert main(["manifest", "scan", str(path), "--out", out]) == 2
        assert f"error: {out} cannot be written: " in capsys.readouterr().err
    assert main(["manifest", "split", str(path), "--parts", "x=1", "--out", "/proc/none"]) == 2
    assert "/proc/none/a-x.json cannot be written: " in capsys.readouterr().err


def test_manifests_that_may_not_be_read(tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Path, **options: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuses)
    assert main(["manifest", "stats", str(tmp_path / "a.json")]) == 2
    assert "cannot be read: Permission denied" in capsys.readouterr().err
