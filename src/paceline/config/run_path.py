"""Folder of a run: a pure decision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePath

from paceline.config.settings import RunSettings
from paceline.core.errors import InvalidSetting
from paceline.core.run_folder import RECORD


def run_folder(settings: RunSettings, *, task: str, moment: str, exists: Callable[[Path], bool]) -> Path:
    """Return `out`, else the named run, else the run of the checkpoint to resume, else one named for task and moment.

    A new run never gets a folder that exists: a number is appended.
    """
    if settings.out is not None:
        return settings.out
    if settings.exp_name is not None:
        pure = PurePath(settings.exp_name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise InvalidSetting(
                f"--exp-name {settings.exp_name}: is a path, not a name",
                hint="type a name such as `quartznet-a`; `--runs-dir` says where it goes, `--out` names any folder",
            )
        named = settings.runs_dir / settings.exp_name
        return named if settings.resume == "auto" else _unused(named, exists)
    if settings.resume == "auto":
        raise InvalidSetting(
            "`--resume auto` needs to know the run",
            hint="add `--out FOLDER`, the run's folder, or `--exp-name NAME`; `paceline runs` lists runs",
        )
    if isinstance(settings.resume, Path):
        run = settings.resume.resolve().parent.parent
        if exists(run / RECORD):
            return run
    return _unused(settings.runs_dir / f"{task}-{moment}", exists)


def _unused(path: Path, exists: Callable[[Path], bool]) -> Path:
    number, candidate = 1, path
    while exists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
