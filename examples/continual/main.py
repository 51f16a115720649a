"""Continual learning with Mammoth's options: its command lines run here as they are.

    python examples/continual/main.py --model derpp --dataset seq-mnist --buffer_size 500 --minibatch_size 10 \\
        --batch_size 10 --n_epochs 1 --lr 0.03 --alpha 1 --beta 0.5 --base_path data -O 2 --distributed=dp

It only translates, and runs `paceline train continual`, which it prints first, with what has no meaning here;
`--print_command` shows that and leaves.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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
    "num_workers": "workers",
    "eval_epochs": "val-every-epochs",
    "code_optimization": "level",
}
"""Theirs -> ours, where the value stays as it is."""
BACKBONES = {"mnistmlp": "mlp"}
MOST_TASKS = 1000
WANDB = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_name": "WANDB_NAME"}
"""Theirs -> the variable from which W&B itself takes it."""
NOTHING_TO_DO = {
    "enable_other_metrics": "backward and forward transfer and forgetting are always in continual.json",
    "disable_log": "metrics.jsonl and continual.json are always written; `paceline train --out` says where",
    "results_path": "results are in the run's folder",
    "notes": "a run is named with `paceline train --exp-name`",
    "ckpt_name": "checkpoints are in the run's folder",
}
"""Accepted, as results are the same without; why nothing is done."""
REFUSED = {
    "joint": "type `--model joint`",
    "validation": "no part of the training data is held out here; all tasks are tested after each",
    "inference_only": "`paceline eval RUN` measures a trained run",
    "optim_nesterov": "there is no SGD with Nesterov's momentum here",
    "noise_rate": "labels are taken as they are",
    "label_perc": "all examples have labels here",
    "label_perc_by_class": "all examples have labels here",
    "start_from": "tasks are trained from the first one; `--loadcheck RUN` goes on where a run was",
    "stop_after": "all tasks are trained; `paceline train continual --num-tasks` cuts the stream into fewer",
    "custom_task_order": "`--permute_classes 1 --seed N` draws an order",
    "dataset_config": "`paceline train continual --help` has what it sets, as options",
}
"""They would change the results, and cannot be done: what else can."""


class Options(argparse.ArgumentParser):
    """Says a mistake as the commands of paceline do."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    """Mammoth's options, as far as they mean something here."""
    options = Options(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    options.add_argument("--model", required=True, help="er, derpp, sgd, ...")
    options.add_argument("--dataset", required=True, help="seq-mnist, seq-cifar10, ...")
    options.add_argument("--model_config", choices=("default", "best"), default="default")
    options.add_argument("--code_optimization", "-O", type=int, choices=(0, 1, 2, 3), default=0)
    options.add_argument("--distributed", choices=("no", "dp", "ddp"), default="no")
    options.add_argument("--savecheck", choices=("last", "task"), help="which checkpoints are kept")
    options.add_argument("--loadcheck", type=Path, help="a run, or one of its checkpoints, to go on from")
    options.add_argument("--permute_classes", type=int, choices=(0, 1), default=0)
    options.add_argument("--debug_mode", type=int, choices=(0, 1), default=0)
    options.add_argument("--nowand", type=int, choices=(0, 1), default=0, help="no Weights & Biases")
    for name in WANDB:
        options.add_argument(f"--{name}")
    options.add_argument("--non_verbose", type=int, choices=(0, 1), default=0, help="lines instead of a bar")
    options.add_argument("--device", help="cpu, or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs")
    options.add_argument("--fitting_mode", choices=("epochs", "iters", "time", "early_stopping"), default="epochs")
    options.add_argument("--lr_scheduler", type=str.lower, choices=("multisteplr", "cosine"))
    options.add_argument("--scheduler_mode", choices=("epoch", "iter"), default="epoch")
    options.add_argument("--lr_milestones", type=int, nargs="+", default=[])
    options.add_argument("--sched_multistep_lr_gamma", default="0.1")
    options.add_argument("--print_command", action="store_true", help="show the translation, and leave")
    for name in (*NOTHING_TO_DO, *REFUSED):
        options.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in SAME:
        if name not in ("dataset", "code_optimization"):
            options.add_argument(f"--{name}")
    return options


def read(argv: Sequence[str]) -> argparse.Namespace:
    """What was typed; all that cannot be understood or done is said at once."""
    options = parser()
    given, unknown = options.parse_known_args(argv)
    wrong = []
    for word in [word for word in unknown if word.startswith("-")] or unknown:
        close = difflib.get_close_matches(word.partition("=")[0], options._option_string_actions, n=1)
        hint = f"did you mean {close[0]}?" if close else "`--help` lists the options of Mammoth that are known here"
        wrong.append(f"{word}: there is no such option\n  {hint}")
    for name, hint in REFUSED.items():
        value = getattr(given, name)
        nothing = ("1", "1.0") if name.startswith("label_perc") else ("0", "0.0")
        if value is not None and value not in nothing:
            wrong.append(f"--{name} {value}: cannot be done here\n  {hint}")
    if given.fitting_mode in ("time", "early_stopping"):
        hint = "fit for `--n_epochs`, or with `--fitting_mode iters` for `--n_iters`"
        wrong.append(f"--fitting_mode {given.fitting_mode}: cannot be done here\n  {hint}")
    if given.device is not None and given.device not in ("cpu", "cuda", "gpu"):
        number = given.device.removeprefix("cuda:").removeprefix("gpu:")
        hint = f"type `CUDA_VISIBLE_DEVICES={number} python ... --device cuda`"
        wrong.append(f"--device {given.device}: GPUs are not chosen by number here\n  {hint}")
    if given.lr_scheduler == "multisteplr" and given.scheduler_mode == "epoch":
        hint = "give them in steps of a task, with `--scheduler_mode iter`"
        wrong.append(f"--lr_milestones are epochs, and how many steps these have differs from task to task\n  {hint}")
    if wrong:
        options.error("\nerror: ".join(wrong))
    return given


def notes(given: argparse.Namespace) -> list[str]:
    """What was typed and does nothing, or does it differently, a line each."""
    found = [f"--{name}: {why}" for name, why in NOTHING_TO_DO.items() if getattr(given, name) is not None]
    for name, variable in WANDB.items():
        value = getattr(given, name)
        if value is not None:
            how = "not used, because of --nowand 1" if given.nowand else f"export {variable}={shlex.quote(value)}"
            found.append(f"--{name}: {how}")
    if given.lr_scheduler == "cosine":
        found.append("--lr_scheduler cosine: falls with every step of a task, not with every epoch")
    return found


def translate(argv: Sequence[str]) -> list[str]:
    """The words of `paceline train continual` that mean the same."""
    given = read(argv)
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
    if given.non_verbose:
        words += ["--progress", "lines"]
    if given.device is not None:
        words += ["--device", "cpu" if given.device == "cpu" else "cuda"]
    if given.lr_scheduler == "cosine":
        words += ["--schedule", "cosine"]
    elif given.lr_scheduler is not None:
        words += ["--schedule", "piecewise", "--decay", given.sched_multistep_lr_gamma]
        words += ["--milestones", *map(str, given.lr_milestones)]
    if not given.nowand and any(getattr(given, name) is not None for name in WANDB):
        words += ["--loggers", "tensorboard", "wandb"]
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
    given = read(sys.argv[1:])
    print(*notes(given), f"paceline {shlex.join(translated)}", sep="\n", flush=True)
    sys.exit(0 if given.print_command else paceline(translated))
