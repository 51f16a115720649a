"""NeMo's `examples/asr/jasper.py`, on Paceline: the same flags, translated to `paceline train asr`.

    python -m torch.distributed.launch --nproc_per_node=8 examples/asr/jasper.py --batch_size=64 --num_gpus=8 \
        --num_epochs=100 --lr=0.015 --warmup_steps=8000 --weight_decay=0.001 --train_manifest=a.json,b.json \
        --val_manifest1=dev-clean.json --val_manifest2=dev-other.json --model_config=jasper15x5SEP.yaml --exp_name=NAME

Flags of both generations of the script are taken (`--train_manifest` and `--train_dataset`, ...). What is not one of
them goes to `paceline train asr` as it is. `--print_command` shows the translation and leaves.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from paceline.cli.main import main
from paceline.core.errors import PacelineError
from paceline.recipes.speech.exchange.nemo_yaml import max_seconds
from paceline.recipes.speech.network.config import read_document
from paceline.world.discover.environment import discover

SCHEDULES = {
    "CosineAnnealing": "cosine",
    "SquareAnnealing": "square",
    "SquareRootAnnealing": "sqrt",
    "WarmupAnnealing": "linear",
    "InverseSquareRootAnnealing": "inverse-sqrt",
    "PolynomialDecayAnnealing": "polynomial",
}
OPTIMIZERS = {"adam_w": "adamw", "fused_adam": "adam", "fused_novograd": "novograd", "fused_lamb": "lamb"}
IGNORED = {
    "create_tb_writer": "TensorBoard is written anyway",
    "tensorboard_dir": "it is in the run's folder",
    "checkpoint_dir": "checkpoints are in the run's folder",
    "cudnn_benchmark": "it would make runs differ",
    "project": "name the run with --exp_name",
}
"""Flags that mean nothing here, and why."""
PRECISIONS = {"O1": "fp16", "O2": "fp16-master", "O3": "fp16-pure"}


def parser() -> argparse.ArgumentParser:
    """NeMo's flags with the defaults of its jasper.py."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = flags.add_argument
    add("--local_rank", "--local-rank", type=int, help="set by the launcher; which rank this is comes from there")
    add("--num_gpus", type=int, help="ranks to start, where no launcher has done it")
    add("--train_manifest", "--train_dataset", required=True, help="manifests, with commas between them")
    for number in (1, 2, 3):
        add(f"--val_manifest{number}", default="", help="a validation set")
    add("--eval_datasets", nargs="*", default=[], help="validation sets")
    add("--model_config", required=True, help="network: a YAML file, or the name of a shipped one")
    add("--batch_size", type=int, default=64, help="per device")
    add("--eval_batch_size", type=int)
    add("--batch_per_step", "--iter_per_step", type=int, default=1, help="batches per update")
    add("--num_epochs", type=int)
    add("--max_steps", type=int)
    add("--lr", type=float, default=0.02)
    add("--lr_policy", choices=[*SCHEDULES], default="CosineAnnealing")
    add("--warmup_steps", type=int, default=0)
    add("--weight_decay", type=float, default=0.001)
    add("--optimizer", default="novograd")
    add("--beta1", type=float, default=0.95)
    add("--beta2", type=float, default=0.25)
    add("--amp_opt_level", choices=["O0", *PRECISIONS], default="O1", help="mixed precision, where the device has it")
    add("--disable_mixed_precision", action="store_true")
    add("--exp_name", default="Jasper")
    add("--work_dir", "--logdir", default="runs", help="where runs live")
    add("--load_dir", help="weights to start from")
    add("--eval_freq", type=int, default=1000, help="steps")
    add("--save_freq", "--checkpoint_save_freq", type=int, default=1000, help="steps")
    add("--synced_bn", action="store_true", help="batch norm over all ranks")
    add("--synced_bn_groupsize", type=int, default=0, help="or over so many")
    for name in IGNORED:
        add(f"--{name}", nargs="?", const="", help=argparse.SUPPRESS)
    add("--print_command", action="store_true")
    return flags


def translate(args: argparse.Namespace, num_ranks: int, has_gpu: bool) -> list[str]:
    """The words of `paceline train asr` that mean the same."""
    validation = [_one_set(f"val_manifest{number}", getattr(args, f"val_manifest{number}")) for number in (1, 2, 3)] + [
        _one_set(f"eval_dataset{number}", files) for number, files in enumerate(args.eval_datasets, 1)
    ]
    grains = num_ranks * args.batch_per_step
    words = ["asr", "--network", args.model_config, "--train-manifest", args.train_manifest]
    if any(validation):
        words += ["--val-manifest", ",".join(filter(None, validation))]
    words += ["--global-batch", str(args.batch_size * grains), "--grains", str(grains)]
    if args.max_steps is None or args.num_epochs is not None:
        words += ["--epochs", str(args.num_epochs or 100)]
    optional = {
        "--steps": args.max_steps,
        "--eval-batch": args.eval_batch_size,
        "--init-from": args.load_dir,
        "--warmup-steps": args.warmup_steps or None,
    }
    words += [word for name, value in optional.items() if value is not None for word in (name, str(value))]
    if not args.warmup_steps:
        words += ["--warmup-ratio", "none"]
    optimizer = OPTIMIZERS.get(args.optimizer, args.optimizer)
    words += ["--optimizer", optimizer, "--lr", str(args.lr), "--weight-decay", str(args.weight_decay)]
    if optimizer != "sgd":
        words += ["--betas", f"{args.beta1},{args.beta2}"]
    if args.synced_bn:
        words += ["--sync-batchnorm", str(args.synced_bn_groupsize or "all")]
    words += ["--schedule", SCHEDULES[args.lr_policy], "--val-every-steps", str(args.eval_freq)]
    words += ["--save-every-steps", str(args.save_freq), "--exp-name", args.exp_name, "--runs-dir", args.work_dir]
    words += ["--resume", "auto"]  # as there: a run of this name goes on
    is_mixed = args.amp_opt_level in PRECISIONS and not args.disable_mixed_precision and has_gpu
    words += ["--precision", PRECISIONS[args.amp_opt_level]] if is_mixed else ["--level", "0"]
    return words


def _one_set(name: str, files: str) -> str:
    """Files with commas between them are one set there."""
    return f"{name}={files.replace(',', '+')}" if "," in files else files


def longest(model_config: str) -> float | None:
    """The `max_duration` of training utterances that NeMo's file asks for."""
    if not Path(model_config).is_file():
        return None  # the name of a shipped network
    value = read_document(Path(model_config)).value
    return max_seconds(value) if isinstance(value, dict) else None


def run() -> int:
    """Translate and train."""
    import torch

    flags = parser()
    args, others = flags.parse_known_args()
    try:
        world = discover(os.environ)
    except PacelineError as error:
        print(f"error: {error}\n  {error.hint}", file=sys.stderr)
        return 2
    for name, why in IGNORED.items():
        if getattr(args, name) is not None and world.rank == 0:
            print(f"--{name} has no effect here: {why}")
    num_ranks = world.size if world.launcher != "plain" else args.num_gpus or 1
    if world.launcher != "plain" and args.num_gpus not in (None, world.size) and world.rank == 0:
        print(f"--num_gpus is {args.num_gpus}, but the launcher has started {world.size}: that is what counts")
    has_gpu = torch.cuda.is_available()
    if args.amp_opt_level != "O0" and not args.disable_mixed_precision and not has_gpu and world.rank == 0:
        print(f"--amp_opt_level {args.amp_opt_level}: no GPU here, training in fp32")
    try:
        limit_s = None if any(word.startswith("--max-seconds") for word in others) else longest(args.model_config)
    except PacelineError as error:
        print(f"error: {error}\n  {error.hint}", file=sys.stderr)
        return 2
    if limit_s is not None:
        others += ["--max-seconds", str(limit_s)]
        if world.rank == 0:
            print(f"max_duration {limit_s:g} of {args.model_config}: longer training utterances are dropped")
    words = translate(args, num_ranks, has_gpu) + others
    if world.launcher == "plain" and num_ranks > 1:
        words += ["--procs", str(num_ranks)]
    if args.print_command:
        print(shlex.join(["paceline", "train", *words]))
        return 0
    return main(["train", *words])


if __name__ == "__main__":
    sys.exit(run())
