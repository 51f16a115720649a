"""`paceline predict` beside the truth: calibrated on 1 and 2 ranks, predicted for 4 and 8, then measured there.

Every rank is a host of its own: a network namespace on a bridge, whose link `tc tbf` limits in both directions. Needs
root, and says so. What is trained is real paceline, with a model whose layers sleep: a fixed time in forward and a
fixed time in backward, so that gradients become ready layer by layer and two cores are enough for eight ranks. Weights,
gradients, sums, averages and everything on the wire are real. The grains of a step are those of any number of ranks.

    grad exact, grad fast          gradients summed in one order, or in any (`sums`)
    param blocking, overlapped, int8   averages every 4 steps (`reduce: param`); the last two under the next 4 steps
    shard exact, shard fast        full shards

    --stand-in even      4 layers alike, 8 grains: a rank has 8, 4, 2 or 1
    --stand-in uneven    6 layers of other sizes and times, 12 grains: of 8 ranks four have two and four have one
    --stand-in ragged    5 layers, 10 grains: of 4 ranks two have three and two have two, of 8 ranks two have two

`measured` is the median time of a step over whole intervals of averages, from the ranks' own stamps, without the first
steps of an epoch. Run folders are kept under `--folder`: `--only measure` and `--only compare` do half of the work, and
`--ranks` measures some of them. Truth and prediction meet in the table alone; what is predicted is calibrated on the
runs of 1 and 2 ranks.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from slow_hosts import INTERFACE, NETWORK, build_network, host, limit, remove_network, sent_bytes
from table import machine, parser
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.lab.predict.calibration import calibrate
from paceline.lab.predict.communication import parse_link
from paceline.lab.predict.prediction import predict

RANKS, CALIBRATED = (1, 2, 4, 8), 2
EVERY = 4
EPOCH_STEPS, EPOCHS = 12, 2
PORT = 29_431
SIZES = {"100mbit": 1 << 19, "1gbit": 1 << 21, "10gbit": 1 << 23}
"""Parameters of the model, by the link's rate: 2, 8 and 32 MiB."""
LINKS = {"100mbit": "100Mbit,0.3ms", "1gbit": "1Gbit,0.15ms", "10gbit": "10Gbit,0.1ms"}
"""What a user would type: the rate, and half of what ping says."""


@dataclass(frozen=True)
class StandIn:
    """A model that sleeps, by layer."""

    grains: int
    sizes: tuple[float, ...]
    """Share of the model's parameters."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


STAND_INS = {
    "even": StandIn(8, (0.25,) * 4, (0.012,) * 4, (0.024,) * 4),
    "uneven": StandIn(
        12,
        (0.0625, 0.1875, 0.0625, 0.375, 0.1875, 0.125),
        (0.004, 0.010, 0.004, 0.008, 0.006, 0.004),
        (0.008, 0.020, 0.010, 0.016, 0.008, 0.004),
    ),
    "ragged": StandIn(
        10,
        (0.3125, 0.09375, 0.25, 0.0625, 0.28125),
        (0.006, 0.003, 0.009, 0.003, 0.006),
        (0.012, 0.008, 0.018, 0.006, 0.012),
    ),
}
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.shape, ctx.backward_s = weight.shape, backward_s
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.backward_s)
        return gradients[0], torch.full(ctx.shape, 1e-3), None, None


class Layer(nn.Module):
    def __init__(self, numbers: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers // 64, 64))
        self._times = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x, self.weight, *self._times)
        return result


class Model(nn.Module):
    def __init__(self, numbers: int, stand_in: StandIn) -> None:
        super().__init__()
        layers = zip(stand_in.sizes, stand_in.forward_s, stand_in.backward_s, strict=True)
        self.layers = nn.ModuleList(Layer(round(size * numbers), *times) for size, *times in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Sleeper(paceline.Task):
    """Trains the model above, and notes when each step has ended."""

    def __init__(self, numbers: int, stand_in: StandIn) -> None:
        self.numbers, self.stand_in = numbers, stand_in
        self.ends_s: list[float] = []
        self.sent: list[int] = []
        self.cpu_s: list[float] = []

    def model(self) -> nn.Module:
        return Model(self.numbers, self.stand_in)

    def train_data(self) -> Any:
        return TensorDataset(torch.zeros(EPOCH_STEPS * 2 * self.stand_in.grains, 1))

    def loss(self, model: nn.Module, grain: paceline.Grain) -> Any:
        (x,) = grain
        return model(x.requires_grad_()).sum() + 1.0, len(x)

    def after_step(self, model: nn.Module, step: Any, grains: list[paceline.Grain]) -> None:
        self.ends_s.append(time.monotonic())
        self.sent.append(sent_bytes())
        self.cpu_s.append(time.process_time())


# -- one rank ----------------------------------------------------------------------------------------------------------


def train(rank: int, rate: str, way: str, stand_in: StandIn, out: Path) -> None:
    """Train in this process, which is one of the ranks; stamps go beside the run folder."""
    task = Sleeper(SIZES[rate], stand_in)
    fixed = {"device": "cpu", "threads": 1, "loggers": (), "progress": "none", "workers": 0, "level": 0}
    fixed |= {"optimizer": "sgd", "momentum": 0.0, "lr": 1e-6, "global_batch": 2 * stand_in.grains}
    fixed["grains"] = stand_in.grains
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


def fork_ranks(ranks: int, rate: str, ways: Sequence[str], stand_in: StandIn, folder: Path, port: int) -> None:
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
                train(rank, rate, way, stand_in, run_of(folder, rate, way, ranks))
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
    """Return the truth of the slowest rank, which an epoch waits for: ranks that step apart may be ahead of it."""
    run = run_of(folder, rate, way, ranks)
    everyone, sent, cpu_s = [], [], []
    for rank in range(ranks):
        stamps = json.loads(run.with_name(f"{run.name}-rank{rank}.json").read_text())
        intervals = []
        for epoch in range(EPOCHS):  # but for the first steps of an epoch, and twice as many of the run
            for first in range(epoch * EPOCH_STEPS + EVERY - 1, (epoch + 1) * EPOCH_STEPS - 1, EVERY):
                if first < 2 * EVERY - 1:
                    continue
                end = first + EVERY
                intervals.append((stamps["ends_s"][end] - stamps["ends_s"][first]) / EVERY)
                sent.append((stamps["sent"][end] - stamps["sent"][first]) / EVERY)
                cpu_s.append((stamps["cpu_s"][end] - stamps["cpu_s"][first]) / EVERY)
        everyone.append(intervals)
    slowest = max(everyone, key=statistics.median)
    median, spread = statistics.median(slowest), statistics.pstdev(slowest)
    return Truth(rate, way, ranks, median, spread, statistics.mean(sent), ranks * statistics.mean(cpu_s))


def measure(rates: Sequence[str], ways: Sequence[str], ranks: Sequence[int], stand_in: StandIn, folder: Path) -> None:
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
                fork_ranks(size, rate, chosen, stand_in, folder, PORT + 20 * number)
                load = os.getloadavg()[0]
                for way in chosen:
                    truth = truth_of(folder, rate, way, size)
                    line = json.dumps({**asdict(truth), "load": load})
                    print(line, flush=True)
                    with (folder / "truth.jsonl").open("a") as file:
                        file.write(line + "\n")
    finally:
        remove_network(max(ranks))


# -- beside the prediction ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    rate: str
    way: str
    ranks: int
    low_s: float
    predicted_s: float
    high_s: float
    measured_s: float
    is_calibration: bool
    """The row's own run was used: it says how well the model fits, not how well it predicts."""
    cores: float = 0.0
    """Share of this machine's cores that the ranks took: near 1 the truth is of the cores, which all hosts share."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


def compare(rates: Sequence[str], ways: Sequence[str], folder: Path) -> Iterator[Line]:
    """Predict from the runs of 1 and 2 ranks, and look at the truth of all."""
    for rate in rates:
        link = parse_link(LINKS[rate])
        for way in ways:
            candidates = [run_of(folder, rate, each, 1) for each in (way, "grad exact", "grad fast")]
            alone = next(run for run in candidates if run.exists())
            calibration = calibrate([alone, run_of(folder, rate, way, CALIBRATED)], link)
            for row in predict(calibration, ranks=RANKS[1:], between=link).rows:
                step = row.step_s
                truth = truth_of(folder, rate, way, row.ranks)
                known = row.ranks <= CALIBRATED
                yield Line(
                    rate,
                    way,
                    row.ranks,
                    step.low,
                    step.value,
                    step.high,
                    truth.step_s,
                    known,
                    truth.cpu_s / truth.step_s / (os.cpu_count() or 1),
                )


def show(lines: Sequence[Line], as_json: bool) -> None:
    if as_json:
        for line in lines:
            print(json.dumps({**asdict(line), "error": line.error, "is_inside": line.is_inside}))
        return
    print(machine())
    print("| link | way | ranks | predicted ms (interval) | measured ms | error | inside | cores busy |")
    print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        low, value, high, measured = (
            f"{1e3 * each:.0f}" for each in (line.low_s, line.predicted_s, line.high_s, line.measured_s)
        )
        inside = "yes" if line.is_inside else "**no**"
        ranks = f"{line.ranks}{' (fit)' if line.is_calibration else ''}"
        error, cores = f"{100 * line.error:+.1f} %", f"{100 * line.cores:.0f} %"
        cells = (line.rate, line.way, ranks, f"{value} ({low} to {high})", measured, error, inside, cores)
        print(f"| {' | '.join(cells)} |")
    judged = [line for line in lines if not line.is_calibration]
    if judged:
        worst = max(judged, key=lambda line: abs(line.error))
        inside = sum(line.is_inside for line in judged)
        width = max((line.high_s - line.low_s) / 2 / line.predicted_s for line in judged)
        mean = statistics.mean(abs(line.error) for line in judged)
        print(
            f"predicted rows: {len(judged)}; error {100 * mean:.1f} % mean, {100 * abs(worst.error):.1f} % worst "
            f"({worst.rate} {worst.way} {worst.ranks}); inside the interval {inside}; half-width at most "
            f"{100 * width:.0f} %"
        )


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rates", default="100mbit,1gbit")
    arguments.add_argument("--ways", default=",".join(WAYS))
    arguments.add_argument("--ranks", default=",".join(map(str, RANKS)), help="to measure")
    arguments.add_argument("--stand-in", choices=STAND_INS, default="even")
    arguments.add_argument("--folder", type=Path, default=Path("/tmp/paceline-predict"))
    arguments.add_argument("--only", choices=("measure", "compare"))
    given = arguments.parse_args()
    rates, ways, ranks = given.rates.split(","), given.ways.split(","), [int(word) for word in given.ranks.split(",")]
    if given.only != "compare":
        if os.geteuid() != 0:
            raise SystemExit("predict.py makes network namespaces and limits them with tc: run it as root")
        measure(rates, ways, ranks, STAND_INS[given.stand_in], given.folder)
    if given.only != "measure":
        show(list(compare(rates, ways, given.folder)), given.json)


if __name__ == "__main__":
    main()
