"""`paceline predict RUN ...` or `paceline predict TASK ...`: speed on other numbers of ranks, with intervals."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from paceline.config.command_line import asks_for_help, read_words
from paceline.config.load import load
from paceline.config.settings import Positive, PositiveFloat, Section, TrainConfig
from paceline.core.disk import cannot_write, replacing
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.core.terminal import emit, tell, warn
from paceline.lab.predict import api
from paceline.lab.predict.calibration import calibrate
from paceline.lab.predict.links import parse_link
from paceline.lab.predict.prediction import Prediction
from paceline.lab.predict.report import FILE
from paceline.lab.predict.show import show

PROG = "paceline predict"
POSITIONAL = ("source",)
OF_RUNS = ("reduce", "sums", "wire", "shard", "sync_step", "sync_seconds", "sync_overlap", "grains")

with warnings.catch_warnings():
    # `json` hides a method that pydantic itself has given up; it is the word that users know.
    warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)

    class PredictCommand(Section):
        """Which ranks, on which machines."""

        source: tuple[str, ...]
        """Folders of runs of one task, or a task: a recipe's name or `path/to/file.py:ClassName`."""
        ranks: tuple[Annotated[int, Field(gt=0)], ...] = ()
        """Numbers of ranks, with commas between them; 1 to 64 if not set."""
        nodes: tuple[Annotated[int, Field(gt=0)], ...] = ()
        """Machines, one number for each of `ranks` or one for all; alone, each has as many ranks as in the run. If not
        set, each rank is on a machine of its own."""
        link: str | None = None
        """Bandwidth and latency between machines, in one direction: `100Gbit,10us`; 10Gbit,50us if not set."""
        link_file: Path | None = None
        """The same as measured: what `paceline doctor --json` printed on two machines or more."""
        failures: str | None = None
        """Failures per 1,000 node-days, such as `4/1000nd` or `2.3-6.5/1000nd`: adds the share of useful time."""
        price: PositiveFloat | None = None
        """Price of a rank for an hour, in any currency."""
        calibration_steps: Annotated[int, Field(ge=20)] = api.CALIBRATION_STEPS
        """Steps of each calibration run of a task."""
        random_seed: Annotated[int, Field(ge=0)] = 0
        """Seed of the simulation."""
        json: bool = False  # type: ignore[assignment]
        """Print JSON instead of a table."""


class PredictOptions(PredictCommand):
    """Say how fast a run would be on other numbers of ranks and machines, with intervals, and what to change."""

    run_link: str | None = None
    """Link that the runs' own ranks met over, if they were on several machines."""
    reduce: Literal["grad", "param"] | None = None
    """Way to one model to predict for: summed gradients or averaged parameters; the run's own if not set."""
    sums: Literal["exact", "fast"] | None = None
    """Sums in one order, or as the library adds; the run's own if not set."""
    wire: Literal["full", "fp16", "bf16", "int8"] | None = None
    """Form in which numbers travel; the run's own if not set."""
    shard: Literal["none", "full", "node"] | None = None
    """Sharding to predict for; the run's own if not set."""
    sync_step: Positive | None = None
    """Steps between two averages (`reduce: param`); the run's own if not set, or 1."""
    sync_seconds: PositiveFloat | None = None
    """Seconds between two averages, instead of `sync_step`."""
    sync_overlap: Annotated[int, Field(ge=0)] | None = None
    """Steps that go on while an average is under way; the run's own if not set."""
    grains: Positive | None = None
    """Grains per step; the run's own if they were set, else one per rank."""


OPTIONS = PredictOptions


class NothingToPredict(PacelineError):
    """Neither a run nor a task is named."""

    sentence = "predict from which run or task?"
    hint = "`paceline predict runs/NAME --nodes 8`, or `paceline predict digits`; `paceline runs` lists runs"


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    places = read_words(OPTIONS, words, POSITIONAL).loose
    named = [words[place] for place in places]
    if not named and not asks_for_help(words):
        raise NothingToPredict
    if len(named) == 1 and not api.is_run(named[0]) and not asks_for_help(words):
        return _of_task(named[0], [word for place, word in enumerate(words) if place != places[0]])
    options = load(OPTIONS, words, prog=PROG, positional=POSITIONAL)
    between = api.link_between(options.link, options.link_file)
    run_link = None if options.run_link is None else parse_link(options.run_link)
    folders = [api.run_folder_of(each) for each in options.source]
    found = calibrate(folders, run_link)
    settings = {name: getattr(options, name) for name in OF_RUNS if name != "grains"}
    result = api.answer(
        found,
        between,
        options.ranks,
        options.nodes,
        settings,
        options.grains,
        options.failures,
        options.price,
        options.random_seed,
    )
    _print(result, options)
    if not options.json:
        _keep(result, folders[0])
    return 0


def _of_task(name: str, rest: list[str]) -> int:
    """Calibrate on short runs of a task, whose settings are those of `paceline train`."""
    from paceline.config.train_command import task_settings
    from paceline.train.find_task import find_task  # from here on torch is needed

    task_class = find_task(name)
    bases: Any = (task_class.Settings, PredictCommand)
    model: type[PredictCommand] = create_model("PredictTaskOptions", __base__=bases, __doc__=PredictOptions.__doc__)
    options = load(model, [name, *rest], prog=PROG, positional=POSITIONAL)
    settings: TrainConfig = task_settings(options, task_class.Settings)
    between = api.link_between(options.link, options.link_file)
    sizes = options.ranks or options.nodes or tuple(size for size in api.RANKS if size <= 8)
    values = settings.model_dump(mode="json", include=set(settings.model_fields_set))
    found = api.calibrated_on_task(
        name, values, sizes, settings.grains, steps=options.calibration_steps, say=lambda line: warn(f"{line}\n")
    )
    found = api.with_length(found, settings)
    result = api.answer(
        found,
        between,
        options.ranks or (() if options.nodes else sizes),
        options.nodes,
        {},
        settings.grains,
        options.failures if "failures" in options.model_fields_set else None,  # training has a usual rate
        options.price,
        options.random_seed,
    )
    _print(result, options)
    return 0


def _print(result: Prediction, options: PredictCommand) -> None:
    if options.json:
        emit(json.dumps(result.to_json(), indent=1) + "\n")
    else:
        show(result)


def _keep(result: Prediction, folder: Path) -> None:
    """Write the prediction to the run's folder, for its report."""
    path = folder / FILE
    text = json.dumps(result.to_json(), indent=1)
    try:
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error, len(text), "it keeps the prediction for the report") from error
    tell(f"\nin {near(path)}; `paceline report {near(folder)}` draws it\n")
