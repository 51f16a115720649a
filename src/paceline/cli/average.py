"""`paceline average RUN`: the mean of a run's last or best checkpoints, validated beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.config.load import load
from paceline.core.cloud.address import shown
from paceline.core.language import translate
from paceline.core.terminal import emit, tell
from paceline.train.averaged import Averaged, AverageOptions, average_checkpoints

OPTIONS, POSITIONAL = AverageOptions, ("run",)


def run(argv: Sequence[str]) -> int:
    options = load(AverageOptions, argv, prog="paceline average", positional=POSITIONAL)
    done = average_checkpoints(options)
    if options.json:
        parts = [{"checkpoint": path.name, "score": score} for path, score in zip(done.parts, done.scores, strict=True)]
        result = {"checkpoint": shown(done.path), "score": done.score, "metrics": dict(done.metrics), "parts": parts}
        emit(json.dumps(result) + "\n")
    else:
        tell(_table(done))
    return 0


def _table(done: Averaged) -> str:
    """Return the scores of the parts and of their mean, and how to use it."""
    rows = [(path.name, score) for path, score in zip(done.parts, done.scores, strict=True)]
    rows.append((done.path.name, done.score))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {'-' if score is None else f'{score:.6g}'}" for name, score in rows]
    lines += [f"{name}: {value:.6g}" for name, value in done.metrics.items()]
    if done.score is None:
        lines.append(translate("not validated: the run's checkpoints have no scores, or it was not asked for"))
    run, name = shown(done.path.parent.parent), done.path.name
    use = f"use it: `paceline eval {run} --checkpoint {name}`, and so `infer`, `export` and `paceline.load`"
    lines.append(translate(use))
    return "".join(f"{line}\n" for line in lines)
