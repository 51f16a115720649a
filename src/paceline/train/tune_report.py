"""What `paceline tune` found, in words: a table, a sentence, and a file for `paceline train --config`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from paceline.train.tune import LEAST_ROUNDS, Changes, Failure, Found, Speed, Trial, speed_of, wins_needed
from paceline.train.tune_space import is_free

HEAD = "# Written by `paceline tune`"
"""How a file of ours is known."""
COLUMNS = ("setting", "samples/s", "vs default", "memory", "spread", "results")
_FAILURES = {
    "memory": "out of memory",
    "killed": "killed (out of memory?)",
    "time": "not in time",
    "refused": "not possible",
    "failed": "failed",
}


def label(changes: Changes) -> str:
    """`level 2, workers 4`"""
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changes.items()) or "default"


def numerics(changes: Changes) -> str:
    """Which of the changed settings change results."""
    return ", ".join(name.replace("_", "-") for name in changes if not is_free(name))


def rows(found: Found) -> list[tuple[str, ...]]:
    """One row per setting, in the order they were first tried. What raced the default has the ratio of that race."""
    by_label: dict[str, list[Trial]] = {}
    for trial in found.trials:
        by_label.setdefault(label(trial.changes), []).append(trial)
    compared = speed_of(by_label[label(found.base)])
    lines: list[tuple[str, ...]] = []
    for name, each in by_label.items():
        outcome = speed_of(each)
        mark = " *" if name == label(found.winner) else ""
        if isinstance(outcome, Failure):
            lines.append((name, "-", _FAILURES[outcome.kind], "-", "-", _results(each[0].changes)))
            continue
        ratio = "-"
        if found.rounds and name == label(found.rival):
            ratio = f"{statistics.median(found.rounds):.2f}x"
        elif isinstance(compared, Speed):
            ratio = f"{outcome.samples_per_s / compared.samples_per_s:.2f}x"
        lines.append(
            (
                name + mark,
                f"{outcome.samples_per_s:.4g}",
                ratio,
                size(outcome.memory_bytes),
                f"±{100 * outcome.spread:.1f}%",
                _results(each[0].changes),
            )
        )
    return lines


def table(found: Found) -> list[str]:
    """Columns below their names; all but the first and the last to the right."""
    every = [COLUMNS, *rows(found)]
    widths = [max(len(row[column]) for row in every) for column in range(len(COLUMNS))]
    last = len(COLUMNS) - 1
    lines = []
    for row in every:
        cells = [
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def sentence(found: Found) -> str:
    """Who won, and how surely."""
    base = "the default" if not found.base else f"`{label(found.base)}`"
    if not found.default_wins:
        won = f"{statistics.median(found.rounds):.2f}x as fast as {base}"
        return f"`{label(found.winner)}` is {won}: ahead in {_rounds(found)}"
    if all(trial.changes == found.base for trial in found.trials):
        no_time = "there was no time to try anything else (set a larger `--budget`)"
        return f"{base} stays: {no_time if found.untried else 'there was nothing else to try'}"
    if not found.rival:
        return f"{base} wins: nothing that was tried is faster"
    if len(found.rounds) < LEAST_ROUNDS:
        return f"{base} stays: there was no time to race `{label(found.rival)}` against it (set a larger `--budget`)"
    needed = wins_needed(len(found.rounds))
    return (
        f"{base} wins: `{label(found.rival)}` seemed faster at first, but was ahead in only {_rounds(found)}; "
        f"less than {needed} may be luck"
    )


def _rounds(found: Found) -> str:
    """`14 of 15 rounds against it (0.98x to 1.31x)`"""
    ahead = sum(ratio > 1 for ratio in found.rounds)
    span = f"{min(found.rounds):.2f}x to {max(found.rounds):.2f}x"
    return f"{ahead} of {len(found.rounds)} rounds in turns ({span})"


def file_text(task: str, given: Mapping[str, Any], found: Found, lines: Sequence[str]) -> str:
    """Settings for `--config`: as they were given, and as they were chosen."""
    head = [f"{HEAD}: paceline train {task} --config THIS_FILE", *(f"# {line}".rstrip() for line in lines)]
    as_given = {name: value for name, value in given.items() if name not in found.winner}
    parts = [("as given", as_given), ("as chosen", dict(found.winner))]
    blocks = [f"# {title}\n{_yaml(values)}" for title, values in parts if values]
    return "\n".join(head) + "\n\n" + "\n".join(blocks)


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(values), sort_keys=False, width=120, allow_unicode=True))


def _results(changes: Changes) -> str:
    changed = numerics(changes)
    return f"changed by {changed}" if changed else "the same"
