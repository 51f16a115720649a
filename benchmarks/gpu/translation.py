"""The Transformer in training on one GPU: the plain ways to run it beside our levels, from sentences on the device.

    python benchmarks/gpu/translation.py [--json] [--budgets 25000 100000] [--only bf16 O4] [--size big] [--profile]
        [--compile-only]
    python benchmarks/gpu/translation.py --device cpu --size tiny --budgets 300 --batches 1 --vocabulary 100    dry run

A step is forward, cross-entropy with smoothed labels, backward and fused AdamW on a batch of so many source and target
tokens, padding counted. Lengths are spread as in newspapers (log-normal, 27 words on average, targets 0.8 to 1.3 of
it); `NUM_BATCHES` batches follow each other, each of sentences of like length. Rates are of source and target tokens
without padding. `bf16` is a loop as its user would write it, `bf16-compile` compiled once for all shapes, `bf16-graphs`
compiled with CUDA graphs, `hf` padded batches of as many sentences as come, in any order. `head` has the last layer and
the loss in chunks. `O0` to `O3` are our engine on padded batches; `O4` is the fastest of its ways on packed ones, in
the shapes that a run has (`O2+kernels+graphs` and the like: one of them). `--profile` shows where a step's time goes,
against the least that its products (at the rate of large ones) and its bytes (at the memory's rate) would take.
`--compile-only` fills the caches of torch and Triton for later, and times nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from device import add_device, announce, candidate, clear, compile_kernels, is_cuda, peak_gib, wait
from table import Row, parser, show

from paceline.config.settings import TrainConfig
from paceline.data.grain import Grain
from paceline.layers import linear_cross_entropy
from paceline.recipes.translation.data.packed import PackedLadder
from paceline.recipes.translation.data.pairs import Pair
from paceline.recipes.translation.fast import fused
from paceline.recipes.translation.network.shape import SIZES, Shape
from paceline.recipes.translation.network.transformer import Transformer
from paceline.recipes.translation.task import smoothed_loss
from paceline.recipes.translation.text.vocabulary import BEGIN, END, PAD
from paceline.speed.autotune.candidates import Candidate, candidates
from paceline.speed.autotune.choice import choose
from paceline.speed.layers.kernels.ways import MEASURED, using
from paceline.train.autotune import timing
from paceline.train.task import Accelerates, Recordable, Task
from paceline.world.discover.environment import discover
from paceline.world.start import start

NUM_BATCHES, WARM, ROUNDS, SMOOTHING = 8, 2, 3, 0.1
PLAIN = ("bf16", "bf16-compile", "bf16-graphs", "hf")
OURS = ("head", "O0", "O2", "O3", "O4")


@dataclass(frozen=True)
class Sentences:
    """A padded batch on the device."""

    source: Tensor
    target: Tensor
    truth: Tensor
    num_tokens: int
    """Of source and target, without padding."""
    num_target: int

    pairs: list[Pair]
    """The same, not padded."""

    @property
    def data(self) -> dict[str, Tensor]:
        return {"source": self.source, "target": self.target, "truth": self.truth}


def spread(number: int, dice: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths of sources and targets."""
    source = np.clip(np.round(dice.lognormal(np.log(24), 0.5, number)), 2, 120).astype(int)
    target = np.clip(np.round(source * dice.uniform(0.8, 1.3, number)), 2, 140).astype(int)
    return source, target


def cut(budget: int, number: int, *, is_sorted: bool, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield lengths of batches: of like lengths within the budget, or as many sentences as are in it on average."""
    dice = np.random.default_rng(seed)
    source, target = spread(max(64, NUM_BATCHES * budget // 20), dice)
    if not is_sorted:
        each = max(1, budget // int(source.max() + target.max()))
        for place in range(number):
            part = slice(place * each, (place + 1) * each)
            yield source[part], target[part]
        return
    order = np.argsort(np.maximum(source, target), kind="stable")
    batches, first = [], 0
    for end in range(1, len(order) + 1):
        part = order[first : end + 1]
        if end == len(order) or len(part) * (source[part].max() + target[part].max()) > budget:
            batches.append(order[first:end])
            first = end
    for place in dice.permutation(len(batches))[:number]:
        yield source[batches[place]], target[batches[place]]


def make_batches(
    budget: int, number: int, vocabulary: int, device: str, *, is_sorted: bool, multiple: int
) -> list[Sentences]:
    dice = torch.Generator().manual_seed(1)
    made = []
    for source, target in cut(budget, number, is_sorted=is_sorted):
        longest = [-(-int(each.max()) // multiple) * multiple for each in (source, target)]
        rows = [torch.randint(END + 5, vocabulary, (len(source), length), generator=dice) for length in longest]
        for ids, lengths in zip(rows, (source, target), strict=True):
            ids[torch.arange(ids.shape[1]) >= torch.from_numpy(lengths)[:, None]] = PAD
        truth = rows[1]
        begun = torch.cat([torch.full((len(truth), 1), BEGIN), truth[:, :-1]], 1)
        begun[truth == PAD] = PAD
        counts = int(source.sum() + target.sum()), int(target.sum())
        sides = [
            [row[: size - 1].numpy().astype(np.int32) for row, size in zip(ids, lengths, strict=True)]
            for ids, lengths in zip(rows, (source, target), strict=True)
        ]  # the last token of a sentence is its mark
        pairs = [Pair(*both) for both in zip(*sides, strict=True)]
        made.append(Sentences(rows[0].to(device), begun.to(device), truth.to(device), *counts, pairs))
    return made


def make_network(shape: Shape, vocabulary: int, device: str) -> Transformer:
    torch.manual_seed(0)
    return Transformer(shape, vocabulary).to(device).train()


class Bench(Task, Accelerates, Recordable):
    """The same for our engine."""

    def __init__(self, shape: Shape, vocabulary: int, device: str) -> None:
        super().__init__()
        self._made = shape, vocabulary, device

    def model(self) -> nn.Module:
        return make_network(*self._made)

    def loss(self, model: nn.Module, grain: Grain) -> tuple[Tensor, Tensor]:
        truth, packings = grain["truth"], grain.data.get("packings")
        total = model(grain["source"], grain["target"], truth, SMOOTHING, packings)
        return total, (truth != PAD).sum()

    def accelerate(self, model: nn.Module) -> Sequence[str]:
        assert isinstance(model, Transformer)
        return fused.accelerate(model)

    def recordable(self, grain: Grain) -> Any:
        return grain.data

    def optimizer(self, groups: list[dict[str, Any]], settings: Any, device: torch.device) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-4, fused=True)


def by_hand(name: str, shape: Shape, vocabulary: int, device: str) -> Callable[[Sentences], None]:
    """Return a step on a batch, compiled once for batches of any size."""
    model = make_network(shape, vocabulary, device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    # Functions of tensors alone: a compiler would guard whatever else they are given, and compile again.
    losses: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]] = {
        "plain": lambda source, target, truth: (
            smoothed_loss(model(source, target), truth, SMOOTHING),
            (truth != PAD).sum(),
        ),
        "head": lambda source, target, truth: linear_cross_entropy(
            model.hidden(source, target), model.head_weight, truth, label_smoothing=SMOOTHING, ignore_index=PAD
        ),
    }
    loss = losses["head" if name == "head" else "plain"]
    if name.endswith("compile"):
        loss = torch.compile(loss, dynamic=True)
    elif name == "bf16-graphs":
        loss = torch.compile(loss, dynamic=True, mode="reduce-overhead")

    def step(batch: Sentences) -> None:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            total, count = loss(batch.source, batch.target, batch.truth)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()

    return step


def round_ms(round_: Callable[[], None], device: str) -> float:
    """Return the milliseconds of a round of steps: one after the other, as a run has them."""
    times = []
    for number in range(WARM + ROUNDS):
        wait(device)
        began = time.perf_counter()
        round_()
        wait(device)
        if number >= WARM:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def ours(name: str, shape: Shape, vocabulary: int, device: str, batches: Sequence[Sentences]) -> tuple[Any, str]:
    """Return a round of steps of our engine, and which way it is."""
    task, link = Bench(shape, vocabulary, device), start(discover({}), device=device)  # type: ignore[arg-type]
    is_packed = name == "O4" or "kernels" in name
    data = [PackedLadder()(each.pairs) if is_packed else each.data for each in batches]
    rows = [np.arange(len(each.pairs)) for each in batches]
    grains = [Grain(each, 0, ids).to(link.device) for each, ids in zip(data, rows, strict=True)]
    config = TrainConfig(global_batch=len(grains[0]), steps=1000)
    workload = timing.Workload(task, config, link, task.model(), grains)
    if name != "O4":
        way = candidate(name, device)
        compile_kernels(way, workload)
        return timing.TimedSteps(way, workload), ""
    ways = candidates([0, 1, 2, 3], has_kernels=is_cuda(device), can_graph=is_cuda(device), leaves_some=False)
    began = time.perf_counter()
    compile_kernels(ways[0], workload)

    def seconds(way: Candidate, limit_s: float) -> float:
        found = timing.step_seconds(way, limit_s, workload=workload)
        print(f"  {way.name}: {1e3 * found:.4g} ms a round", file=sys.stderr, flush=True)
        return found

    choice = choose(ways, seconds, partial(timing.in_turns, workload=workload), lambda: time.perf_counter() - began)
    print(f"  contest: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print("\n".join([choice.line("measured"), *choice.notes]), file=sys.stderr, flush=True)
    return timing.TimedSteps(choice.candidate, workload), choice.candidate.name


PARTS = {
    "products": ("nvjet", "gemm", "cutlass", "splitK"),
    "attention": ("_attend", "flash", "sdpa", "fmha"),
    "dropout, residual, norm": ("_add_norm", "layer_norm", "dropout", "GammaBeta"),
    "loss": ("_losses", "SoftMax", "nll_loss"),
    "embedding": ("_embed", "_sum_pieces", "_add_tokens", "embedding"),
    "sums over rows, ReLU": ("_sums", "_sum_parts", "reduce_kernel"),
    "update, sums and checks of gradients": ("multi_tensor_apply", "FusedAdam"),
}
"""Kernels by what their names contain; what is in none is copies, fills and the like."""
PRODUCTS_PER_S, BYTES_PER_S = 788e12, 4.3e12
"""Of an H200, measured: large products in bf16, and reading and writing large tensors."""


def floor_ms(shape: Shape, vocabulary: int, batch: Sentences) -> dict[str, float]:
    """Return the least milliseconds of the parts of a step: the arithmetic, and activations read and written once."""
    width, num_target = shape.width, batch.num_target
    num_source = batch.num_tokens - num_target
    inner = 2 * width * shape.ffn_width
    weights = num_source * (shape.encoder_layers * (4 * width**2 + inner) + shape.decoder_layers * 2 * width**2)
    weights += num_target * (shape.decoder_layers * (6 * width**2 + inner) + width * vocabulary)
    rows = 2 * num_source * shape.encoder_layers + 3 * num_target * shape.decoder_layers
    attended = num_source * shape.encoder_layers + 2 * num_target * shape.decoder_layers
    parameters = sum(parameter.numel() for parameter in Transformer(shape, vocabulary).parameters())
    row_bytes = 2 * width
    many_bytes = {
        "dropout, residual, norm": rows * row_bytes * (4 + 5),
        "attention": attended * row_bytes * (4 + 8),
        "loss": num_target * vocabulary * 2 * 2,
        "sums over rows, ReLU": (num_source * shape.encoder_layers + num_target * shape.decoder_layers)
        * 2
        * (3 * shape.ffn_width + 3 * width),
        "embedding": batch.num_tokens * width * (4 + 2 + 2 + 2 + 4 + 4),
        "update, sums and checks of gradients": parameters * (4 + 12 + 4 + 28 + 6),
    }
    return {
        "products": 1e3 * 6 * weights / PRODUCTS_PER_S,
        **{name: 1e3 * number / BYTES_PER_S for name, number in many_bytes.items()},
    }


def show_profile(step: Callable[[], None], shape: Shape, vocabulary: int, batches: Sequence[Sentences]) -> None:
    """Kernels of a round, by the time they take, and the parts of a step beside the least that they would take."""
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
    number = len(batches)
    print(f"{sum(spent.values()) / 1e3 / number:.2f} ms in {sum(calls.values()) // number} kernels a step")
    for name, microseconds in spent.most_common(30):
        print(f"  {microseconds / 1e3 / number:7.3f} ms  x{calls[name] / number:6.1f}  {name[:100]}")
    floors = [floor_ms(shape, vocabulary, batch) for batch in batches]
    rest = sum(spent.values())
    print(f"{'part of a step':40s} {'ms':>8s} {'floor':>8s}")
    for part, words in PARTS.items():
        taken = sum(value for name, value in spent.items() if _part_of(name) == part)
        rest -= taken
        least = statistics.mean(floor[part] for floor in floors)
        print(f"{part:40s} {taken / 1e3 / number:8.3f} {least:8.3f}  {', '.join(words)}")
    print(f"{'copies, fills and the rest':40s} {rest / 1e3 / number:8.3f}")


def _part_of(kernel: str) -> str | None:
    return next((part for part, words in PARTS.items() if any(word in kernel for word in words)), None)


def measure(name: str, shape: Shape, options: Any, budget: int, plain: Callable[[Sentences], None] | None) -> list[Row]:
    device, vocabulary = options.device, options.vocabulary
    multiple = 1 if name in ("bf16", "hf", "head") else 8
    batches = make_batches(budget, options.batches, vocabulary, device, is_sorted=name != "hf", multiple=multiple)
    tokens = sum(each.num_tokens for each in batches)
    case = f"{'-' if name.startswith('O') else ''}{name}, {budget:,} padded tokens"
    way, began = "", time.perf_counter()
    if plain is None:
        round_, way = ours(name, shape, vocabulary, device, batches)
    else:

        def round_() -> None:
            for batch in batches:
                plain(batch)

    round_()
    wait(device)
    print(f"{case}: ready in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if options.compile_only:
        return []
    ms = round_ms(round_, device)
    rate, of_target = 1e3 * tokens / ms, 1e3 * sum(each.num_target for each in batches) / ms
    print(f"{case}: {rate:,.0f} tokens/s, of target {of_target:,.0f} {way}", file=sys.stderr, flush=True)
    if options.profile and is_cuda(device):
        show_profile(round_, shape, vocabulary, batches)
    padded = sum(each.source.numel() + each.target.numel() for each in batches)
    if name == "O4" or "kernels" in name:
        packed = [PackedLadder()(each.pairs) for each in batches]
        padded = sum(len(each["source"]) + len(each["target"]) for each in packed)
    rows = [
        Row(case, "step", ms / len(batches), "ms"),
        Row(case, "padding", 100 * (1 - tokens / padded), "%"),
        Row(case, "rate of target", of_target, "tokens/s"),
        Row(case, "rate", rate, "tokens/s"),
    ]
    if is_cuda(device):
        rows.insert(1, Row(case, "peak memory", peak_gib(device), "GiB"))
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--size", default="base", choices=["tiny", "small", "base", "big"])
    arguments.add_argument("--vocabulary", type=int, default=32_768)
    arguments.add_argument("--budgets", type=int, nargs="+", default=[25_000, 100_000])
    arguments.add_argument("--batches", type=int, default=NUM_BATCHES, help="different ones, one after the other")
    arguments.add_argument("--only", nargs="+", default=[*PLAIN, *OURS])
    add_device(arguments)
    arguments.add_argument("--ways", nargs="+", default=[], choices=["scores", "packed", "added_norm"])
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--compile-only", action="store_true", help="one round of each way, nothing is timed")
    options = arguments.parse_args()
    announce(options.device)
    shape = SIZES["transformer", options.size]
    found: dict[int, dict[str, list[Row]]] = {budget: {} for budget in options.budgets}
    for name in options.only:
        clear(options.device)
        plain = None if name.startswith("O") else by_hand(name, shape, options.vocabulary, options.device)
        for budget in options.budgets:
            try:
                with using(replace(MEASURED, **dict.fromkeys(options.ways, True))):
                    found[budget][name] = measure(name, shape, options, budget, plain)
            except Exception as error:  # the others still count
                print(f"{name}, {budget}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        del plain
    rows = [row for each in found.values() for row in beside_best(each)]
    show(rows, f"Transformer {options.size} in training on one {options.device.upper()}", options.json)


def beside_best(found: dict[str, list[Row]]) -> list[Row]:
    """Return all rows, rates beside that of the best plain way, whichever came first."""
    rates = [row.value for name in PLAIN for row in found.get(name, []) if row.metric == "rate"]
    return [
        replace(row, versus="best plain way", ratio=row.value / max(rates)) if row.metric == "rate" and rates else row
        for rows in found.values()
        for row in rows
    ]


if __name__ == "__main__":
    main()
