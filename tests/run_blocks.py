"""Runs Python files one after the other, each in a process of its own that has torch already; prints what came out.

`python run_blocks.py FOLDER...`: each folder's `block.py` runs there; a line of JSON per folder.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo

import paceline


def run(folder: Path) -> dict[str, object]:
    """Fork, run the block, and say how it ended."""
    output, errors = folder / "stdout", folder / "stderr"
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for path, number in ((output, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = 0
        try:
            sys.path.insert(0, str(folder))
            runpy.run_path("block.py", run_name="__main__")
        except BaseException:  # the end of this process: whatever it is, it is reported
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return {"folder": str(folder), "code": code, "stdout": output.read_text(), "stderr": errors.read_text()}


if __name__ == "__main__":
    # What takes the time is loaded once and inherited: our names and torch's, which come on first use.
    for name in paceline.__all__:
        getattr(paceline, name)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    for argument in sys.argv[1:]:
        print(json.dumps(run(Path(argument))), flush=True)
