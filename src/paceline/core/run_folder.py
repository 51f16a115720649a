"""The folder of a run: names of its files, its record, its journal, its lock and its status.

run.json          settings, grains, status
metrics.jsonl     one line per step, epoch, look at the progress, validation, and change of ranks
checkpoints/      see train/checkpoint
logs/             one file per rank, where there are several; one that failed early may have left some
batch/            the scripts that `paceline submit` queued and what they printed; may be there before the run
profile/          timelines

A task may add files of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.core.bounded_file import open_text
from paceline.core.disk import CannotWrite, is_aside, is_full, remove_asides, replacing
from paceline.core.errors import PacelineError, Unreadable
from paceline.core.json_text import parse_json, read_json

RECORD, METRICS, LOCK = "run.json", "metrics.jsonl", ".lock"
CHECKPOINTS, LOGS, BATCH, TIMELINES = "checkpoints", "logs", "batch", "profile"
RUNNING, DIED, UNSEEN = "running", "died", "running or died"
"""Status of a run whose record says `running`; UNSEEN if this machine cannot tell."""

_MAY_PRECEDE_RECORD = (LOCK, BATCH, LOGS)
_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.02
"""`status_now` of another process holds the lock for a moment."""
_ON = " on "
_MAX_OWNER = 1000
_MAX_LINE = 64 * 2**20
"""Characters of a journal's line; what is longer is no record."""


class NotARun(PacelineError):
    """A folder with files of others, which is not written to, or with a record that is broken."""

    folder: Path
    why: str
    sentence = "{folder} is not a run: {why}"
    hint = "choose another `--out`, or an empty folder"


class RunExists(PacelineError):
    """A run is never overwritten."""

    folder: Path
    sentence = "{folder} holds a run already"
    hint = "add `--resume auto` to go on with it, or choose another `--out`"


class RunBusy(PacelineError):
    """Another process is training in this folder."""

    folder: Path
    owner: str
    sentence = "{folder} is being trained by {owner}"
    hint = "wait for it or stop it, or choose another `--out`"


class RunChanged(PacelineError):
    """Another start has trained in the folder while this one was being set up."""

    folder: Path
    sentence = "{folder} was trained by another start while this one was being set up"
    hint = "look at it with `paceline runs`; `--resume auto` goes on from where it is now, or choose another `--out`"


# -- the record --------------------------------------------------------------------------------------------------------


class BrokenRecord(Exception):
    """A record that is not one: `{RECORD} {reason}`. Commands catch it and say what it means for them."""

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(f"{RECORD} {reason}")
        self.reason = reason
        self.cause = cause
        """The reason, for a message that names the file."""


@dataclass
class RunRecord:
    """Content of `run.json`. Only `settings` are in every one; `other` holds keys that this version does not know."""

    settings: dict[str, Any]
    task: str | None = None
    status: str | None = None
    grains: int | None = None
    choice: dict[str, Any] | None = None
    """Choice of the autotuner (`auto`, `-O4`)."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """See provenance.py."""
    other: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: object) -> RunRecord:
        """Raises `BrokenRecord`."""
        if not isinstance(values, dict) or not isinstance(values.get("settings"), dict):
            raise BrokenRecord("has no settings", "it has no 'settings'")
        rest = dict(values)
        for name, kind in (("grains", int | None), ("choice", dict | None)):
            if not isinstance(rest.get(name), kind):
                raise BrokenRecord(f"has {name} of another form", f"its {name!r} has another form")
        starts = rest.pop("starts", None)
        return cls(
            settings=_present_names(rest.pop("settings")),
            task=_text(rest.pop("task", None)),
            status=_text(rest.pop("status", None)),
            grains=rest.pop("grains", None),
            choice=rest.pop("choice", None),
            starts=[_start(each) for each in starts if isinstance(each, dict)] if isinstance(starts, list) else [],
            other=rest,
        )

    def to_json(self) -> dict[str, Any]:
        values = {"status": self.status, "grains": self.grains, "task": self.task, "settings": self.settings}
        if self.choice is not None:
            values["choice"] = self.choice
        return {**values, **self.other, "starts": self.starts}

    @property
    def plugins(self) -> list[dict[str, Any]]:
        """Plugins that the last start used, see plugins.py."""
        entries = self.starts[-1].get("plugins") if self.starts else None
        return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []

    def require(self, *names: str) -> None:
        """Raise `BrokenRecord` for the first of these fields that the file does not have."""
        for name in names:
            if getattr(self, name) is None:
                raise BrokenRecord(f"has no {name}", f"it has no {name!r}")


def read_record(folder: Path) -> RunRecord:
    """Return the record of the run in `folder`; raises `BrokenRecord`, or `FileNotFoundError` where there is none."""
    try:
        values = read_json(folder / RECORD)
    except ValueError as error:
        raise BrokenRecord(f"is not JSON ({error})", str(error)) from error
    except FileNotFoundError:
        raise
    except OSError as error:  # a folder in its place, a pipe, no permission
        raise BrokenRecord(f"cannot be read ({error.strerror})", str(error.strerror)) from error
    return RunRecord.from_json(values)


def _start(start: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a start without parts of another form than provenance.py gives them."""
    return {name: value for name, value in start.items() if name not in ("versions", "git") or isinstance(value, dict)}


def _present_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return recorded settings with `validation` where earlier versions have `mode`."""
    kept = {name: value for name, value in settings.items() if name != "mode"}
    return {"validation": settings["mode"] != "train", **kept} if "mode" in settings else kept


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# -- the journal -------------------------------------------------------------------------------------------------------


@dataclass
class JournalRecords:
    """Lines of `metrics.jsonl` as dictionaries, in their order."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    progress: list[dict[str, Any]] = field(default_factory=list)
    """Looks at how far and how fast the run was; runs of earlier versions have none."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Changes of the ranks, where survivors go on."""
    num_unread: int = 0
    """Complete lines that are no records."""


def read_journal(path: Path) -> JournalRecords:
    """Read a journal that may be missing, damaged, or in the middle of a line (a crash, or a run that is running)."""
    journal = JournalRecords()
    every: list[dict[str, Any]] = []
    kinds = {
        "step": journal.steps,
        "epoch": journal.epochs,
        "validation": journal.validations,
        "progress": journal.progress,
        "ranks": journal.ranks,
    }
    try:
        with open_text(path) as file:
            for line in iter(lambda: file.readline(_MAX_LINE), ""):
                record = _journal_record(line)
                if record is None:
                    journal.num_unread += line.endswith("\n")
                elif record["kind"] in kinds:
                    kinds[record["kind"]].append(record)
                    every.append(record)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Unreadable(
            f"{path} cannot be read: {error.strerror}",
            hint="bring back the file that the run wrote, or leave this run out",
        ) from error
    count_epochs_from_one(every)
    return journal


def count_epochs_from_one(records: Sequence[dict[str, Any]]) -> bool:
    """Let the epochs of a journal's lines, in their order, count from 1; True if they did not.

    Earlier versions counted from 0, and gave a validation after an epoch the number of the next.
    """
    if not any(_is_count(record.get("epoch")) and record["epoch"] == 0 for record in records):
        return False
    epoch = 1
    for record in records:
        if record.get("kind") == "validation":
            record["epoch"] = epoch
        elif _is_count(record.get("epoch")):
            epoch = record["epoch"] = record["epoch"] + 1
    return True


@dataclass
class JournalEnd:
    """Validations of a journal, its last step, and the last look at its progress; each is empty where there is none."""

    step: dict[str, Any] = field(default_factory=dict)
    validations: list[dict[str, Any]] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)


def read_progress(path: Path) -> JournalEnd:
    """Read how far a run is. Fast: the steps before the last one, most of the lines, are not parsed."""
    first, last, progress, validations = "", "", "", []
    try:
        with open_text(path) as file:
            for line in iter(lambda: file.readline(_MAX_LINE), ""):
                if not line.endswith("\n"):
                    break  # being written, or cut short by a crash
                if '"kind": "validation"' in line:
                    validations.append(_parsed(line))
                elif line.startswith('{"kind": "step", "step": ') and line.endswith("}\n"):
                    first, last = first or line, line
                elif line.startswith('{"kind": "progress", "step": ') and line.endswith("}\n"):
                    progress = line
    except OSError:
        return JournalEnd()
    end = JournalEnd(_parsed(last) or {}, [record for record in validations if record], _parsed(progress) or {})
    count_epochs_from_one([_parsed(first) or {}, end.progress, end.step])
    return end


def _journal_record(line: str) -> dict[str, Any] | None:
    record = _parsed(line)
    if record is None or not isinstance(record.get("kind"), str) or not _is_count(record.get("step")):
        return None
    return None if record["kind"] == "epoch" and not _is_count(record.get("epoch")) else record


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


# -- lock and status ---------------------------------------------------------------------------------------------------


def status_now(folder: Path, status: str) -> str:
    """Return the status of a run: as recorded, and for one recorded as `running`, what its lock tells.

    A lock that is free on this machine may be held on another one: not all shared disks tell.
    """
    if status != RUNNING:
        return status
    try:
        with open_text(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            host = file.read(_MAX_OWNER).strip().rpartition(_ON)[2]
    except BlockingIOError:
        return RUNNING
    except OSError:  # no lock, or a file system without locks
        return UNSEEN
    if host == socket.gethostname():
        return DIED
    return f"{UNSEEN}{_ON}{host}" if host else UNSEEN


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield all run folders below a folder; the folders inside a run are not searched."""
    for path, below, files in os.walk(folder):
        if RECORD in files:
            below.clear()
            yield Path(path)


class RunFolder:
    """The folder of one run; only the first rank writes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self.metrics = folder / METRICS
        self.logs = folder / LOGS
        self._lock: IO[str] | None = None

    @property
    def is_run(self) -> bool:
        return os.path.exists(self.folder / RECORD)  # unlike Path.exists also where the name is too long to be one

    def lock(self) -> None:
        """Keep others out until `unlock`, or until this process ends, however it does.

        By `flock`, which Linux also does over NFS (by the server's locks, so between hosts), unless it was mounted with
        `nolock` or `local_lock`; where a file system has no locks nothing can be promised.
        """
        self._create()
        with self._writing(LOCK):
            file = (self.folder / LOCK).open("a+", encoding="utf-8")
        if not self._take(file, fcntl.LOCK_EX):
            file.close()
            return
        file.truncate(0)
        with suppress(OSError):  # a full disk: the lock holds, whether or not it names its owner
            os.write(file.fileno(), f"pid {os.getpid()}{_ON}{socket.gethostname()}\n".encode())
        self._lock = file
        for name in (RECORD, METRICS):  # who has the lock is the only one to write them
            remove_asides(self.folder / name)

    def check_free(self) -> None:
        """Raise `RunBusy` if another process has the lock now; `lock` decides, later."""
        with suppress(OSError), open_text(self.folder / LOCK) as file:
            self._take(file, fcntl.LOCK_SH)

    def _take(self, file: IO[str], how: int) -> bool:
        """Lock the lock file; return False on a file system without locks."""
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if attempt + 1 < _LOCK_TRIES:
                    time.sleep(_LOCK_PAUSE_S)
            except OSError:
                return False
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise RunBusy(self.folder, owner or "another process")

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check(self, *, may_exist: bool) -> RunRecord | None:
        """Return the record of the run, None for a folder that is free to use."""
        if not os.path.exists(self.folder):
            return None
        if not self.folder.is_dir():
            raise NotARun(self.folder, "it is a file")
        if not self.is_run:
            names = [path.name for path in self.folder.iterdir()]
            if not all(name in _MAY_PRECEDE_RECORD or is_aside(name) for name in names):
                raise NotARun(self.folder, f"it has files but no {RECORD}")
            return None
        try:
            record = read_record(self.folder)
        except BrokenRecord as error:
            raise NotARun(self.folder, str(error)) from error
        if record.status == "failed" and not any(self.checkpoints.glob("step-*")):
            return None  # it failed before it had anything to lose
        if not may_exist:
            raise RunExists(self.folder)
        return record

    def check_unchanged(self, before: RunRecord | None, *, may_exist: bool) -> None:
        """Under the lock: raise unless the run is as `check` returned it, so that nobody's work is overwritten.

        Every start adds itself to the record before it writes anything else.
        """
        os.listdir(self.folder)  # over NFS, opening a folder brings in the names that other hosts have made
        now = self.check(may_exist=may_exist)
        if (None if now is None else now.starts) != (None if before is None else before.starts):
            raise RunChanged(self.folder)

    def write(self, record: RunRecord) -> None:
        self._create()
        with self._writing(RECORD), replacing(self.folder / RECORD) as file:
            # Only what looks like a secret is masked. A file that is there already hands on its permissions.
            os.chmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o660)
            json.dump(record.to_json(), file, indent=1)

    def _create(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NotARun(self.folder, f"it cannot be made ({error.strerror})") from error

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            room = "make room there, or choose another `--out`"
            rights = "make it writable, or choose another `--out`"
            raise CannotWrite(self.folder / name, error, room if is_full(error) else rights) from error


class RunListener:
    """Follows the process that trains in a run folder, to keep a copy elsewhere. This one does nothing."""

    def starting(self) -> AbstractContextManager[None]:
        """Return the context in which the process writes its first record. An error in it ends the start."""
        return nullcontext()

    def on_written(self) -> None:
        """Called when a checkpoint is on disk, in the thread that writes it."""

    def abandon(self) -> None:
        """Called when the folder is left to another process, which completes the copy."""

    def close(self, *, is_patient: bool = True) -> bool:
        """Called when everything is written. Return True if the copy is complete."""
        return True
