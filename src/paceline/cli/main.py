"""The command line: runs a command and returns its exit code. Each command is a module, imported when it is used."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from paceline.core.language import ENGLISH, VARIABLE, can_be_written, translate
from paceline.core.terminal import tell, warn

if TYPE_CHECKING:
    from paceline.core.errors import PacelineError

COMMANDS = {
    "train": "train a task on this machine or under any launcher",
    "eval": "measure a trained run on its validation sets or on others",
    "infer": "predict with a trained run",
    "average": "write the mean of a run's last or best checkpoints as one, and validate it",
    "pack": "pack data into HDF5 that is read at memory speed",
    "export": "write a trained model as files that other programs can read",
    "launch": "start a command as several ranks, on this machine or on each of several",
    "submit": "write a batch script for SLURM, Grid Engine, LSF, PBS or Kubernetes, and queue it",
    "doctor": "check a machine, or all ranks of an allocation, and say what is wrong",
    "runs": "list runs: what was trained, how far, how well",
    "diff": "show how two runs differ",
    "report": "write one page about runs: losses, metrics, time, verdicts, settings, samples",
    "completion": "print a script that completes commands and options in your shell",
}
"""Commands of the core. Recipes, lab tools and other packages register theirs as plugins."""

_FOLDERS = ("pack",)
"""Commands that have a folder; the others have a file of their name."""


def command_names() -> list[str]:
    """Return the names of all commands: the core's, then those of plugins."""
    from paceline.core import plugins

    return [*COMMANDS, *(name for name in plugins.names("commands") if name not in COMMANDS)]


def import_command(name: str) -> Any:
    """Import the module of a command: `run(words)`, its options as the model `OPTIONS`, and `POSITIONAL`."""
    if name in COMMANDS:
        return importlib.import_module(f"paceline.cli.{name}.command" if name in _FOLDERS else f"paceline.cli.{name}")
    from paceline.core import plugins

    plugin = plugins.find("commands", name)
    assert plugin is not None, name
    module = plugins.load_command(plugin).module
    if plugin.is_ours:  # a package of ours that is missing has a better message
        return importlib.import_module(module)
    return plugins.guarded(plugin, "cannot be imported", lambda: importlib.import_module(module))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 2 for a user's mistake, 1 for a crash."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process is the command's
        from paceline.world.signals import process_ends_with_run

        process_ends_with_run()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files that are no UTF-8 are printed as they are
    if not can_be_written(translate("error: "), sys.stdout.encoding, sys.stderr.encoding):
        os.environ[VARIABLE] = ENGLISH
    if words and words[0].startswith("--local"):
        from paceline.core.errors import PacelineError
        from paceline.world.discover.local_rank import without_local_rank

        try:
            words = without_local_rank(words, os.environ)
        except PacelineError as error:
            return _mistake(error)
    try:
        with _plugins_as_asked(words):
            code = _command(words)
        sys.stdout.flush()
    except BrokenPipeError:  # `paceline runs | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        from paceline.core.disk import OutputFull, is_full

        if not is_full(error):
            raise
        _drop_output()
        return _mistake(OutputFull(error))
    return code


@contextmanager
def _plugins_as_asked(words: list[str]) -> Iterator[None]:
    """Take `--no-plugins`, which every command has, out of the words before `--`.

    Processes that are started inherit it.
    """
    own = words[: words.index("--")] if "--" in words else words
    if "--no-plugins" not in own:
        yield
        return
    from paceline.core.plugins import SWITCH

    before = os.environ.get(SWITCH)
    words[: len(own)] = [word for word in own if word != "--no-plugins"]
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def _command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        tell(_help())
        return 0
    if words[0] == "--version":
        from paceline import __version__

        tell(f"paceline {__version__}\n")
        return 0
    known = command_names()
    if words[0] not in known:
        nearest = difflib.get_close_matches(words[0], known, n=1)
        from paceline.core.errors import NotFound

        hint = f"did you mean `paceline {nearest[0]}`?" if nearest else f"commands: {', '.join(known)}"
        return _mistake(NotFound(f"there is no command {words[0]!r}", hint=hint))
    return _run(words[0], words[1:])


def _run(name: str, words: list[str]) -> int:
    from paceline.core.errors import PacelineError
    from paceline.core.extras import CommandNeedsPackages, missing_package

    # Read when torch is imported: its store warns once per connection where a name server does not know the peer, and
    # prints C++ frames when a peer is gone, which our own message says better.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler says when it starts and stops, which nobody asked
    try:
        code: int = import_command(name).run(words)
    except PacelineError as error:
        return _mistake(error)
    except ModuleNotFoundError as error:
        missing = missing_package(error, name)
        if missing is None:
            raise
        return _mistake(CommandNeedsPackages(name, *missing))
    except SystemExit as left:  # after `--help`
        return left.code if isinstance(left.code, int) else 0
    return code


def _drop_output() -> None:
    """Drop what waits to be written to a full disk, or the interpreter would try once more when it ends."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _mistake(error: PacelineError) -> int:
    warn(f"{error.rendered()}\n")
    return error.exit_code


def _help() -> str:
    lines = [f"  {name:<12}{translate(what)}" for name, what in command_table()]
    more = [
        translate("`paceline COMMAND --help` lists a command's options"),
        translate("`--no-plugins` leaves out what other packages add"),
    ]
    return "\n".join([translate("usage: paceline COMMAND [OPTIONS]"), "", *lines, "", *more, ""])


def command_table() -> Iterator[tuple[str, str]]:
    """Yield the name and description of each command: the core's, then those of plugins."""
    from paceline.core import plugins

    yield from COMMANDS.items()
    for plugin in plugins.installed().of("commands"):
        try:
            yield plugin.name, plugins.load_command(plugin).about
        except plugins.PluginFails as error:  # one broken package must not hide the others
            yield plugin.name, str(error)
