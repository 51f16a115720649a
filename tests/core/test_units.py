"""Amounts as people read them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.core.errors import PacelineError
from paceline.core.units import counted, duration, plural, size

SOURCE = Path(paceline.__file__).parent


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (115_038, "115.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (32 * 10**9, "32.0 GB"),
        (5 * 10**15, "5,000.0 TB"),
    ],
)
def test_sizes(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (4.26, "4.3 s"), (59.9, "59.9 s"), (59.96, "1.0 min"), (3596.9, "59.9 min"), (3600, "1.00 h")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
    assert duration(960 * 3600) == "960.00 h"


@given(st.integers(1, 10**15))
def test_a_size_is_never_nothing(num_bytes: int) -> None:
    """What is shown is within half a unit of its last digit."""
    number, unit = size(num_bytes).split()
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert float(number.replace(",", "")) * factor == pytest.approx(num_bytes, abs=0.051 * factor)
    assert float(number.replace(",", "")) > 0


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "core", "1 core"),
        (0, "core", "0 cores"),
        (2, "core", "2 cores"),
        (1024, "bad line", "1,024 bad lines"),
        (2, "process", "2 processes"),
        (2, "audio file", "2 audio files"),
        (1, "value of speaker", "1 value of speaker"),
        (2, "value of speaker", "2 values of speaker"),
    ],
)
def test_a_number_and_its_noun(number: int, noun: str, words: str) -> None:
    assert counted(number, noun) == words


def test_verbs_follow_their_number() -> None:
    assert [plural(number, verb) for number in (1, 2) for verb in ("is", "has")] == ["is", "has", "are", "have"]


def test_declared_errors_know_nouns() -> None:
    class TooFew(PacelineError):
        """As errors are declared."""

        ranks: int
        sizes: list[int]
        sentence = "{ranks:#rank}, {sizes[0]:#CUDA device}, {{}}"
        hint = "use {ranks:,} or {sizes[1]:#more core}"

    error = TooFew(1, [2, 1])
    assert (str(error), error.hint) == ("1 rank, 2 CUDA devices, {}", "use 1 or 1 more core")


def test_no_text_of_ours_counts_one_as_many() -> None:
    """A sweep: f-strings with a number and a plural noun go through `counted`, but for those that are never of one."""
    pattern = re.compile(
        r"\{[^{}\"']*\} (?:[a-z]+ )?(?:cores|files|steps|epochs|ranks|grains|lines|samples|utterances|processes|"
        r"workers|recordings|rows|labels|settings|restarts|threads|GPUs|slots|shards|nodes|devices)\b"
    )
    known = json.loads((Path(__file__).parent / "golden" / "never_one.json").read_text())
    found = {
        f"{path.relative_to(SOURCE)}: {match.group()}"
        for path in SOURCE.rglob("*.py")
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    }
    assert sorted(found - set(known)) == [], "use `counted(number, noun)`, or in a declared error `{number:#noun}`"
