"""What a training loop costs per step, in microseconds over raw PyTorch, for us and for what people use today.

    python benchmarks/loop_overhead.py [--json] [--rounds 7] [--steps 2000]

The same tiny model (two linear layers, SGD with momentum, batch 32) and the same in-memory batches for everyone; one
thread. Rounds are interleaved and every case is set against the raw loop of its own round, because machines are noisy.
Ours runs with its finite check, clock, per-step record in `metrics.jsonl` (`log_every` 50, no TensorBoard) and keyed
randomness on; the peers run as lean as they allow (no logger, no progress bar); nobody saves checkpoints. The
`own-loader` rows feed each one from 64,000 samples in memory through its own data loader instead.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from table import Row, parser, show
from torch import nn

BATCH, FEATURES, CLASSES = 32, 32, 10
NUM_BATCHES = 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(NUM_BATCHES)
    ]


def ready(num_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ready batches, over and over, in a list: nobody pays for reading or collating."""
    batches = make_batches()
    return [batches[step % NUM_BATCHES] for step in range(num_steps)]


def samples(num_steps: int) -> torch.utils.data.TensorDataset:
    batches = make_batches()
    repeats = -(-num_steps // NUM_BATCHES)
    x = torch.cat([x for x, _ in batches]).repeat(repeats, 1)
    y = torch.cat([y for _, y in batches]).repeat(repeats)
    return torch.utils.data.TensorDataset(x[: num_steps * BATCH], y[: num_steps * BATCH])


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def us_per_step(seconds: float, num_steps: int) -> float:
    return seconds / num_steps * 1e6


# -- the loops -----------------------------------------------------------------------------------------------------


def raw(num_steps: int, own_loader: bool) -> float:
    model = make_model()
    optimizer = make_optimizer(model)
    data: Any = ready(num_steps)
    if own_loader:
        data = torch.utils.data.DataLoader(samples(num_steps), batch_size=BATCH, shuffle=True)
    began = time.perf_counter()
    for batch in data:
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    return us_per_step(time.perf_counter() - began, num_steps)


def engine(num_steps: int, own_loader: bool) -> float:
    from paceline import Batch, Engine, Grain

    ours = Engine(level=0, device="cpu", threads=1)
    model, _ = ours.prepare(*_pair())

    def loss(grain: Grain) -> tuple[torch.Tensor, int]:
        x, y = grain
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    if own_loader:
        data: Any = ours.batches(samples(num_steps), global_batch=BATCH, workers=0)
    else:
        import numpy as np

        ids = np.arange(BATCH)
        data = (Batch(0, step, 1, BATCH, BATCH, [Grain(batch, 0, ids)]) for step, batch in enumerate(ready(num_steps)))
    began = time.perf_counter()
    for batch in data:
        ours.step(loss, batch)
    return us_per_step(time.perf_counter() - began, num_steps)


def trainer(num_steps: int, own_loader: bool) -> float:
    import numpy as np

    from paceline import HasLengths, Task, TrainConfig
    from paceline.train.loop import train_epoch
    from paceline.train.run import open_run
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    class Tiny(Task, HasLengths):
        collate = None if own_loader else staticmethod(lambda batches: batches[0])

        def model(self) -> nn.Module:
            return make_model()

        def train_data(self) -> Any:
            return samples(num_steps) if own_loader else ready(num_steps)

        def counts(self, data: Any) -> Any:
            return None if own_loader else np.full(num_steps, BATCH)

        def loss(self, model: nn.Module, grain: Any) -> Any:
            x, y = grain
            return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            epochs=1,
            global_batch=BATCH if own_loader else 1,
            order="random" if own_loader else "none",
            optimizer="sgd",
            lr=0.01,
            level=0,
            device="cpu",
            threads=1,
            workers=0,
            log_every=50,
            save_every_epochs=None,
            loggers=(),
            out=Path(folder) / "run",
        )
        run = open_run(Tiny(), config, start(discover({}), device="cpu", threads=1))
        run.progress._console.quiet = True
        began = time.perf_counter()
        feed = run.begin_stage(0)
        run.stages.follow(run, feed)
        train_epoch(run, feed)
        return us_per_step(time.perf_counter() - began, num_steps)


def fabric(num_steps: int, own_loader: bool) -> float:
    from lightning.fabric import Fabric

    theirs = Fabric(accelerator="cpu", devices=1)
    model, optimizer = theirs.setup(*_pair())
    data: Any = ready(num_steps)
    if own_loader:
        data = theirs.setup_dataloaders(torch.utils.data.DataLoader(samples(num_steps), batch_size=BATCH, shuffle=True))
    began = time.perf_counter()
    for batch in data:
        optimizer.zero_grad()
        theirs.backward(mean_loss(model, batch))
        optimizer.step()
    return us_per_step(time.perf_counter() - began, num_steps)


def accelerate(num_steps: int, own_loader: bool) -> float:
    from accelerate import Accelerator

    theirs = Accelerator(cpu=True)
    model, optimizer = theirs.prepare(*_pair())
    data: Any = ready(num_steps)
    if own_loader:
        data = theirs.prepare(torch.utils.data.DataLoader(samples(num_steps), batch_size=BATCH, shuffle=True))
    began = time.perf_counter()
    for batch in data:
        optimizer.zero_grad()
        theirs.backward(mean_loss(model, batch))
        optimizer.step()
    return us_per_step(time.perf_counter() - began, num_steps)


def lightning(num_steps: int, own_loader: bool) -> float:
    from lightning.pytorch import LightningModule, Trainer

    class Tiny(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.began = self.ended = 0.0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return mean_loss(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.net)

        def on_train_epoch_start(self) -> None:
            self.began = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            self.ended = time.perf_counter()

    loader: Any = torch.utils.data.DataLoader(ready(num_steps), batch_size=None)
    if own_loader:
        loader = torch.utils.data.DataLoader(samples(num_steps), batch_size=BATCH, shuffle=True)
    module = Tiny()
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(module, loader)
    return us_per_step(module.ended - module.began, num_steps)


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    return model, make_optimizer(model)


CASES: dict[str, Callable[[int, bool], float]] = {
    "raw": raw,
    "engine": engine,
    "trainer": trainer,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
}


def measure(num_rounds: int, num_steps: int, own_loader: bool) -> list[Row]:
    rounds: dict[str, list[float]] = {name: [] for name in CASES}
    for case in CASES.values():
        case(max(num_steps // 10, 50), own_loader)
    for _ in range(num_rounds):
        for name, case in CASES.items():
            rounds[name].append(case(num_steps, own_loader))
    suffix = "-own-loader" if own_loader else ""
    rows = [Row(f"raw{suffix}", "step", statistics.median(rounds["raw"]), "us/step")]
    over = {
        name: statistics.median(value - raw for value, raw in zip(values, rounds["raw"], strict=True))
        for name, values in rounds.items()
    }
    for name in list(CASES)[1:]:
        versus, ratio = ("fabric", over[name] / over["fabric"]) if name != "fabric" else (None, None)
        rows.append(Row(f"{name}{suffix}", "over_raw", over[name], "us/step", versus, ratio))
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=2000)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = [
        *measure(options.rounds, options.steps, own_loader=False),
        *measure(options.rounds, options.steps, own_loader=True),
    ]
    show(rows, "training-loop overhead per step over raw PyTorch", options.json)


if __name__ == "__main__":
    main()
