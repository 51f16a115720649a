"""Lists of hosts against what they were made from, and against what `scontrol` writes out (captured)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.world.discover.hostlist import HostlistUnreadable, expand, fold

# `scontrol show hostnames TEXT`, SLURM 22.05.8.
CAPTURED = {
    "n1": ["n1"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[08-10,3]": ["n08", "n09", "n10", "n3"],
    "n[001-003,7],login": ["n001", "n002", "n003", "n7", "login"],
    "rack[0-1]n[1-2]": ["rack0n1", "rack0n2", "rack1n1", "rack1n2"],
    "a[1-2]b[3]c[4-5]": ["a1b3c4", "a1b3c5", "a2b3c4", "a2b3c5"],
    "a-b-[9-11],login": ["a-b-9", "a-b-10", "a-b-11", "login"],
}


@pytest.mark.parametrize("text", CAPTURED)
def test_as_scontrol_writes_them_out(text: str) -> None:
    assert expand(text) == CAPTURED[text]


def test_names_go_on_behind_a_bracket() -> None:
    """SLURM 22.05 refuses these itself; people and other tools write them."""
    assert expand("r[1,3]-ib0,c[5]d") == ["r1-ib0", "r3-ib0", "c5d"]
    assert expand("rack[0-1]n[1-2].x") == ["rack0n1.x", "rack0n2.x", "rack1n1.x", "rack1n2.x"]


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="SLURM is not installed (Debian: slurm-client)")
def test_captured_is_what_scontrol_says(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\n")
    env = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    for text, hosts in CAPTURED.items():
        done = subprocess.run(["scontrol", "show", "hostnames", text], env=env, capture_output=True, text=True)
        assert done.stdout.split() == hosts, done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("n1,,n2", "empty"),
        ("n[1-3", "not closed"),
        ("n1-3]", "character 5"),
        ("n[[1]]", "character 3"),
        ("n[a-c]", "'a-c'"),
        ("n[]", "''"),
        ("n[3-1]", "backwards"),
        ("n[1-9999999999]", "more than"),
        ("n[0-999]m[0-999],x", "more than"),
    ],
)
def test_what_is_no_list_is_refused(text: str, why: str) -> None:
    with pytest.raises(HostlistUnreadable, match=re.escape(why)):
        expand(text)


_NAME = st.from_regex(r"[a-z][a-z.-]{0,5}", fullmatch=True)
_SPAN = st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4))


@st.composite
def _lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list of hosts, and the names in it, put together without a parser."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        pieces: list[tuple[str, list[str]]] = []
        for start, brackets in draw(st.lists(st.tuples(_NAME, st.lists(_SPAN, max_size=3)), min_size=1, max_size=2)):
            pieces.append((start, [start]))
            spans, numbers = [], []
            for first, more, width in brackets:
                low, high = str(first).zfill(width), str(first + more).zfill(width)
                spans.append(low if more == 0 else f"{low}-{high}")
                numbers += [str(number).zfill(width) for number in range(first, first + more + 1)]
            if spans:
                pieces.append((f"[{','.join(spans)}]", numbers))
        texts.append("".join(text for text, _ in pieces))
        hosts += ["".join(choice) for choice in product(*(names for _, names in pieces))]
    return ",".join(texts), hosts


@given(_lists())
def test_expand_gives_what_the_list_was_made_from(made: tuple[str, list[str]]) -> None:
    text, hosts = made
    assert expand(text) == hosts


@given(_lists())
def test_fold_and_expand_are_a_round_trip(made: tuple[str, list[str]]) -> None:
    _, hosts = made
    assert expand(fold(hosts)) == hosts


def test_fold_is_short() -> None:
    assert fold(["n08", "n09", "n10", "n3", "login"]) == "n[08-09],n[10,3],login"
    assert fold([f"gpu{number:03}.x" for number in range(100)]) == "gpu[000-099].x"
