"""What keeping the replay buffer right on several ranks costs, and how fast a step of experience replay is alone.

    python benchmarks/recipes/continual/replay.py [--json] [--steps 300] [--ranks 1 2 4] [--data-root data] [--no-step]

Synchronisation alone: draw, observe and prefetch of a buffer in the middle of its stream, on gloo over loopback,
against an all-gather of the whole batch and of the whole buffer in every step, which is how one would do it by hand.
Bytes are those that one rank sends, averaged over steps and ranks. Share of a step: microseconds over those of a whole
training step (ER) on as many ranks.

One process on seq-mnist (batch 10, replay 10, buffer 500): a step of ours against a plain loop as continual-learning
libraries write it (a buffer of float32 examples, one Python call per stored example, `loss.item()` in every step).
Mammoth e75a491 itself was measured on 2 cores of such a machine at 12 s for 6,000 steps, 2 ms a step.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from table import Row, parser, show

SHAPES = {
    "seq-mnist MLP": {
        "shape": (1, 28, 28),
        "batch": 10,
        "replay": 10,
        "capacity": 500,
        "seen": 30_000,
        "stage": 12_000,
    },
    "seq-cifar10": {
        "shape": (3, 32, 32),
        "batch": 32,
        "replay": 32,
        "capacity": 500,
        "seen": 250_000,
        "stage": 500_000,
    },
}
ROUNDS = 3
WHOLE_RUN = 6000
"""Steps of one pass over MNIST: items are admitted ever more rarely."""


def timed(step: Callable[[int], None], num_steps: int) -> float:
    """Microseconds per step, the least of some rounds: others on the machine only ever add."""
    found = []
    for number in range(ROUNDS):
        began = time.perf_counter()
        for index in range(num_steps):
            step(number * num_steps + index)
        found.append((time.perf_counter() - began) / num_steps * 1e6)
    return min(found)


class Counter:
    """Counts the bytes that collectives send."""

    def __init__(self) -> None:
        self.sent = 0

    def watch(self) -> None:
        from paceline.recipes.continual.replay import exchange

        to_all, to_each = exchange.to_all, exchange.to_each

        def all_counted(link: Any, rows: Any, counts: Any) -> Any:
            self.sent += max(counts) * rows.shape[1] * rows.element_size() * (link.world.size - 1)
            return to_all(link, rows, counts)

        def each_counted(rows: Any, send: Any, receive: Any, order: Any) -> Any:
            import torch.distributed as dist

            self.sent += (sum(send) - send[dist.get_rank()]) * rows.shape[1]
            return to_each(rows, send, receive, order)

        exchange.to_all, exchange.to_each = all_counted, each_counted


def one_step(buffer: Any, items: Any, batch: int, replay: int, pieces: tuple[int, ...], _: int) -> None:
    buffer.draw(replay, pieces, 1)
    buffer.observe(items, batch, pieces)
    buffer.prefetch(replay, pieces, 1)


def work(rank: int, size: int, port: int, num_steps: int, pipe: Any) -> None:
    """One rank: all cases, in the same order."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from paceline.data.partition import grain_ranks
    from paceline.recipes.continual.replay.buffer import ReplayBuffer
    from paceline.recipes.continual.replay.table import Field
    from paceline.world.discover.environment import World
    from paceline.world.start import start

    meeting = f"127.0.0.1:{port}" if size > 1 else None
    link = start(World(rank, rank, size, size, 0, 1, "benchmark", meeting), device="cpu", threads=1)
    counter = Counter()
    counter.watch()
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name, case in SHAPES.items():
        shape, batch, replay = case["shape"], case["batch"], case["replay"]
        pieces = grain_ranks(batch, max(size, 1), size)
        parts = np.array_split(np.arange(batch), len(pieces))
        mine = sum(len(part) for part, owner in zip(parts, pieces, strict=True) if owner == rank)
        fields = {"x": Field(torch.uint8, shape), "y": Field(torch.int64), "logits": Field(torch.float32, (10,))}
        items = {
            "x": torch.zeros(mine, *shape, dtype=torch.uint8),
            "y": torch.zeros(mine, dtype=torch.int64),
            "logits": torch.zeros(mine, 10),
        }
        for mode in ("replicated", "sharded"):
            buffer = ReplayBuffer(case["capacity"], fields, link, seed=1, mode=mode)  # type: ignore[arg-type]
            while buffer.num_stored < case["capacity"]:
                buffer.observe(items, batch, pieces)
            buffer.num_seen = case["seen"]  # the middle of the stream: few items are admitted

            step = partial(one_step, buffer, items, batch, replay, pieces)
            step(0)
            counter.sent = 0
            spent = timed(step, num_steps)
            found[name, mode] = (spent, counter.sent / (ROUNDS * num_steps))
            row_bytes = buffer.layout.row_bytes
        if size > 1:
            whole = torch.zeros(-(-batch // size), row_bytes, dtype=torch.uint8)
            part = torch.zeros(-(-case["capacity"] // size), row_bytes, dtype=torch.uint8)
            for other, tensor in (("all-gather of the batch", whole), ("all-gather of the buffer", part)):
                places = [torch.empty_like(tensor) for _ in range(size)]
                spent = timed(lambda _, t=tensor, p=places: dist.all_gather(p, t) and None, num_steps)  # type: ignore[misc]
                found[name, other] = (spent, tensor.numel() * (size - 1))
    pipe.send(found)
    link.close()


def whole_steps(rank: int, size: int, port: int, num_steps: int, pipe: Any) -> None:
    """Microseconds of a whole training step (ER) per rank, for both shapes, on pictures of noise."""
    import torch

    from paceline.recipes.continual import streams
    from paceline.recipes.continual.files import Labelled
    from paceline.recipes.continual.settings import ContinualSettings
    from paceline.recipes.continual.task import Continual
    from paceline.train.loop import train
    from paceline.train.run import open_run
    from paceline.world.discover.environment import World
    from paceline.world.start import start

    meeting = f"127.0.0.1:{port}" if size > 1 else None
    link = start(World(rank, rank, size, size, 0, 1, "benchmark", meeting), device="cpu", threads=1)
    found = {}
    for name, dataset in (("seq-mnist MLP", "seq-mnist"), ("seq-cifar10", "seq-cifar10")):
        case = SHAPES[name]
        noise = torch.randint(0, 256, (2000, *case["shape"]), dtype=torch.uint8)
        data = Labelled(noise, torch.arange(2000) % 10)
        kind = streams.STREAMS[dataset]
        streams.STREAMS[dataset] = type(kind)(**{**vars(kind), "read": lambda root, data=data: (data, data)})
        steps = num_steps if dataset == "seq-mnist" else 3
        settings = ContinualSettings(
            dataset=dataset,
            method="er",
            buffer_size=case["capacity"],
            global_batch=case["batch"],
            minibatch_size=case["replay"],
            grains=size,
            epochs=None,
            steps=steps + 2,
            progress="none",
            loggers=(),
            validation=False,
            num_tasks=1,
        )
        task = Continual()
        task.measures_untrained = False
        trainer = open_run(task, settings, link)
        times: list[float] = []
        engine_step = trainer.stepper.step

        def stamped(*args: Any, engine_step: Any = engine_step, times: list[float] = times) -> Any:
            done = engine_step(*args)
            times.append(time.perf_counter())
            return done

        trainer.stepper.step = stamped  # type: ignore[method-assign]
        task.after_stage = lambda model, stage: None  # type: ignore[method-assign]
        train(trainer)
        gaps = [later - sooner for sooner, later in pairwise(times[1:])]
        found[name] = 1e6 * statistics.median(gaps)
    pipe.send(found)
    link.close()


def on_ranks(size: int, target: Callable[..., None], num_steps: int) -> list[Any]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, size, port, num_steps, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return answers


def synchronisation(size: int, num_steps: int) -> list[Row]:
    ranks = on_ranks(size, work, num_steps)
    steps = on_ranks(size, whole_steps, num_steps)
    rows = []
    for name, way in ranks[0]:
        spent = max(rank[name, way][0] for rank in ranks)
        sent = statistics.mean(rank[name, way][1] for rank in ranks)
        case = f"{name}, {size} rank{'s' * (size > 1)}"
        whole = max(rank[name] for rank in steps)
        rows.append(Row(case, way, spent, "us/step"))
        rows.append(Row(case, way, sent, "bytes/step"))
        rows.append(Row(case, way, 100 * spent / whole, "% of a step"))
    return rows


def plain_loop(data: Any) -> Callable[[int], None]:
    """Experience replay as it is usually written."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from paceline.recipes.continual.backbones import MLP

    torch.manual_seed(0)
    model = MLP((1, 28, 28), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capacity, seen = 500, 0
    examples, labels = torch.zeros(capacity, 1, 28, 28), torch.zeros(capacity, dtype=torch.int64)
    loader = torch.utils.data.DataLoader(
        [(x.float() / 255, int(y)) for x, y in zip(data.x[:12_000], data.y[:12_000], strict=True)],
        batch_size=10,
        shuffle=True,
    )
    batches = iter(loader)

    def step(_: int) -> None:
        nonlocal seen, batches
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        inputs, wanted = x, y
        if seen:
            chosen = np.random.choice(min(seen, capacity), size=min(10, seen), replace=False)
            inputs = torch.cat([x, torch.stack(list(examples[chosen]))])
            wanted = torch.cat([y, labels[chosen]])
        loss = F.cross_entropy(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        for number in range(len(x)):
            slot = seen if seen < capacity else np.random.randint(0, seen + 1)
            seen += 1
            if slot < capacity:
                examples[slot] = x[number]
                labels[slot] = y[number]
        loss.item()

    return step


def ours(root: Path, num_steps: int) -> float:
    """CPU microseconds per step of the recipe, through the whole training loop."""
    from paceline.recipes.continual.settings import ContinualSettings
    from paceline.recipes.continual.task import Continual
    from paceline.train.loop import train
    from paceline.train.run import open_run
    from paceline.world.discover.environment import World
    from paceline.world.start import start

    link = start(World(0, 0, 1, 1, 0, 1, "benchmark", None), device="cpu", threads=1)
    settings = ContinualSettings(
        dataset="seq-mnist",
        data_root=root,
        method="er",
        buffer_size=500,
        minibatch_size=10,
        lr=0.1,
        steps=num_steps,
        num_tasks=1,
        epochs=None,
        progress="none",
        loggers=(),
        validation=False,
    )
    task = Continual()
    task.measures_untrained = False
    stamps: list[float] = []
    task.after_stage = lambda model, stage: stamps.append(time.process_time())  # type: ignore[method-assign]
    run = open_run(task, settings, link)
    set_up = run.stages.set_up

    def stamped(run: Any, feed: Any) -> bool:
        is_ready = set_up(run, feed)
        stamps.append(time.process_time())
        return is_ready

    run.stages.set_up = stamped  # type: ignore[method-assign]
    train(run)
    return 1e6 * (stamps[1] - stamps[0]) / num_steps


def cpu_us(step: Callable[[int], None], num_steps: int) -> float:
    began = time.process_time()
    for number in range(num_steps):
        step(number)
    return 1e6 * (time.process_time() - began) / num_steps


def alone(root: Path, num_steps: int) -> list[Row]:
    """Both in turn, the least of some rounds, in processor time: a machine with other work on it only adds to it."""
    import torch

    from paceline.recipes.continual import files

    torch.set_num_threads(1)
    step = plain_loop(files.mnist(root)[0])
    plain, mine = [], []
    for _ in range(ROUNDS):
        plain.append(cpu_us(step, num_steps))
        mine.append(ours(root, num_steps))
    case, least = "ER on seq-mnist, one process", min(mine)
    return [
        Row(case, "plain loop", min(plain), "CPU us/step"),
        Row(case, "ours", least, "CPU us/step", "plain loop", least / min(plain)),
        Row(case, "ours", least, "CPU us/step", "Mammoth, 2000 us", least / 2000),
    ]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    arguments.add_argument("--data-root", type=Path, default=Path("data"))
    arguments.add_argument("--no-step", action="store_true", help="without the step of one process on seq-mnist")
    options = arguments.parse_args()
    rows = []
    for size in options.ranks:
        rows += synchronisation(size, options.steps)
    if not options.no_step:
        rows += alone(options.data_root, WHOLE_RUN)
    show(rows, "the replay buffer on ranks, and a step of experience replay", options.json)


if __name__ == "__main__":
    main()
