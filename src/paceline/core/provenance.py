"""Provenance of a run: command, host, versions and git state of each of its starts."""

from __future__ import annotations

import hashlib
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.core.plugins import Plugin
from paceline.core.secrets import masked_words

PACKAGES = ("torch", "numpy", "paceline")
# A repository on a slow disk must not hold up a training run.
_GIT_TIMEOUT_S = 5.0


def start_record(plugins: Sequence[Plugin] = ()) -> dict[str, Any]:
    """Return the record of a start: time, host, command, versions, git state, and the plugins that it uses."""
    record: dict[str, Any] = {
        "time": datetime.now().isoformat(sep=" ", timespec="milliseconds"),
        "command": command_line(sys.argv),
        "host": socket.gethostname(),
        "versions": versions(),
        "git": git_state(Path.cwd()),
    }
    return record | ({"plugins": [plugin.record() for plugin in plugins]} if plugins else {})


def command_line(argv: Sequence[str]) -> str:
    """Return a command as it is typed, secrets masked; `python -m paceline` is written as `paceline`."""
    program = Path(argv[0])
    is_ours = program.name == "__main__.py" and program.parent.name == "paceline"
    return shlex.join(["paceline" if is_ours else program.name, *masked_words(argv[1:])])


def versions() -> dict[str, str]:
    """Return the versions of Python and of `PACKAGES`, without those that run from a source tree."""
    by_name = {name: version_of(name) for name in PACKAGES}
    return {"python": platform.python_version(), **{name: text for name, text in by_name.items() if text is not None}}


def version_of(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_digest(files: Iterable[Path], root: Path) -> str:
    """Return a short digest of source files, by their names below `root`; one that cannot be read counts as empty."""
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            content = b""
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode(errors="surrogateescape"))
        digest.update(content)
    return digest.hexdigest()[:12]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit, and True as `dirty` if tracked files differ; None outside of a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if not commit or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
