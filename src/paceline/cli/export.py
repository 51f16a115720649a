"""`paceline export RUN FOLDER`: the weights of a checkpoint and what they are for, in files that anything can read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from paceline.config.load import load
from paceline.config.settings import Section
from paceline.core.terminal import tell

PROG = "paceline export"


class ExportOptions(Section):
    """Write the weights of a checkpoint of RUN to FOLDER, as safetensors, with a YAML file that describes the model."""

    run: Path
    """Folder of the run."""
    folder: Path
    """Where to; must not be there yet, or hold an export."""
    checkpoint: Literal["best", "last"] | Path = "best"
    """The one with the best score (the newest where none has one), the newest, or one by its path or name."""
    task: str | None = None
    """Where the task is now (`path/to/file.py:ClassName`), if its file has moved since the run was made."""


OPTIONS, POSITIONAL = ExportOptions, ("run", "folder")


def run(argv: Sequence[str]) -> int:
    options = load(ExportOptions, argv, prog=PROG, positional=POSITIONAL)
    from paceline.cli.eval import settings_of, task_of
    from paceline.train import apply
    from paceline.train.task import export
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    record = apply.read_run(options.run)
    task = task_of(options.run, options.task, record)
    settings = settings_of(task, options.run, record.settings)
    apply.attach(task, settings, start(discover({}), device="cpu"))
    checkpoint = apply.find_checkpoint(options.run, options.checkpoint)
    about = {"run": str(options.run), "checkpoint": checkpoint.name}
    export(task, options.folder, apply.read_weights(checkpoint), about)
    files = ", ".join(sorted(path.name for path in options.folder.iterdir()))
    tell(f"{checkpoint}\n{options.folder}: {files}\n")
    return 0
