"""OpenSeq2Seq's `run.py`, on Paceline: the same flags and config files, translated to `paceline train`.

    mpiexec -np 2 python run.py --config_file=small.py --mode=train_eval --use_horovod=True --enable_logs

`base_model` in the config is a task instead of a model: a subclass of `paceline.Task`, or what `paceline train` takes.
`Text2Text` is taken as it is: it is the recipe `translation` (reversal.py).
Names of TensorFlow and OpenSeq2Seq in it are only names; neither is needed. Any base parameter may be given as
--name=value, in a dictionary as --outer/name=value. `--print_command` shows the translation and leaves.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openseq2seq_config import ParameterRefused, merged, overrides, read_config
from openseq2seq_params import count_towers, translate
from openseq2seq_text import USED_PARAMS, is_text_model, text_settings, text_to_infer

from paceline.cli.main import main
from paceline.core import plugins
from paceline.core.errors import PacelineError
from paceline.train.task import Task
from paceline.world.discover.environment import discover
from paceline.world.failure.together import user_message


def task_name(model: Any) -> str:
    """What `paceline train` calls the task that a config names."""
    if isinstance(model, type) and issubclass(model, Task):
        recipes = {plugin.value: plugin.name for plugin in reversed(plugins.installed().of("recipes"))}
        return recipes.get(f"{model.__module__}:{model.__name__}", f"{inspect.getfile(model)}:{model.__name__}")
    if is_text_model(model):
        return "translation"
    if isinstance(model, str):
        return model
    shown = getattr(model, "__name__", model)
    raise ParameterRefused(f"`base_model` {shown} is no task", "set it to a subclass of paceline.Task, or to 'digits'")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = flags.add_argument
    add("--config_file", type=Path, required=True)
    add("--mode", choices=["train", "eval", "train_eval", "infer"], default="train")
    add("--infer_output_file", default="infer-out.txt")
    add("--continue_learning", action="store_true", help="go on with the run in logdir")
    add("--no_dir_check", action="store_true", help="go on with it if there is one, else begin")
    add("--benchmark", action="store_true")
    add("--bench_steps", type=int, default=20)
    add("--bench_start", type=int, default=10)
    add("--enable_logs", action="store_true", help="always: a run stores its settings, versions and output")
    add("--print_command", action="store_true")
    return flags


def command(argv: Sequence[str], num_ranks: int | None, has_gpu: bool) -> tuple[list[str], list[str]]:
    """The words of `paceline` that mean the same, and what is to be said. `num_ranks` is None without a launcher."""
    args, others = parser().parse_known_args(argv)
    config = read_config(args.config_file)
    base = merged(config.get("base_params", {}), overrides(others, config.get("base_params", {})))
    train, evaluate, infer = (merged(base, config.get(f"{mode}_params", {})) for mode in ("train", "eval", "infer"))
    towers = count_towers(train)
    is_text = is_text_model(config.get("base_model"))
    used = USED_PARAMS if is_text else ()
    values, words = translate(train, infer if args.mode == "infer" else evaluate, num_ranks or towers, has_gpu, used)
    if is_text:
        of_text, more = text_settings(train, evaluate)
        values, words = {**of_text, **values}, [*words, *more]
    if num_ranks is not None and num_ranks > 1 and not train["use_horovod"]:
        words.append(f"`use_horovod` is off, but the launcher has started {num_ranks} ranks: they train together")
    procs = [f"--procs={towers}"] if num_ranks is None and towers > 1 else []
    if args.mode in ("eval", "infer") and not args.benchmark:
        which = "best" if train.get("restore_best_checkpoint") else "last"
        words = [word for word in words if word.startswith("`use_horovod`")]
        if "out" not in values:
            raise ParameterRefused("`logdir` is missing: of which run?", "add --logdir=FOLDER")
        out = [f"--out={args.infer_output_file}"] if args.mode == "infer" else []
        common = [f"--checkpoint={which}", f"--eval-batch={values['eval_batch']}", *procs]
        inputs: list[str] = []
        if is_text and args.mode == "infer":
            source, search = text_to_infer(infer)
            inputs, common = [source], [*common, *search]
        return [args.mode, str(values["out"]), *inputs, *common, *out], words
    if args.mode == "train_eval" and "val_every_steps" not in values:
        raise ParameterRefused("`eval_steps` is missing", "OpenSeq2Seq, too, needs it with --mode=train_eval")
    values["mode"] = args.mode
    if train.get("restore_best_checkpoint"):
        words.append("`restore_best_checkpoint` is of --mode=eval and --mode=infer: it has no effect here")
    if args.benchmark:
        values.pop("out", None)
        values |= {"mode": "train", "benchmark": True, "bench_steps": args.bench_steps, "bench_start": args.bench_start}
    elif args.continue_learning or args.no_dir_check:
        folder = Path(values.get("out", ""))
        is_there = (folder / "run.json").exists()
        if not args.no_dir_check and not is_there:
            raise ParameterRefused(f"--continue_learning: there is no run in {folder}", "--no_dir_check begins one")
        values["resume"] = "auto"
        if is_there:
            values["allow_change"] = True
            words.append(f"if there is a checkpoint in {folder}, its run goes on with these settings, changed or not")
    return ["train", task_name(config.get("base_model")), *as_words(values), *procs], words


def as_words(values: Mapping[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        if value is None or isinstance(value, bool):
            return str(value).lower()
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return [f"--{name.replace('_', '-')}={text(value)}" for name, value in values.items()]


def run() -> int:
    import torch

    try:
        world = discover(os.environ)
        has_launcher = world.launcher != "plain"
        words, said = command(sys.argv[1:], world.size if has_launcher else None, torch.cuda.is_available())
    except PacelineError as error:
        print(user_message(error), file=sys.stderr)
        return 2
    if world.rank == 0:
        print("\n".join([*said, shlex.join(["paceline", *words])]), flush=True)
    return 0 if "--print_command" in sys.argv else main(words)


if __name__ == "__main__":
    sys.exit(run())
