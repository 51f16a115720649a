"""Settings as keyword arguments: the written file is fresh, and a type checker finds mistakes in calls."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paceline.config.arguments import DataArguments, EngineArguments, TrainArguments
from paceline.config.settings import DataSettings, EngineConfig, TrainConfig
from tools.docs import arguments as generator

ROOT = Path(__file__).parents[2]


def test_the_written_file_is_fresh() -> None:
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


CALLS = """\
from pathlib import Path

import paceline


class Own(paceline.TrainConfig):
    hidden: int = 3


class Plain(paceline.Task):
    pass


class Mine(paceline.Task[Own]):
    Settings = Own

    def width(self) -> int:
        return self.settings.hidden


paceline.fit(Plain(), epochs=1, out="runs/a", precision="bf16", optimizer="lion", betas=[0.9, 0.99], watchers=[])
paceline.fit(Plain(), paceline.TrainConfig(epochs=1, out=Path("runs/a")))
paceline.fit(Mine(), epochs=1, hidden=5)
paceline.fit(Mine(), Own(epochs=1, hidden=5), watchers=[])
engine = paceline.Engine(level=2, clip_norm=1.0, shard="fsdp")
batches = engine.batches([1, 2], global_batch=2, workers="auto")
paceline.fit(Plain(), epoch=1)  # wrong
paceline.fit(Plain(), epochs="many")  # wrong
paceline.fit(Plain(), hidden=5)  # wrong
paceline.fit(Mine(), hiden=5)  # wrong
paceline.fit(Mine(), Own(hiden=5))  # wrong
paceline.TrainConfig(epoch=5)  # wrong
paceline.Engine(levle=2)  # wrong
paceline.Engine(level=7)  # wrong
paceline.Engine(epochs=7)  # wrong
engine.batches([1, 2], globl_batch=2)  # wrong
engine.evaluate(lambda grain: {}, [1, 2], evalbatch=2)  # wrong
Mine().settings.hiden  # wrong
"""


def test_type_checkers_find_wrong_settings(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    file = tmp_path / "calls.py"
    file.write_text(CALLS, encoding="utf-8")
    # The cache is the one that `mypy` of the whole project leaves, where it did.
    config = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    out, err, _ = api.run([*config, str(file)])
    assert not err
    found = {int(line.split(":")[1]) for line in out.splitlines() if ": error: " in line}
    assert found == {number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")}, out
