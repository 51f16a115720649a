"""What `paceline tune` found, in words: a table, a sentence, and a file for `paceline train --config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from paceline.speed.autotune.knobs import is_free
from paceline.speed.autotune.proof import is_faster, luck
from paceline.speed.autotune.search import LEAST_ROUNDS, MARGIN, Changes, Failure, Race, SearchResult, Trial, speed_of

HEAD = "# Written by `paceline tune`"
"""How a file of ours is known."""
COLUMNS = ("setting", "samples/s", "alone", "in turns", "memory", "spread", "results")
"""`alone` compares what was measured one after the other, each with the machine to itself: the samples/s. `in turns` is
of races, which decide."""
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


def rows(found: SearchResult) -> list[tuple[str, ...]]:
    """One row per setting, in the order they were first tried."""
    lines: list[tuple[str, ...]] = []
    for name, each in _by_label(found).items():
        outcome = speed_of(each)
        changes = each[0].changes
        if isinstance(outcome, Failure):
            lines.append((name, "-", "-", _FAILURES[outcome.kind], "-", "-", _results(changes)))
            continue
        alone = _alone(found, changes)
        lines.append(
            (
                name + (" *" if name == label(found.winner) else ""),
                number(outcome.samples_per_s),
                "-" if alone is None else f"{alone:.2f}x",
                _in_turns(found, changes),
                size(outcome.memory_bytes),
                f"±{100 * outcome.spread:.1f}%",
                _results(changes),
            )
        )
    return lines


def _by_label(found: SearchResult) -> dict[str, list[Trial]]:
    by_label: dict[str, list[Trial]] = {}
    for trial in found.trials:
        by_label.setdefault(label(trial.changes), []).append(trial)
    return by_label


def _alone(found: SearchResult, changes: Changes) -> float | None:
    """Speed over the default's, both measured alone."""
    trials = _by_label(found)
    mine, others = (speed_of(trials[label(which)]) for which in (changes, found.base))
    if isinstance(mine, Failure) or isinstance(others, Failure):
        return None
    return mine.samples_per_s / others.samples_per_s


def _race_of(found: SearchResult, changes: Changes) -> Race | None:
    """The race that tells most of a setting: against the default if there was one, else the last."""
    held = [race for race in found.races if label(race.second) == label(changes)]
    finals = [race for race in held if label(race.first) == label(found.base)]
    return next(reversed(finals or held), None)


def _in_turns(found: SearchResult, changes: Changes) -> str:
    if label(changes) == label(found.base):
        return "-"
    race, alone = _race_of(found, changes), _alone(found, changes)
    if race is None:
        return "not raced" if alone is not None and alone > 1 + MARGIN else "-"
    other = "" if label(race.first) == label(found.base) else f" of {label(race.first)}"
    return f"{race.ratio:.2f}x{other}"


def table(found: SearchResult) -> list[str]:
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


def number(value: float) -> str:
    """Samples per second: four digits, or all that come before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def sentence(found: SearchResult) -> str:
    """Who won, and how surely."""
    base = "the default" if not found.base else f"`{label(found.base)}`"
    if not found.default_wins:
        race = Race(found.base, found.winner, found.rounds)
        return f"`{label(found.winner)}` is {race.ratio:.2f}x as fast as {base}: {_rounds(race)}"
    if all(trial.changes == found.base for trial in found.trials):
        no_time = "there was no time to try anything else (set a larger `--budget`)"
        return f"{base} stays: {no_time if found.untried else 'there was nothing else to try'}"
    if found.rival and len(found.rounds) < LEAST_ROUNDS:
        return f"{base} stays: there was no time to race `{label(found.rival)}` against it (set a larger `--budget`)"
    if found.races:
        return f"{base} stays: nothing is proven to be faster in turns"
    if any((_alone(found, trial.changes) or 0) > 1 + MARGIN for trial in found.trials):
        return f"{base} stays: what looked faster alone was not raced"
    return f"{base} wins: nothing that was tried is faster"


def unproven(found: SearchResult) -> list[str]:
    """What looked faster than the default alone and was not found to be: why not."""
    lines = []
    for name, each in _by_label(found).items():
        alone, race = _alone(found, each[0].changes), _race_of(found, each[0].changes)
        if name in (label(found.base), label(found.winner)) or alone is None:
            continue
        if race is not None and not _has_won(race):
            seemed = f"looked {alone:.2f}x as fast alone" if alone > 1 else "seemed faster at first"
            against = "" if label(race.first) == label(found.base) else f" against `{label(race.first)}`"
            lines.append(f"`{name}` {seemed}, but was {race.ratio:.2f}x in turns{against}: {_rounds(race)}")
        elif race is None and found.default_wins and alone > 1 + MARGIN and name != label(found.rival):
            lines.append(f"`{name}` looked {alone:.2f}x as fast alone, but was not raced")
    return lines


def proven(found: SearchResult) -> list[str]:
    """What won a race, of a search that did not come to its end."""
    return [
        f"`{label(race.second)}` is {race.ratio:.2f}x as fast as `{label(race.first)}`: {_rounds(race)}"
        for race in found.races
        if _has_won(race)
    ]


def _has_won(race: Race) -> bool:
    return is_faster(race.ratios, MARGIN)


def _rounds(race: Race) -> str:
    """`ahead in 14 of 15 rounds in turns (0.98x to 1.31x); luck alone looks as good in 0.1% of races`"""
    ratios = race.ratios
    ahead = sum(ratio > 1 for ratio in ratios)
    span = f"{min(ratios):.2f}x to {max(ratios):.2f}x"
    by_luck = 100 * luck(ratios)
    often = "in less than 0.1%" if by_luck < 0.1 else f"in {by_luck:.1f}%" if by_luck < 10 else f"in {by_luck:.0f}%"
    return f"ahead in {ahead} of {len(ratios)} rounds in turns ({span}); luck alone looks as good {often} of races"


def file_text(task: str, given: Mapping[str, Any], found: SearchResult, lines: Sequence[str]) -> str:
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
