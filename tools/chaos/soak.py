"""Long runs, compressed: many thousand tiny steps with saves and validations; nothing may grow or slow down.

Eight hours at four steps a second are 115,200 steps.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tools.chaos.campaign import Outcome, Trial
from tools.chaos.kills import Round, start
from tools.chaos.processes import Nursery
from tools.chaos.runs import leftovers, status_of
from tools.chaos.tasks import SAMPLES_FILE, Variant, pack

DEADLINE_S = 900.0
SHORT, LONG, NUM_SHORT = 1200, 15_000, 6
"""Steps of the first cases, and of those after them."""
_LOOP = (
    *("--epochs", "1000000", "--save-every-steps", "250", "--save-every-epochs", "100", "--val-every-steps", "400"),
    *("--val-every-epochs", "500", "--global-batch", "8", "--optimizer", "sgd", "--lr", "0.01", "-O0"),
)
VARIANTS: tuple[tuple[Variant, int], ...] = (
    (Variant("plain", (*_LOOP, "--workers", "0"), task="Soaked"), 1),
    (Variant("ranks", (*_LOOP, "--workers", "0", "--ema", "0.9"), task="Soaked"), 2),
    (Variant("workers", (*_LOOP, "--workers", "1"), task="Soaked"), 1),
    (Variant("average", (*_LOOP, "--workers", "0", "--reduce", "param", "--sync-step", "5"), task="Soaked"), 2),
    (Variant("packed", (*_LOOP, "--workers", "0"), task="SoakedPacked"), 1),
    (Variant("shards", (*_LOOP, "--workers", "0", "--shard", "full"), task="Soaked"), 2),
)


@dataclass(frozen=True)
class Sample:
    """What a rank takes at one moment."""

    step: int
    seconds: float
    """Of the processor: those of a clock tell how busy the machine is."""
    rss_kb: int
    descriptors: int
    threads: int
    files: int
    """In the run folder."""


def read_samples(path: Path) -> list[Sample]:
    return [Sample(**json.loads(line)) for line in path.read_text().splitlines()]


def growth(samples: Sequence[Sample]) -> list[str]:
    """Return what has grown between the second quarter of a run and its last one."""
    quarter = len(samples) // 4
    if quarter < 4:
        return [f"only {len(samples)} samples"]
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def middle(part: Sequence[Sample], name: str) -> float:
        return float(median(vars(sample)[name] for sample in part))

    troubles = []
    # A best checkpoint comes later, and one is being written: two folders more are no growth.
    allowed = {"rss_kb": (1.05, 6_000.0), "descriptors": (1.0, 1.0), "threads": (1.0, 1.0), "files": (1.0, 14.0)}
    for name, (factor, more) in allowed.items():
        before, after = middle(early, name), middle(late, name)
        if after > before * factor + more:
            troubles.append(f"{name} from {before:,.0f} to {after:,.0f}")
    before, after = (median(_seconds_per_step(part)) for part in (early, late))
    # A quarter of a short run is over in seconds: what else the machine does then counts more than what has grown.
    if samples[-1].step >= LONG and after > 1.6 * before + 0.0002:
        troubles.append(f"a step from {1e3 * before:.2f} to {1e3 * after:.2f} ms")
    return troubles


def _seconds_per_step(samples: Sequence[Sample]) -> list[float]:
    pairs = itertools.pairwise(samples)
    return [(second.seconds - first.seconds) / (second.step - first.step) for first, second in pairs]


class Soak:
    """See the module."""

    name = "soak"
    counts = (SHORT, 115_200)
    mostly_waits = False

    def why_not(self) -> str | None:
        return None

    def prepare(self, folder: Path, nursery: Nursery) -> None:
        self._shared = folder
        pack(folder / "packed.hdf")

    def run(self, trial: Trial) -> Outcome:
        variant, ranks = VARIANTS[trial.index % len(VARIANTS)]
        steps = SHORT if trial.index < NUM_SHORT else LONG
        out = trial.folder / "run"
        begun = time.monotonic()
        more = ("--steps", str(steps), "--log-every", "50")
        plan = Round(ranks, ranks > 1, ())
        env = {SAMPLES_FILE: str(trial.folder / "samples")}
        processes = start(trial.nursery, variant, plan, trial.folder, "soak", out, self._shared, *more, env=env)
        trial.nursery.wait(processes, DEADLINE_S)
        troubles = [f"left running: {line}" for line in trial.nursery.left(5.0)]
        codes = [process.code for process in processes]
        if any(code != 0 for code in codes):
            troubles.append(f"exit codes {codes}: {processes[0].err[-400:]}")
        else:
            troubles += leftovers(out)
            if status_of(out) != "finished":
                troubles.append(f"status {status_of(out)!r}")
            for rank in range(ranks):
                samples = read_samples(trial.folder / f"samples-{rank}")
                troubles += [f"rank {rank}: {trouble}" for trouble in growth(samples)]
        seconds = time.monotonic() - begun
        return trial.judged([f"{variant.name}, {steps} steps: {trouble}" for trouble in troubles], steps, seconds)
