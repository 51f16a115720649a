"""Symptoms of commit ce01e4b from Python and beside other libraries, by public names that it had, too.

This file runs there, and each of its tests fails there with what its docstring says.

To see that, lay it over a copy of that commit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.cli.main import main
from tests.crash import _context

ROOT = Path(__file__).parents[2]
PLAIN: dict[str, Any] = {"level": 0, "workers": 0, "progress": "none", "order": "none", "device": "cpu"}


class Line(paceline.Task):
    """A line through twelve points; knows how to be looked at from outside."""

    def __init__(self, data: Any = None) -> None:
        self.data = TensorDataset(torch.arange(12.0).reshape(12, 1)) if data is None else data
        self.seen: list[float] = []

    def model(self) -> nn.Module:
        self.net = nn.Linear(1, 1)
        return self.net

    def train_data(self) -> Any:
        return self.data

    def loss(self, model: nn.Module, grain: Any) -> Any:
        x = (grain.x if isinstance(grain.data, dict) else grain[0]).reshape(-1, 1)
        self.seen += x.flatten().tolist()
        return (model(x) - 1.0).square().sum(), len(x)


class Validated(Line):
    def val_data(self) -> Any:
        return {"dev": self.data}


def what_others_read() -> list[Any]:
    """Read what torch and libraries beside us read of the process."""
    with torch.backends.cudnn.flags(enabled=True):
        pass
    exported = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    return [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, len(list(exported.graph.nodes))]


@pytest.mark.parametrize("way", ["engine", "fit"])
def test_1_torch_is_as_it_was(way: str) -> None:
    """RuntimeError of `cudnn.flags()`, `cudnn.allow_tf32` and `torch.export`; threads and random numbers were ours."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        if way == "engine":
            engine = paceline.Engine(level=0, device="cpu", threads=1)
            with torch.random.fork_rng():
                what_others_read()  # while it works, too
            engine.close()
        else:
            paceline.fit(Line(), epochs=1, global_batch=4, threads=1, **PLAIN)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert tuple(what_others_read()[:2]) == flags
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[1:]
    finally:
        torch.set_num_threads(num_threads)


class OwnRates(Line):
    """Two groups, and a scheduler that the task steps."""

    def optimizer(self, groups: Any, settings: Any, device: torch.device) -> torch.optim.Optimizer:
        own = [{"params": [self.net.weight], "lr": 0.7}, {"params": [self.net.bias], "lr": 0.1}]
        self.optim = torch.optim.SGD(own, lr=0.5)
        self.decay = torch.optim.lr_scheduler.StepLR(self.optim, step_size=1, gamma=0.5)
        return self.optim

    def after_step(self, model: nn.Module, step: Any, grains: Any) -> None:
        self.decay.step()


def test_2_rates_of_an_own_optimizer_and_scheduler_stay() -> None:
    """Both were 0.0005: half of the default of `lr`, which was set at every step."""
    task = OwnRates()
    paceline.fit(task, epochs=1, global_batch=4, **PLAIN)
    assert [group["lr"] for group in task.optim.param_groups] == pytest.approx([0.7 / 8, 0.1 / 8])


class Stream(IterableDataset[Any]):
    """Numbers in a row; `state_dict` says where it is."""

    def __init__(self, row: list[float], stop_after: int = -1) -> None:
        self.row, self.stop_after, self.num_read, self._at = row, stop_after, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        start, self._at = self._at, 0
        for at in range(start, len(self.row)):
            self.num_read += 1
            if self.num_read == self.stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
            self._at = at + 1
            yield {"x": torch.tensor([self.row[at]])}


class Sharded(Stream):
    """As Hugging Face's: `shard` takes its two numbers in another order than ours."""

    num_shards = 2

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Sharded:
        if not 0 <= index < num_shards:
            raise IndexError(f"shard {index} of {num_shards}")
        return Sharded(self.row[index::num_shards])


def test_3_a_data_loader_is_its_data_set() -> None:
    """Three batches of 4 were three samples of one step."""
    numbers = TensorDataset(torch.arange(12.0).reshape(12, 1))
    task = Line(DataLoader(numbers, batch_size=4))
    assert paceline.fit(task, epochs=1, global_batch=4, **PLAIN).num_steps == 3
    assert task.seen == [float(number) for number in range(12)]


def test_3_shards_of_hugging_face() -> None:
    """IndexError: the rank was handed over as the number of shards."""
    task = Line(Sharded([0.0, 1.0, 2.0, 3.0]))
    paceline.fit(task, epochs=1, global_batch=2, **PLAIN)
    assert sorted(task.seen) == [0.0, 1.0, 2.0, 3.0]


def test_3_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    """The 8 samples of before were read again: 20."""
    settings = {"epochs": 1, "global_batch": 4, "out": tmp_path / "run", **PLAIN}
    row = [float(number) for number in range(20)]
    assert paceline.fit(Line(Stream(row, stop_after=7)), **settings).status == "stopped"
    stream = Stream(row)
    task = Line(stream)
    paceline.fit(task, resume="auto", **settings)
    assert task.seen[-4:] == row[-4:]
    assert stream.num_read == len(task.seen) < 20


def test_4_a_run_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`finished`, in a local folder `memory:`; one that nobody knows, too."""
    fsspec = pytest.importorskip("fsspec", reason="comes with the extra `cloud`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert paceline.fit(Line(), epochs=1, global_batch=4, out="memory://shelf/run", **PLAIN).status == "finished"
    assert fsspec.filesystem("memory").exists("/shelf/run/run.json")
    with pytest.raises(paceline.PacelineError, match="nowhere"):
        paceline.fit(Line(), epochs=1, global_batch=4, out="nowhere://bucket/run", **PLAIN)
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


def spread(values: Any) -> float:
    """No mean over samples: each batch has another one than the whole."""
    return float(max(values) - min(values))


def test_5_a_metric_that_is_no_mean() -> None:
    """Only pairs were taken, whose mean over batches is 3 where the set's number is 11."""

    class Spread(Validated):
        def metrics(self, model: nn.Module, grain: Any) -> Any:
            values = grain[0].flatten()
            gathered = getattr(paceline, "Gathered", None)  # ce01e4b has pairs alone
            return {"spread": gathered(spread, values) if gathered else (spread(values.tolist()), 1)}

    result = paceline.fit(Spread(), epochs=1, global_batch=4, **PLAIN)
    assert result.metrics["dev/spread"] == 11.0


def test_6_a_result_has_what_was_trained(tmp_path: Path) -> None:
    """`Result` had neither model nor folder, and `best` was a number."""
    result = paceline.fit(Validated(), epochs=1, global_batch=4, out=tmp_path / "run", **PLAIN)
    assert {"model", "folder", "best"} <= set(dir(result))
    assert result.folder == tmp_path / "run"
    assert isinstance(result.model, nn.Module)
    assert isinstance(result.best, Path)
    assert "load" in dir(paceline)
    torch.testing.assert_close(paceline.load(result.folder, task=Validated()).state_dict(), result.model.state_dict())


def test_6_weights_of_other_programs(tmp_path: Path) -> None:
    """Not a directory: only our own checkpoints were taken."""
    torch.save({"weight": torch.full((1, 1), 3.0), "bias": torch.zeros(1)}, tmp_path / "plain.pt")
    task = Line()
    paceline.fit(task, epochs=1, global_batch=4, optimizer="sgd", lr=1e-30, init_from=tmp_path / "plain.pt", **PLAIN)
    assert task.net.weight.item() == 3.0


def in_a_group_of_its_own(rank: int, port: int, file: str) -> None:
    """As Ray Train does: the group is there when `fit` is called."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    assert paceline.fit(Line(), epochs=1, global_batch=4, **PLAIN).status == "finished"
    assert torch.distributed.is_initialized(), "it is not ours to end"
    torch.distributed.destroy_process_group()


def test_7_a_group_that_is_there_is_used(tmp_path: Path) -> None:
    """ValueError: trying to initialize the default process group twice."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    both = [
        _context().Process(target=in_a_group_of_its_own, args=(rank, port, str(tmp_path / "meeting")))
        for rank in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]


def test_8_mistakes_are_ours() -> None:
    """pydantic's ValidationError for the first two, `did you mean fp16?` for the third."""
    for wrong, nearest in (({"epoch": 1, "lr": -1.0}, "epochs"), ({"epochs": 1, "batch_size": 4}, "global_batch")):
        with pytest.raises(paceline.PacelineError) as error:
            paceline.fit(Line(), **wrong)
        said = f"{error.value} {error.value.hint}"
        assert nearest in said
        assert all(name in said for name in wrong if name != "epochs")
    with pytest.raises(paceline.PacelineError, match="level 7"):
        paceline.Engine(level=7)
    for name in ("bf16", "bf16-mixed", "16-mixed", "32"):
        paceline.TrainConfig(epochs=1, precision=name)
    with pytest.raises(paceline.PacelineError, match="precision 'bf17': must be one of .* or bf16, tf32 or 32"):
        paceline.TrainConfig(epochs=1, precision="bf17")


class TwoOptimizers(Line):
    def optimizer(self, groups: Any, settings: Any, device: torch.device) -> Any:
        return [torch.optim.SGD([self.net.weight], lr=0.1), torch.optim.SGD([self.net.bias], lr=0.1)]


def test_8_two_optimizers_are_explained() -> None:
    """AttributeError: a list has no param_groups."""
    with pytest.raises(paceline.PacelineError) as error:
        paceline.fit(TwoOptimizers(), epochs=1, global_batch=4, **PLAIN)
    assert "two engines" in f"{error.value} {error.value.hint}"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell the difference")
def test_9_threads_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cores, whatever OMP_NUM_THREADS said."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = paceline.Engine(level=0, device="cpu")
        assert torch.get_num_threads() == 1
        engine.close()
    finally:
        torch.set_num_threads(before)


def test_9_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """ModuleNotFoundError: No module named 'sklearn'."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["train", "digits", "--epochs", "1", "--progress", "none"]) == 2
    assert "pip install" in capsys.readouterr().err


def test_10_own_numbers_norms_and_epochs(tmp_path: Path) -> None:
    """A task had no `log`, a journal no norm of gradients, and the first epoch was 0."""

    class Logging(Validated):
        def loss(self, model: nn.Module, grain: Any) -> Any:
            if model.training:
                self.log("mean_x", grain[0].sum(), len(grain[0]))
            return super().loss(model, grain)

    paceline.fit(Logging(), epochs=1, global_batch=4, log_every=3, out=tmp_path / "run", **PLAIN)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "step"][-1]
    assert last["mean_x"] == 5.5
    assert last["gradient_norm"] > 0
    assert last["lr"] == 0.001
    assert {record["epoch"] for record in records if "epoch" in record} == {1}


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


def test_11_types_find_mistakes(tmp_path: Path) -> None:
    """`Task` was not generic, `hidden` no attribute of settings, and every misspelt keyword was fine."""
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    file = tmp_path / "calls.py"
    file.write_text(CALLS, encoding="utf-8")
    # The cache is the one that `mypy` of the whole project leaves, where it did.
    config = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    out, err, _ = api.run([*config, str(file)])
    assert not err
    found = {int(line.split(":")[1]) for line in out.splitlines() if ": error: " in line}
    assert found == {number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")}, out
