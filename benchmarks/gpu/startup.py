"""How long a run takes to its first step, what a run without a level reaches, and how fp16 begins; on one GPU.

    python benchmarks/gpu/startup.py [first auto fp16 phases] [--batch 64] [--utterances 1024] [--epochs 6] [--json]

All parts run `paceline train asr` as a user would type it, in processes of their own, on packed noise of the lengths of
read speech (1.5 to 16.7 s, mean 12.5).

`first`: seconds from the start of the process to the end of the first step (its line is in `metrics.jsonl`), cold (no
Triton kernel and no choice is kept) and warm (the same again), of QuartzNet 15x5, and cold of Jasper 10x5dr.
`auto`: the same run with no level typed and at `-O4`, utterances per second of the epochs after the first.
`fp16`: `--precision fp16`, utterances per second of the first two epochs, and the number of steps that were skipped.
`phases`: where the time of a start goes, in this process: run it alone.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()  # before anything is imported

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import Row, machine, parser, show

RATE, SHORTEST, LONGEST = 16000, 1.5, 16.7
PARTS = ("first", "auto", "fp16", "phases")
FIRST_LIMIT_S = 300.0


def speech(folder: Path, number: int) -> Path:
    """Noise of the lengths of read speech, with letters at 14 a second, packed."""
    import numpy as np
    import soundfile

    random = np.random.default_rng(0)
    noise = random.integers(-8000, 8000, round(LONGEST * RATE) + number, dtype=np.int16)
    letters, lines = np.array(list("abcdefghijklmnopqrstuvwxyz")), []
    for index in range(number):
        seconds = round(SHORTEST + (LONGEST - SHORTEST) * random.beta(4, 1.5), 2)
        soundfile.write(folder / f"{index}.wav", noise[index : index + round(seconds * RATE)], RATE, subtype="PCM_16")
        text = "".join(random.choice(letters, round(14 * seconds)))
        lines.append(json.dumps({"audio_filepath": f"{index}.wav", "duration": seconds, "text": text}))
    manifest = folder / "train.json"
    manifest.write_text("\n".join(lines))
    subprocess.run([sys.executable, "-m", "paceline", "pack", manifest, folder / "train.h5"], check=True)
    return folder / "train.h5"


def words(options: Any, data: Path, out: Path, *more: str) -> list[str]:
    """Return the command of a training run."""
    plain = ["--train-manifest", data, "--global-batch", options.batch, "--out", out, "--device", options.device]
    quiet = ["--progress", "lines", "--mode", "train"]
    return [sys.executable, "-m", "paceline", "train", "asr", *map(str, [*plain, *quiet, *more])]


def first_step(command: list[str], out: Path, caches: Path) -> float:
    """Return the seconds until the first step is written down; the run is ended then."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(caches / "triton"), "XDG_CACHE_HOME": str(caches / "user")}
    began, log = time.perf_counter(), out.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            while time.perf_counter() - began < FIRST_LIMIT_S:
                if '"kind": "step"' in _text(out / "metrics.jsonl"):
                    return time.perf_counter() - began
                if process.poll() is not None:
                    break
                time.sleep(0.02)
            raise RuntimeError(f"no first step: {log.read_text()[-3000:]}")
        finally:
            process.terminate()
            process.wait()
            print(log.read_text()[-1500:] if "-v" in sys.argv else "", end="", file=sys.stderr)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def first(options: Any, data: Path, folder: Path) -> Iterator[Row]:
    for network in options.networks:
        for state in ("cold", "warm"):
            caches, out = folder / f"caches-{network}", folder / f"{network}-{state}"
            command = words(options, data, out, "--network", network, "--epochs", "2", "--log-every", "1")
            seconds = first_step(command, out, caches)
            print(f"{network}, {state}: first step after {seconds:.1f} s", file=sys.stderr, flush=True)
            yield Row(f"{network}, {state}", "first step", seconds, "s")


def run(command: list[str], out: Path) -> list[dict[str, Any]]:
    """Train to the end; return the records of its epochs."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    chosen = [line for line in done.stdout.splitlines() if line.startswith(("auto is", "-O4 is", "CUDA graphs"))]
    print("\n".join(chosen), file=sys.stderr, flush=True)
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "epoch"]


def rate(record: dict[str, Any]) -> float:
    """Return the utterances per second of an epoch, set-up not counted."""
    seconds = {name: value for name, value in record["seconds"][0].items() if name != "setup"}
    return float(record["samples"] / sum(seconds.values()))


def auto(options: Any, data: Path, folder: Path) -> Iterator[Row]:
    rates = {}
    for name, more in {"-O4": ["-O4"], "no level": []}.items():
        out = folder / f"rate{name.replace(' ', '')}"
        epochs = run(
            words(options, data, out, "--network", options.networks[0], "--epochs", str(options.epochs), *more), out
        )
        later = [rate(record) for record in epochs[1:]]
        rates[name] = sorted(later)[len(later) // 2]
        print(f"{name}: {rates[name]:,.0f} utterances/s", file=sys.stderr, flush=True)
    yield Row("-O4", "rate", rates["-O4"], "utterances/s")
    yield Row("no level", "rate", rates["no level"], "utterances/s", "-O4", rates["no level"] / rates["-O4"])


def fp16(options: Any, data: Path, folder: Path) -> Iterator[Row]:
    out = folder / "fp16"
    more = ["--network", options.networks[0], "--epochs", "3", "--precision", "fp16"]
    epochs = run(words(options, data, out, *more), out)
    rates = [rate(record) for record in epochs]
    skipped = sum(record["skipped"] for record in epochs)
    line = ", ".join(f"{each:,.0f}" for each in rates)
    print(f"fp16: {line} utterances/s, skipped {skipped}", file=sys.stderr, flush=True)
    yield Row("fp16, epoch 2", "rate", rates[1], "utterances/s")
    yield Row("fp16, epoch 1", "rate", rates[0], "utterances/s", "epoch 2", rates[0] / rates[1])
    yield Row("fp16", "skipped", float(skipped), "steps")


def phases(options: Any, data: Path, folder: Path) -> Iterator[Row]:
    """In this process: imports, CUDA, and the parts of the set-up."""
    marks: list[tuple[str, float]] = []
    last = BEGAN

    def mark(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        marks.append((name, now - last))
        last = now

    import torch

    mark("import torch")
    from paceline.recipes.speech.settings import AsrSettings
    from paceline.recipes.speech.task import Asr
    from paceline.train.autotune import autotuner, timing
    from paceline.train.loop import train
    from paceline.train.run import open_run
    from paceline.world.discover.environment import discover
    from paceline.world.start import start

    mark("import paceline")
    if options.device == "cuda":
        torch.zeros(1, dtype=torch.float32, device="cuda").add_(1)
        torch.cuda.synchronize()
        mark("CUDA")

    def timed(module: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            mark(f"until {name}")
            try:
                return original(*args, **kwargs)
            finally:
                mark(name)

        setattr(module, name, wrapper)

    for module, name in (
        (timing, "compile_kernels"),
        (timing, "try_out"),
        (autotuner, "costly_shapes"),
        (autotuner, "record_shapes"),
    ):
        timed(module, name)
    settings = AsrSettings(
        train_manifest=(data,),
        network=options.networks[0],
        global_batch=options.batch,
        steps=1,
        max_seconds=None,
        validation=False,
        loggers=(),
        progress="lines",
        device=options.device,
    )
    trainer = open_run(Asr(), settings, start(discover({}), device=options.device))
    mark("trainer")
    train(trainer)
    mark("first step and the end")
    for name, seconds in marks:
        yield Row(name, "start", seconds, "s")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("parts", nargs="*", default=["first", "auto", "fp16"], help=f"some of {', '.join(PARTS)}")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--networks", nargs="+", default=["quartznet15x5", "jasper10x5dr"])
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--utterances", type=int, default=1024)
    arguments.add_argument("--epochs", type=int, default=6)
    arguments.add_argument("-v", action="store_true", help="show the output of the runs")
    options = arguments.parse_args()
    print(machine(), flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        data = speech(Path(folder), options.utterances)
        for part in options.parts:
            with contextlib.suppress(KeyboardInterrupt):
                rows += globals()[part](options, data, Path(folder))
    show(rows, "the start of a run", options.json)


if __name__ == "__main__":
    main()
