"""`paceline.predict`: speed on other numbers of ranks, from Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from paceline.config.python_call import settings_of_call
from paceline.config.settings import ReduceSettings, TrainConfig
from paceline.core import plugins
from paceline.core.cloud.address import local_path
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import PacelineError
from paceline.core.run_folder import RECORD
from paceline.core.units import counted
from paceline.lab.predict.calibration import Calibration, calibrate
from paceline.lab.predict.links import LinkSpeed, parse_link, read_link_file
from paceline.lab.predict.prediction import Prediction
from paceline.lab.predict.prediction import predict as predict_from

CALL = "paceline.predict"
RANKS = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_LINK = "10Gbit,50us"
CALIBRATION_STEPS = 40
MOST_GRAINS = 64
"""Grains of a calibration run at most: each takes a forward and a backward of its own."""


OWN = ("out", "exp_name", "resume", "runs_dir", "steps", "mode", "grains", "progress", "profile", "profile_ranks")
"""Settings that a calibration run has of its own."""


class LinkTwice(PacelineError):
    """Both `--link` and `--link-file`."""

    sentence = "both `--link` and `--link-file` say how machines are linked"
    hint = "give one of them"


class CalibrationFailed(PacelineError):
    """A calibration run that ended with an error."""

    command: str
    end: str
    sentence = "the calibration run failed: {end}"
    hint = "see what is wrong with `{command}`"


def predict(
    source: str | Path | Sequence[str | Path],
    *,
    ranks: Sequence[int] = (),
    nodes: Sequence[int] = (),
    link: str | None = None,
    link_file: str | Path | None = None,
    run_link: str | None = None,
    reduce: Literal["grad", "param"] | None = None,
    sums: Literal["exact", "fast"] | None = None,
    wire: Literal["full", "fp16", "bf16", "int8"] | None = None,
    shard: Literal["none", "full", "node"] | None = None,
    sync_step: int | None = None,
    sync_seconds: float | None = None,
    sync_overlap: int | None = None,
    grains: int | None = None,
    failures: str | None = None,
    price: float | None = None,
    seed: int = 0,
) -> Prediction:
    """Return how fast a run would be on other numbers of ranks, with intervals; see docs/predict.md.

    `source` is the folder of a run, several of one task (on 1 and on 2 ranks, for one), or a task by its name, for
    which short runs are made. `nodes` are machines: alone, each has as many ranks as in the run; without `nodes` each
    rank has a machine of its own. `link` is the link between machines (`10Gbit,50us` if not set), `run_link` the one
    that the runs' own ranks met over, if it was no machine's own. `price` is that of a rank for an hour.
    """
    settings = {
        **{"reduce": reduce, "sums": sums, "wire": wire, "shard": shard, "sync_step": sync_step},
        **{"sync_seconds": sync_seconds, "sync_overlap": sync_overlap},
    }
    between = link_between(link, link_file)
    sources = [source] if isinstance(source, str | Path) else list(source)
    if len(sources) == 1 and not is_run(sources[0]):
        sizes = ranks or nodes or [size for size in RANKS if size <= 8]
        found = replace(calibrated_on_task(str(sources[0]), settings, sizes, grains), total_steps=None)
    else:
        found = calibrate([run_folder_of(each) for each in sources], None if run_link is None else parse_link(run_link))
    return answer(found, between, ranks, nodes, settings, grains, failures, price, seed)


def answer(
    found: Calibration,
    between: LinkSpeed,
    ranks: Sequence[int],
    nodes: Sequence[int],
    settings: dict[str, Any],
    grains: int | None,
    failures: str | None,
    price: float | None,
    seed: int,
) -> Prediction:
    """Return the prediction for these ranks or machines, with settings that are not None in place of the run's."""
    changes = {name: value for name, value in settings.items() if value is not None}
    if "sync_step" in changes or "sync_seconds" in changes:  # one instead of the other
        changes = {"sync_step": None, "sync_seconds": None, **changes}
    manner = replace(found.manner, **changes)
    settings_of_call(ReduceSettings, {name: value for name, value in asdict(manner).items() if value is not None}, CALL)
    if manner.reduce == "param" and manner.sync_step is None and manner.sync_seconds is None:
        manner = replace(manner, sync_step=1)
    base = found.runs[0]  # whose ranks had a machine as predicted ones have it
    sizes = list(ranks)
    if not sizes:
        sizes = [number * -(-base.ranks // base.nodes) for number in nodes] if nodes else list(RANKS)
    return predict_from(
        found,
        ranks=sizes,
        nodes=list(nodes) or None,
        between=between,
        manner=manner,
        grains=grains,
        failures=failures,
        price=price,
        seed=seed,
    )


def link_between(link: str | None, link_file: str | Path | None) -> LinkSpeed:
    """Return the link between machines, as typed, as measured, or the usual one."""
    if link is not None and link_file is not None:
        raise LinkTwice
    return read_link_file(Path(link_file)) if link_file is not None else parse_link(link or DEFAULT_LINK)


def is_run(source: str | Path) -> bool:
    """Return True for a word that means a run: a folder with a record, an address, or any path that is no task."""
    text = str(source)
    path = local_path(text)
    if (path / RECORD).exists():
        return True
    return ".py:" not in text and text not in plugins.names("recipes") and ("/" in text or path.exists())


def run_folder_of(source: str | Path) -> Path:
    folder = local_path(source)
    bring_run(folder)
    return folder


def calibrated_on_task(
    name: str,
    values: Mapping[str, Any],
    ranks: Sequence[int],
    grains: int | None,
    *,
    steps: int = CALIBRATION_STEPS,
    say: Callable[[str], None] | None = None,
) -> Calibration:
    """Train a task for a few steps, on one rank and, where there are two cores or GPUs, on two; return what they tell.

    `values` are settings of the task. Where no grains are asked for, the runs have as many as the most ranks have:
    their grains are then of that size.
    """
    number = grains or max(2, min(MOST_GRAINS, max(ranks)))
    sizes = [1, 2] if _num_seats() > 1 else [1]
    with tempfile.TemporaryDirectory(prefix="paceline-predict-") as place:
        config = Path(place, "settings.yaml")
        chosen = {name: value for name, value in values.items() if value is not None and name not in OWN}
        config.write_text(yaml.safe_dump(chosen, allow_unicode=True) if chosen else "", encoding="utf-8")
        folders = []
        for size in sizes:
            folders.append(Path(place, f"{name.rpartition(':')[2]}-{size}"))
            if say is not None:
                say(f"calibration: {counted(steps, 'step')} on {counted(size, 'rank')}")
            _train(name, config, folders[-1], size, number, steps)
        return calibrate(folders)


def with_length(found: Calibration, settings: TrainConfig) -> Calibration:
    """Return a calibration of short runs with the length of the run that is meant."""
    per_epoch = found.profile.epoch_steps
    ends = [settings.steps, settings.epochs * per_epoch if settings.epochs and per_epoch else None]
    return replace(found, total_steps=min((end for end in ends if end), default=None))


def _num_seats() -> int:
    """Return the ranks that this machine has room for: one per GPU, or per core without one."""
    if Path("/proc/driver/nvidia/version").exists():
        import torch

        return torch.cuda.device_count() or len(os.sched_getaffinity(0))
    return len(os.sched_getaffinity(0))


def _train(name: str, config: Path, folder: Path, ranks: int, grains: int, steps: int) -> None:
    words = ["--config", str(config), "--steps", str(steps), "--mode", "train", "--grains", str(grains)]
    command = [sys.executable, "-m", "paceline", "train", name, *words]
    command += ["--out", str(folder), "--procs", str(ranks), "--progress", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        error = next((line for line in lines if line.startswith("error: ")), lines[-1])
        raise CalibrationFailed(f"paceline train {name}", error.removeprefix("error: "))
