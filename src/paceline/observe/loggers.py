"""Loggers of `--loggers`, as callbacks. Their packages are optional and imported only when asked for.

Each gets one point per log line (`log_every` steps), under the names `loss`, `lr`, `epoch/...` (`epoch/number`
from 1) and `set/metric`; every single step is in `metrics.jsonl`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.core import plugins
from paceline.core.errors import NotInstalled
from paceline.observe.callback import Callback, Record, RunInfo
from paceline.observe.epoch import RankEpoch
from paceline.observe.records import STEP_KEYS, EpochRecord, declared_numbers

EPOCH_NUMBERS = [name for name, number in declared_numbers(EpochRecord, RankEpoch).items() if number.is_logged]
"""Keys of an epoch's record that are drawn over time."""
MEMORY_NAMES = {"host_bytes": "host_gib", "device_bytes": "device_gib"}


class PointLogger(Callback):
    """Logger that takes named numbers at a step."""

    advice = ""
    """Advice where it does not start."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def step(self, records: list[Record]) -> None:
        last = records[-1]
        notes = {name: value for record in records for name, value in record.items() if name not in STEP_KEYS}
        self.log(
            _finite({"loss": last["loss"], "lr": last["lr"], "epoch/number": last["epoch"], **notes}), last["step"]
        )

    def progress(self, record: Record) -> None:
        self.log(_finite({"samples_per_s": record.get("samples_per_s")}), record["step"])

    def epoch(self, record: Record) -> None:
        epoch = EpochRecord.from_json(record)
        numbers = {f"epoch/{name}": record.get(name) for name in EPOCH_NUMBERS}
        numbers |= {f"epoch/{name}": rate for name, rate in epoch.rates.items()}
        numbers |= {f"time/{phase}": share for phase, share in time_shares(epoch.seconds).items()}
        numbers |= {f"epoch/{MEMORY_NAMES[kind]}": peak / 2**30 for kind, peak in epoch.memory_peaks().items()}
        self.log(_finite(numbers), epoch.step)

    def validation(self, record: Record) -> None:
        self.log(_finite({name: value for name, value in record.items() if "/" in name}), record["step"])


class TensorBoard(PointLogger):
    """Event files in `<run>/tensorboard`, one per launch.

    Written through tensorboard's own record format without its file layer, which would import TensorFlow where that
    is installed. Without a run folder nothing is written.
    """

    def start(self, info: RunInfo) -> None:
        self._info = info
        self._file: IO[bytes] | None = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self._info.folder is None or not numbers:
            return
        if self._file is None:  # not before: a run that has nothing left to do leaves its folder as it was
            self._file = self._open(self._info.folder / "tensorboard")
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(step=step, summary=self._summary(value=values))
        self._file.flush()

    def _open(self, folder: Path) -> IO[bytes]:
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        records = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        # In ascending order of launches, because TensorBoard reads the files by name.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        file = (folder / name).open("wb")
        self._writer = records.RecordWriter(file)
        self._write(file_version="brain.Event:2")
        # Tells TensorBoard to forget what an earlier launch wrote from this step on.
        forget = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(step=self._info.next_step, session_log=forget)
        return file

    def end(self, status: str) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())


class WeightsAndBiases(PointLogger):
    """W&B run, which a resumed run goes on with. W&B itself drops points of steps that it has already.

    The project comes from W&B's own settings. A run that the process has open already is used, and stays open.
    """

    advice = "log in with `wandb login`, set WANDB_MODE=offline"

    def start(self, info: RunInfo) -> None:
        self._wandb = importlib.import_module("wandb")
        open_run = self._wandb.run
        self._is_ours = open_run is None
        if open_run is not None:
            self._run = open_run
            self._run.config.update(info.settings, allow_val_change=True)
            return
        saved_name = _RunName(info, "wandb")
        self._run = self._wandb.init(
            name=None if info.folder is None else info.folder.name,
            dir=None if info.folder is None else str(info.folder),
            config=info.settings,
            id=saved_name.read(),
            resume="allow",
        )
        saved_name.write(self._run.id)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def end(self, status: str) -> None:
        if self._is_ours:
            self._run.finish(exit_code=1 if status in ("failed", "diverged") else 0)


class MlFlow(PointLogger):
    """MLflow run, which a resumed run goes on with. Server and experiment come from MLflow's own variables.

    A run that the process has open already is used, and stays open.
    """

    advice = "look at MLFLOW_TRACKING_URI (a server, or `sqlite:///mlflow.db`, which needs sqlalchemy and alembic)"
    STATUS = {"failed": "FAILED", "diverged": "FAILED", "stopped": "KILLED"}  # noqa: RUF012
    MOST_PARAMS = 100
    """In one request."""
    MOST_CHARACTERS = 500
    """Of a parameter's value."""

    def start(self, info: RunInfo) -> None:
        self._mlflow = importlib.import_module("mlflow")
        saved_name = _RunName(info, "mlflow")
        before = saved_name.read()
        name = info.task.rpartition("/")[2] if info.folder is None else info.folder.name
        run = self._mlflow.active_run()
        self._is_ours = run is None
        if run is None:
            run = self._mlflow.start_run(run_id=before) if before else self._mlflow.start_run(run_name=name)
        self._id = run.info.run_id
        if not before:  # MLflow refuses to change a parameter
            params = [(name, str(value)[: self.MOST_CHARACTERS]) for name, value in info.settings.items()]
            for first in range(0, len(params), self.MOST_PARAMS):
                self._mlflow.log_params(dict(params[first : first + self.MOST_PARAMS]), run_id=self._id)
        saved_name.write(self._id)

    def log(self, numbers: dict[str, float], step: int) -> None:
        named = {_NOT_OF_MLFLOW.sub("_", name): number for name, number in numbers.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._id)

    def end(self, status: str) -> None:
        if self._is_ours:
            self._mlflow.end_run(status=self.STATUS.get(status, "FINISHED"))


_NOT_OF_MLFLOW = re.compile(r"[^\w\-./ :]")
"""Characters that MLflow refuses in a name, such as those of `recall@5`."""


LOGGERS: dict[str, type[PointLogger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MlFlow}


def build(names: Sequence[str], *, is_asked: bool) -> tuple[list[Callback], list[str]]:
    """Return the loggers of these names, and the names of those that are not installed.

    Where the user asked for them, a missing package is an error; the default is only a default.
    """
    missing = [name for name in names if name in LOGGERS and not _is_installed(name)]
    if missing and is_asked:
        raise NotInstalled(
            f"`loggers` has {missing[0]!r}, but the package {missing[0]} is not installed",
            hint=f"`pip install {missing[0]}`, or take {missing[0]} out of `loggers`",
        )
    return [_make(name) for name in names if name not in missing], missing


def _make(name: str) -> Callback:
    """Return a new logger: ours, or one that a plugin brings as a class, or as a function that returns one."""
    if name in LOGGERS:
        return LOGGERS[name]()
    plugin = plugins.find("loggers", name)
    assert plugin is not None, "the settings were checked"
    make = plugins.load(plugin)
    if not callable(make):
        raise plugins.unfit(plugin, make, "a paceline.Callback class, or a function that returns a callback")
    made = plugins.guarded(plugin, "cannot be made", make)
    if not isinstance(made, Callback):
        raise plugins.unfit(plugin, made, "a paceline.Callback")
    return made


def advice(name: str) -> str:
    """Return what to do where a logger does not start."""
    return LOGGERS[name].advice if name in LOGGERS else ""


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec, made by hand
        return True


def time_shares(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each phase in the time of all ranks."""
    total = sum(sum(rank.values()) for rank in seconds)
    return {phase: sum(rank[phase] for rank in seconds) / total for phase in seconds[0]} if total else {}


def _finite(numbers: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


class _RunName:
    """File of the run folder with the name that a service gave to this run, so that a resumed run finds it again."""

    def __init__(self, info: RunInfo, service: str) -> None:
        self._path = None if info.folder is None else info.folder / f"{service}-run-id"
        self._is_resumed = info.next_step > 0  # a run that starts over is another run

    def read(self) -> str | None:
        if self._path is None or not self._is_resumed or not self._path.exists():
            return None
        return self._path.read_text(encoding="utf-8").strip()

    def write(self, name: str) -> None:
        if self._path is not None:
            self._path.write_text(f"{name}\n", encoding="utf-8")
