"""Weights from outside (a NeMo archive, an exported folder, a checkpoint), refused where they mean something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import Conflict, NotFound, PacelineError
from paceline.core.run_folder import BrokenRecord, RunFolder, read_record
from paceline.recipes.speech.exchange.export import NETWORK, check_labels, check_weights, is_export, read_export
from paceline.recipes.speech.exchange.nemo import read_nemo, read_nemo_network
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.network.encoder import weight_shapes
from paceline.recipes.speech.sound.features import FrontEnd
from paceline.train import apply
from paceline.train.checkpoint import reader
from paceline.train.checkpoint.format import DIGESTS, listed

DECODER = "decoder."


class _Known(NamedTuple):
    """Facts about a model beside its weights; None where unknown."""

    labels: tuple[str, ...] | None = None
    sample_rate: int | None = None
    front_end: str | None = None


def read_model(path: Path) -> tuple[NetworkSettings, dict[str, Tensor]] | None:
    """Network and weights of a file that holds both; None where it is neither an archive nor an export."""
    if path.suffix == ".nemo":
        return read_nemo(path)
    return read_export(path) if is_export(path) else None


def front_end_of(path: Path) -> FrontEnd | None:
    """Return the front end of an archive or export that weights are to be taken from; None where it is neither, or
    cannot be read: whoever reads the weights says why."""
    try:
        if path.suffix == ".nemo":
            return read_nemo_network(path).features.front_end
        return read_network(path / NETWORK).features.front_end if is_export(path) else None
    except (PacelineError, OSError):
        return None


def read_weights(
    path: Path, network: NetworkSettings, *, new_decoder: bool, say: Callable[[str], None]
) -> Mapping[str, Tensor]:
    """Return the weights that `init_from` names, for a model of this network; weights of another one are refused, not
    taken in part.

    A decoder for other labels has other meanings even where its shape fits: it is refused, or left out on request. Of a
    checkpoint with an average of its weights, that is what is taken.
    """
    found = read_model(path)
    if found is None:
        if not (path / DIGESTS).exists():
            raise _no_weights(path)
        weights: Mapping[str, Tensor] = apply.read_weights(path)
        known = _known_of(path)
    else:
        theirs, weights = found
        known = _Known(theirs.labels, theirs.sample_rate, theirs.features.front_end)
    if known.labels is None and not new_decoder:
        say(f"{path} does not say which labels it is for: whether they are this network's could not be checked")
    elif known.labels is not None and not new_decoder:
        check_labels(network.labels, known.labels, path)
    if known.sample_rate not in (None, network.sample_rate):
        raise Conflict(
            f"{path} is a model for {known.sample_rate} Hz, and the network is for {network.sample_rate} Hz",
            hint=f"set `sample_rate: {known.sample_rate}` in the network's file; audio of any rate is resampled to it",
        )
    if known.front_end not in (None, network.features.front_end):
        say(
            f"{path} was trained with the front end {known.front_end}, and this run hears with "
            f"{network.features.front_end}; `--front-end {known.front_end}` hears as it did"
        )
    if new_decoder:
        ours = {name: shape for name, shape in weight_shapes(network).items() if name.startswith(DECODER)}
        weights = without_decoder(weights)
        check_weights(
            network,
            {**weights, **{name: torch.empty(ours[name], dtype=torch.float32, device="meta") for name in ours}},
            path,
        )
        return weights
    check_weights(network, weights, path)
    return weights


def _no_weights(path: Path) -> NotFound:
    hint = "name a checkpoint (RUN/checkpoints/step-...), an exported folder or a .nemo archive"
    if RunFolder(path).is_run:
        names = [str(checkpoint) for checkpoint in listed(RunFolder(path).checkpoints)]
        hint = f"name one of them: {', '.join(names)}" if names else "it has none yet"
        return NotFound(f"{path}: is a run, not one of its checkpoints", hint=hint)
    if path.exists():
        return NotFound(f"{path}: is not a checkpoint, an exported model or a .nemo archive", hint=hint)
    return NotFound(f"{path}: there is no such file or folder", hint=hint)


def without_decoder(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.startswith(DECODER)}


def _known_of(checkpoint: Path) -> _Known:
    """Return the facts in a checkpoint or, of an old one without them, in the record of its run."""
    about = reader.load(checkpoint, [], verify=False).state.get("about") or _network_of_run(checkpoint)
    try:
        front_end = about.get("front_end") or about.get("features", {}).get("front_end", "nemo-0.11")
        return _Known(tuple(about["labels"]), int(about["sample_rate"]), front_end)
    except (KeyError, TypeError, ValueError, AttributeError):
        return _Known()


def _network_of_run(checkpoint: Path) -> Any:
    try:
        return read_record(checkpoint.resolve().parent.parent).settings.get("network")
    except (OSError, BrokenRecord):
        return None
