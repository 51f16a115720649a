"""A trained model as a plain folder that needs no run: `model.safetensors` and `network.yaml`, readable anywhere."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.config.problems import first_lines
from paceline.core.disk import sync
from paceline.core.errors import AlreadyExists, Conflict, Failed, NotFound, PacelineError, Unreadable
from paceline.recipes.speech.network.config import ENGLISH, BlockSettings, NetworkSettings, read_network
from paceline.recipes.speech.network.encoder import weight_shapes
from paceline.recipes.speech.text.subwords.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
NETWORK = "network.yaml"
MAX_SHOWN = 10
_PARTS = f"an exported model is a folder with {WEIGHTS} and {NETWORK}"


class WeightsDiffer(PacelineError):
    """Weights that are not those of the network."""

    where: str | Path
    mistakes: Sequence[str]
    sentence = "{where}: the weights do not fit the network{lines}"
    hint = "these weights were made with another network"

    @property
    def lines(self) -> str:
        return "".join(f"\n{line}" for line in first_lines(self.mistakes, MAX_SHOWN))


def check_labels(ours: Sequence[str], theirs: Sequence[str], where: str | Path) -> None:
    """Refuse a model at `where` whose labels are not ours, in our order."""
    if tuple(ours) == tuple(theirs):
        return
    only_ours = [label for label in ours if label not in theirs]
    only_theirs = [label for label in theirs if label not in ours]
    lines = [
        f"{where} is a model for other labels",
        f"  wanted      {_shown(ours)}",
        f"  the model's {_shown(theirs)}",
        *([f"  only wanted: {_shown(only_ours)}"] if only_ours else []),
        *([f"  only the model's: {_shown(only_theirs)}"] if only_theirs else []),
        *([] if only_ours or only_theirs else ["  they are the same labels in another order"]),
    ]
    raise Conflict(
        "\n".join(lines),
        hint="use a network with the model's labels, or take only its encoder with `--new-decoder`",
    )


def check_weights(network: NetworkSettings, weights: Mapping[str, Tensor], where: str | Path) -> None:
    """Refuse weights of which any is missing, too many or of another shape."""
    wanted = weight_shapes(network)
    mistakes = [f"{name} is missing" for name in wanted if name not in weights]
    mistakes += [f"{name} does not belong to it" for name in weights if name not in wanted]
    mistakes += [
        f"{name} is {_size(weights[name].shape)} instead of {_size(shape)}"
        for name, shape in wanted.items()
        if name in weights and weights[name].shape != shape
    ]
    if mistakes:
        raise WeightsDiffer(where, tuple(mistakes))


def is_export(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() and (folder / NETWORK).is_file()


def write_export(
    folder: Path,
    network: NetworkSettings,
    weights: Mapping[str, Tensor],
    about: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model, whole or not at all; an earlier export is replaced, any other folder refused.

    `weights` are named as in the whole model (`encoder.`, `decoder.`); `about` becomes a comment for people.
    The `tokenizer` of subwords lies beside them, as it lies in the run.
    """
    check_weights(network, weights, folder)
    try:
        if folder.exists() and not is_export(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise AlreadyExists(
                f"cannot export to {folder}: it exists and is not an export",
                hint="choose a folder that does not exist yet",
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            # mkdtemp lets only its owner in; an export is for everyone whom the folder above lets in.
            written = aside / "export"
            written.mkdir()
            plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
            save_file(plain, written / WEIGHTS, metadata={"format": "pt"})
            (written / NETWORK).write_text(as_yaml(network, about), encoding="utf-8")
            if tokenizer is not None:
                (written / tokenizer.file).write_bytes(tokenizer.content)
            _to_disk(written)
            _put(written, folder, aside / "replaced")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        why = str(getattr(error, "strerror", None) or error)
        raise Failed(f"cannot export to {folder}: {why}", hint="free some space or choose another folder") from error


def read_export(folder: Path) -> tuple[NetworkSettings, dict[str, Tensor]]:
    """The network and its weights, checked against each other."""
    for name in (NETWORK, WEIGHTS):
        if not (folder / name).is_file():
            why = f"there is no {name} in it" if folder.is_dir() else "there is no such folder"
            raise NotFound(f"{folder}: {why}", hint=_PARTS)
    network = read_network(folder / NETWORK)
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise Unreadable(f"{folder}: {WEIGHTS} cannot be read: {error}", hint=_PARTS) from error
    check_weights(network, weights, folder / WEIGHTS)
    return network, weights


def as_yaml(network: NetworkSettings, about: Mapping[str, Any]) -> str:
    """A network as a file for people: what it is about in comments, one line per block, its defaults left out."""
    values = network.model_dump(mode="json")
    values["features"] = {"front_end": network.features.front_end, **values["features"]}
    blocks, labels = values.pop("blocks", []), values.pop("labels")
    comment = "".join(f"# {line}\n" for line in _dumped(dict(about)).splitlines()) if about else ""
    defaults = {name: field.default for name, field in BlockSettings.model_fields.items()}
    rows = [{name: value for name, value in block.items() if value != defaults[name]} for block in blocks]
    parts = [
        comment,
        "" if tuple(labels) == ENGLISH else _dumped({"labels": labels}, flow=None),
        _dumped(values),
        "blocks:\n" if rows else "",
        *(f"- {_dumped(row, flow=True)}" for row in rows),
    ]
    return "".join(parts)


def _dumped(value: Any, flow: bool | None = False) -> str:
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=flow, width=10_000, allow_unicode=True)


def _put(new: Path, folder: Path, old: Path) -> None:
    """Give the new folder its name; what had it before gets it back if that fails."""
    is_replaced = folder.exists()
    if is_replaced:
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        if is_replaced:
            os.rename(old, folder)
        raise


def _to_disk(folder: Path) -> None:
    """A folder must not get its name before what is in it is on disk."""
    for path in (*folder.iterdir(), folder):
        sync(path)


def _shown(labels: Sequence[str]) -> str:
    return f"({len(labels)}) {' '.join('space' if label == ' ' else label for label in labels)}"


def _size(shape: torch.Size) -> str:
    return " x ".join(map(str, shape)) or "a number"
