"""YAML of strangers: bounded in size, depth and aliases; each refusal names the file and the line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.config.yaml_text import MAX_BYTES, MAX_VALUES, NotYaml, YamlText

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{x}: &{x} [{', '.join([f'*{y}'] * 9)}]\n" for y, x in zip("abcdefghi", "bcdefghij", strict=True)
)
LONG = "freeze:\n" + "".join(f"- l{number}\n" for number in range(MAX_VALUES + 1))

REFUSED = {
    "aliases of aliases": (BOMB, "5: more than 50,000 values up to here"),
    "recursive anchor": ("freeze: &a [x, *a]\n", "1: `*a` stands for what it is part of"),
    "recursive mapping": ("lr: 1\nfreeze: &a\n  b: *a\n", "3: `*a` stands for what it is part of"),
    "deep list": ("freeze: " + "[" * 3000 + "]" * 3000, "1: nested more than 50 deep"),
    "deep aliases": (
        "a0: &a0 []\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60)),
        "50: nested more than 50 deep",
    ),
    "long list": (LONG, "more than 50,000 values up to here"),
    "large file": ("# " + "x" * MAX_BYTES, "it is larger than 1.0 MB"),
    "long values of aliases": (f"a: &a {'x' * 50_000}\nfreeze: [{'*a, ' * 100}]\n", "2: more than 4,000,000 char"),
    "long number": (f"lr: {'1:' * 500}1\n", "1: a number of 1001 characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_out_of_bounds_is_refused_with_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On ce01e4b: no end, `RecursionError`, or more than a minute."""
    monkeypatch.chdir(tmp_path)
    text, told = REFUSED[name]
    Path("a.yaml").write_text(text)
    assert main(["train", "digits", "--config", "a.yaml", "--epochs", "1", "--print-config"]) == 2
    error = capsys.readouterr().err
    assert "a.yaml" in error
    assert told in error
    assert len(error) < 1000


def test_aliases_within_bounds_mean_what_they_stand_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("freeze: &names [a, b]\ncheckpoint_activations: *names\nepochs: &n 3\nseed: *n\n")
    assert main(["train", "digits", "--config", str(file), "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["checkpoint_activations"] == printed["freeze"] == ["a", "b"]
    assert printed["seed"] == printed["epochs"] == 3


def test_a_pipe_is_read_and_an_endless_file_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("epochs: 7\n",))
    writer.start()
    assert main(["train", "digits", "--config", str(pipe), "--print-config"]) == 0
    writer.join()
    assert "epochs: 7" in capsys.readouterr().out
    assert main(["train", "digits", "--config", "/dev/zero", "--print-config"]) == 2
    assert "larger than 1.0 MB" in capsys.readouterr().err


def test_a_long_value_is_shown_by_its_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"epochs: {list(range(5000))}\n")
    assert main(["train", "digits", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "[0, 1, 2, 3" in error
    assert "..." in error
    assert len(error) < 1000


scalars = st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.text("abc: -#'\"\n", max_size=8))
trees = st.recursive(
    scalars,
    lambda each: st.one_of(st.lists(each, max_size=4), st.dictionaries(st.text("ab", max_size=3), each, max_size=4)),
)


@given(trees)
def test_what_is_within_bounds_is_read_as_pyyaml_reads_it(tree: object) -> None:
    text = yaml.safe_dump(tree)
    assert YamlText("a.yaml", text).construct() == yaml.safe_load(text)


@given(st.text("ab&*[]{}:,-?|>!%@`'\"# \n\t", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        YamlText("a.yaml", text).construct()
    except NotYaml as refused:
        assert refused.problem.where.startswith("a.yaml")
