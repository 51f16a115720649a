"""Steps that Muon and AdamW need to the same loss on translation: learning rates by one search, then three seeds each.

    python benchmarks/gpu/muon_steps.py DATA OUT [--steps 400] [--rates 0.0005 0.001 ...] [--set size=small ...]

DATA has train and val of Multi30k as .en.gz and .de.gz. Both optimizers are tried with each rate and one seed; that
with the lowest validation loss at the end is trained with three further seeds, and `paceline compare` says what the
difference is worth and how many steps it saves. All runs of a part train at once, each a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import parser

OPTIMIZERS = ("adamw", "muon")
RECIPE = {
    "size": "small",
    "vocabulary": "8000",
    "level": "2",
    "batch_cost": "8192",
    "warmup_steps": "100",
    "output_ratio": "0.01",  # losses are compared, not translations
    "save_every_epochs": "1000",
    "weight_decay": "0.01",
    "progress": "none",
    "workers": "1",
}


def start(data: Path, out: Path, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    files = {
        f"{part}_{side}": f"{part}.{name}.gz"
        for part in ("train", "val")
        for side, name in (("source", "en"), ("target", "de"))
    }
    chosen = {**RECIPE, **{name: str(data / file) for name, file in files.items()}, **settings, "out": str(out)}
    words = [sys.executable, "-m", "paceline", "train", "translation"]
    for name, value in chosen.items():
        words += [f"--{name.replace('_', '-')}", value]
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)


def wait(running: Sequence[subprocess.Popen[bytes]], out: Path) -> None:
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"runs ended with {codes}: see {out}/*.log")


def last_loss(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return float([line for line in lines if line["kind"] == "validation"][-1]["val/loss"])


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("data", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--rates", nargs="+", default=["0.0005", "0.001", "0.002", "0.004", "0.008"])
    arguments.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    options = arguments.parse_args()
    common = {"steps": str(options.steps), "val_every_steps": str(max(1, options.steps // 20))}
    common |= dict(each.split("=", 1) for each in options.set)
    began = time.monotonic()
    tried = {(name, rate): options.out / "search" / f"{name}-{rate}" for name in OPTIMIZERS for rate in options.rates}
    wait(
        [start(options.data, out, {**common, "optimizer": name, "lr": rate}) for (name, rate), out in tried.items()],
        options.out / "search",
    )
    losses = {choice: last_loss(run) for choice, run in tried.items()}
    best = {name: min(options.rates, key=lambda rate: losses[name, rate]) for name in OPTIMIZERS}
    for (name, rate), loss in losses.items():
        print(f"{name} {rate}: {loss:.4f}{'  best' if best[name] == rate else ''}", flush=True)
    print(f"search: {time.monotonic() - began:.0f} s", flush=True)
    runs = [
        (options.out / "seeds" / f"{name}-{seed}", {**common, "optimizer": name, "lr": best[name], "seed": str(seed)})
        for name in OPTIMIZERS
        for seed in (1, 2, 3)
    ]
    wait([start(options.data, out, settings) for out, settings in runs], options.out / "seeds")
    print(f"all: {time.monotonic() - began:.0f} s", flush=True)
    words = [sys.executable, "-m", "paceline", "compare", *(str(run) for run, _ in runs)]
    for more in ([], ["--json"]) if options.json else ([],):
        subprocess.run([*words, "--metric", "val/loss", "--mode", "min", "--group", "optimizer", *more], check=True)


if __name__ == "__main__":
    main()
