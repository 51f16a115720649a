"""Report of `paceline tune`: a table, a sentence, and a file for `paceline train --config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from paceline.lab.tune.knobs import is_free
from paceline.lab.tune.search import LEAST_ROUNDS, MARGIN, Changes, Failure, Race, SearchResult, Trial, speed_of
from paceline.speed.autotune.proof import is_faster, luck

HEAD = "# Written by `paceline tune`"
"""First words of a file of ours, by which it is known."""
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
    """Return the names of the changed settings that change results."""
    return ", ".join(name.replace("_", "-") for name in changes if not is_free(name))


def rows(result: SearchResult) -> list[tuple[str, ...]]:
    """One row per setting, in the order they were first tried."""
    lines: list[tuple[str, ...]] = []
    for name, each in _by_label(result).items():
        outcome = speed_of(each)
        changes = each[0].changes
        if isinstance(outcome, Failure):
            lines.append((name, "-", "-", _FAILURES[outcome.kind], "-", "-", _results(changes)))
            continue
        alone = _alone(result, changes)
        lines.append(
            (
                name + (" *" if name == label(result.winner) else ""),
                number(outcome.samples_per_s),
                "-" if alone is None else f"{alone:.2f}x",
                _in_turns(result, changes),
                size(outcome.memory_bytes),
                f"±{100 * outcome.spread:.1f}%",
                _results(changes),
            )
        )
    return lines


def _by_label(result: SearchResult) -> dict[str, list[Trial]]:
    by_label: dict[str, list[Trial]] = {}
    for trial in result.trials:
        by_label.setdefault(label(trial.changes), []).append(trial)
    return by_label


def _alone(result: SearchResult, changes: Changes) -> float | None:
    """Speed over the default's, both measured alone."""
    trials = _by_label(result)
    speed, base_speed = (speed_of(trials[label(which)]) for which in (changes, result.base))
    if isinstance(speed, Failure) or isinstance(base_speed, Failure):
        return None
    return speed.samples_per_s / base_speed.samples_per_s


def _race_of(result: SearchResult, changes: Changes) -> Race | None:
    """The race that tells most of a setting: against the default if there was one, else the last."""
    held = [race for race in result.races if label(race.second) == label(changes)]
    finals = [race for race in held if label(race.first) == label(result.base)]
    return next(reversed(finals or held), None)


def _in_turns(result: SearchResult, changes: Changes) -> str:
    if label(changes) == label(result.base):
        return "-"
    race, alone = _race_of(result, changes), _alone(result, changes)
    if race is None:
        return "not raced" if alone is not None and alone > 1 + MARGIN else "-"
    other = "" if label(race.first) == label(result.base) else f" of {label(race.first)}"
    return f"{race.ratio:.2f}x{other}"


def table(result: SearchResult) -> list[str]:
    """Columns below their names; all but the first and the last to the right."""
    every = [COLUMNS, *rows(result)]
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


def sentence(result: SearchResult) -> str:
    """Return a sentence that says who won, and how surely."""
    base = "the default" if not result.base else f"`{label(result.base)}`"
    if not result.default_wins:
        race = Race(result.base, result.winner, result.rounds)
        return f"`{label(result.winner)}` is {race.ratio:.2f}x as fast as {base}: {_rounds(race)}"
    if all(trial.changes == result.base for trial in result.trials):
        no_time = "there was no time to try anything else (set a larger `--budget`)"
        return f"{base} stays: {no_time if result.untried else 'there was nothing else to try'}"
    if result.rival and len(result.rounds) < LEAST_ROUNDS:
        return f"{base} stays: there was no time to race `{label(result.rival)}` against it (set a larger `--budget`)"
    if result.races:
        return f"{base} stays: nothing is proven to be faster in turns"
    if any((_alone(result, trial.changes) or 0) > 1 + MARGIN for trial in result.trials):
        return f"{base} stays: what looked faster alone was not raced"
    return f"{base} wins: nothing that was tried is faster"


def unproven(result: SearchResult) -> list[str]:
    """Return a line for each setting that looked faster than the default alone but was not proven to be, with the
    reason."""
    lines = []
    for name, each in _by_label(result).items():
        alone, race = _alone(result, each[0].changes), _race_of(result, each[0].changes)
        if name in (label(result.base), label(result.winner)) or alone is None:
            continue
        if race is not None and not _has_won(race):
            seemed = f"looked {alone:.2f}x as fast alone" if alone > 1 else "seemed faster at first"
            against = "" if label(race.first) == label(result.base) else f" against `{label(race.first)}`"
            lines.append(f"`{name}` {seemed}, but was {race.ratio:.2f}x in turns{against}: {_rounds(race)}")
        elif race is None and result.default_wins and alone > 1 + MARGIN and name != label(result.rival):
            lines.append(f"`{name}` looked {alone:.2f}x as fast alone, but was not raced")
    return lines


def proven(result: SearchResult) -> list[str]:
    """Return a line for each race that was won, of a search that did not come to its end."""
    return [
        f"`{label(race.second)}` is {race.ratio:.2f}x as fast as `{label(race.first)}`: {_rounds(race)}"
        for race in result.races
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


def file_text(task: str, settings: Mapping[str, Any], result: SearchResult, lines: Sequence[str]) -> str:
    """Settings for `--config`: as they were given, and as they were chosen."""
    head = [f"{HEAD}: paceline train {task} --config THIS_FILE", *(f"# {line}".rstrip() for line in lines)]
    as_given = {name: value for name, value in settings.items() if name not in result.winner}
    parts = [("as given", as_given), ("as chosen", dict(result.winner))]
    blocks = [f"# {title}\n{_yaml(values)}" for title, values in parts if values]
    return "\n".join(head) + "\n\n" + "\n".join(blocks)


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(values), sort_keys=False, width=120, allow_unicode=True))


def _results(changes: Changes) -> str:
    changed = numerics(changes)
    return f"changed by {changed}" if changed else "the same"
