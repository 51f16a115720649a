"""Ports of code from elsewhere: on 1 and 2 ranks the same bits, and not longer than the same in Lightning."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

from tests.examples.run_ports import PORTS

NEEDED = {
    "timm_mixup": ("timm", "torchvision", "sklearn"),
    "gpt2_collator": ("transformers", "tokenizers"),
    "seq2seq_bleu": ("sacrebleu",),
    "gan": ("sklearn",),
    "own_loop": ("torchmetrics", "sklearn"),
}
HEAVY = ("timm_mixup", "gpt2_collator")
"""Their packages take long to import: only with `--long`."""
Answers = dict[tuple[str, int], list[dict[str, Any]]]


def missing(name: str) -> list[str]:
    return [package for package in NEEDED[name] if importlib.util.find_spec(package) is None]


def skip_if_missing(name: str) -> None:
    if missing(name):
        pytest.skip(f"not installed: {', '.join(missing(name))} (extra `ports`)")


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """All ports that have their packages, on 1 and 2 ranks, from one process that imports those once."""
    names = [name for name in NEEDED if request.config.getoption("--long") or name not in HEAVY]
    jobs = [f"{name}:{size}" for name in names if not missing(name) for size in (1, 2)]
    command = [sys.executable, "-m", "tests.examples.run_ports", str(tmp_path_factory.mktemp("ports")), *jobs]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=400, cwd=PORTS.parents[1], env=dict(os.environ)
    )
    assert ended.returncode == 0, ended.stderr
    found: Answers = {}
    for line in ended.stdout.splitlines():
        answer = json.loads(line)
        found.setdefault((answer["port"], answer["size"]), []).append(answer)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in HEAVY else name for name in NEEDED]
)
def test_one_and_two_ranks_come_to_the_same_bits(name: str, answers: Answers) -> None:
    skip_if_missing(name)
    (alone,), both = answers[name, 1], answers[name, 2]
    for each in (alone, *both):
        assert each["code"] == 0, each["out"] + each["err"]
    assert len(both) == 2
    for each in both:
        assert (each["numbers"], each["digest"]) == (alone["numbers"], alone["digest"])


@pytest.mark.parametrize(
    ("name", "number", "worst", "best"),
    [
        pytest.param("timm_mixup", "val/accuracy", 0.2, 1.0, marks=pytest.mark.long),
        pytest.param("gpt2_collator", "val/loss", 0.0, 5.9, marks=pytest.mark.long),  # ln 400 = 5.99 without training
        ("seq2seq_bleu", "val/loss", 0.0, 2.4),  # ln 13 = 2.56
        ("own_loop", "val_auroc", 0.95, 1.0),
    ],
)
def test_they_learn(name: str, number: str, worst: float, best: float, answers: Answers) -> None:
    skip_if_missing(name)
    assert worst <= answers[name, 1][0]["numbers"][number] <= best


def num_code_lines(path: Path) -> int:
    """Count lines with code: no comments, no docstrings, nothing empty."""
    text = path.read_text(encoding="utf-8")
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and begins
        if token.type not in ignored and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return len(lines)


@pytest.mark.parametrize("name", NEEDED)
def test_not_longer_than_lightning(name: str) -> None:
    assert num_code_lines(PORTS / f"{name}.py") <= num_code_lines(PORTS / "lightning" / f"{name}.py")


def test_every_port_is_here() -> None:
    assert {path.stem for path in PORTS.glob("*.py")} == set(NEEDED)
    assert {path.stem for path in (PORTS / "lightning").glob("*.py")} == set(NEEDED)


@pytest.mark.long
@pytest.mark.parametrize("name", NEEDED)
def test_what_lightning_is_counted_by_runs(name: str, tmp_path: Path) -> None:
    skip_if_missing(name)
    pytest.importorskip("lightning")
    script = PORTS / "lightning" / f"{name}.py"
    code = "from tests.examples.run_ports import *; define_operators_of_vision(); sys.argv = [sys.argv[1]]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    path = os.pathsep.join([str(PORTS.parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code, str(script)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
