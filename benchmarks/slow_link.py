"""Training over a slow link: 4 hosts with 100 Mbit/s each, a model of 5 M parameters, 50 steps between syncs.

The hosts are network namespaces on one bridge; `tc tbf` limits both directions of each one's interface. Needs root, and
says so. Every case runs in the same processes, one after the other, in interleaved rounds; medians are shown.

    none               no communication: what the others are measured against
    ddp, ddp bf16      torch's DistributedDataParallel; the second with gradients rounded on the wire by a hook
    post-local sgd     torch's PostLocalSGDOptimizer with its PeriodicModelAverager
    per tensor         one blocking all-reduce per parameter, as RETURNN's param reduction and Accelerate's LocalSGD do
    paceline ...       `reduce: param` with sync_state keep (the others average no optimizer state either)

A step is forward, backward and an SGD update on the CPU; what is left of `--step-ms` is slept, as if a device computed
and the host were free (`--step-ms 0`: nothing is). `steps/s` is over whole intervals in steady state. `bytes` are what
the interface of one host has sent, per step. `blocked` is what a sync costs the training thread: calls that were
timed, or for PostLocalSGD the step with the sync over the median step. DDP is timed over few steps, because each takes
seconds; final losses (on points of their own, after a last sync) are of runs of `--loss-steps` steps with the limit
lifted and a learning rate that falls to 0.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from slow_hosts import INTERFACE, NETWORK, build_network, host, limit, remove_network, sent_bytes
from table import Row, parser, show
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from paceline.data.grain import Batch, Grain
from paceline.train.engine import Engine
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start

RANKS, EVERY, WARM = 4, 50, 50
WIDTHS = (320, 1500, 1500, 1500, 10)  # 5.0 M parameters
SAMPLES, BATCH, LR, MOMENTUM = 4096, 8, 0.005, 0.9
PORT = 29_417


# -- what is trained ---------------------------------------------------------------------------------------------------


class Data:
    """Points and noisy values of a function of them; each rank draws its own, and there are always new ones."""

    def __init__(self, rank: int) -> None:
        random = torch.Generator().manual_seed(1)
        self._teacher = torch.randn(WIDTHS[0], WIDTHS[-1], generator=random) * 2 / WIDTHS[0] ** 0.5
        self._rank = rank
        self.x, self.y = self._draw(2**40, SAMPLES)  # to judge the result by

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._draw(RANKS * step + self._rank, BATCH)

    def _draw(self, seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(number, WIDTHS[0], generator=random)
        return x, torch.tanh(x @ self._teacher) + torch.randn(number, WIDTHS[-1], generator=random)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


class Case:
    """One way of training: `step` by `step`, then `finish`, which brings the ranks together."""

    def __init__(self, data: Data, link: Link) -> None:
        self.data, self.link = data, link
        self.model = make_model()
        self.sync_s: list[float] = []
        self.prepare()

    def prepare(self) -> None:
        self.runner: nn.Module = self.model
        self.optimizer: Any = make_sgd(self.model)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        x, y = self.data.batch(number)
        (self.runner(x) - y).square().mean().backward()
        self.optimizer.step()
        self.sync(number)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def sync(self, number: int) -> None:
        """Between steps."""

    def finish(self) -> None:
        """After the last."""

    def close(self) -> None:
        """Let go of hooks and groups."""


class Ddp(Case):
    def prepare(self) -> None:
        self.runner = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = make_sgd(self.model)


class DdpBf16(Ddp):
    """torch's own hook for bf16 refuses CPU tensors; this is what it does."""

    def prepare(self) -> None:
        super().prepare()
        assert isinstance(self.runner, DistributedDataParallel)
        self.runner.register_comm_hook(None, _round_and_reduce)


def _round_and_reduce(_, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and wants no text
    half = bucket.buffer().div(RANKS).bfloat16()
    work = dist.all_reduce(half, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


class PostLocal(Case):
    def prepare(self) -> None:
        self.runner = self.model
        averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
        self.optimizer = PostLocalSGDOptimizer(make_sgd(self.model), averager)
        self._times: list[float] = []

    def step(self, number: int) -> None:
        began = time.perf_counter()
        super().step(number)
        took = time.perf_counter() - began
        if number % EVERY == 0:  # its averager counts from 0
            self.sync_s.append(took - (statistics.median(self._times) if self._times else 0.0))
        else:
            self._times.append(took)

    def finish(self) -> None:
        _per_tensor(self.model)


class PerTensor(Case):
    def sync(self, number: int) -> None:
        if (number + 1) % EVERY == 0:
            began = time.perf_counter()
            _per_tensor(self.model)
            self.sync_s.append(time.perf_counter() - began)

    def finish(self) -> None:
        _per_tensor(self.model)


@torch.no_grad()
def _per_tensor(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= RANKS


class Paceline(Case):
    settings: dict[str, Any] = {}  # noqa: RUF012

    def prepare(self) -> None:
        self.runner = self.model
        self.engine = Engine(
            link=self.link, level=0, reduce="param", sync_step=EVERY, sync_state="keep", device="cpu", **self.settings
        )
        self.optimizer = make_sgd(self.model)
        self.engine.prepare(self.model, self.optimizer)

    def step(self, number: int) -> None:
        grain = Grain(self.data.batch(number), self.link.world.rank, np.arange(BATCH))
        batch = Batch(0, number, RANKS, RANKS * BATCH, RANKS * BATCH, [grain], own_count=BATCH)
        before = self.engine.prepared.strategy.blocked_s  # type: ignore[attr-defined]
        averages = self.engine.prepared.strategy.num_averages  # type: ignore[attr-defined]
        self.engine.step(self._sum, batch)
        self._blocked = getattr(self, "_blocked", 0.0) + self.engine.prepared.strategy.blocked_s - before  # type: ignore[attr-defined]
        if self.engine.prepared.strategy.num_averages > averages:  # type: ignore[attr-defined]
            self.sync_s.append(self._blocked)
            self._blocked = 0.0

    def _sum(self, grain: Grain) -> tuple[torch.Tensor, int]:
        x, y = grain
        return (self.model(x) - y).square().sum() / WIDTHS[-1], len(x)

    def finish(self) -> None:
        self.engine.sync()

    def close(self) -> None:
        self.engine.release()


class Overlapped(Paceline):
    settings = {"sync_overlap": EVERY}  # noqa: RUF012


class OverlappedInt8(Paceline):
    settings = {"sync_overlap": EVERY, "wire": "int8"}  # noqa: RUF012


CASES: dict[str, type[Case]] = {
    "none": Case,
    "ddp": Ddp,
    "ddp bf16": DdpBf16,
    "post-local sgd": PostLocal,
    "per tensor": PerTensor,
    "paceline blocking": Paceline,
    "paceline overlapped": Overlapped,
    "paceline overlapped int8": OverlappedInt8,
}


# -- one rank ----------------------------------------------------------------------------------------------------------


def measure(case: Case, warm: int, timed: int, step_s: float) -> dict[str, float]:
    """Steps per second, bytes per step, own computing time of a step, seconds per sync."""

    def run(number: int) -> float:
        began = time.perf_counter()
        blocked = sum(case.sync_s)
        case.step(number)
        took = time.perf_counter() - began - (sum(case.sync_s) - blocked)
        time.sleep(max(0.0, step_s - took))
        return took

    for number in range(warm):
        run(number)
    case.link.barrier()
    before, sent, syncs = time.perf_counter(), sent_bytes(), len(case.sync_s)
    own = [run(warm + number) for number in range(timed)]
    took, sent = time.perf_counter() - before, sent_bytes() - sent
    case.link.barrier()
    blocked = case.sync_s[syncs:]
    return {
        "steps/s": timed / took,
        "bytes/step": sent / timed,
        "step ms": 1e3 * statistics.median(own),
        "blocked s": statistics.median(blocked) if blocked else 0.0,
    }


def final_loss(case: Case, steps: int) -> float:
    for number in range(steps):
        case.set_rate(LR * (1 - number / steps))
        case.step(number)
    case.finish()
    with torch.no_grad():
        return float((case.model(case.data.x) - case.data.y).square().mean())


def rank_main(rank: int, options: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    world = World(rank, 0, RANKS, 1, rank, RANKS, "benchmark", f"{NETWORK}.1:{PORT}")
    link = start(world, device="cpu", threads=1, timeout_s=600.0)
    data = Data(rank)
    with link:
        for name, kind in CASES.items():  # with the limit lifted
            case = kind(data, link)
            loss = final_loss(case, options["loss_steps"])
            case.close()
            tell(link, {"case": name, "loss": loss})
        tell(link, {"ready": True})
        if rank == 0:
            sys.stdin.readline()  # the limit is on
        link.barrier()
        for number in range(options["rounds"]):
            for name, kind in CASES.items():
                is_ddp = isinstance(kind, type) and issubclass(kind, Ddp)
                warm, timed = (1, options["ddp_steps"]) if is_ddp else (WARM, options["intervals"] * EVERY)
                case = kind(data, link)
                found = measure(case, warm, timed, options["step_ms"] / 1e3)
                case.finish()
                case.close()
                everyone = link.gather_objects(found)
                tell(link, {"case": name, "round": number, "ranks": everyone})


def tell(link: Link, message: dict[str, Any]) -> None:
    if link.is_first:
        print(json.dumps(message), flush=True)


# -- the hosts ---------------------------------------------------------------------------------------------------------


def run_hosts(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Messages of the first rank."""
    text = json.dumps(options)
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host(rank), sys.executable, __file__, "--rank", str(rank), "--options", text],
            stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    first = ranks[0]
    assert first.stdout is not None
    assert first.stdin is not None
    try:
        for line in first.stdout:
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "ready" in message:
                limit(RANKS, options["rate"])
                first.stdin.write("\n")
                first.stdin.flush()
            else:
                yield message
        if any(process.wait() for process in ranks):
            raise SystemExit("a rank failed")
    finally:
        for process in ranks:
            process.kill()


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rate", default="100mbit")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--intervals", type=int, default=3, help=f"timed intervals of {EVERY} steps")
    arguments.add_argument("--ddp-steps", type=int, default=4)
    arguments.add_argument("--loss-steps", type=int, default=400)
    arguments.add_argument("--step-ms", type=float, default=60.0)
    arguments.add_argument("--rank", type=int, help="(started by the script itself)")
    arguments.add_argument("--options")
    given = arguments.parse_args()
    if given.rank is not None:
        rank_main(given.rank, json.loads(given.options))
        return
    if os.geteuid() != 0:
        raise SystemExit("slow_link.py makes network namespaces and limits them with tc: run it as root")
    options = {
        name: getattr(given, name) for name in ("rate", "rounds", "intervals", "ddp_steps", "loss_steps", "step_ms")
    }
    remove_network(RANKS)
    build_network(RANKS)
    losses: dict[str, float] = {}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    try:
        for message in run_hosts(options):
            name = message["case"]
            if "loss" in message:
                losses[name] = message["loss"]
                print(f"final loss: {name}: {losses[name]:.5f}", file=sys.stderr)
                continue
            for metric in message["ranks"][0]:
                found[name][metric].append(statistics.mean(rank[metric] for rank in message["ranks"]))
            print(f"round {message['round'] + 1}: {name}: {found[name]['steps/s'][-1]:.3g} steps/s", file=sys.stderr)
    finally:
        remove_network(RANKS)
    medians = {
        name: {metric: statistics.median(values) for metric, values in case.items()} for name, case in found.items()
    }
    title = f"{RANKS} hosts at {given.rate}, {EVERY} steps between syncs, {given.rounds} rounds"
    show(rows(medians, losses), title, given.json)


def rows(medians: dict[str, dict[str, float]], losses: dict[str, float]) -> Iterator[Row]:
    for name, case in medians.items():
        yield Row(name, "speed", case["steps/s"], "steps/s", "none", case["steps/s"] / medians["none"]["steps/s"])
        fewer = medians["ddp"]["bytes/step"] / case["bytes/step"] if case["bytes/step"] else None
        yield Row(name, "sent per step", case["bytes/step"] / 1e6, "MB", "ddp (times fewer)", fewer)
        yield Row(name, "blocked per sync", case["blocked s"], "s")
        yield Row(name, "step itself", case["step ms"], "ms")
        yield Row(name, "final loss", losses[name], "", "ddp", losses[name] / losses["ddp"])


if __name__ == "__main__":
    main()
