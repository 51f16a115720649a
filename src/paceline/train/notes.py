"""What is worth noting of a step beside its loss, read from the device when something is logged anyway."""

from __future__ import annotations

from paceline.optim.larc import Larc
from paceline.train.checkpoint import state
from paceline.train.engine import Engine


def notes(engine: Engine, larc: Larc | None) -> dict[str, float]:
    """The loss scale, where there is one, and effective learning rates by parameter, where LARC sets them."""
    scale = {"loss_scale": engine.scale.current()} if engine.precision.scaled else {}
    rates = {} if larc is None else larc.rates(state.names(engine))
    return {**scale, **{f"larc/{name}": rate for name, rate in rates.items()}}
