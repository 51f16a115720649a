"""Runs that an earlier version left behind go on here as they would have gone on there, bit for bit.

`old_runs/` holds runs of commit ce01e4b, killed in mid-epoch, and what that commit makes of each when it resumes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.train.old_runs import write

HERE = Path(write.__file__).parent
ENDS = json.loads((HERE / "ends.json").read_text())


@pytest.mark.parametrize("name", list(write.RUNS))
def test_run_of_an_earlier_version_resumes_bitwise(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    shutil.copytree(HERE / name, run)
    write.train(name, run, "--resume", "auto")
    expected, end = ENDS["ends"][name], write.end(run)
    assert (end["checkpoint"], list(end["tensors"])) == (expected["checkpoint"], list(expected["tensors"]))
    assert end["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    if write.machine() != ENDS["made_on"]:
        pytest.skip(f"bits are compared on {ENDS['made_on']} only; losses agree")
    assert end == expected
