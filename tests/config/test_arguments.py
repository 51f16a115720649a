"""Settings as keyword arguments: the written file is fresh. What mypy finds in calls is in train/test_once_wrong.py."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from paceline.config.arguments import DataArguments, EngineArguments, TrainArguments
from paceline.config.settings import DataSettings, EngineConfig, TrainConfig

ROOT = Path(__file__).parents[2]


def test_the_written_file_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("docs_arguments", ROOT / "docs" / "arguments.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    text = generator.FILE.read_text(encoding="utf-8")
    assert _normal(text) == _normal(generator.module()), "`make docs` writes config/arguments.py anew"


def _normal(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())  # a formatter may move lines
    return ast.dump(tree)


def test_every_setting_is_an_argument() -> None:
    for arguments, model in (
        (EngineArguments, EngineConfig),
        (DataArguments, DataSettings),
        (TrainArguments, TrainConfig),
    ):
        assert set(arguments.__annotations__) == set(model.model_fields)
        assert not arguments.__required_keys__
