"""`paceline.predict`: speed on other numbers of ranks, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from paceline.config.python_call import settings_of_call
from paceline.config.settings import ReduceSettings
from paceline.core.cloud.address import local_path
from paceline.core.cloud.run_copy import bring_run
from paceline.core.errors import Conflict
from paceline.lab.predict.calibration import Reduction, calibrate
from paceline.lab.predict.communication import LinkSpeed, parse_link, read_link_file
from paceline.lab.predict.prediction import Prediction
from paceline.lab.predict.prediction import predict as predict_from

CALL = "paceline.predict"
RANKS = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_LINK = "10Gbit,50us"


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
) -> Prediction:
    """Return how fast a run would be on other numbers of ranks, with intervals; see docs/predict.md.

    `source` is the folder of a run, or several of one task (such as one on 1 and one on 2 ranks). `nodes` is the number
    of machines: alone, each has as many ranks as in the run; without `nodes`, each rank has a machine of its own.
    `link` connects machines (default: `10Gbit,50us`), `run_link` connected the ranks of the runs, if they were on
    several machines. `price` is the price of a rank for an hour.
    """
    folders = [local_path(each) for each in ([source] if isinstance(source, str | Path) else source)]
    between = _link(link, link_file)
    for folder in folders:
        bring_run(folder)
    calibration = calibrate(folders, None if run_link is None else parse_link(run_link))
    changes = {
        **{"reduce": reduce, "sums": sums, "wire": wire, "shard": shard, "sync_step": sync_step},
        **{"sync_seconds": sync_seconds, "sync_overlap": sync_overlap},
    }
    base = calibration.runs[0]
    return predict_from(
        calibration,
        ranks=list(ranks) or [number * -(-base.ranks // base.nodes) for number in nodes] or list(RANKS),
        nodes=list(nodes) or None,
        between=between,
        reduction=_changed(calibration.runs[-1].reduction, _given(changes)),
        grains=grains,
        failures=failures,
        price=price,
    )


def _link(link: str | None, file: str | Path | None) -> LinkSpeed:
    if file is None:
        return parse_link(link or DEFAULT_LINK)
    if link is not None:
        raise Conflict("`--link` and `--link-file` cannot be used together", hint="give one of them")
    return read_link_file(Path(file))


def _changed(measured: Reduction, changes: Mapping[str, Any]) -> Reduction:
    """Return the reduction of the run with other settings, which must be valid together."""
    if "sync_step" in changes or "sync_seconds" in changes:  # one replaces the other
        changes = {"sync_step": None, "sync_seconds": None, **changes}
    reduction = replace(measured, **changes)
    settings_of_call(ReduceSettings, _given(asdict(reduction)), CALL)
    has_interval = reduction.sync_step is not None or reduction.sync_seconds is not None
    return reduction if reduction.reduce == "grad" or has_interval else replace(reduction, sync_step=1)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
