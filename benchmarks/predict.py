"""`paceline predict` beside the truth: calibrated on 1 and 2 ranks, predicted for 4 and 8, then measured there.

Every rank is a host of its own: a network namespace on a bridge, whose link `tc tbf` limits in both directions. Needs
root, and says so. What is trained is real paceline, with a model whose layers sleep: a fixed time in forward and a
fixed time in backward, so that gradients become ready layer by layer and two cores are enough for eight ranks. Weights,
gradients, sums, averages and everything on the wire are real. A step has 8 grains whatever the number of ranks.

    grad exact, grad fast          gradients summed in one order, or in any (`sums`)
    param blocking, overlapped, int8   averages every 4 steps (`reduce: param`); the last two under the next 4 steps
    shard exact, shard fast        full shards

`measured` is the median time of a step over whole intervals of averages, from the ranks' own stamps, without the first
steps of an epoch. Run folders are kept under `--folder`; `--measure` and `--compare` do one half of the work.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slow_hosts import INTERFACE, NETWORK, build_network, host, limit, remove_network, sent_bytes
from table import parser
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

RANKS = (1, 2, 4, 8)
LAYERS, GRAINS, BATCH, EVERY = 4, 8, 16, 4
FORWARD_S, BACKWARD_S = 0.012, 0.024
"""Of a layer."""
EPOCH_STEPS, EPOCHS = 12, 2
PORT = 29_431
LAYER_NUMBERS = {"100mbit": 1 << 17, "1gbit": 1 << 19, "10gbit": 1 << 21}
"""Parameters of a layer, by the link's rate: 2, 8 and 32 MiB as a whole."""
SEGMENTS = {"100mbit": 8192, "1gbit": 32_768, "10gbit": 65_536}
"""Bytes of a segment: each passes two shapers, one after the other, which must not look like latency."""
_PARAM: dict[str, Any] = {"reduce": "param", "sync_step": EVERY, "sync_state": "keep"}
WAYS: dict[str, dict[str, Any]] = {
    "grad exact": {"sums": "exact"},
    "grad fast": {"sums": "fast"},
    "param blocking": _PARAM,
    "param overlapped": {**_PARAM, "sync_overlap": EVERY},
    "param int8": {**_PARAM, "sync_overlap": EVERY, "wire": "int8"},
    "shard exact": {"shard": "full", "sums": "exact"},
    "shard fast": {"shard": "full", "sums": "fast"},
}


# -- what is trained ---------------------------------------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    """A layer that takes its time, and gives its weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        ctx.shape = weight.shape
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD_S)
        return gradients[0], torch.full(ctx.shape, 1e-3)


class Layer(nn.Module):
    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers // 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x, self.weight)
        return result


class Model(nn.Module):
    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(numbers) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Sleeper(paceline.Task):
    """Trains the model above, and notes when each step has ended."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self.ends_s: list[float] = []
        self.sent: list[int] = []
        self.cpu_s: list[float] = []

    def model(self) -> nn.Module:
        return Model(self.numbers)

    def train_data(self) -> Any:
        return TensorDataset(torch.zeros(EPOCH_STEPS * BATCH, 1))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        (x,) = grain
        return model(x.requires_grad_()).sum() + 1.0, len(x)

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        self.ends_s.append(time.monotonic())
        self.sent.append(sent_bytes())
        self.cpu_s.append(time.process_time())


# -- one rank ----------------------------------------------------------------------------------------------------------


def train(rank: int, ranks: int, rate: str, way: str, out: Path) -> None:
    """Train in this process, which is one of the ranks; stamps go beside the run folder."""
    task = Sleeper(LAYER_NUMBERS[rate])
    fixed = {"device": "cpu", "threads": 1, "loggers": (), "progress": "none", "workers": 0, "level": 0}
    fixed |= {"optimizer": "sgd", "momentum": 0.0, "lr": 1e-6, "global_batch": BATCH, "grains": GRAINS}
    fixed |= {"epochs": EPOCHS, "save_every_epochs": None, "timeout_s": 120.0}
    paceline.fit(task, **{**fixed, **WAYS[way], "out": out})
    stamps = {"rank": rank, "ends_s": task.ends_s, "sent": task.sent, "cpu_s": task.cpu_s}
    out.with_name(f"{out.name}-rank{rank}.json").write_text(json.dumps(stamps))


def enter(rank: int) -> None:
    """Move this process to a host: its network and its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{host(rank)}", os.O_RDONLY)
    if libc.setns(descriptor, 0x40000000) or libc.unshare(0x04000000):  # CLONE_NEWNET, CLONE_NEWUTS
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(descriptor)
    libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: large tensors are not given back to the system,
    libc.mallopt(-1, 1 << 30)  # whose fresh pages take longer than the sums
    socket.sethostname(host(rank))
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def fork_ranks(ranks: int, rate: str, ways: Sequence[str], folder: Path, port: int) -> None:
    """Train every way on so many ranks, in processes that are forked: torch is imported once."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            enter(rank)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
            for number, way in enumerate(ways):
                os.environ.update(MASTER_ADDR=f"{NETWORK}.1", MASTER_PORT=str(port + number))
                train(rank, ranks, rate, way, run_of(folder, rate, way, ranks))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    try:
        codes = [os.waitpid(child, 0)[1] for child in children]
    except SystemExit:
        for child in children:
            os.kill(child, signal.SIGKILL)
        raise
    if any(codes):
        raise SystemExit(f"{ranks} ranks at {rate}: {codes}")


def run_of(folder: Path, rate: str, way: str, ranks: int) -> Path:
    return folder / rate / f"{way.replace(' ', '-')}-{ranks}"


# -- the truth ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """A measured run."""

    rate: str
    way: str
    ranks: int
    step_s: float
    """Median of whole intervals of averages within epochs."""
    spread_s: float
    """Standard deviation between these intervals."""
    sent: float
    """Bytes that a rank's interface has sent per step, mean of the ranks."""
    cpu_s: float
    """Seconds of a core per step, all ranks together."""


def truth_of(folder: Path, rate: str, way: str, ranks: int) -> Truth:
    run = run_of(folder, rate, way, ranks)
    intervals, sent, cpu_s = [], [], []
    for rank in range(ranks):
        stamps = json.loads(run.with_name(f"{run.name}-rank{rank}.json").read_text())
        for epoch in range(EPOCHS):  # but for the first steps of an epoch, and twice as many of the run
            for first in range(epoch * EPOCH_STEPS + EVERY - 1, (epoch + 1) * EPOCH_STEPS - 1, EVERY):
                if first < 2 * EVERY - 1:
                    continue
                intervals.append((stamps["ends_s"][first + EVERY] - stamps["ends_s"][first]) / EVERY)
                sent.append((stamps["sent"][first + EVERY] - stamps["sent"][first]) / EVERY)
                cpu_s.append((stamps["cpu_s"][first + EVERY] - stamps["cpu_s"][first]) / EVERY)
    return Truth(
        rate,
        way,
        ranks,
        statistics.median(intervals),
        statistics.pstdev(intervals),
        statistics.mean(sent),
        ranks * statistics.mean(cpu_s),
    )


def measure(rates: Sequence[str], ways: Sequence[str], ranks: Sequence[int], folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    remove_network(max(ranks))
    build_network(max(ranks))
    try:
        for rate in rates:
            limit(max(ranks), rate, queue="400ms", segment=SEGMENTS[rate])
            for number, size in enumerate(ranks):
                (folder / rate).mkdir(parents=True, exist_ok=True)
                # On one rank only the order of sums makes a difference.
                chosen = [way for way in ways if size > 1 or way.startswith("grad")]
                for way in chosen:
                    shutil.rmtree(run_of(folder, rate, way, size), ignore_errors=True)
                fork_ranks(size, rate, chosen, folder, PORT + 20 * number)
                load = os.getloadavg()[0]
                for way in chosen:
                    truth = truth_of(folder, rate, way, size)
                    line = json.dumps({**asdict(truth), "load": load})
                    print(line, flush=True)
                    with (folder / "truth.jsonl").open("a") as file:
                        file.write(line + "\n")
    finally:
        remove_network(max(ranks))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rates", default="100mbit,1gbit")
    arguments.add_argument("--ways", default=",".join(WAYS))
    arguments.add_argument("--ranks", default=",".join(map(str, RANKS)))
    arguments.add_argument("--folder", type=Path, default=Path("/tmp/paceline-predict"))
    given = arguments.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("predict.py makes network namespaces and limits them with tc: run it as root")
    ranks = [int(word) for word in given.ranks.split(",")]
    measure(given.rates.split(","), given.ways.split(","), ranks, given.folder)


if __name__ == "__main__":
    main()
