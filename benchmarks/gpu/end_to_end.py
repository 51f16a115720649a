"""A whole run at `-O4` from packed audio, beside the bare step; and whether it learns real speech as plain bf16 does.

    python benchmarks/gpu/end_to_end.py rate [--batch 64] [--steps 160] [--utterances 1024] [--network quartznet15x5]
    python benchmarks/gpu/end_to_end.py curve --data .../librispeech [--steps 500] [--csv curve.csv]

`rate`: utterances of 16.7 s are packed by `paceline pack`; workers read and collate them, the GPU makes features,
masks and the step. The bare step is the same engine on one grain that lies on the GPU already, front end included.
`curve`: real speech, packed, trained on at `-O4` and three times (three seeds) at `-O2`; the losses go to a CSV, and
`-O4` lies within the spread if it is no further from the mean of the three than one of them is from the mean of the
others, in windows of 25 steps.
"""

from __future__ import annotations

import csv
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, machine, parser, show

from paceline.data.grain import Batch, Grain
from paceline.recipes.asr.settings import AsrSettings
from paceline.recipes.asr.task import Asr
from paceline.train.benchmark import benchmark
from paceline.train.trainer import Trainer
from paceline.world.discover.environment import discover
from paceline.world.link import Link
from paceline.world.start import start

RATE, SECONDS, NUM_LABELS = 16000, 16.7, 250
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
        "mode": "train",
        "loggers": (),
        "progress": "lines",
        "device": options.device,
        "log_every": 20,
    }
    return AsrSettings(**{**plain, **more})


def link_of(options: Any) -> Link:
    return start(discover({}), device=options.device)


# -- rate --------------------------------------------------------------------------------------------------------------


def synthetic(folder: Path, number: int, seconds: float) -> Path:
    """Noise, and letters to go with it, packed."""
    random = np.random.default_rng(0)
    some = [random.integers(-8000, 8000, round(seconds * RATE), dtype=np.int16) for _ in range(16)]
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    lines = []
    for index in range(number):
        soundfile.write(folder / f"{index}.wav", np.roll(some[index % 16], index), RATE, subtype="PCM_16")
        text = "".join(random.choice(letters, NUM_LABELS))
        lines.append(json.dumps({"audio_filepath": f"{index}.wav", "duration": seconds, "text": text}))
    manifest = folder / "train.json"
    manifest.write_text("\n".join(lines))
    return pack(manifest, folder / "train.h5")


def bare(task: Asr, config: AsrSettings, link: Link, num_steps: int) -> float:
    """Utterances per second of the step alone, set up as the run would be, on one grain that is on the device."""
    trainer = Trainer(task, config.model_copy(update={"progress": "none"}), link)
    feed = trainer._feed(0, trainer.stages[0])
    if config.level == 4:
        trainer._tune(feed)
    engine = trainer.engine
    [grain] = feed.read([(0, 0)])
    feed.close()
    batch = Batch(0, 0, 1, len(grain), len(grain), [Grain(grain.data, 0, grain.samples)], own_count=len(grain))

    def run(number: int) -> float:
        if link.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(number):
            engine.step(lambda each: task.loss(engine.model, each), batch)
        if link.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run(4)
    return len(grain) * num_steps / run(num_steps)


def rate(options: Any) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        data = synthetic(Path(folder), options.utterances, options.seconds)
        link = link_of(options)
        timed = {"bench_steps": options.steps, "bench_start": options.steps // 4}
        config = settings(options, data, level=options.level, **timed)
        alone = bare(Asr(), config, link, max(8, options.steps // 4))
        print(f"bare step: {alone:,.0f} utterances/s", flush=True)
        gc.collect()  # its recorded graphs hold as much memory as those of the run
        torch.cuda.empty_cache()
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
    Trainer(Asr(), settings(options, options.data, **more), link_of(options)).fit()


def losses(options: Any, folder: Path, ways: list[tuple[int, int]]) -> list[list[float]]:
    """Of each (level, seed), all trained at the same time."""
    running = []
    for level, seed in ways:
        out = folder / f"level{level}-seed{seed}"
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
    whole = len(curve) // WINDOW * WINDOW
    return np.asarray(curve[:whole]).reshape(-1, WINDOW).mean(1)


def distance(one: NDArray[np.float64], others: list[NDArray[np.float64]]) -> float:
    """Mean over the windows of the relative distance to the others' mean."""
    mean = np.mean(others, axis=0)
    return float(np.mean(np.abs(one - mean) / mean))


def curve(options: Any) -> list[Row]:
    ways = [(options.level, 0), *((2, seed) for seed in SEEDS)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        options.data = pack(options.data / "train.json", Path(folder) / "train.h5")
        found = losses(options, Path(folder), ways)
        print(f"{len(ways)} runs of {options.steps} steps in {time.perf_counter() - began:.0f} s", flush=True)
        log = (Path(folder) / f"level{options.level}-seed0.log").read_text().splitlines()
        print("\n".join(line for line in log if line.startswith(("-O4", "CUDA graphs"))), flush=True)
    curves = {f"-O{level} seed {seed}": values for (level, seed), values in zip(ways, found, strict=True)}
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
        f"-O{options.level} is {100 * ours_off:.2f}% off the mean of three seeds, one of them {100 * spread:.2f}% off"
        f" the others': {verdict} their spread; {100 * inside:.0f}% of {len(ours)} windows lie in between"
    )
    print("window means, ours and the three: last", [round(float(each[-1]), 2) for each in (ours, *plain)])
    return [
        Row(f"-O{options.level}", "distance", 100 * ours_off, "%", "-O2 seeds", ours_off / spread),
        Row("-O2 seeds", "distance", 100 * spread, "%"),
    ]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("part", choices=["rate", "curve", "train"])
    arguments.add_argument("--network", default="quartznet15x5")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--level", type=int, default=4)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--steps", type=int, default=160)
    arguments.add_argument("--utterances", type=int, default=1024)
    arguments.add_argument("--seconds", type=float, default=SECONDS)
    arguments.add_argument("--lr", type=float, default=0.01)
    arguments.add_argument("--data", type=Path, help="folder of librispeech with train.json; of `train`, a packed file")
    arguments.add_argument("--seed", type=int, default=0, help="of `train`, which is one run of `curve`")
    arguments.add_argument("--out", type=Path, help="run folder of `train`")
    arguments.add_argument("--csv", type=Path, default=Path("curve.csv"))
    options = arguments.parse_args()
    if options.part == "train":
        train(options)
        return
    print(machine(), flush=True)
    rows = rate(options) if options.part == "rate" else curve(options)
    show(rows, f"end to end, {options.part}", options.json)


if __name__ == "__main__":
    main()
