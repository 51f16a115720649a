"""Translation from files at the speed of the bare step: whole epochs, beside the run's own batches from device memory.

    python benchmarks/gpu/translation_epochs.py [--budgets 25000 100000] [--epochs 4] [--pairs 60000] [--json]
    python benchmarks/gpu/translation_epochs.py --device cpu --size tiny --budgets 400 --pairs 200 --vocabulary 500

Two files of made-up words, with the lengths of `translation.py`, are read, encoded, dealt into batches of so many
padded tokens and trained on by `level: auto`, as `paceline train translation` does. Then the batches of the last epoch,
kept on the device, are trained on again by the same engine. Rates are of source and target tokens without padding.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from device import add_device, announce, wait
from table import Row, parser, show
from translation import spread

from paceline.data.grain import Batch, Grain
from paceline.observe.clock import elapsed
from paceline.recipes.translation.settings import TranslationSettings
from paceline.recipes.translation.task import Translation
from paceline.train.feed import Feed
from paceline.train.loop import train
from paceline.train.probe import Probe, unkept
from paceline.train.run import Run, open_run
from paceline.world.discover.environment import discover
from paceline.world.start import start

ROUNDS = 3


def write_text(folder: Path, pairs: int, vocabulary: int) -> tuple[Path, Path]:
    """Write two files; marks take some of the vocabulary."""
    dice = np.random.default_rng(0)
    paths = folder / "train.one", folder / "train.other"
    for path, lengths in zip(paths, spread(pairs, dice), strict=True):
        words = [f"w{number}" for number in range(vocabulary - 8)]
        ids = dice.integers(0, len(words), int(lengths.sum()))
        ends = np.cumsum(lengths)
        rows = (" ".join(words[word] for word in row) for row in np.split(ids, ends[:-1]))
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return paths


class Epochs(Probe):
    """Times epochs, and then the batches of the last one from device memory."""

    def __init__(self, epochs: int, loss: Any) -> None:
        super().__init__()
        self._epochs, self._loss = epochs, loss
        self.walls_s: list[float] = []
        self.waits_s: list[float] = []
        self.bare_s: list[float] = []
        self._batches: list[Batch] = []
        self._steps = 0

    def begin(self, run: Run, feed: Feed) -> None:
        self._run, self._feed = run, feed
        self._at, self._clock = self._now()

    def after_step(self, num_steps: int, grains: Sequence[Grain]) -> None:
        self._steps += 1
        if len(self.walls_s) == self._epochs - 1:
            count = sum(int((grain["truth"] != 0).sum()) for grain in grains) if len(grains) > 1 else 1.0
            size = sum(len(grain) for grain in grains)
            self._batches.append(Batch(0, 0, len(grains), size, count, list(grains), own_count=count))
        if self._steps < (self._feed.num_steps(len(self.walls_s)) or 0):
            return
        now, clock = self._now()
        self.walls_s.append(now - self._at)
        self.waits_s.append(elapsed(self._clock, clock)["data"])
        print(f"epoch {len(self.walls_s)}: {self.walls_s[-1]:.3f} s, {self._steps} steps", file=sys.stderr, flush=True)
        self._steps = 0
        if len(self.walls_s) == self._epochs:
            self._replay()
            self.is_over = True
        self._at, self._clock = self._now()

    def _replay(self) -> None:
        engine = self._run.stepper
        for number in range(ROUNDS + 1):
            began, _ = self._now()
            for batch in self._batches:
                engine.step(partial(self._loss, engine.model), batch)
            now, _ = self._now()
            if number:  # the first is for whatever must settle
                self.bare_s.append(now - began)
                print(f"bare: {self.bare_s[-1]:.3f} s", file=sys.stderr, flush=True)

    def _now(self) -> tuple[float, dict[str, float]]:
        wait(self._run.link.device)
        self._run.clock.lap("compute")
        return time.perf_counter(), self._run.clock.read()


def measure(options: Any, budget: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = write_text(Path(folder), options.pairs, options.vocabulary)
        config = TranslationSettings(
            train_source=(source,),
            train_target=(target,),
            tokens="words",
            vocabulary=options.vocabulary,
            size=options.size,
            batch_cost=budget,
            epochs=options.epochs + 1,
            device=options.device,
            level=options.level if options.level == "auto" else int(options.level),
            progress="lines",
        )
        task = Translation()
        probe = Epochs(options.epochs, task.loss)
        link = start(discover({}), device=options.device)
        train(open_run(task, unkept(config, 10**6), link, probe=probe))
        tokens = task.train_data().total_length
    case = f"{budget:,} padded tokens"
    settled = probe.walls_s[1:] or probe.walls_s  # the first has what is set up once
    bare, whole = tokens / statistics.median(probe.bare_s), tokens / statistics.median(settled)
    slowest = tokens / max(settled)
    print(f"{case}: bare {bare:,.0f}, from files {whole:,.0f} tokens/s", file=sys.stderr, flush=True)
    return [
        Row(f"bare step, {case}", "rate", bare, "tokens/s"),
        Row(f"from files, {case}", "rate", whole, "tokens/s", "bare step", whole / bare),
        Row(f"from files, {case}", "slowest epoch", slowest, "tokens/s", "bare step", slowest / bare),
        Row(f"from files, {case}", "data wait", 100 * sum(probe.waits_s[1:]) / max(1e-9, sum(settled)), "%"),
    ]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--size", default="base", choices=["tiny", "small", "base", "big"])
    arguments.add_argument("--vocabulary", type=int, default=32_768)
    arguments.add_argument("--budgets", type=int, nargs="+", default=[25_000, 100_000])
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--pairs", type=int, default=60_000)
    arguments.add_argument("--level", default="auto")
    add_device(arguments)
    options = arguments.parse_args()
    announce(options.device)
    rows = [row for budget in options.budgets for row in measure(options, budget)]
    show(rows, f"Transformer {options.size} trained from files", options.json)


if __name__ == "__main__":
    main()
