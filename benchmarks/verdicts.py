"""Does a run say what holds it back? Real runs on two ranks, each made slow in one way, and a healthy one.

    python benchmarks/verdicts.py [--json] [--only data straggler ...]

For each case: what its epoch's record says was wrong, which must be what was done to it, and nothing in the healthy
run. A machine that is busy with other things is found as well (`cores`), and may hide the rest, which is then said.
Where the advice is a setting, the same run with that setting typed, in samples per second. A rank has one thread, and
the second of two epochs counts. It lasts seconds: one of less than a second is not judged, which would be an error
here. `recompiles` (one rank, one epoch) needs a C++ compiler, begins without a cache and takes a minute; the last four
need a GPU, and without one are left out.

    healthy          a small network on data in memory
    data             reading a sample takes milliseconds on rank 1 (a slow disk), reading by the training process
    communication    16 MB of gradients (a table of words) for a step of a few milliseconds
    padding          lengths between 8 and 512 in random order
    balance          three grains of a step on two ranks
    straggler        rank 1 computes everything four times over
    recompiles       -O3, and a loop over time whose length changes from batch to batch
    launches         hundreds of tiny layers on a GPU
    precision        -O0 on a GPU that has bf16
    depthwise        depthwise convolutions in bf16 on a GPU that computes them slowly in it
    healthy-gpu      large products in bf16 on a GPU
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline import HasLengths, Task, TrainConfig
from paceline.data.grain import Grain
from paceline.observe.callback import Record, Watcher
from paceline.observe.verdict import LEAST_SECONDS
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start

RANKS = 2
WIDTH = 128


# -- what is trained ---------------------------------------------------------------------------------------------------


class Disk:
    """Samples that take a while to read."""

    def __init__(self, number: int, width: int, read_s: float) -> None:
        self._number, self._width, self._read_s = number, width, read_s

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._read_s)
        return torch.full((self._width,), index / self._number), torch.zeros(1)


class Healthy(Task):
    """A few milliseconds of computing per step, and little to send."""

    num_samples, depth, width, hidden = 262_144, 12, WIDTH, WIDTH

    def model(self) -> nn.Module:
        layers = [nn.Linear(self.width, self.hidden), nn.ReLU()]
        for _ in range(self.depth - 1):
            layers += [nn.Linear(self.hidden, self.hidden), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.hidden, 1))

    def train_data(self) -> Any:
        x = torch.randn(self.num_samples, self.width, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x[:, :1])

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        x, y = grain
        return (model(x) - y).square().sum(), len(y)


class SlowData(Healthy):
    num_samples = 1024

    def train_data(self) -> Any:
        return Disk(self.num_samples, self.width, 0.003 if self.world.rank == 1 else 0.0)


class MuchToSend(Task):
    """A table of words, nearly all of which a step does not need."""

    num_words, width = 16_384, 256

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(self.num_words, self.width), nn.Linear(self.width, 1))

    def train_data(self) -> Any:
        words = torch.randint(self.num_words, (768, 8), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(words)

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        return model(grain[0]).square().sum(), len(grain)


class SlowRank(Healthy):
    num_samples = 32_768

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        total, count = super().loss(model, grain)
        for _ in range(6 if self.world.rank == 1 else 0):
            total = total + 0.0 * super().loss(model, grain)[0]
        return total, count


class Sequences:
    """Frames of very different numbers, and how many they are."""

    def __init__(self, number: int, shortest: int, longest: int, width: int) -> None:
        self.lengths = np.random.default_rng(1).integers(shortest, longest + 1, number)
        self._width = width

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(int(self.lengths[index]), self._width)


class Padded(Task, HasLengths):
    """Computes over all frames, those of the padding too."""

    width = 64

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, 512), nn.ReLU(), nn.Linear(512, self.width))

    def train_data(self) -> Any:
        return Sequences(1536, 8, 512, self.width)

    @staticmethod
    def collate(samples: list[torch.Tensor]) -> dict[str, Any]:
        return {"x": nn.utils.rnn.pad_sequence(samples, batch_first=True), "frames": sum(map(len, samples))}

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        return (model(grain["x"]) - grain["x"]).square().sum(), grain["frames"]

    def counts(self, data: Any) -> Any:
        return data.lengths


class Loop(nn.Module):
    """A recurrent layer written by hand: its graph is as long as the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width) -> (batch, width)
        state = torch.zeros_like(x[:, 0])
        for frame in x.unbind(1):
            state = torch.tanh(self.weight * frame + state)
        return state


class ManyShapes(Padded):
    width = 8

    def model(self) -> nn.Module:
        return Loop(self.width)

    def train_data(self) -> Any:
        data = Sequences(96, 2, 5, self.width)
        data.lengths = np.sort(data.lengths)
        return data

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        return model(grain["x"]).square().sum(), grain["frames"]


class ManyLayers(Healthy):
    """Kernels so small that launching one takes longer than computing it."""

    depth, num_samples = 300, 4096


class Wide(Healthy):
    """Enough to compute for a GPU."""

    depth, hidden, num_samples = 8, 4096, 131_072


class WideForLong(Wide):
    num_samples = 1_048_576


class Depthwise(Healthy):
    """Each channel over 1,024 frames by itself, several times."""

    width, depth, num_samples = 256, 6, 8192

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv1d(self.width, self.width, 33, padding=16, groups=self.width) for _ in range(self.depth))
        )

    def loss(self, model: nn.Module, grain: Grain) -> tuple[torch.Tensor, int]:
        x = grain[0].unsqueeze(2).expand(-1, -1, 1024)
        return (model(x) - x).square().mean((1, 2)).sum(), len(x)


# -- what makes it slow, and what should be said -----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A way of training that is slow for one reason."""

    task: Callable[[], Task]
    expected: str | None
    """Kind of finding; None: nothing is to be found."""
    settings: dict[str, Any] = field(default_factory=dict)
    advised: dict[str, Any] | None = None
    """What the advice says to type, where that is a setting."""
    rank: int | None = None
    """Which one it is about."""
    needs_gpu: bool = False
    num_ranks: int = RANKS


CASES: dict[str, Case] = {
    "healthy": Case(Healthy, None, {"global_batch": 8192}),
    "data": Case(SlowData, "data", {"global_batch": 32}, {"workers": 1}, rank=1),
    "communication": Case(MuchToSend, "communication", {"global_batch": 8}, {"reduce": "param", "sync_step": 100}),
    "padding": Case(Padded, "padding", {"global_batch": 32}, {"order": "bucket"}),
    "balance": Case(Healthy, "balance", {"global_batch": 3072, "grains": 3}, {"grains": 8}),
    "straggler": Case(SlowRank, "straggler", {"global_batch": 512}, rank=1),
    "recompiles": Case(
        ManyShapes,
        "recompiles",
        {"global_batch": 8, "level": 3, "order": "none", "epochs": 1},  # the second epoch would have nothing new
        {"level": 2},
        num_ranks=1,
    ),
    "launches": Case(ManyLayers, "launches", {"global_batch": 16, "level": 2}, needs_gpu=True, num_ranks=1),
    "precision": Case(Wide, "precision", {"global_batch": 4096}, {"level": 2}, needs_gpu=True, num_ranks=1),
    "depthwise": Case(
        Depthwise,
        "precision",
        {"global_batch": 64, "level": 2},
        {"level": 0, "precision": "fp16"},
        needs_gpu=True,
        num_ranks=1,
    ),
    "healthy-gpu": Case(WideForLong, None, {"global_batch": 4096, "level": 2}, needs_gpu=True, num_ranks=1),
}


def is_right(case: Case, findings: list[Record]) -> bool:
    if case.expected is None:
        return not findings
    return any(
        finding["kind"] == case.expected and (case.rank is None or finding["rank"] == case.rank) for finding in findings
    )


class Kept(Watcher):
    """The last epoch's record."""

    def epoch(self, record: Record) -> None:
        self.record = record


def provoke(link: Link, case: Case, **more: Any) -> Record | None:
    """Train as the case says; the record of its last epoch, on the first rank."""
    usual = {"epochs": 2, "grains": link.world.size, "workers": 0, "level": 0, "optimizer": "sgd", "lr": 1e-4}
    place = {"device": link.device.type, "progress": "none", "loggers": ()}
    config = TrainConfig(**{**usual, **place, **case.settings, **more})
    kept = Kept()
    train(open_run(case.task(), config, link, [kept]))
    return kept.record if link.is_first else None


# -- all of them, on two ranks -----------------------------------------------------------------------------------------


def rank_main(rank: int, size: int, port: int, names: list[str], pipe: Any) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        _rank_main(rank, size, port, names, pipe)


def _rank_main(rank: int, size: int, port: int, names: list[str], pipe: Any) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    meeting = f"127.0.0.1:{port}" if size > 1 else None
    device: Any = "cuda" if CASES[names[0]].needs_gpu else "cpu"
    with start(World(rank, rank, size, size, 0, 1, "benchmark", meeting), device=device, threads=1) as link:
        for name in names:
            case = CASES[name]
            found = provoke(link, case)
            better = None if case.advised is None else provoke(link, case, **case.advised)
            if link.is_first:
                pipe.send((name, found, better))


def run(size: int, names: list[str]) -> list[tuple[str, Record, Record | None]]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=rank_main, args=(rank, size, port, names, theirs)) for rank in range(size)]
    for process in ranks:
        process.start()
    answers = []
    while len(answers) < len(names):
        if ours.poll(1.0):
            answers.append(ours.recv())
        elif any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
    for process in ranks:
        process.join()
    return answers


def main() -> None:
    from table import Row, parser, show

    arguments: argparse.ArgumentParser = parser(__doc__ or "")
    arguments.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = arguments.parse_args()
    has_gpu, answers = torch.cuda.is_available(), []
    names = [name for name in options.only if has_gpu or not CASES[name].needs_gpu]
    if left_out := sorted(set(options.only) - set(names)):
        print(f"no GPU here: left out {', '.join(left_out)}", file=sys.stderr)
    for alike in itertools.groupby(names, lambda name: (CASES[name].num_ranks, CASES[name].needs_gpu)):
        (num_ranks, _), group = alike
        answers += run(num_ranks, list(group))
    rows, failed = [], []
    for name, record, better in answers:
        case, findings = CASES[name], record["findings"]
        for finding in findings:
            print(f"{name}: {finding['text']}: {finding['advice']}", file=sys.stderr)
        kinds = [finding["kind"] for finding in findings]
        seconds = max(sum(rank.values()) for rank in record["seconds"])
        if seconds < LEAST_SECONDS:  # so short an epoch is healthy whatever is done to it
            failed.append(f"{name}: its epoch of {seconds:.2f} s is not judged; give it more samples")
        elif not is_right(case, findings) and "cores" in kinds:
            print(f"{name}: the machine was too busy to show it", file=sys.stderr)
        elif not is_right(case, findings):
            failed.append(f"{name}: expected {case.expected}, found {', '.join(kinds) or 'nothing'}")
        rows.append(Row(name, "findings", len(findings), ", ".join(kinds) or "none"))
        rows.append(Row(name, "speed", record["objects_per_s"], "samples/s"))
        if better is not None:
            typed = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in (case.advised or {}).items())
            ratio = better["objects_per_s"] / record["objects_per_s"]
            rows.append(Row(name, typed, better["objects_per_s"], "samples/s", name, ratio))
    show(rows, "what holds a run back: said by the run itself", options.json)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
