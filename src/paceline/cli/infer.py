"""`paceline infer RUN`: the predictions of a run's checkpoint, one line per sample, in the order of the data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from paceline.cli.eval import UseOptions, call_data_function, data_twice, open_run, restore, run_here_or_on_procs
from paceline.core.cloud.address import Place, shown
from paceline.core.cloud.file_copy import send
from paceline.core.errors import Conflict
from paceline.core.terminal import tell

if TYPE_CHECKING:
    from paceline.config.settings import TrainConfig
    from paceline.train.task import Task
    from paceline.world.link import Link


class InferOptions(UseOptions):
    """Predict with a checkpoint of RUN."""

    inputs: tuple[str, ...] = ()
    """What to predict (files, folders), for a task that reads them; `-` is standard input: lines to translate, or audio
    to transcribe while it arrives."""
    data: str | None = None
    """A function without arguments that returns a data set, as `path/to/file.py:function`; the task's `infer_data` if
    not set, which is its first validation set."""
    out: Place | None = None
    """File for the predictions instead of the console."""


_STANDARD_INPUT = "-"
OPTIONS, POSITIONAL = InferOptions, ("run", "inputs")


def run(argv: Sequence[str]) -> int:
    return run_here_or_on_procs("infer", InferOptions, POSITIONAL, argv, infer)


def infer(options: InferOptions) -> int:
    """Predict on this rank, with all others; the first one writes."""
    from paceline.data.dataset import DatasetTraits
    from paceline.train import apply
    from paceline.train import predictions as outcome
    from paceline.train import task as tasks

    # A run that was tried out on a few batches is not meant to predict only those.
    task, config, link = open_run(options, "infer", {"limit_batches": None}, {})
    with link:
        inputs = [*options.inputs, *options.manifest]
        if inputs and options.data is not None:
            raise data_twice(options.data, inputs)
        data = None if options.data is None else call_data_function(options.data)
        if data is None:
            apply.attach(task, config, link)
            if isinstance(task, tasks.StreamsInputs) and inputs and task.is_stream(inputs):
                if link.world.size > 1:
                    first = "standard input" if _STANDARD_INPUT in inputs else inputs[0]
                    raise Conflict(
                        f"{first} is predicted piece by piece while it is read, which one rank does alone; there are "
                        f"{link.world.size}",
                        hint="leave out `--procs`, and start it without a launcher",
                    )
                return _stream(task, config, link, inputs, options)
            # here, for the names that it may have
            data = tasks.read_inputs(task, inputs) if inputs else task.infer_data()
        restored = restore(task, config, link, options, "infer")
        pairs = apply.predict_stepper(task, config, restored.stepper, restored.grains, data)
        traits = DatasetTraits(data)
        text_line = outcome.bare_line if traits.are_lines else outcome.text_line
        line = partial(outcome.json_line if options.json else text_line, names=traits.names)
        number = outcome.write_predictions(pairs, link, line, options.out)
    if link.is_first and options.out is not None:
        send(options.out)
        tell(f"{number} predictions in {shown(options.out)}\n")
    return 0


def _stream(task: Task, config: TrainConfig, link: Link, inputs: Sequence[str], options: InferOptions) -> int:
    """Predict inputs piece by piece, on the only rank."""
    from paceline.core.disk import OutputFile
    from paceline.train import task as tasks

    assert isinstance(task, tasks.StreamsInputs)
    stepper = restore(task, config, link, options, "infer").stepper
    with stepper.evaluating():
        if options.out is None:
            task.stream(stepper.model, inputs, sys.stdout, as_json=options.json)
            return 0
        # Hours may pass, and live audio may have no end: what was heard so far is there to be read.
        advice = "what was predicted so far is in it: make room, or choose another `--out`"
        with OutputFile(options.out, advice) as file:
            number = task.stream(stepper.model, inputs, file, as_json=options.json)
    send(options.out)
    tell(f"{number} predictions in {shown(options.out)}\n")
    return 0
