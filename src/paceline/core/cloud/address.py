"""Addresses such as `s3://bucket/run`, and the paths of their copies on this machine. Nothing here touches a network.

A copy lies below one folder, in a path that is made of its address, so that either gives the other and paths inside a
copy are made as of any folder: `s3://bucket/run` is `<root>/s3/bucket/run`.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer

from paceline.core.errors import Conflict, PacelineError

EXTRA = "cloud"
"""Our extra that installs fsspec."""
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/{1,3}(?P<rest>[^/].*)", re.DOTALL)
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+::.*:/", re.DOTALL)
_NO_BUCKET = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/*")
_LOCAL = ("file", "local")


class NotAnAddress(PacelineError, ValueError):
    """An address that cannot be used."""

    address: str
    why: str
    advice: str
    sentence = "{why}"
    hint = "{advice}"


def copies_root() -> Path:
    """Return the folder of all copies: `PACELINE_COPIES`, else below the user's cache (XDG base directories)."""
    names = ("PACELINE_COPIES", "XDG_CACHE_HOME", "HOME")
    return _root(*(os.environ.get(name) for name in names))


@lru_cache(maxsize=8)
def _root(chosen: str | None, cache: str | None, home: str | None) -> Path:
    if chosen:
        return Path(os.path.realpath(os.path.expanduser(chosen)))
    return Path(os.path.realpath(cache or Path(home or Path.home(), ".cache")), "paceline", "copies")


def is_address(path: str | Path) -> bool:
    """Return True for an address, also for one that has become a path, which has one slash where it had two."""
    text = str(path)
    return any(form.match(text) for form in (_ADDRESS, _CHAIN)) or _NO_BUCKET.fullmatch(text) is not None


def local_path(path: str | Path) -> Path:
    """Return the path of the copy of an address; a path of this machine as it is. Raises `NotAnAddress`."""
    match = _ADDRESS.fullmatch(str(path))
    if match is None and _CHAIN.match(str(path)):
        raise NotAnAddress(
            str(path).partition("://")[0],
            f"{str(path).partition('://')[0]}://... is a chain of file systems",
            "name the last one alone, as scheme://bucket/folder/name: it has a copy on this machine anyway",
        )
    if match is None and is_address(path):
        raise NotAnAddress(str(path), f"{path} names no bucket or folder", "write it as scheme://bucket/folder/name")
    if match is None:
        return Path(path)
    scheme, rest = match["scheme"].lower(), match["rest"].rstrip("/")
    if scheme in _LOCAL:
        return Path("/", rest)
    parts = rest.split("/")
    if _has_password(rest):
        raise NotAnAddress(
            f"{scheme}://...",
            f"a password in an address ({scheme}://USER:********@...) would be written down with the run",
            "leave it out: credentials come from the environment or from fsspec's configuration (docs/cloud.md)",
        )
    if any(part in ("", ".", "..") for part in parts) or "::" in rest or "?" in rest:
        plain = rest.partition("?")[0] + ("?..." if "?" in rest else "")  # behind it there may be a signature
        raise NotAnAddress(
            f"{scheme}://{plain}",
            f"{scheme}://{plain} is not an address of a folder or file",
            "write it as scheme://bucket/folder/name",
        )
    check_scheme(scheme)
    return copies_root().joinpath(scheme, *parts)


def _has_password(rest: str) -> bool:
    """Return True for `user:password@...`; a password may have slashes in it, and `host:22/a@b` has none."""
    user, has_user, _ = rest.rpartition("@")
    _, has_colon, password = user.partition("/")[0].partition(":")
    is_port = password.isdecimal() and "/" in user
    return bool(has_user and has_colon) and not is_port


def address_of(path: Path) -> str | None:
    """Return the address that a path is the copy of; None for any other path."""
    root = str(copies_root())
    text = os.path.abspath(path)
    if not text.startswith(root + os.sep):
        return None
    scheme, _, rest = text[len(root) + 1 :].partition("/")
    return f"{scheme}://{rest}" if rest and not scheme.startswith(".") else None


def refuse_memory(run: Path | None) -> None:
    """Refuse a run at `memory://` that other processes are started for."""
    address = None if run is None else address_of(run)
    if address is not None and address.startswith("memory://"):
        raise Conflict(
            f"{address} is memory of one process, and would be gone with the process that is started to train",
            hint="give the run a folder or another address, or train it in this process: without `procs`",
        )


def shown(value: str | Path) -> str:
    """Return a text or path with addresses in place of their copies."""
    return re.sub(rf"{re.escape(str(copies_root()))}/([a-z0-9+.-]+)/(?=[^/])", r"\1://", str(value))


def check_scheme(scheme: str) -> None:
    """Raise `NotAnAddress` unless fsspec and what it needs for this scheme are installed."""
    try:
        from fsspec.core import get_filesystem_class
        from fsspec.registry import known_implementations, registry
    except ModuleNotFoundError:
        raise NotAnAddress(
            f"{scheme}://",
            f"{scheme}:// needs the package fsspec, which is not installed",
            f"pip install 'paceline[{EXTRA}]'",
        ) from None
    if scheme not in known_implementations and scheme not in registry:
        raise NotAnAddress(
            f"{scheme}://",
            f"there is no scheme {scheme!r}",
            "fsspec knows s3, gs, az, hf, ssh, memory and others (docs/cloud.md); a folder of this machine is named "
            "without `://`",
        )
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        entry = known_implementations.get(scheme, {})
        package = entry.get("class", "").partition(".")[0] or scheme
        package = {"gcsfs": "gcsfs", "fsspec": _behind_fsspec(scheme)}.get(package, package)
        raise NotAnAddress(
            f"{scheme}://", f"{scheme}:// needs the package {package}, which is not installed", f"pip install {package}"
        ) from error


def _behind_fsspec(scheme: str) -> str:
    """Return the package that fsspec's own implementation of a scheme imports."""
    return {"sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "http": "aiohttp", "https": "aiohttp"}.get(
        scheme, f"fsspec[{scheme}]"
    )


def placed_absolute(path: Path) -> Path:
    """Return the copy of an address, or an absolute path; `~` is expanded, links are kept."""
    return local_path(path) if is_address(path) else Path(os.path.abspath(os.path.expanduser(path)))


_SHOWN = PlainSerializer(shown, return_type=str, when_used="json")
Place = Annotated[Path, AfterValidator(local_path), _SHOWN]
"""A setting that may be an address: its value is the path of the copy, and its record the address."""
AbsolutePlace = Annotated[Path, AfterValidator(placed_absolute), _SHOWN]
"""The same, where paths of this machine are made absolute."""
