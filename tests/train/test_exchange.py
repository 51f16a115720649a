"""What a run leaves for others, and takes from them: model, folder, checkpoints; weights in other programs' files.

On ce01e4b a result had no model and no folder, `best` was a score, there was no `paceline.load`, and a `.pt` file as
`init_from` was a broken checkpoint.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import save as save_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

import paceline
from paceline.train import exchange
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.world.link import Link
from tests.commands import run_command
from tests.ranks import ranks
from tests.train.small import BATCH, SmallTask, assert_same, fresh_net

PLAIN: dict[str, Any] = {"global_batch": BATCH, "level": 0, "workers": 0, "progress": "none"}


def test_a_result_has_model_folder_and_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = paceline.fit(SmallTask(), epochs=3, lr=0.01, out=out, **PLAIN)
    assert result.folder == out
    assert result.checkpoint == out / "checkpoints" / "step-00000009"
    assert result.best is not None
    assert result.best == result.best_checkpoint  # its name in earlier versions
    assert result.best_score == result.metrics["dev/loss"]
    assert result.model is not None
    assert not result.model.training
    last = paceline.load(out, checkpoint="last", task=SmallTask())
    assert_same(result.model.state_dict(), last.state_dict())
    by_path = paceline.load(result.checkpoint, task=SmallTask())
    assert_same(by_path.state_dict(), last.state_dict())
    best = paceline.load(str(out), task=SmallTask())
    assert_same(best.state_dict(), paceline.load(out, checkpoint=result.best.name, task=SmallTask()).state_dict())
    loss = result.model(torch.ones(2, 4)).sum()
    loss.backward()  # nothing of the run hangs on it any more
    with pytest.raises(paceline.PacelineError, match="is not a run"):
        paceline.load(tmp_path / "no")


def test_a_result_without_a_folder() -> None:
    result = paceline.fit(SmallTask(), epochs=1, **PLAIN)
    assert (result.folder, result.checkpoint, result.best) == (None, None, None)
    assert isinstance(result.model, nn.Module)


@ranks(2)
def test_every_rank_gets_the_model(link: Link, tmp_path: Path) -> None:
    trainer = open_run(SmallTask(), paceline.TrainConfig(epochs=1, ema=0.5, out=tmp_path / "run", **PLAIN), link)
    result = train(trainer)
    weights = {name: tensor.tolist() for name, tensor in trainer.give_model().state_dict().items()}
    first, second = link.gather_objects((weights, result.checkpoint))
    assert first == second


def write(kind: str, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write weights as other programs do."""
    path = folder / kind
    half = dict(list(weights.items())[:2])
    match kind:
        case "plain.safetensors":
            save_file(weights, path)
        case "plain.pt":
            torch.save(weights, path)
        case "old.pt":
            torch.save(weights, path, _use_new_zipfile_serialization=False)
        case "sparse.pt":
            torch.save({name: tensor.to_sparse() for name, tensor in weights.items()}, path)
        case "lightning.ckpt":
            named = {f"model.{name}": tensor for name, tensor in weights.items()}
            torch.save({"state_dict": named, "epoch": 3, "loops": {}}, path)
        case "ddp.pth":
            torch.save({"model": {f"module.{name}": tensor for name, tensor in weights.items()}, "step": 7}, path)
        case "hf":
            path.mkdir()
            (path / "config.json").write_text("{}")
            save_file(weights, path / "model.safetensors")
        case "hf-parts":
            path.mkdir()
            rest = {name: tensor for name, tensor in weights.items() if name not in half}
            save_file(half, path / "model-00001-of-00002.safetensors")
            save_file(rest, path / "model-00002-of-00002.safetensors")
            where = {name: f"model-0000{1 if name in half else 2}-of-00002.safetensors" for name in weights}
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        case "dcp":
            with pytest.warns(UserWarning, match="single process"):
                save_dcp(
                    {"model": weights, "optim": {"state": {0: weights}, "lr": 0.1}}, checkpoint_id=path, no_dist=True
                )
    return path


@pytest.mark.parametrize(
    "kind",
    ["plain.safetensors", "plain.pt", "old.pt", "sparse.pt", "lightning.ckpt", "ddp.pth", "hf", "hf-parts", "dcp"],
)
def test_a_run_starts_from_weights_of_other_programs(kind: str, tmp_path: Path) -> None:
    weights = {name: tensor + 1.0 for name, tensor in fresh_net(3).state_dict().items()}
    path = write(kind, tmp_path, weights)
    result = paceline.fit(SmallTask(), epochs=1, optimizer="sgd", lr=1e-30, init_from=path, **PLAIN)
    assert result.model is not None
    assert_same(result.model.state_dict(), weights)


def test_files_that_are_no_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"not at all")
    torch.save(fresh_net(), tmp_path / "whole.pt")  # a module, which only running its code could read
    torch.save([1, 2], tmp_path / "list.pt")
    said = {}
    for name in ("broken.safetensors", "whole.pt", "list.pt", "absent.pt"):
        with pytest.raises(paceline.PacelineError) as error:
            paceline.fit(SmallTask(), epochs=1, init_from=tmp_path / name, **PLAIN)
        said[name] = str(error.value)
    assert "it cannot be read (SafetensorError" in said["broken.safetensors"]
    assert "it holds more than tensors, and reading it could run code" in said["whole.pt"]
    assert "it holds a list, not tensors by name" in said["list.pt"]
    assert "there is no such file or folder" in said["absent.pt"]


def test_files_of_strangers_are_named(tmp_path: Path) -> None:
    """Each was a traceback: a dictionary inside of itself, a description with other types, an index that leads away."""
    cycle: dict[str, Any] = {}
    cycle["model"] = cycle
    torch.save(cycle, tmp_path / "cycle.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Metadata({"a": None, "b": 3}, planner_data=7)))
    (tmp_path / "dcp-without").mkdir()
    (tmp_path / "dcp-without" / ".metadata").write_bytes(pickle.dumps(Metadata(None)))  # type: ignore[arg-type]
    (tmp_path / "hf").mkdir()
    index = {"weight_map": {"weight": str(write("plain.pt", tmp_path, fresh_net().state_dict()))}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, why in {
        "cycle.pt": "it cannot be read \\(RecursionError",
        "dcp": "it cannot be read",
        "dcp-without": "it cannot be read \\(AttributeError",
        "hf": "plain.pt', which is not a file of this folder",
    }.items():
        with pytest.raises(paceline.PacelineError, match=why):
            exchange.read(tmp_path / name)


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("kind", ["a.pt", "metadata", "bytes"])
def test_reading_weights_runs_no_code(kind: str, tmp_path: Path) -> None:
    """Before, torch's reader of distributed checkpoints unpickled whatever was there."""
    path, trace = tmp_path / kind, tmp_path / "trace"
    weights = fresh_net(3).state_dict()
    if kind == "a.pt":
        torch.save({**weights, "more": Evil(trace)}, path)
    else:
        with pytest.warns(UserWarning, match="single process"):
            save_dcp({**weights, "more": Evil(trace)}, checkpoint_id=path, no_dist=True)
    if kind == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Evil(trace)))
    if kind == "bytes":  # what is no tensor is not read
        assert_same(dict(exchange.read(path)), weights)
    else:
        with pytest.raises(paceline.PacelineError, match="it holds more than tensors, and reading it could run code"):
            exchange.read(path)
    assert not trace.exists()


def test_folders_that_are_not_whole_are_named(tmp_path: Path) -> None:
    write("hf-parts", tmp_path, fresh_net().state_dict())
    index = tmp_path / "hf-parts" / "model.safetensors.index.json"
    for text in ("[1]", '{"weight_map": ["a.safetensors"]}', '{"weight_map": {"a": 7}}'):
        index.write_text(text)
        with pytest.raises(paceline.PacelineError, match="its index has no `weight_map`"):
            exchange.read(tmp_path / "hf-parts")
    path = write("dcp", tmp_path, fresh_net().state_dict())
    (part,) = path.glob("*.distcp")
    part.unlink()
    with pytest.raises(paceline.PacelineError, match=r"it cannot be read .*No such file"):
        exchange.read(path)


@pytest.fixture(scope="module")
def run_of_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "small_task.py"
    file.write_text("from tests.train.small import SmallTask as Base\n\n\nclass Small(Base):\n    pass\n")
    words = ["--epochs", "1", "--global-batch", "8", "--workers", "0", "-O0", "--progress", "none", "--loggers", "none"]
    assert run_command(["train", f"{file}:Small", *words, "--out", str(folder / "run")]).code == 0
    return folder / "run"


SCRIPT = """
import torch
import paceline
from tests.train.small import SmallTask


class Named(SmallTask):
    def train_data(self):
        return [{"image": x, "label": y} for x, y in SmallTask.train_data(self)]

    def val_data(self):
        return {"dev": self.train_data()}

    def loss(self, model, grain):
        return (model(grain.image) - grain.label).square().sum(), len(grain)

    def metrics(self, model, grain):
        return {"loss": self.loss(model, grain)}


class Folded(Named):
    def __init__(self, fold):
        super().__init__()


def train(out, **settings):
    return paceline.fit(Named(), epochs=1, out=out, **settings)
"""


def test_a_run_of_a_script_knows_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline.load(result.folder)`, `eval` and `export` after `fit` in a script said: there is no recipe 'Named'."""
    (tmp_path / "script_of_mine.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    import script_of_mine

    result = script_of_mine.train(tmp_path / "run", **PLAIN)
    assert_same(paceline.load(result.folder).state_dict(), result.model.state_dict())
    answer = run_command(["eval", str(result.folder), "--json"])
    assert (answer.code, json.loads(answer.out)["metrics"]) == (0, result.metrics)
    answer = run_command(["export", str(result.folder), str(tmp_path / "onnx"), "--format", "onnx"])
    assert answer.code == 2
    assert "its grains have no `x`, but `image`, `label`" in answer.err
    assert "`(grain.image,)`" in answer.err

    class Inner(script_of_mine.Named):
        pass

    for task in (Inner(), script_of_mine.Folded(fold=3)):
        name = type(task).__name__
        paceline.fit(task, epochs=1, out=tmp_path / name, **PLAIN)
        with pytest.raises(paceline.PacelineError, match=f"made by paceline.fit with the task {name}") as refused:
            paceline.load(tmp_path / name)
        assert f"task={name}(...)" in refused.value.hint
        paceline.load(tmp_path / name, task=task)


def test_a_run_instead_of_a_checkpoint_names_one(run_of_small: Path) -> None:
    with pytest.raises(paceline.PacelineError, match="it is a run, not one of its checkpoints") as error:
        paceline.fit(SmallTask(), epochs=1, init_from=run_of_small, **PLAIN)
    named = error.value.hint.partition("--init-from ")[2].rstrip("`")
    assert Path(named).parent == run_of_small / "checkpoints"
    paceline.fit(SmallTask(), steps=1, init_from=named, **PLAIN)


def test_export_in_every_form(run_of_small: Path, tmp_path: Path) -> None:
    weights = paceline.load(run_of_small).state_dict()
    for form, name in (("safetensors", "model.safetensors"), ("torch", "model.pt"), ("dcp", ".metadata"), ("auto", "")):
        assert run_command(["export", str(run_of_small), str(tmp_path / form), "--format", form]).code == 0
        assert (tmp_path / form / name).exists()
    assert_same(load_file(tmp_path / "safetensors" / "model.safetensors"), weights)
    assert_same(load_file(tmp_path / "auto" / "model.safetensors"), weights)
    assert_same(torch.load(tmp_path / "torch" / "model.pt", weights_only=True), weights)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    assert_same(torch.load(tmp_path / "dcp.pt", weights_only=True), weights)
    again = run_command(["export", str(run_of_small), str(tmp_path), "--format", "torch"])
    assert (again.code, "contains other files" in again.err) == (2, True)


def test_export_to_onnx(run_of_small: Path, tmp_path: Path) -> None:
    answer = run_command(["export", str(run_of_small), str(tmp_path / "onnx"), "--format", "onnx"])
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError:
        assert (answer.code, "pip install onnx onnxscript" in answer.err) == (2, True)
        return
    assert answer.code == 0
    onnx.checker.check_model(onnx.load(tmp_path / "onnx" / "model.onnx"))
