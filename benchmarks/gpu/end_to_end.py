"""A whole run at `-O4` from packed audio, beside the bare step; and whether it learns real speech as plain bf16 does.

    python benchmarks/gpu/end_to_end.py epochs [--batch 64] [--epochs 20] [--speed-range 0.9 1.1 --gain-db -6 6]
    python benchmarks/gpu/end_to_end.py augment [--batch 256] [--seconds 16.7]
    python benchmarks/gpu/end_to_end.py rate [--batch 64] [--steps 160] [--utterances 1024] [--network quartznet15x5]
    python benchmarks/gpu/end_to_end.py curve --data .../librispeech [--steps 500] [--csv curve.csv]
    python benchmarks/gpu/end_to_end.py pack --utterances 2048 --packed noise.h5
    python benchmarks/gpu/end_to_end.py epochs --device cpu --level 0 --network small --batch 2 --utterances 6    (dry)

`epochs`: whole epochs of packed utterances with the lengths of real speech (LibriSpeech's train-clean-5), beside the
bare step: the padded batches of the last epoch, kept on the GPU, trained on again by the same engine. The speed of each
epoch, the time spent waiting for data, the shapes and the memory are shown.
`augment`: a batch that lies on the GPU is resampled and scaled there, beside soxr on one core.
`rate`: utterances of 16.7 s are packed by `paceline pack`; workers read and collate them, the GPU makes features,
masks and the step. The bare step is the same engine on one grain that lies on the GPU already, front end included.
`curve`: real speech, packed, trained on at `-O4` and three times (three seeds) at `-O2`; the losses go to a CSV, and
`-O4` lies within the spread if it is no further from the mean of the three than one of them is from the mean of the
others, in windows of 25 steps.
`pack`: only the packed file that `epochs` reads.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from device import announce, clear, wait
from table import Row, machine, parser, show

from paceline.data.grain import Batch, Grain, map_tensors
from paceline.observe.clock import elapsed
from paceline.recipes.speech.settings import AsrSettings
from paceline.recipes.speech.sound.augment import Augmentation, pending
from paceline.recipes.speech.sound.perturb import PerturbSettings, draw, max_stretch, perturb
from paceline.recipes.speech.task import Asr
from paceline.train import loop
from paceline.train.benchmark import benchmark
from paceline.train.feed import Feed
from paceline.train.probe import Probe, unkept
from paceline.train.run import Run, open_run
from paceline.world.discover.environment import discover
from paceline.world.link import Link
from paceline.world.start import start

RATE, SECONDS, NUM_LABELS = 16000, 16.7, 250
LABELS_PER_S = 14.6
"""Of the same utterances."""
# fmt: off
LENGTHS_S = (
    1.87, 2.77, 3.27, 3.85, 4.58, 5.04, 5.88, 6.69, 7.43, 8.02, 8.72, 9.15, 9.66, 10.05, 10.70, 10.98, 11.32, 11.76,
    12.01, 12.20, 12.39, 12.56, 12.67, 12.82, 13.00, 13.12, 13.25, 13.37, 13.48, 13.64, 13.75, 13.83, 13.91, 13.98,
    14.09, 14.16, 14.25, 14.34, 14.42, 14.52, 14.58, 14.65, 14.70, 14.80, 14.86, 14.93, 15.00, 15.08, 15.15, 15.21,
    15.28, 15.33, 15.39, 15.45, 15.49, 15.54, 15.63, 15.69, 15.78, 15.82, 15.92, 16.02, 16.20, 16.37, 16.64,
)
# fmt: on
"""Lengths of the 1,510 utterances of train-clean-5 of at most 16.7 s, at 64ths of their number."""
WINDOW = 25
SEEDS = (0, 1, 2)


def pack(manifest: Path, out: Path) -> Path:
    """As a user would, before training."""
    subprocess.run([sys.executable, "-m", "paceline", "pack", manifest, out], check=True)
    return out


def settings(options: Any, data: Path, **more: Any) -> AsrSettings:
    plain: dict[str, Any] = {
        "network": options.network,
        "train_manifest": (data,),
        "max_seconds": None,
        "global_batch": options.batch,
        "grains": 1,
        "steps": options.steps,
        "validation": False,
        "loggers": (),
        "progress": "lines",
        "device": options.device,
        "log_every": 20,
    }
    return AsrSettings(**{**plain, **more})


def link_of(options: Any) -> Link:
    return start(discover({}), device=options.device)


# -- rate --------------------------------------------------------------------------------------------------------------


def like_speech(number: int) -> NDArray[np.float64]:
    """Lengths in seconds, in an order that no sort has made, distributed as those of real speech."""
    shares = np.random.default_rng(0).permutation((np.arange(number) + 0.5) / number)
    return np.round(np.interp(shares, np.linspace(0, 1, len(LENGTHS_S)), LENGTHS_S), 2)


def synthetic(folder: Path, lengths_s: NDArray[np.float64], labels_per_s: float, packed: Path | None) -> Path:
    """Noise, and letters to go with it, packed; `packed` is made where it is missing, and kept for the next call."""
    if packed is not None and packed.exists():
        return packed
    random = np.random.default_rng(0)
    longest = random.integers(-8000, 8000, 2 * round(lengths_s.max() * RATE), dtype=np.int16)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    lines = []
    for index, seconds in enumerate(lengths_s.tolist()):
        begin, samples = 7 * index % (len(longest) // 2), round(seconds * RATE)
        soundfile.write(folder / f"{index}.wav", longest[begin : begin + samples], RATE, subtype="PCM_16")
        text = "".join(random.choice(letters, round(seconds * labels_per_s)))
        lines.append(json.dumps({"audio_filepath": f"{index}.wav", "duration": samples / RATE, "text": text}))
    manifest = folder / "train.json"
    manifest.write_text("\n".join(lines))
    if packed is None:
        return pack(manifest, folder / "train.h5")
    packed.parent.mkdir(parents=True, exist_ok=True)
    return pack(manifest, packed)


class Bare(Probe):
    """Times the step alone when the run is set up, on one grain that is on the device."""

    def __init__(self, loss: Any, num_steps: int) -> None:
        self._loss, self._num_steps = loss, num_steps
        self.rate = 0.0
        """Utterances per second."""

    def begin(self, run: Run, feed: Feed) -> None:
        engine, device = run.stepper, run.link.device
        [grain] = feed.read([(0, 0)])
        batch = Batch(0, 0, 1, len(grain), len(grain), [Grain(grain.data, 0, grain.samples)], own_count=len(grain))

        def run(number: int) -> float:
            wait(device)
            began = time.perf_counter()
            for _ in range(number):
                engine.step(partial(self._loss, engine.model), batch)
            wait(device)
            return time.perf_counter() - began

        run(4)
        self.rate = len(grain) * self._num_steps / run(self._num_steps)
        self.is_over = True


def rate(options: Any) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        lengths_s = np.full(options.utterances, options.seconds)
        data = synthetic(Path(folder), lengths_s, NUM_LABELS / options.seconds, options.packed)
        link, task = link_of(options), Asr()
        timed = {"bench_steps": options.steps, "bench_start": options.steps // 4}
        config = settings(options, data, level=options.level, **timed)
        probe = Bare(task.loss, max(8, options.steps // 4))
        loop.train(open_run(task, unkept(config.model_copy(update={"progress": "none"}), 1), link, probe=probe))
        alone = probe.rate
        print(f"bare step: {alone:,.0f} utterances/s", flush=True)
        clear(link.device)  # its recorded graphs hold as much memory as those of the run
        found = benchmark(Asr(), config, link)
        waited = found.seconds.get("data", 0.0) / found.wall_s
        print(
            f"end to end: {found.objects_per_s:,.0f} utterances/s, {100 * waited:.1f}% of it waiting for data",
            flush=True,
        )
        return [
            Row("bare step", "speed", alone, "utterances/s"),
            Row("end to end", "speed", found.objects_per_s, "utterances/s", "bare step", found.objects_per_s / alone),
            Row("end to end", "data wait", 100 * waited, "%"),
            Row("end to end", "step", 1e3 * found.step_s, "ms"),
        ]


# -- epochs ------------------------------------------------------------------------------------------------------------


class Epochs(Probe):
    """Times every epoch, keeps the batches of the last one on the device, and then trains on those again."""

    def __init__(self, epochs: int, rounds: int, loss: Any) -> None:
        self._epochs, self._rounds, self._loss = epochs, rounds, loss
        self.walls_s: list[float] = []
        self.waits_s: list[float] = []
        self.num_samples: list[int] = []
        self.bare: list[float] = []
        self.run_bytes = self.bare_bytes = 0
        self._batches: list[Batch] = []
        self._steps = self._samples = 0

    def begin(self, run: Run, feed: Feed) -> None:
        self._run, self._feed = run, feed
        self._at, self._clock = self._now()

    def after_step(self, num_steps: int, grains: Sequence[Grain]) -> None:
        self._steps += 1
        size = sum(len(grain) for grain in grains)
        self._samples += size
        if len(self.walls_s) == self._epochs - 1:
            self._batches.append(Batch(0, 0, len(grains), size, size, list(grains), own_count=size))
        if self._steps < (self._feed.num_steps(len(self.walls_s)) or 0):
            return
        now, clock = self._now()
        self.walls_s.append(now - self._at)
        self.waits_s.append(elapsed(self._clock, clock)["data"])
        self.num_samples.append(self._samples)
        print(f"epoch {len(self.walls_s)}: {self._samples / self.walls_s[-1]:,.0f} utterances/s", flush=True)
        self._steps = self._samples = 0
        if len(self.walls_s) == self._epochs - 1:
            self.run_bytes = _peak_bytes(self._run.link.device)
        if len(self.walls_s) == self._epochs:
            self._replay()
            self.is_over = True
        self._at, self._clock = self._now()

    def _replay(self) -> None:
        engine, device = self._run.stepper, self._run.link.device
        held = sum(_num_bytes(grain.data) for batch in self._batches for grain in batch.grains)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for number in range(self._rounds + 1):
            began, _ = self._now()
            for batch in self._batches:
                engine.step(partial(self._loss, engine.model), batch)
            now, _ = self._now()
            if number:  # the first is for whatever must settle
                self.bare.append(sum(batch.num_samples for batch in self._batches) / (now - began))
                print(f"bare step: {self.bare[-1]:,.0f} utterances/s", flush=True)
        self.bare_bytes = _peak_bytes(device) - held
        self.shapes = len({tuple(batch.grains[0]["audio"].shape) for batch in self._batches})

    def _now(self) -> tuple[float, dict[str, float]]:
        wait(self._run.link.device)
        self._run.clock.lap("compute")
        return time.perf_counter(), self._run.clock.read()


def _num_bytes(data: Any) -> int:
    return sum(value.nbytes for value in data.values() if isinstance(value, torch.Tensor))


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def epochs(options: Any) -> list[Row]:
    perturbed = {
        name: tuple(value)
        for name, value in (("speed_range", options.speed_range), ("gain_db", options.gain_db))
        if value is not None
    }
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        data = synthetic(Path(folder), like_speech(options.utterances), options.labels_per_s, options.packed)
        print(f"packed in {time.perf_counter() - began:.1f} s", flush=True)
        link, task = link_of(options), Asr()
        config = settings(options, data, level=options.level, augment_on=options.augment_on, **perturbed)
        config = unkept(config, options.epochs * -(-options.utterances // options.batch) + 1)
        probe = Epochs(options.epochs, 3, task.loss)
        loop.train(open_run(task, config, link, probe=probe))
        rates = [number / wall_s for number, wall_s in zip(probe.num_samples, probe.walls_s, strict=True)]
        settled = rates[1:] or rates  # the first has what is set up once
        waited = sum(probe.waits_s[1:]) / max(1e-9, sum(probe.walls_s[1:]))
        bare_rate, bare_bytes = float(np.median(probe.bare)), probe.bare_bytes
        name = "end to end" + (", perturbed" if perturbed else "")
        whole = sum(probe.num_samples[1:]) / max(1e-9, sum(probe.walls_s[1:]))
        return [
            Row("bare step", "speed", bare_rate, "utterances/s"),
            Row("bare step", "memory", bare_bytes / 2**30, "GiB"),
            Row("bare step", "shapes of an epoch", probe.shapes, ""),
            Row(name, "speed", whole, "utterances/s", "bare step", whole / bare_rate),
            Row(name, "first epoch", rates[0], "utterances/s", "bare step", rates[0] / bare_rate),
            Row(name, "slowest epoch", min(settled), "utterances/s", "fastest epoch", min(settled) / max(settled)),
            Row(name, "data wait", 100 * waited, "%"),
            Row(
                name, "memory", probe.run_bytes / 2**30, "GiB", "bare step", probe.run_bytes / max(1, probe.bare_bytes)
            ),
        ]


# -- augment -----------------------------------------------------------------------------------------------------------


def augment(options: Any) -> list[Row]:
    """Time a batch on the device (some batches without a pause), and an utterance on a core."""
    settings = PerturbSettings(speed_range=options.speed_range or (0.9, 1.1), gain_db=options.gain_db or (-6, 6))
    random, device = np.random.default_rng(0), torch.device(options.device)
    audio = random.integers(-8000, 8000, (options.batch, round(options.seconds * RATE)), dtype=np.int16)
    draws = [draw(audio.shape[1], RATE, settings, np.random.default_rng(key)) for key in range(len(audio))]
    width = round(audio.shape[1] * max_stretch(settings))
    data = {
        "audio": torch.from_numpy(audio),
        "lengths": torch.tensor([each.length for each in draws]),
        "pending": pending(draws, width, None, None),
    }
    data = map_tensors(lambda tensor: tensor.to(device), data)
    change = Augmentation.of(settings)

    def run(number: int) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(number):
            change.finish(data)
        launched = time.perf_counter() - began
        wait(device)
        return launched if number == 1 else (time.perf_counter() - began) / number

    run(3)
    launch_ms, device_ms = 1e3 * run(1), 1e3 * run(max(2, options.steps // 8))
    began = time.perf_counter()
    few = min(4, len(audio))
    for key in range(few):
        perturb(audio[key], RATE, settings, np.random.default_rng(key))
    core_ms = 1e3 * (time.perf_counter() - began) / few
    name = f"batch of {options.batch}"
    return [
        Row("soxr on a core", "utterance", core_ms, "ms"),
        Row(name, "device", device_ms, "ms", "soxr on a core", device_ms / core_ms / options.batch),
        Row(name, "host, to launch it", launch_ms, "ms"),
    ]


# -- curve -------------------------------------------------------------------------------------------------------------


def train(options: Any) -> None:
    """One curve, in a process of its own: the GPU is mostly idle while plain PyTorch launches its kernels."""
    more = {
        "out": options.out,
        "save_every_epochs": None,
        "lr": options.lr,
        "level": options.level,
        "seed": options.seed,
    }
    loop.train(open_run(Asr(), settings(options, options.data, **more), link_of(options)))


def losses(options: Any, folder: Path, ways: list[tuple[int, int]]) -> list[list[float]]:
    """Of each (level, seed), all trained at the same time."""
    running = []
    for level, seed in ways:
        out = folder / f"run{len(running)}-level{level}-seed{seed}"
        words = [
            "train",
            "--level",
            level,
            "--seed",
            seed,
            "--out",
            out,
            "--data",
            options.data,
            "--steps",
            options.steps,
        ]
        words += [
            "--network",
            options.network,
            "--batch",
            options.batch,
            "--lr",
            options.lr,
            "--device",
            options.device,
        ]
        log = (folder / f"{out.name}.log").open("w")
        running.append((out, subprocess.Popen([sys.executable, __file__, *map(str, words)], stdout=log, stderr=log)))
    for out, process in running:
        if process.wait():
            sys.exit((folder / f"{out.name}.log").read_text())
    return [
        [
            record["loss"]
            for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
            if record["kind"] == "step"
        ]
        for out, _ in running
    ]


def smooth(curve: list[float]) -> NDArray[np.float64]:
    width = min(WINDOW, len(curve))
    whole = len(curve) // width * width
    return np.asarray(curve[:whole]).reshape(-1, width).mean(1)


def distance(one: NDArray[np.float64], others: list[NDArray[np.float64]]) -> float:
    """Mean over the windows of the relative distance to the others' mean."""
    mean = np.mean(others, axis=0)
    return float(np.mean(np.abs(one - mean) / mean))


def _name(level: int | str) -> str:
    return f"-O{level}" if isinstance(level, int) else level


def curve(options: Any) -> list[Row]:
    plain_level = 2 if options.device == "cuda" else 0  # not every CPU has bf16
    ways = [(options.level, 0), *((plain_level, seed) for seed in SEEDS)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        options.data = pack(options.data / "train.json", Path(folder) / "train.h5")
        found = losses(options, Path(folder), ways)
        print(f"{len(ways)} runs of {options.steps} steps in {time.perf_counter() - began:.0f} s", flush=True)
        log = (Path(folder) / f"run0-level{options.level}-seed0.log").read_text().splitlines()
        print("\n".join(line for line in log if line.startswith(("-O4", "auto is", "CUDA graphs"))), flush=True)
    curves = {
        f"{'plain' if number else 'ours'}, {_name(level)} seed {seed}": values
        for number, ((level, seed), values) in enumerate(zip(ways, found, strict=True))
    }
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        writer.writerows([step, *values] for step, values in enumerate(zip(*curves.values(), strict=True)))
    ours, *plain = [smooth(values) for values in curves.values()]
    spread = max(distance(each, [other for other in plain if other is not each]) for each in plain)
    ours_off = distance(ours, plain)
    low, high = np.min(plain, axis=0), np.max(plain, axis=0)
    inside = float(np.mean((ours >= low) & (ours <= high)))
    verdict = "within" if ours_off <= spread else "outside"
    print(
        f"{_name(options.level)} is {100 * ours_off:.2f}% off the mean of three seeds, one of them "
        f"{100 * spread:.2f}% off the others': {verdict} their spread; "
        f"{100 * inside:.0f}% of {len(ours)} windows lie in between",
        flush=True,
    )
    last = [round(float(each[-1]), 2) for each in (ours, *plain)]
    print("window means, ours and the three: last", last, flush=True)
    return [
        Row(_name(options.level), "distance", 100 * ours_off, "%", f"-O{plain_level} seeds", ours_off / spread),
        Row(f"-O{plain_level} seeds", "distance", 100 * spread, "%"),
    ]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("part", choices=["epochs", "augment", "rate", "curve", "train", "pack"])
    arguments.add_argument("--network", default="quartznet15x5")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--level", type=lambda word: word if word == "auto" else int(word), default=4)
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--speed-range", type=float, nargs=2)
    arguments.add_argument("--gain-db", type=float, nargs=2)
    arguments.add_argument("--augment-on", default="auto", choices=["auto", "device", "workers"])
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--steps", type=int, default=160)
    arguments.add_argument("--utterances", type=int, default=1024)
    arguments.add_argument("--seconds", type=float, default=SECONDS)
    arguments.add_argument("--labels-per-s", type=float, default=LABELS_PER_S, help="of `epochs`; subwords are 3 or 4")
    arguments.add_argument("--lr", type=float, default=0.01)
    arguments.add_argument("--data", type=Path, help="folder of librispeech with train.json; of `train`, a packed file")
    arguments.add_argument("--seed", type=int, default=0, help="of `train`, which is one run of `curve`")
    arguments.add_argument("--out", type=Path, help="run folder of `train`")
    arguments.add_argument("--packed", type=Path, help="of `epochs` and `rate`: file of packed noise, made if missing")
    arguments.add_argument("--csv", type=Path, default=Path("curve.csv"))
    options = arguments.parse_args()
    if options.part == "train":
        train(options)
        return
    if options.part == "pack":
        with tempfile.TemporaryDirectory() as folder:
            synthetic(Path(folder), like_speech(options.utterances), options.labels_per_s, options.packed)
        return
    announce(options.device)
    print(machine(), flush=True)
    parts = {"epochs": epochs, "augment": augment, "rate": rate, "curve": curve}
    rows = parts[options.part](options)
    show(rows, f"end to end, {options.part}", options.json)


if __name__ == "__main__":
    main()
