"""A trained model as a plain folder that needs no run: weights, units and sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import Unreadable
from paceline.recipes.translation.network.shape import Shape
from paceline.recipes.translation.text.vocabulary import FILE, Vocabulary
from paceline.train import exchange

NETWORK = "network"
"""Entry of the description that has the network's sizes."""


def write_export(
    folder: Path, shape: Shape, vocabulary: Vocabulary, weights: Mapping[str, Tensor], about: Mapping[str, Any]
) -> None:
    """Write a model, whole or not at all; an earlier export is replaced, any other folder refused."""
    described = {**about, "task": "translation", NETWORK: asdict(shape)}
    exchange.write(folder, "safetensors", weights, described, {FILE: vocabulary.json})


def is_export(folder: Path) -> bool:
    return (folder / exchange.ABOUT).is_file() and (folder / FILE).is_file()


def read_export(folder: Path) -> tuple[Shape, Vocabulary, dict[str, Tensor]]:
    """Return sizes, units and weights of an exported model."""
    try:
        about = json.loads((folder / exchange.ABOUT).read_text(encoding="utf-8"))
        shape = Shape(**about[NETWORK])
        weights = load_file(folder / exchange.NAMES["safetensors"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Unreadable(
            f"{folder}: is not an exported model ({type(error).__name__}: {error})",
            hint="an exported model is a folder with model.safetensors, tokenizer.json and export.json",
        ) from None
    return shape, Vocabulary.read(folder), weights
