"""The secret that the processes of a job share: from the environment, or from a file that only the user can read."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import Failed, InvalidSetting, PacelineError

VARIABLE = "PACELINE_SECRET"
_LEAST_LENGTH = 16
_NUM_BYTES = 32
_EXPORT = "export PACELINE_SECRET=$(openssl rand -hex 32)"


@dataclass(frozen=True)
class Secret:
    """A secret, and where it was found."""

    value: bytes
    source: str

    def __repr__(self) -> str:
        return f"Secret from {self.source}"


class SecretUnsafe(PacelineError):
    """The file with the secret is not the user's alone."""

    path: Path
    why: str
    hint_text: str
    sentence = "{path}: {why}, so it protects nothing"
    hint = "{hint_text}"


def new_secret() -> str:
    """Return a secret for one job, as text."""
    return secrets.token_hex(_NUM_BYTES)


def find_secret(env: Mapping[str, str], is_one_machine: bool) -> Secret:
    """Return the secret of a job that no launcher of ours started.

    PACELINE_SECRET, else a file in the user's configuration folder, made at its first use; on one machine, where that
    folder cannot be written, a file in a folder of the user's own below that for temporary files.
    """
    text = env.get(VARIABLE)
    if text:
        if len(text) < _LEAST_LENGTH:
            raise InvalidSetting(
                f"PACELINE_SECRET has less than {_LEAST_LENGTH} characters, and can be guessed",
                hint=f"type `{_EXPORT}` once, and give the same value to all ranks",
            )
        return Secret(text.encode(), VARIABLE)
    path = secret_path(env)
    try:
        return Secret(_read_or_make(path), str(path))
    except OSError as error:
        if not is_one_machine:
            raise _unwritable(path, error) from None
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.geteuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_private(folder, os.lstat(folder), is_kind=stat.S_ISDIR)
        return Secret(_read_or_make(folder / "secret"), str(folder / "secret"))
    except OSError as error:
        raise _unwritable(folder, error) from None


def secret_path(env: Mapping[str, str]) -> Path:
    """Return the path of the user's file (XDG base directories)."""
    base = env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or os.path.expanduser("~")) / ".config"
    return Path(base) / "paceline" / "secret"


def _read_or_make(path: Path) -> bytes:
    with suppress(FileNotFoundError):
        return _read(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(f"{new_secret()}\n")
            file.flush()
            os.fsync(file.fileno())
        # Of several ranks that come here at once, one makes the file, and all read that one.
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SecretUnsafe(path, f"it cannot be read ({error.strerror})", _mend(path)) from None
    try:
        _check_private(path, os.fstat(handle), is_kind=stat.S_ISREG)
        value = os.read(handle, 4096).strip()
    finally:
        os.close(handle)
    if len(value) < _LEAST_LENGTH:
        raise SecretUnsafe(path, f"it holds less than {_LEAST_LENGTH} characters", _mend(path))
    return value


def _check_private(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode):
        raise SecretUnsafe(path, "it is no plain file or folder", _mend(path))
    if status.st_uid != os.geteuid():
        raise SecretUnsafe(path, f"it belongs to another user (uid {status.st_uid})", _mend(path))
    if status.st_mode & 0o077:
        why = f"other users may read or write it (mode {stat.S_IMODE(status.st_mode):o})"
        raise SecretUnsafe(path, why, _mend(path))


def _unwritable(path: Path, error: OSError) -> Failed:
    return Failed(
        f"the secret that the ranks of a job share cannot be stored in {path}: {error.strerror or error}",
        hint=f"export the same PACELINE_SECRET for all ranks: `{_EXPORT}`",
    )


def _mend(path: Path) -> str:
    return f"delete {path} and start again (on several machines, copy the new one to all), or export PACELINE_SECRET"
