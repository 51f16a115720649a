"""A run's folder: what makes it one, and what may be done to it.

run.json          settings, grains, status
metrics.jsonl     one line per step and per validation
checkpoints/      see restore.py
logs/             one file per rank, where there are several; one that failed early may have left some
batch/            the scripts that `paceline submit` queued and what they printed; may be there before the run
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.config.run_path import MARK as MARK
from paceline.core.disk import CannotWrite, replacing
from paceline.core.errors import PacelineError
from paceline.core.run_lock import LOCK, owner

_MAY_BE_FIRST = (LOCK, "batch", "logs")
_TRIES, _PAUSE_S = 10, 0.02
"""Who only looks whether a run is running has its lock for a moment."""


class NotARun(PacelineError):
    """A folder with other things in it is not written to."""

    hint = "choose another `--out`, or an empty folder"

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{folder} is not a run: {why}")
        self.folder = folder


class RunExists(PacelineError):
    """A run is never overwritten."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} holds a run already")
        self.hint = "add `--resume auto` to go on with it, or choose another `--out`"
        self.folder = folder


class RunBusy(PacelineError):
    """Another process is training in this folder."""

    hint = "wait for it or stop it, or choose another `--out`"

    def __init__(self, folder: Path, owner: str) -> None:
        super().__init__(f"{folder} is being trained by {owner}")
        self.folder = folder


class Run:
    """The folder of one run; only the first rank writes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.metrics = folder / "metrics.jsonl"
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Keep others out until this process ends."""
        self.make()
        with self._writing(LOCK):
            file = (self.folder / LOCK).open("a+", encoding="utf-8")
        for attempt in range(_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 < _TRIES:
                    time.sleep(_PAUSE_S)
                    continue
                file.seek(0)
                other = file.read().strip()
                file.close()
                raise RunBusy(self.folder, other or "another process") from None
            except OSError:
                file.close()  # a file system without locks: nothing can be promised there
                return
        file.truncate(0)
        with suppress(OSError):  # a full disk: the lock holds, whether or not it says who has it
            os.write(file.fileno(), f"{owner()}\n".encode())
        self._lock = file

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check(self, *, may_exist: bool) -> dict[str, Any] | None:
        """What `run.json` holds, None for a folder that is free to use."""
        if not self.folder.exists():
            return None
        if not self.folder.is_dir():
            raise NotARun(self.folder, "it is a file")
        mark = self.folder / MARK
        if not mark.exists():
            if any(path.name not in _MAY_BE_FIRST for path in self.folder.iterdir()):
                raise NotARun(self.folder, f"it has files but no {MARK}")
            return None
        try:
            record = json.loads(mark.read_text(encoding="utf-8"))
        except ValueError as error:
            raise NotARun(self.folder, f"{MARK} is not JSON ({error})") from error
        if not isinstance(record, dict) or "settings" not in record:
            raise NotARun(self.folder, f"{MARK} has no settings")
        if record.get("status") == "failed" and not any(self.checkpoints.glob("step-*")):
            return None  # it failed before it had anything to lose
        if not may_exist:
            raise RunExists(self.folder)
        return record

    def make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotARun(self.folder, f"it cannot be made ({error.strerror})") from error

    def write(self, record: dict[str, Any]) -> None:
        self.make()
        with self._writing(MARK), replacing(self.folder / MARK) as file:
            json.dump(record, file, indent=1)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotWrite(self.folder / name, error, "make room there, or choose another `--out`") from error
