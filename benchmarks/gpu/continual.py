"""seq-cifar10 with ResNet-18 on one GPU: ER and DER++, strict fp32 (-O0) against bf16 and compile (-O3).

    python benchmarks/gpu/continual.py --data /path/to/cifar10_5k1k.npz [--json] [--epochs 10] [--seeds 1]

`--data` is an `.npz` with x_train, y_train, x_test, y_test, or a folder with the official archive. Best known arguments
(batch 32, replay 32, buffer 500; `best.yaml`) but fewer epochs. Seconds are of the whole run, compilation and measuring
included; the time per step is the median over steps of the last task, when everything is compiled. On the subset
accuracies are not comparable with published ones.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from table import Row, parser, show

if importlib.util.find_spec("safetensors") is None:  # nothing is saved here, so nothing of it is called
    stub: Any = types.ModuleType("safetensors.torch")
    stub.load_file, stub.SafetensorError = None, Exception
    sys.modules["safetensors"] = sys.modules["safetensors.torch"] = stub


def run(method: str, level: int, root: Path, epochs: int, seed: int, backbone: str) -> dict[str, float]:
    """One run through the whole trainer; nothing is saved."""
    from paceline.recipes.continual.settings import ContinualSettings
    from paceline.recipes.continual.task import Continual
    from paceline.train.loop import train
    from paceline.train.run import open_run
    from paceline.world.discover.environment import World
    from paceline.world.start import start

    link = start(World(0, 0, 1, 1, 0, 1, "benchmark", None), device="auto")
    settings = ContinualSettings(
        dataset="seq-cifar10",
        data_root=root,
        method=method,
        buffer_size=500,
        best_args=True,
        epochs=epochs,
        level=level,
        backbone=backbone,
        seed=seed,
        progress="none",
        loggers=(),
    )
    task = Continual()
    began = time.perf_counter()
    trainer = open_run(task, settings, link)
    times: list[tuple[int, float]] = []
    engine_step = trainer.stepper.step

    def stamped(*args: Any) -> Any:
        done = engine_step(*args)
        if link.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((task.stage, time.perf_counter()))
        return done

    trainer.stepper.step = stamped  # type: ignore[method-assign]
    train(trainer)
    last = [stamp for stage, stamp in times if stage == len(task.stream.experiences) - 1]
    gaps = [later - sooner for sooner, later in pairwise(last)] or [float("nan")]
    summary = task.results.summary()
    return {
        "seconds": time.perf_counter() - began,
        "ms": 1e3 * statistics.median(gaps),
        "class_il": summary["class_il"],
        "task_il": summary["task_il"],
        "steps": len(times),
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--levels", type=int, nargs="+", default=[0, 3])
    arguments.add_argument("--backbone", default="resnet18")
    arguments.add_argument("--methods", nargs="+", default=["er", "derpp"])
    options = arguments.parse_args()
    root = options.data.parent if options.data.is_file() else options.data
    rows: list[Row] = []
    for method in options.methods:
        before: dict[str, float] = {}
        for level in options.levels:
            found = [run(method, level, root, options.epochs, seed, options.backbone) for seed in range(options.seeds)]
            mean = {name: statistics.mean(each[name] for each in found) for name in found[0]}
            case, versus = f"{method} -O{level}", f"{method} -O{options.levels[0]}" if before else None
            for name, unit in (("seconds", "s"), ("ms", "ms/step"), ("class_il", "%"), ("task_il", "%"), ("steps", "")):
                ratio = mean[name] / before[name] if before else None
                rows.append(Row(case, name, mean[name], unit, versus, ratio))
            before = before or mean
            print(case, mean, file=sys.stderr, flush=True)
    show(rows, f"seq-cifar10, ResNet-18, buffer 500, {options.epochs} epochs per task", options.json)


if __name__ == "__main__":
    main()
