"""File of a run with the score of every sample of its last validation, from which a corpus metric can be drawn anew.

A sample has a row of statistics that are summed over the corpus: errors and words of a word error rate, matches and
lengths of BLEU. The metric is a function of the sums.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.core.disk import replacing
from paceline.core.run_folder import RunFolder

SCORES = "sample-scores.json"
"""File of the run folder."""
MOST_SAMPLES = 200_000
"""Samples of a set up to which their scores are kept."""
Form = Literal["ratio", "bleu"]
Array = NDArray[np.float64]
_WIDTHS = {"ratio": 2, "bleu": 10}
"""(sum, weight); or (length, length of the reference, matches of 1 to 4 words, 1- to 4-grams)."""


@dataclass(frozen=True)
class SampleScores:
    """Statistics of all samples of a set, in the order of the set."""

    form: Form
    rows: Array  # (samples, statistics)

    @classmethod
    def of(cls, form: Form, parts: Sequence[Sequence[tuple[int, Sequence[float]]]]) -> SampleScores:
        """Return the scores of a set from (sample, statistics) of all ranks."""
        by_sample = {sample: list(row) for part in parts for sample, row in part}
        rows = np.array([by_sample[sample] for sample in sorted(by_sample)], dtype=np.float64)
        return cls(form, rows.reshape(len(by_sample), _WIDTHS[form]))

    def value(self) -> float:
        """Return the corpus metric."""
        return float(corpus_values(self.form, self.rows.sum(0)))

    def is_of_the_same(self, other: SampleScores) -> bool:
        """Return True if both are of the same samples, as far as the references tell."""
        if self.form != other.form or self.rows.shape != other.rows.shape:
            return False
        return bool(np.array_equal(self.rows[:, 1], other.rows[:, 1]))


def corpus_values(form: Form, sums: Array) -> Array:  # (..., statistics) -> (...)
    """Return a metric from summed statistics: sum / weight, or BLEU from 0 to 100 (exponential smoothing)."""
    if form == "ratio":
        return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1e-300))
    length, reference = sums[..., 0], sums[..., 1]
    matches, totals = sums[..., 2:6], sums[..., 6:10]
    # As in sacreBLEU: each precision without a match is halved once more, 1/2, 1/4, ... of one match.
    halvings = np.cumsum((matches == 0) & (totals > 0), axis=-1)
    smoothed = np.where(matches == 0, np.power(0.5, halvings), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(smoothed / totals).mean(-1)
        brevity = np.where(length < reference, np.exp(1 - reference / length), 1.0)
        score = 100 * brevity * np.exp(logs)
    is_defined = (totals > 0).all(-1) & (matches > 0).any(-1)
    return np.where(is_defined, score, 0.0)


def write_scores(folder: Path, scores: Mapping[str, Mapping[str, SampleScores]]) -> None:
    """Write the file of a run, by set and metric; a folder that holds no run is left alone, and so are huge sets."""
    if not RunFolder(folder).is_run:
        return
    values = {
        name: {
            metric: {"form": each.form, "rows": [[float(f"{number:.9g}") for number in row] for row in each.rows]}
            for metric, each in metrics.items()
            if len(each.rows) <= MOST_SAMPLES
        }
        for name, metrics in scores.items()
    }
    # Of a full disk the journal tells, which is written next.
    with suppress(OSError), replacing(folder / SCORES) as file:
        json.dump(values, file, separators=(",", ":"))


def read_scores(folder: Path) -> dict[str, SampleScores]:
    """Return the scores of a run by `set/metric`; what is none, of a damaged file or another version, is left out."""
    try:
        values = json.loads((folder / SCORES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for name, metrics in values.items() if isinstance(values, dict) else ():
        for metric, each in metrics.items() if isinstance(metrics, dict) else ():
            with suppress(KeyError, TypeError, ValueError):
                found[f"{name}/{metric}"] = _scores(each)
    return found


def _scores(values: Any) -> SampleScores:
    form, rows = values["form"], np.array(values["rows"], dtype=np.float64)
    if form not in get_args(Form) or rows.ndim != 2 or rows.shape[1] != _WIDTHS[form] or not len(rows):
        raise ValueError(form)
    return SampleScores(form, rows)
