"""Declarations that `pyproject.toml` registers for speech: light, so that `paceline --help` imports nothing else."""

from __future__ import annotations

from pathlib import Path

from paceline.core.plugins import Command

MANIFEST = Command("make, check and split manifests of speech data", "paceline.recipes.speech.commands.manifest")
LM = Command("make an n-gram language model of text, or measure one", "paceline.recipes.speech.commands.lm")
DEMO = Command("train something small and real, and report", "paceline.recipes.speech.commands.demo")


def is_model(path: Path) -> bool:
    """Return True for a model that needs no run: a `.nemo` archive, or a folder that `paceline export` wrote."""
    if path.suffix == ".nemo" and not path.is_dir():
        return True
    return all((path / file).is_file() for file in ("network.yaml", "model.safetensors"))
