"""QuartzNet 15x5 in training on one GPU: the plain ways to run it beside our levels, from random data on the device.

    python benchmarks/gpu/quartznet.py [--json] [--batches 64 256] [--only bf16 O4] [--network jasper10x5dr] [--profile]
        [--ways no-turned]
    python benchmarks/gpu/quartznet.py --device cpu --network small --batches 2 --frames 160 --labels 8 --steps 1    dry

A step is forward, CTC, backward and fused AdamW on a batch of 16.7 s utterances (1,672 frames of 64 mels, lengths 70
to 100 %, 200 labels), median of 3 rounds of 8 without a pause. `bf16`, `fp16`, `bf16-compile` are loops as their user
would write them, `lightning` is its Trainer; `O0` to `O3` are our engine, and `O4` the fastest of its ways, found as a
run finds it.
`bf16-channels-last` runs convolutions as two-dimensional ones of height 1. `--profile` shows where a step goes.
A name with `@64` is for that batch alone; `O2+kernels+graphs` is a way that `O4` may choose. `--ways` runs our
levels a second time, with other kernels than those in use (`paceline.speed.layers.kernels.ways`).
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from device import Device, add_device, announce, candidate, clear, compile_kernels, is_cuda, peak_gib, wait
from table import Row, parser, show

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.optim.adamw import AdamW
from paceline.recipes.speech.fast import accelerate
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.network.encoder import Decoder, Encoder
from paceline.recipes.speech.text.ctc import ctc_loss_sum
from paceline.speed.autotune.candidates import Candidate, candidates
from paceline.speed.autotune.choice import choose
from paceline.speed.layers.kernels.ways import MEASURED, Ways, using
from paceline.train.autotune import timing
from paceline.train.task import Accelerates, Recordable, Task
from paceline.world.discover.environment import discover
from paceline.world.start import start

FRAMES, LABELS, WARM, STEPS, ROUNDS = 1672, 200, 3, 8, 3
PLAIN = ("bf16", "fp16", "bf16-compile", "lightning")


class Network(nn.Module):
    """Mels to log-probabilities."""

    def __init__(self, network: NetworkSettings) -> None:
        super().__init__()
        self.encoder = Encoder(network)
        self.decoder = Decoder(network.channels[-1], network.num_classes)

    def forward(self, mels: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        encoded, lengths = self.encoder(mels, frames)
        return self.decoder(encoded), lengths


def make_batch(
    size: int, device: Device = "cuda", seed: int = 1, longest: int = FRAMES, labels: int = LABELS
) -> dict[str, Tensor]:
    dice = torch.Generator(device).manual_seed(seed)
    frames = (longest * (0.7 + 0.3 * torch.rand(size, device=device, generator=dice))).long()
    frames[0] = longest
    return {
        "mels": torch.randn(size, 64, longest, device=device, generator=dice),
        "frames": frames,
        "text": torch.randint(0, 28, (size, labels), device=device, generator=dice),
        "labels": torch.full((size,), labels, device=device),
    }


def make_network(network: NetworkSettings, device: Device) -> Network:
    torch.manual_seed(0)
    return Network(network).to(device).train()


class Bench(Task, Accelerates, Recordable):
    """The same for our engine."""

    def __init__(self, network: NetworkSettings, device: Device = "cuda") -> None:
        super().__init__()
        self._network, self._device = network, device

    def model(self) -> nn.Module:
        return make_network(self._network, self._device)

    def loss(self, model: nn.Module, grain: Grain) -> tuple[Tensor, int]:
        log_probs, lengths = model(grain["mels"], grain["frames"])
        return ctc_loss_sum(log_probs, grain["text"], lengths, grain["labels"]), len(grain)

    def accelerate(self, model: nn.Module) -> Sequence[str]:
        assert isinstance(model, Network)
        return accelerate(model.encoder)

    def recordable(self, grain: Grain) -> Any:
        return grain.data

    def optimizer(self, groups: list[dict[str, Any]], settings: Any, device: torch.device) -> torch.optim.Optimizer:
        return AdamW(groups, lr=1e-3, fused=True)


def frames_after(network: NetworkSettings, batch: dict[str, Tensor]) -> Tensor:
    """On the host, where torch's CTC wants them."""
    return torch.tensor([network.output_length(frames) for frames in batch["frames"].tolist()])


def by_hand(
    network: NetworkSettings,
    batch: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    compiled: bool,
    channels_last: bool = False,
) -> Callable[[], None]:
    device = batch["mels"].device
    model = make_network(network, device)
    if channels_last:
        as_two_dimensional(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    target_lengths, text = batch["labels"].cpu(), batch["text"]
    frames = frames_after(network, batch)
    if compiled:
        model.compile()

    def step() -> None:
        with torch.autocast(device.type, dtype):
            log_probs, _ = model(batch["mels"], batch["frames"])
        loss = F.ctc_loss(log_probs.transpose(0, 1), text, frames, target_lengths, blank=28, zero_infinity=True)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def as_two_dimensional(model: nn.Module) -> None:
    """Convolutions over time as two-dimensional ones of height 1 on channels-last memory, the library's fast layout."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d):

            def forward(self: nn.Conv1d, x: Tensor) -> Tensor:
                y = F.conv2d(
                    x.unsqueeze(2).contiguous(memory_format=torch.channels_last),
                    self.weight.unsqueeze(2).contiguous(memory_format=torch.channels_last),
                    self.bias,
                    (1, self.stride[0]),
                    (0, int(self.padding[0])),
                    (1, self.dilation[0]),
                    self.groups,
                )
                return y.squeeze(2)

            module.forward = partial(forward, module)  # type: ignore[method-assign]


def lightning(network: NetworkSettings, size: int, device: str, sizes: tuple[int, int]) -> tuple[float, float]:
    """Milliseconds per step of its Trainer, and GiB; in a process of its own: it asks for PyTorch's older switch of
    fp32 products, which PyTorch refuses once the newer one, which the others use, has been set."""
    torch.backends.cudnn.benchmark = True
    batch = make_batch(size, device, 1, *sizes)
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    frames, lengths = frames_after(network, batch), batch["labels"].cpu()
    marks: list[float] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = make_network(network, device)

        def training_step(self, given: dict[str, Tensor], number: int) -> Tensor:
            log_probs, _ = self.network(given["mels"], given["frames"])
            return F.ctc_loss(log_probs.transpose(0, 1), given["text"], frames, lengths, blank=28, zero_infinity=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)

        def on_train_batch_end(self, *_: Any) -> None:
            wait(device)
            marks.append(time.perf_counter())

    trainer = pl.Trainer(
        accelerator="gpu" if is_cuda(device) else "cpu", devices=1, precision="bf16-mixed", max_steps=WARM + STEPS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader([batch] * (WARM + STEPS), batch_size=None)
    trainer.fit(Module(), data)
    spent = [after - before for before, after in zip(marks[WARM - 1 :], marks[WARM:], strict=False)]
    return 1e3 * statistics.median(spent), peak_gib(device)


def step_ms(step: Callable[[], object], device: Device, steps: int = STEPS) -> float:
    """One after the other, as a run has them: nobody waits for the device in between."""
    for _ in range(WARM):
        step()
    times = []
    for _ in range(ROUNDS):
        wait(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        times.append(1e3 * (time.perf_counter() - began) / steps)
    return statistics.median(times)


class Ours:
    """A step of our engine in one way."""

    def __init__(self, network: NetworkSettings, batch: dict[str, Tensor], device: str) -> None:
        self.task, self.link = Bench(network, device), start(discover({}), device=device)  # type: ignore[arg-type]
        size = len(batch["mels"])
        self.grain = Grain(batch, 0, np.arange(size))
        self.config = TrainConfig(global_batch=size, optimizer="adamw", lr=1e-3, steps=1000)

    def round(self, way: Candidate) -> Callable[[], None]:
        return timing.TimedSteps(way, self.workload())

    def workload(self) -> timing.Workload:
        return timing.Workload(self.task, self.config, self.link, self.task.model(), [self.grain])


def measure(name: str, network: NetworkSettings, size: int, options: Any) -> tuple[float, float, str]:
    """Milliseconds per step, GiB, and which way it was."""
    device, sizes = options.device, (options.frames, options.labels)
    if name == "lightning":
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            return *other.submit(lightning, network, size, device, sizes).result(), ""
    batch, chosen = make_batch(size, device, 1, *sizes), ""
    if name.startswith("O"):
        ours = Ours(network, batch, device)
        way = fastest(ours, device) if name == "O4" else candidate(name, device)
        chosen = way.name if name == "O4" else ""
        compile_kernels(way, ours.workload())
        step: Callable[[], None] = ours.round(way)
    else:
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        step = by_hand(network, batch, dtype, compiled="compile" in name, channels_last="channels" in name)
    found = step_ms(step, device, options.steps), peak_gib(device), chosen
    if options.profile and is_cuda(device):
        show_profile(step)
    return found


def fastest(ours: Ours, device: Device) -> Candidate:
    """Return what a run at `-O4` chooses. What the losers held is free again."""
    leaves_some = is_cuda(device) and bool(ours.task.accelerate(ours.task.model()))
    ways = candidates([0, 1, 2, 3], has_kernels=is_cuda(device), can_graph=is_cuda(device), leaves_some=leaves_some)
    workload = ours.workload()

    def seconds(way: Candidate, limit_s: float) -> float:
        found = timing.step_seconds(way, limit_s, workload=workload)
        print(f"  {way.name}: {1e3 * found:.4g} ms", file=sys.stderr, flush=True)
        return found

    began = time.perf_counter()
    compile_kernels(ways[0], workload)
    choice = choose(ways, seconds, partial(timing.in_turns, workload=workload), lambda: time.perf_counter() - began)
    print(f"  contest: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print("\n".join([choice.line("measured"), *choice.notes]), file=sys.stderr, flush=True)
    clear(device)
    return choice.candidate


def show_profile(step: Callable[[], None]) -> None:
    """Kernels of one step by the time they take."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in seen.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time
            calls[event.name] += 1
    print(f"one step: {sum(spent.values()) / 1e3:.2f} ms in {sum(calls.values())} kernels")
    for name, microseconds in spent.most_common(30):
        print(f"  {microseconds / 1e3:7.3f} ms  x{calls[name]:4d}  {name[:100]}")


def main() -> None:
    arguments = parser(__doc__ or "")
    add_device(arguments)
    arguments.add_argument("--network", default="quartznet15x5")
    arguments.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    arguments.add_argument("--only", nargs="+", default=[*PLAIN, "O0", "O1", "O2", "O3", "O4"])
    arguments.add_argument("--frames", type=int, default=FRAMES)
    arguments.add_argument("--labels", type=int, default=LABELS)
    arguments.add_argument("--steps", type=int, default=STEPS, help="of a round")
    arguments.add_argument("--profile", action="store_true")
    names = [field.name for field in fields(Ways)]
    arguments.add_argument("--ways", nargs="+", default=[], choices=[*names, *(f"no-{name}" for name in names)])
    options = arguments.parse_args()
    announce(options.device)
    network = read_network(options.network)
    trial = replace(MEASURED, **{name.removeprefix("no-"): not name.startswith("no-") for name in options.ways})
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    rows = []
    best_plain: dict[int, float] = {}
    for wanted in options.only:
        name, _, one = wanted.partition("@")
        sizes = [int(one)] if one else options.batches
        both = [MEASURED, trial] if trial != MEASURED and name.startswith("O") else [MEASURED]
        for size, ways in product(sizes, both):
            clear(options.device)
            try:
                with using(ways):
                    ms, peak, way = measure(name, network, size, options)
            except Exception as error:  # the others still count
                print(f"{name}, batch {size}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
                continue
            rate = size / ms * 1e3
            if ways != MEASURED:
                way += f" with {', '.join(options.ways)}"
            if name in PLAIN:
                best_plain[size] = max(best_plain.get(size, 0.0), rate)
            print(f"{name} batch {size}: {ms:.2f} ms, {rate:.0f}/s, {peak:.1f} GiB {way}", file=sys.stderr, flush=True)
            case = f"{'-' if name.startswith('O') else ''}{name}, batch {size}{', new' if ways != MEASURED else ''}"
            rows += [
                (size, Row(case, "step", ms, "ms")),
                (size, Row(case, "peak memory", peak, "GiB")),
                (size, Row(case, "rate", rate, "utterances/s")),
            ]
    shown = [
        replace(row, versus="best plain way", ratio=row.value / best_plain[size])
        if row.metric == "rate" and size in best_plain
        else row
        for size, row in rows
    ]
    show(shown, f"{options.network} in training on one {options.device.upper()}", options.json)


if __name__ == "__main__":
    main()
