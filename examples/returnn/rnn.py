"""RETURNN's `rnn.py`, on Paceline: the same command line and configs, translated to `paceline train`.

    mpirun -np 4 python3 rnn.py config.py ++use_horovod 1
    torchrun --nproc-per-node 4 rnn.py config.py ++torch_distributed "{}"

The config defines or imports one subclass of `paceline.Task`: model, data and loss. `--print_command` shows the
translation and leaves.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import runpy
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from returnn_mistakes import OptionRefused, check_known
from returnn_options import KNOWN, translate
from returnn_text import USED, text_settings

from paceline.cli.main import main
from paceline.core import plugins
from paceline.core.errors import PacelineError
from paceline.train.find_task import guarded
from paceline.train.task import Task
from paceline.world.discover.environment import discover
from paceline.world.failure.together import user_message

OF_SPEECH = {"train_files": "train_manifest", "val_files": "val_manifest"}


def read_words(argv: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The config's path, and what `++name value` sets."""
    if not argv or argv[0].startswith("+"):
        raise OptionRefused("which config?", "rnn.py config.py ++name value ...")
    left, found = list(argv[1:]), {}
    while left:
        name = left.pop(0)
        if not name.startswith("++") or not left:
            raise OptionRefused(f"{name}: no option with a value", "options are typed as ++name value")
        found[name[2:]] = literal(left.pop(0))
    check_known("++", found, KNOWN)
    return Path(argv[0]), found


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise OptionRefused(f"there is no config {path}")
    sys.path.insert(0, str(path.parent.resolve()))  # its task may be beside it
    return guarded(path, "it is executed", lambda: runpy.run_path(str(path)))


def task_name(config: Mapping[str, Any], path: Path) -> str:
    """What `paceline train` calls the task that a config defines or imports."""
    found = [value for value in config.values() if isinstance(value, type) and issubclass(value, Task)]
    found = [value for value in dict.fromkeys(found) if not any(value in other.__mro__[1:] for other in found)]
    if len(found) != 1 or found[0] is Task:
        names = ", ".join(value.__name__ for value in found if value is not Task) or "none"
        raise OptionRefused(f"{path} is to have one subclass of paceline.Task, but has {names}")
    task = found[0]
    file = path if task.__module__ == config["__name__"] else Path(inspect.getfile(task))
    recipes = {plugin.value: plugin.name for plugin in reversed(plugins.installed().of("recipes"))}
    return recipes.get(f"{task.__module__}:{task.__name__}", f"{file}:{task.__name__}")


def misspelt(config: Mapping[str, Any]) -> list[str]:
    """Names that look like options and are none; a config may have names of its own, so nothing is refused."""
    found = []
    for name, value in config.items():
        if name.startswith("_") or name in KNOWN or callable(value) or isinstance(value, ModuleType):
            continue
        close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85)
        found += [f"`{name}` is no option: did you mean `{close[0]}`?"] if close else []
    return found


def command(argv: Sequence[str], num_ranks: int, has_gpu: bool) -> tuple[list[str], list[str]]:
    """The words of `paceline` that mean the same, and what is to be said."""
    path, over = read_words(argv)
    config = read_config(path)
    task = task_name(config, path)
    used = USED if task == "translation" else ()
    values, words = translate({**config, **over}, num_ranks, has_gpu, task.rpartition(":")[2], used)
    if task == "asr":  # which reads files as manifests
        values = {OF_SPEECH.get(name, name): value for name, value in values.items()}
    if task == "translation":
        of_text, more = text_settings({**config, **over})
        values, words = {**values, **of_text}, [*words, *more]
    if values.get("resume") == "auto" and (Path(values["out"]) / "run.json").exists():
        values["allow_change"] = True
        words.append(
            f"if there is a checkpoint in {values['out']}, its run goes on with these settings, changed or not"
        )
    if num_ranks > 1 and "reduce" not in values:
        words.append(f"`use_horovod` is off, but the launcher has started {num_ranks} ranks: they train together")
    return ["train", task, *as_words(values)], [*misspelt(config), *words]


def as_words(values: Mapping[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)

    return [f"--{name.replace('_', '-')}={text(value)}" for name, value in values.items()]


def run() -> int:
    import torch

    argv = [word for word in sys.argv[1:] if word != "--print_command"]
    try:
        world = discover(os.environ)
        words, said = command(argv, world.size, torch.cuda.is_available())
    except PacelineError as error:
        print(user_message(error), file=sys.stderr)
        return 2
    if world.rank == 0:
        print("\n".join([*said, shlex.join(["paceline", *words])]), flush=True)
    return 0 if "--print_command" in sys.argv else main(words)


if __name__ == "__main__":
    sys.exit(run())
