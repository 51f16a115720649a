"""`paceline export RUN FOLDER`: the weights of a checkpoint and what they are for, in files that anything can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.config.load import load
from paceline.config.settings import Positive, Section
from paceline.core.cloud.address import Place, shown
from paceline.core.terminal import tell

PROG = "paceline export"


class ExportOptions(Section):
    """Write the weights of a checkpoint of RUN to FOLDER, in a form that other programs read."""

    run: Place
    """Folder of the run, or its address."""
    folder: Place
    """Where to; must not be there yet, or hold an export. Of a speech model, a file that ends in `.nemo` is an archive
    for NeMo."""
    checkpoint: Literal["best", "last"] | Place = "best"
    """The one with the best score (the newest where none has one), the newest, or one by its path or name."""
    average: Positive = 1
    """Write the mean of the weights of so many checkpoints: that one and those before it (`--keep-last`)."""
    format: Literal["auto", "safetensors", "torch", "dcp", "onnx"] = "auto"
    """`safetensors` or `torch` (one file of weights by name), `dcp` (torch.distributed.checkpoint), `onnx` (the model
    itself); `auto` is the task's own form (a recipe's safetensors and YAML file), safetensors where it has none."""
    task: str | None = None
    """Where the task is now (`path/to/file.py:ClassName`), if its file has moved since the run was made."""


OPTIONS, POSITIONAL = ExportOptions, ("run", "folder")


def run(argv: Sequence[str]) -> int:
    options = load(ExportOptions, argv, prog=PROG, positional=POSITIONAL)
    from paceline.core.cloud.file_copy import send
    from paceline.train import apply, exchange
    from paceline.train.load import load as load_model
    from paceline.train.recorded import settings_of, task_of
    from paceline.train.task import Exports, export
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    record = apply.read_run(options.run)
    task = task_of(options.run, options.task, record)
    settings = settings_of(task, options.run, {**record.settings, "out": options.run})
    checkpoint = apply.find_checkpoint(options.run, options.checkpoint)
    about: dict[str, str | int] = {"run": shown(options.run), "checkpoint": checkpoint.name}
    about |= {"average": options.average} if options.average > 1 else {}
    with start(discover({}), device="cpu") as link:
        apply.attach(task, settings, link)
        if options.format == "auto" and isinstance(task, Exports):
            export(task, options.folder, apply.read_weights(checkpoint, options.average), about)
        elif options.format == "onnx":
            inputs = apply.example_inputs(task, settings, link)
            model = load_model(options.run, checkpoint=checkpoint, task=task, average=options.average)
            exchange.write_onnx(options.folder, model, inputs, str(record.task), about)
        else:
            form: exchange.Format = "safetensors" if options.format == "auto" else options.format
            weights = apply.read_weights(checkpoint, options.average)
            exchange.write(options.folder, form, weights, {**about, "task": str(record.task)})
    files = ", ".join(sorted(path.name for path in options.folder.iterdir())) if options.folder.is_dir() else "written"
    send(options.folder)
    tell(f"{shown(checkpoint)}\n{shown(options.folder)}: {files}\n")
    return 0
