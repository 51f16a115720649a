"""Weights from outside: a NeMo archive, an exported folder, a run's checkpoint; refused where labels differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.errors import PacelineError
from paceline.recipes.asr.encoder import weight_shapes
from paceline.recipes.asr.export import check_labels, check_weights, is_export, read_export
from paceline.recipes.asr.nemo import read_nemo
from paceline.recipes.asr.network import NetworkSettings
from paceline.train import restore
from paceline.train.run import MARK

DECODER = "decoder."


class NoWeights(PacelineError):
    """What `init_from` names holds no weights that can be started from."""

    hint = "name a checkpoint (RUN/checkpoints/step-...), an exported folder or a .nemo archive"

    def __init__(self, path: Path) -> None:
        why = "there is no such file or folder"
        if (path / MARK).exists():
            why = "is a run, not one of its checkpoints"
            names = [str(checkpoint) for checkpoint in restore.listed(path / "checkpoints")]
            self.hint = f"name one of them: {', '.join(names)}" if names else "it has none yet"
        elif path.exists():
            why = "is no checkpoint, no exported model and no .nemo archive"
        super().__init__(f"{path}: {why}")


def read_model(path: Path) -> tuple[NetworkSettings, dict[str, Tensor]] | None:
    """Network and weights of a file that holds both; None where it is neither an archive nor an export."""
    if path.suffix == ".nemo":
        return read_nemo(path)
    return read_export(path) if is_export(path) else None


def read_weights(path: Path, network: NetworkSettings, *, new_decoder: bool) -> Mapping[str, Tensor]:
    """What `init_from` names, for a model of this network; weights of another one are refused, not taken in part.

    A decoder for other labels has other meanings even where its shape fits: it is refused, or left out on request.
    """
    found = read_model(path)
    if found is None:
        if not (path / restore.DIGESTS).exists():
            raise NoWeights(path)
        weights: Mapping[str, Tensor] = restore.load(path, ["model"]).parts["model"]
        labels = _labels_of_run(path)
    else:
        theirs, weights = found
        labels = theirs.labels
    if new_decoder:
        ours = {name: shape for name, shape in weight_shapes(network).items() if name.startswith(DECODER)}
        weights = without_decoder(weights)
        check_weights(network, {**weights, **{name: torch.empty(ours[name], device="meta") for name in ours}}, path)
        return weights
    if labels is not None:
        check_labels(network.labels, labels, path)
    check_weights(network, weights, path)
    return weights


def without_decoder(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.startswith(DECODER)}


def _labels_of_run(checkpoint: Path) -> tuple[str, ...] | None:
    """Of the run that a checkpoint lies in, as its record says."""
    record = checkpoint.resolve().parent.parent / "run.json"
    try:
        return tuple(json.loads(record.read_text(encoding="utf-8"))["settings"]["network"]["labels"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
