"""Continual learning with Mammoth's options: its command lines run here as they are.

    python examples/continual/main.py --model derpp --dataset seq-mnist --buffer_size 500 --minibatch_size 10 \\
        --batch_size 10 --n_epochs 1 --lr 0.03 --alpha 1 --beta 0.5 --base_path data -O 2 --distributed=dp

It only translates, and runs `paceline train continual`, which it prints first.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.main import main as paceline

SAME = {
    "dataset": "dataset",
    "buffer_size": "buffer-size",
    "minibatch_size": "minibatch-size",
    "batch_size": "global-batch",
    "n_epochs": "epochs",
    "n_iters": "steps",
    "lr": "lr",
    "optimizer": "optimizer",
    "optim_wd": "weight-decay",
    "optim_mom": "momentum",
    "alpha": "alpha",
    "beta": "beta",
    "e_lambda": "e-lambda",
    "gamma": "gamma",
    "softmax_temp": "temperature",
    "fitting_epochs": "fitting-epochs",
    "backbone": "backbone",
    "base_path": "data-root",
    "seed": "seed",
    "code_optimization": "level",
}
"""Theirs -> ours, where the value stays as it is."""
BACKBONES = {"mnistmlp": "mlp"}
MOST_TASKS = 1000


def parser() -> argparse.ArgumentParser:
    """Mammoth's options, as far as they mean something here."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", required=True, help="er, derpp, sgd, ...")
    options.add_argument("--dataset", required=True, help="seq-mnist, seq-cifar10, ...")
    options.add_argument("--model_config", choices=("default", "best"), default="default")
    options.add_argument("--code_optimization", "-O", type=int, choices=(0, 1, 2, 3), default=0)
    options.add_argument("--distributed", choices=("no", "dp", "ddp"), default="no")
    options.add_argument("--savecheck", choices=("last", "task"), help="which checkpoints are kept")
    options.add_argument("--loadcheck", type=Path, help="a run, or one of its checkpoints, to go on from")
    options.add_argument("--permute_classes", type=int, choices=(0, 1), default=0)
    options.add_argument("--debug_mode", type=int, choices=(0, 1), default=0)
    for name in SAME:
        if name not in ("dataset", "code_optimization"):
            options.add_argument(f"--{name}")
    return options


def translate(argv: Sequence[str]) -> list[str]:
    """The words of `paceline train continual` that mean the same."""
    given = parser().parse_args(argv)
    words = ["train", "continual", "--method", given.model]
    for theirs, ours in SAME.items():
        value = getattr(given, theirs)
        if value is not None:
            words += [f"--{ours}", BACKBONES.get(str(value), str(value))]
    if given.model_config == "best":
        words.append("--best-args")
    if given.permute_classes:
        words.append("--permute-classes")
    if given.debug_mode:
        words += ["--limit-batches", "5"]
    if given.distributed != "no":
        words += ["--procs", "auto"]  # DataParallel there; here always one process per GPU
    if given.savecheck == "task":
        words += ["--keep-last", str(MOST_TASKS)]
    elif given.savecheck == "last":
        words += ["--keep-last", "1"]
    if given.loadcheck is not None:
        is_run = (given.loadcheck / "run.json").exists()
        words += ["--out", str(given.loadcheck), "--resume", "auto"] if is_run else ["--resume", str(given.loadcheck)]
    return words


if __name__ == "__main__":
    translated = translate(sys.argv[1:])
    print("paceline", shlex.join(translated), flush=True)
    sys.exit(paceline(translated))
