"""Settings of runs, flat, and those in which runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.report.runs import RunRecord

ABSENT = "(none)"
OWN_NAMES = ("out", "exp_name", "runs_dir", "resume")
"""They name a run or say how it was opened, and differ by nature."""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings with one name each: those of sections as `section.name`."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = _text(value)
    return found


def settings_of(run: RunRecord) -> dict[str, str]:
    """All settings of a run, and the number of grains that it was cut into."""
    return flat({"task": run.task, **run.settings, "grains": run.grains})


def start_of(run: RunRecord) -> dict[str, str]:
    """How the run was last started: command, machine, versions, state of the code."""
    start = (run.starts or [{}])[-1]
    git = start.get("git") or {}
    found = {
        "command": start.get("command"),
        "started": start.get("time"),
        "starts": len(run.starts) if len(run.starts) > 1 else None,
        "host": start.get("host"),
        **(start.get("versions") or {}),
        "git commit": git.get("commit"),
        "uncommitted changes": ("yes" if git["dirty"] else "no") if "dirty" in git else None,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def differences(each: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The names whose values are not the same everywhere, with the value of each."""
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
