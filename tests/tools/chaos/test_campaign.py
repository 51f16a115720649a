"""A few cases of every campaign, and all inputs that were found once; `--long` and `make chaos` run thousands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.chaos.campaign import Row

NAMES = ("kills", "survivors", "marathon", "hosts", "cases", "inputs", "checkpoints", "network", "races", "soak")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """All campaigns in one process, which forks what it attacks."""
    folder = tmp_path_factory.mktemp("chaos")
    is_long = request.config.getoption("--long")
    amount = (
        ["--long", "--jobs", str(len(os.sched_getaffinity(0)))]
        if is_long
        else ["--jobs", "2", "--minutes", "1", "--beside"]
    )
    command = [sys.executable, "-m", "tools.chaos", "--seed", "15", *amount]
    command += ["--folder", str(folder / "evidence"), "--json", str(folder / "rows")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert (folder / "rows").exists(), done.stderr
    made = map(Row.from_json, (folder / "rows").read_text().splitlines())
    return {row.campaign: row for row in made}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_bad(name: str, rows: dict[str, Row]) -> None:
    row = rows[name]
    if row.skipped:
        pytest.skip(row.skipped)
    assert row.cases > 0
    assert not row.bad, "\n\n".join(f"{bad.reason}\n{bad.repeat}\n{bad.evidence}" for bad in row.bad)
