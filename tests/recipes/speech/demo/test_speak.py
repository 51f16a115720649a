"""The spoken corpus: the same bytes twice, what it promises about voices and files, and when it is made anew."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from paceline.core.errors import Failed, NotInstalled
from paceline.recipes.speech.demo import speak
from paceline.recipes.speech.demo.espeak import Espeak, EspeakFailed
from paceline.recipes.speech.demo.phrases import DIGITS, MAX_DIGITS, phrase
from paceline.recipes.speech.demo.speak import (
    ACCENTS,
    SAMPLE_RATE,
    SEEN_SPEAKERS,
    UNSEEN_SPEAKERS,
    CorpusFolderUnusable,
    CorpusSettings,
    SpokenCorpus,
    find_corpus,
    make_corpus,
    script,
)
from paceline.recipes.speech.text.labels import ENGLISH

SMALL = CorpusSettings(num_train=40, num_val_seen=8, num_val_unseen=12)


def lines(manifest: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in manifest.read_text().splitlines()]


def contents(corpus: SpokenCorpus) -> dict[str, bytes]:
    return {
        path.relative_to(corpus.folder).as_posix(): path.read_bytes()
        for path in corpus.folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> SpokenCorpus:
    return make_corpus(tmp_path_factory.mktemp("demo") / "corpus", SMALL)


def test_two_fresh_processes_write_the_same_bytes(corpus: SpokenCorpus, tmp_path: Path) -> None:
    again = make_corpus(tmp_path / "again", SMALL)
    assert not again.reused
    assert contents(again) == contents(corpus)
    assert len(contents(corpus)) == 40 + 8 + 12 + 4
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    other = make_corpus(tmp_path / "other", SMALL.model_copy(update={"seed": 1}))
    assert contents(other)["train/00000.flac"] != contents(corpus)["train/00000.flac"]


def test_files_are_what_the_manifests_say(corpus: SpokenCorpus) -> None:
    seconds = 0.0
    for manifest, count in ((corpus.train, 40), (corpus.val_seen, 8), (corpus.val_unseen, 12)):
        rows = lines(manifest)
        assert len(rows) == count
        for row in rows:
            samples, rate = soundfile.read(manifest.parent / row["audio_filepath"], dtype="int16")
            info = soundfile.info(manifest.parent / row["audio_filepath"])
            assert (rate, info.subtype, samples.ndim) == (SAMPLE_RATE, "PCM_16", 1)
            assert len(samples) / rate == row["duration"]
            loudest = np.abs(samples.astype(np.int64)).max()
            assert 0.1 * 32767 - 1 <= loudest <= 0.9 * 32767 + 1
            assert not samples[:1600].any()
            assert not samples[-1600:].any()
            assert ENGLISH.characters.issuperset(row["text"])
            seconds += row["duration"]
    assert corpus.num_utterances == 60
    assert corpus.hours == pytest.approx(seconds / 3600)


def test_unseen_voices_speak_nowhere_else() -> None:
    """By speaker, not only by speaker and accent."""
    voices: dict[str, set[str]] = {}
    for utterance in script(CorpusSettings()):
        voices.setdefault(utterance.path.split("/")[0], set()).add(utterance.voice)
    speakers = {name: {voice.split("+")[1] for voice in found} for name, found in voices.items()}
    assert speakers["train"] == set(SEEN_SPEAKERS)
    assert speakers["val-seen"] <= speakers["train"]
    assert speakers["val-unseen"] == set(UNSEEN_SPEAKERS)
    assert not speakers["val-unseen"] & speakers["train"]
    assert len(voices["train"]) == len(ACCENTS) * len(SEEN_SPEAKERS) == 240


def test_every_voice_is_a_voice_of_its_own() -> None:
    """Each says the same phrase in sane time, without clipping; no two speakers and no two accents sound alike."""
    espeak = Espeak()
    heard: dict[tuple[str, str], bytes] = {}
    for accent in ACCENTS:
        for speaker in (*SEEN_SPEAKERS, *UNSEEN_SPEAKERS):
            voice = f"{accent}+{speaker}"
            samples = espeak.say(
                "turn off the garden lamp", voice, words_per_minute=175, pitch=50, pitch_range=50, volume=speak.VOLUME
            )
            assert 0.9 < len(samples) / espeak.sample_rate < 2.0, voice
            assert 2000 < np.abs(samples.astype(np.int64)).max() < 32000, voice
            heard[accent, speaker] = samples.tobytes()
    for accent in ACCENTS:
        assert len({sound for (its, _), sound in heard.items() if its == accent}) == 50, accent
    for speaker in (*SEEN_SPEAKERS, *UNSEEN_SPEAKERS):
        assert len({sound for (_, its), sound in heard.items() if its == speaker}) == len(ACCENTS), speaker


def test_a_faster_voice_is_done_sooner_and_unknown_ones_are_refused() -> None:
    espeak = Espeak()
    plain = {"pitch": 50, "pitch_range": 50, "volume": 60}
    slow = espeak.say("turn on the light", "en-us+m1", words_per_minute=130, **plain)
    fast = espeak.say("turn on the light", "en-us+m1", words_per_minute=220, **plain)
    assert len(fast) < 0.75 * len(slow)
    for voice in ("en-us+nobody", "no-such-language", "no-such-language+m1"):
        with pytest.raises(EspeakFailed, match="has no voice"):
            espeak.say("seven", voice, words_per_minute=175, **plain)


def test_phrases_stay_in_their_vocabulary() -> None:
    dice = random.Random(0)
    texts = [phrase(dice) for _ in range(5000)]
    words = {word for text in texts for word in text.split(" ")}
    assert words >= {*DIGITS, "turn", "light"}
    assert 40 <= len(words) <= 60
    assert max(len(text.split(" ")) for text in texts) <= max(MAX_DIGITS, 7)
    assert len(set(texts)) > 1000


def test_a_whole_corpus_is_reused(corpus: SpokenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speak, "_speak_in_child", None)
    again = make_corpus(corpus.folder, SMALL)
    assert again.reused
    assert (again.num_utterances, again.hours) == (corpus.num_utterances, corpus.hours)
    assert find_corpus(corpus.folder, SMALL.model_copy(update={"num_train": 39})) is None


def test_a_damaged_corpus_is_made_anew(tmp_path: Path) -> None:
    few = CorpusSettings(num_train=3, num_val_seen=1, num_val_unseen=1)
    calls: list[tuple[int, int]] = []
    made = make_corpus(tmp_path / "corpus", few, lambda done, total: calls.append((done, total)))
    assert calls == [(5, 5)]
    whole = contents(made)

    audio = made.folder / "val-seen" / "00000.flac"
    audio.write_bytes(audio.read_bytes()[:-1] + b"\x00")
    assert find_corpus(made.folder, few) is None
    assert not make_corpus(made.folder, few).reused
    assert contents(made) == whole

    for path, content in [
        ("train/00002.flac", None),
        ("train.json", b""),
        ("corpus.json", b"{"),
        ("corpus.json", b"[]"),
    ]:
        if content is None:
            (made.folder / path).unlink()
        else:
            (made.folder / path).write_bytes(content)
        assert find_corpus(made.folder, few) is None
        for name, data in whole.items():
            (made.folder / name).write_bytes(data)
        assert find_corpus(made.folder, few) is not None


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("months of work")
    for folder in (tmp_path, tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "corpus"):
        with pytest.raises(CorpusFolderUnusable) as caught:
            make_corpus(folder, SMALL)
        assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert (tmp_path / "thesis.txt").read_text() == "months of work"


def test_a_child_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 25 of 60\necho 'OSError: no space left'\nexit 3\n")
    os.chmod(broken, 0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    heard: list[int] = []
    with pytest.raises(Failed, match="ended with code 3: OSError: no space left"):
        make_corpus(tmp_path / "corpus", SMALL, lambda done, _: heard.append(done))
    assert heard == [25]
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_without_espeak_the_user_hears_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled) as caught:
        make_corpus(tmp_path / "corpus", SMALL)
    assert caught.value.hint == "pip install 'paceline[demo]'"
    assert not list(tmp_path.iterdir())
