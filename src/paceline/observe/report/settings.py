"""Settings of runs, flat, and those in which runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.secrets import masked_command, masked_values
from paceline.observe.report.runs import ReportedRun

ABSENT = "(none)"
OWN_NAMES = ("out", "exp_name", "runs_dir", "resume")
"""Settings that name a run or say how it was opened, and differ by nature."""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings with one name each: those of sections as `section.name`."""
    settings: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{prefix}{name}.")
        else:
            settings[prefix + name] = _text(value)
    return settings


def settings_of(run: ReportedRun) -> dict[str, str]:
    """Return all settings of a run, and the number of grains of its batches."""
    return flat({"task": run.task, **masked_values(run.settings), "grains": run.grains})


def start_of(run: ReportedRun) -> dict[str, str]:
    """Return facts of the last start: command, machine, versions, state of the code."""
    start = (run.starts or [{}])[-1]
    git = start.get("git") or {}
    facts = {
        "command": masked_command(start.get("command")),
        "started": start.get("time"),
        "starts": len(run.starts) if len(run.starts) > 1 else None,
        "host": start.get("host"),
        **(start.get("versions") or {}),
        "git commit": git.get("commit"),
        "uncommitted changes": ("yes" if git["dirty"] else "no") if "dirty" in git else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def differences(each: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the settings that are not the same everywhere, with the value of each."""
    names = [name for name in dict.fromkeys(name for one in each for name in one) if name not in OWN_NAMES]
    rows = {name: [one.get(name, ABSENT) for one in each] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _text(value: Any) -> str:
    if value is None or value in ([], {}, ()):
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(repr(each) if each in ("", " ") else _text(each) for each in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(each)}" for name, each in value.items())
    return str(value)
