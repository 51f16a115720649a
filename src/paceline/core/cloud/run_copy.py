"""The copy of a run whose folder is at an address: brought up to date when it is opened, sent as training goes.

A run is trained in its copy, as in any folder. What is there by then is sent after every save, each file whole and
verified, a checkpoint's `digests.json` last: without it a checkpoint is none. So a kill, an error or a cut connection
at any moment leaves the checkpoints that were sent before, and those that were not sent are still in the copy, for the
next pass. `.sent.json` in the copy remembers which files the store has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.cloud.address import address_of, copies_root
from paceline.core.cloud.file_copy import alone
from paceline.core.cloud.store import Entry, Store, StoreFailed
from paceline.core.disk import is_aside, replacing
from paceline.core.errors import PacelineError
from paceline.core.json_text import parse_json
from paceline.core.run_folder import (
    CHECKPOINTS,
    LOCK,
    RECORD,
    BrokenRecord,
    NotARun,
    RunBusy,
    RunChanged,
    RunFolder,
    RunRecord,
    read_record,
)

STARTING = ".starting"
"""Made in the store by a start before it writes the record, and removed after: of several at once, one goes on."""
_MOST_PASSED = 8
"""Starts that were killed and left a name behind; more are a store that does not keep what is written."""
_START_TRIES, _START_PAUSE_S = 20, 1.0
"""Time for another start that has begun to write the record: one that has not written it by then is gone."""
SENT, SENDING, HEADS = ".sent.json", ".sending", ("state.json", "digests.json")
"""Files of the copy itself; of a checkpoint, those that say what it is. The last of them is sent last."""
_DIGESTS = HEADS[-1]
_STEP = re.compile(rf"{CHECKPOINTS}/step-(\d{{8,}})/(.+)")
_MAY_PRECEDE = ("batch/", "logs/", CHECKPOINTS + "/", STARTING)
Starts = list[dict[str, Any]]


class RunTakenOver(PacelineError):
    """Another start goes on with the run: what this one would send belongs to a past that the run no longer has."""

    address: str
    folder: Path
    by: str
    sentence = "{address} is trained by another start since {by}: nothing more of this one is sent there"
    hint = "what this one writes is in {folder} only; end one of the two"


@dataclass(frozen=True)
class SentFile:
    """A file as the store had it and as the copy had it when they were the same."""

    num_bytes: int
    version: str
    mtime_ns: int


def relation(here: Starts | None, there: Starts | None) -> Literal["none", "ahead", "behind", "apart"]:
    """Return how a copy stands to the run, by the starts that both have seen.

    `ahead`: all of the run's starts and maybe more, so what only the copy has is the run's newest. `behind`: the run
    was trained elsewhere since. `apart`: another run, or the run is gone.
    """
    if here is None:
        return "none"
    if there is not None and here[: len(there)] == there:
        return "ahead"
    return "behind" if there is not None and there[: len(here)] == here else "apart"


def outdated(here: set[str], there: set[str]) -> tuple[set[str], set[str]]:
    """Return names of checkpoints in the store to remove, and to put aside, as `Checkpointer` does with its own.

    Older ones that the copy has no longer are removed; later ones are what a resumption from an earlier one left.
    """
    if not here:
        return set(), set()
    newest = max(here, key=_step)
    only_there = there - here
    return {name for name in only_there if _step(name) < _step(newest)}, {
        name for name in only_there if _step(name) > _step(newest)
    }


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


class RunCopy:
    """The copy of one run; one process at a time moves its files."""

    def __init__(self, folder: Path, address: str, store: Store | None = None) -> None:
        self.folder, self.address = folder, address
        self.store = store or Store(address)
        self._found: Entry | None = None

    @classmethod
    def of(cls, folder: Path | None) -> RunCopy | None:
        """Return the copy that a folder is, None for a folder of its own."""
        address = None if folder is None else address_of(folder)
        return None if folder is None or address is None else cls(folder, address)

    # -- from there ------------------------------------------------------------------------------------------------

    def pull(self) -> list[str]:
        """Bring the copy up to date: all but the tensors of checkpoints, which come when they are read.

        Returns lines for the user. A copy that a process trains in now is ahead, and left alone.
        """
        try:
            RunFolder(self.folder).check_free()
        except RunBusy:
            return []
        with alone(self.folder):
            there = self.store.files()
            self._found = there.get(RECORD)
            if RECORD not in there and any(not name.startswith(_MAY_PRECEDE) and name != LOCK for name in there):
                raise NotARun(self.folder, f"it has files but no {RECORD}")
            how = relation(self._starts_here(), self._starts_there(self._found))
            lines = []
            if how == "apart" or (how == "behind" and self._unsent(there)):
                has_checkpoints = bool(self._checkpoints())
                line = self._put_aside(how)
                lines += [line] if has_checkpoints else []
                how = "none"
            if self._found is not None:
                self._bring_files(there, is_behind=how != "ahead")
                self._bring_heads(there, is_behind=how != "ahead")
            return lines

    def check_unchanged(self) -> None:
        """Raise `RunChanged` if the run has been trained by others since `pull`."""
        now = self.store.entry(RECORD)
        if now != self._found:
            raise RunChanged(self.folder)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Keep other starts out while this one writes the record; raises `RunChanged` if one was faster.

        A start that was killed in here is waited for once, then passed over.
        """
        content = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4()}".encode()
        passed: dict[str, bytes | None] = {}
        name = STARTING
        while not self._claim(name, content):
            passed[name] = self.store.read(name)
            if len(passed) == _MOST_PASSED:
                raise StoreFailed(self.address, f"writing {STARTING}", OSError("it is never as it was written"))
            name = f"{STARTING}-{len(passed)}"
        try:
            self.check_unchanged()
            yield
        finally:
            with suppress(StoreFailed):  # one that stays is waited for by the next start
                others = [other for other, theirs in passed.items() if theirs and self.store.read(other) == theirs]
                self.store.remove([*others, name])

    def _claim(self, name: str, content: bytes) -> bool:
        """Return True once a name is ours; False if it stays another's while nothing happens to the record."""
        for _ in range(_START_TRIES):
            if self.store.create(name, content):
                return True
            self.check_unchanged()
            time.sleep(_START_PAUSE_S)
        return False

    def _check_ours(self, there: Mapping[str, Entry]) -> None:
        """Raise `RunTakenOver` if the store has a record with starts that this copy does not know."""
        now = there.get(RECORD)
        if now is None or now == self._found:
            return
        starts = self._starts_there(now)
        if relation(self._starts_here(), starts) in ("behind", "apart") and starts:
            last = starts[-1]
            raise RunTakenOver(self.address, self.folder, f"{last.get('time', '?')} on {last.get('host', '?')}")
        self._found = now

    def _check_still_ours(self) -> None:
        """`_check_ours` as the store is now."""
        now = self.store.entry(RECORD)
        self._check_ours({} if now is None else {RECORD: now})

    def _starts_here(self) -> Starts | None:
        try:
            return read_record(self.folder).starts
        except FileNotFoundError:
            return None
        except BrokenRecord:
            return []

    def _starts_there(self, record: Entry | None) -> Starts | None:
        content = self.store.read(RECORD) if record is not None else None
        if content is None:
            return None
        try:
            return RunRecord.from_json(parse_json(content)).starts
        except ValueError as error:
            raise NotARun(self.folder, f"{RECORD} is not JSON ({error})") from error
        except BrokenRecord as error:
            raise NotARun(self.folder, str(error)) from error

    def _unsent(self, there: Mapping[str, Entry]) -> list[str]:
        """Return the checkpoints of the copy that are whole and that the store has not."""
        sent = self._read_sent()
        return [
            name for name in self._checkpoints() if not self._is_there(name, there, sent) and self._missing(name) == []
        ]

    def _put_aside(self, how: str) -> str:
        number, target = 1, copies_root() / ".aside"
        target.mkdir(parents=True, exist_ok=True)
        while (target / f"{self.folder.name}-{number}").exists():
            number += 1
        target = target / f"{self.folder.name}-{number}"
        self.folder.rename(target)
        why = "is of another run" if how == "apart" else "has checkpoints from before others went on with the run"
        return f"the copy of {self.address} on this machine {why}: it was put aside as {target}"

    def _bring_files(self, there: Mapping[str, Entry], *, is_behind: bool) -> None:
        sent = self._read_sent()
        for name, entry in there.items():
            path = self.folder / name
            if name.startswith(CHECKPOINTS + "/"):
                continue
            if name == LOCK:
                self._bring_lock()
            if name == LOCK or name.startswith(STARTING):
                continue
            known = sent.get(name)
            is_current = path.exists() and known is not None and known.version == entry.version
            has_changes = path.exists() and not (known is not None and _is_as_sent(path, known))
            if is_current or (has_changes and not is_behind):
                continue
            with suppress(FileNotFoundError):
                self._note(sent, name, self.store.get(name, path))

    def _bring_lock(self) -> None:
        """Take over who has trained last. The file stays the same one: another process may hold it."""
        content = self.store.read(LOCK, 1000) or b""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / LOCK).write_bytes(content)

    def _bring_heads(self, there: Mapping[str, Entry], *, is_behind: bool) -> None:
        sent = self._read_sent()
        whole = {name for name in _steps(there) if f"{CHECKPOINTS}/{name}/{_DIGESTS}" in there}
        for name in self._checkpoints() if is_behind else []:
            if name not in whole or not self._is_there(name, there, sent):
                shutil.rmtree(self.folder / CHECKPOINTS / name, ignore_errors=True)
        for name in sorted(whole):
            final = self.folder / CHECKPOINTS / name
            if final.exists():
                continue
            aside = final.with_name(f".writing-{name}")
            shutil.rmtree(aside, ignore_errors=True)
            entries = {}
            try:
                for file in HEADS:
                    entries[file] = self.store.get(f"{CHECKPOINTS}/{name}/{file}", aside / file)
            except FileNotFoundError:  # removed meanwhile, or never complete
                shutil.rmtree(aside, ignore_errors=True)
                continue
            aside.rename(final)
            for file, entry in entries.items():
                self._note(sent, f"{CHECKPOINTS}/{name}/{file}", entry)

    # -- to there --------------------------------------------------------------------------------------------------

    def send_record(self) -> None:
        """Send the record and who trains, so that a store that cannot be written to is known before the first step."""
        with alone(self.folder):
            sent = self._read_sent()
            for name in (RECORD, LOCK):
                self._send_file(name, sent)

    def send(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Send what the store has not, and remove there what is no longer kept here; stops early if told so."""
        with alone(self.folder):
            there, sent = self.store.files(), self._read_sent()
            self._check_ours(there)
            names = self._checkpoints()  # newest first
            unsent = [name for name in names if not self._is_there(name, there, sent) and not self._missing(name)]
            staged: dict[str, Path] = {}
            try:
                for name in unsent:  # all at once, before the next save may remove one
                    with suppress(FileNotFoundError):
                        staged[name] = self._stage(name)
                for name in list(staged):
                    if not goes_on():
                        return
                    self._send_parts(name, staged[name], there, sent)
                    self._check_still_ours()  # parts may take long, and are in nobody's way
                    self._send_others(there, sent)  # the journal of a checkpoint, before the checkpoint counts
                    self._send_from(staged[name] / _DIGESTS, f"{CHECKPOINTS}/{name}/{_DIGESTS}", sent)
            finally:
                shutil.rmtree(self.folder / SENDING, ignore_errors=True)
            if goes_on():
                self._check_still_ours()
                self._send_others(there, sent)
                self._send_file(RECORD, sent, there)
                self._tidy(there)

    def _send_parts(self, name: str, staged: Path, there: Mapping[str, Entry], sent: dict[str, SentFile]) -> None:
        digests = f"{CHECKPOINTS}/{name}/{_DIGESTS}"
        if digests in there and self.store.read(digests) != (staged / _DIGESTS).read_bytes():
            self.store.remove([digests])  # another one of the same step: it counts no longer
        for path in sorted(staged.iterdir()):
            place = f"{CHECKPOINTS}/{name}/{path.name}"
            known, entry = sent.get(place), there.get(place)
            is_sent = known is not None and _is_as_sent(path, known) and entry == Entry(known.num_bytes, known.version)
            if path.name != _DIGESTS and not is_sent:
                self._send_from(path, place, sent)

    def _stage(self, name: str) -> Path:
        """Link a checkpoint's files, so that they are there until they are sent."""
        target = self.folder / SENDING / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in (self.folder / CHECKPOINTS / name).iterdir():
            try:
                os.link(path, target / path.name)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links
                shutil.copy2(path, target / path.name)
        if not (target / _DIGESTS).exists():
            raise FileNotFoundError(name)
        return target

    def _send_others(self, there: Mapping[str, Entry], sent: dict[str, SentFile]) -> None:
        for name in self._others():
            with suppress(FileNotFoundError):
                self._send_file(name, sent, there)

    def _others(self) -> list[str]:
        """Return the files of the run besides checkpoints and the record, without those that are being written."""
        names = []
        for folder, folders, files in os.walk(self.folder):  # passes over folders that vanish meanwhile
            if Path(folder) == self.folder:
                folders[:] = [each for each in folders if each not in (SENDING, CHECKPOINTS)]
            below = Path(folder).relative_to(self.folder)
            names += [
                (below / file).as_posix() for file in files if not is_aside(file) and (file[0] != "." or file == LOCK)
            ]
        return sorted(name for name in names if name != RECORD)

    def _send_file(self, name: str, sent: dict[str, SentFile], there: Mapping[str, Entry] | None = None) -> None:
        """Send a file that may grow meanwhile: as it is now."""
        path, known = self.folder / name, sent.get(name)
        entry = None if there is None else there.get(name)
        if known is not None and _is_as_sent(path, known) and entry == Entry(known.num_bytes, known.version):
            return
        snapshot = self.folder / SENDING / f"file-{os.getpid()}"
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(path, snapshot)
            self._send_from(snapshot, name, sent)
        finally:
            snapshot.unlink(missing_ok=True)
            with suppress(OSError):
                snapshot.parent.rmdir()

    def _send_from(self, source: Path, name: str, sent: dict[str, SentFile]) -> None:
        status = source.stat()
        entry = self.store.put(source, name)
        if name == RECORD:
            self._found = entry  # not changed by others
        sent[name] = SentFile(entry.num_bytes, entry.version, status.st_mtime_ns)
        self._write_sent(sent)

    def _tidy(self, there: Mapping[str, Entry]) -> None:
        """Remove from the store what is no longer kept; what was there before a pass is looked at only."""
        removed, left = outdated(set(self._checkpoints()), _steps(there))
        for name in sorted(removed | left):
            files = [file for file in there if file.startswith(f"{CHECKPOINTS}/{name}/")]
            files.sort(key=lambda file: not file.endswith(f"/{_DIGESTS}"))  # first it counts no longer
            if name in removed or not any(file.endswith(f"/{_DIGESTS}") for file in files):  # or never complete
                self.store.remove(files)
            else:
                for file in files:
                    self.store.move(file, file.replace(f"/{name}/", f"/left-{name}/"))

    # -- the copy --------------------------------------------------------------------------------------------------

    def _checkpoints(self) -> list[str]:
        """Return the names of the copy's checkpoints, newest first."""
        paths = (self.folder / CHECKPOINTS).glob("step-*")
        return sorted((path.name for path in paths if re.fullmatch(r"step-\d{8,}", path.name)), key=_step, reverse=True)

    def _digests(self, name: str) -> dict[str, Any] | None:
        try:
            values = json.loads((self.folder / CHECKPOINTS / name / _DIGESTS).read_bytes())
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    def _missing(self, name: str) -> list[str] | None:
        """Return the files of a checkpoint that are not in the copy; None for a checkpoint that is none."""
        digests = self._digests(name)
        if digests is None:
            return None
        return [file for file in digests if not (self.folder / CHECKPOINTS / name / file).exists()]

    def _is_there(self, name: str, there: Mapping[str, Entry], sent: Mapping[str, SentFile]) -> bool:
        """Return True if the store has this very checkpoint, each file with its size."""
        place, digests = f"{CHECKPOINTS}/{name}", self._digests(name)
        known, entry = sent.get(f"{place}/{_DIGESTS}"), there.get(f"{place}/{_DIGESTS}")
        if digests is None or known is None or entry != Entry(known.num_bytes, known.version):
            return False
        if not _is_as_sent(self.folder / place / _DIGESTS, known):
            return False
        sizes = {file: there[f"{place}/{file}"].num_bytes for file in digests if f"{place}/{file}" in there}
        return sizes == {file: values["bytes"] for file, values in digests.items()}

    def _read_sent(self) -> dict[str, SentFile]:
        try:
            values = json.loads((self.folder / SENT).read_bytes())
            return {name: SentFile(**entry) for name, entry in values.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _note(self, sent: dict[str, SentFile], name: str, entry: Entry) -> None:
        sent[name] = SentFile(entry.num_bytes, entry.version, (self.folder / name).stat().st_mtime_ns)
        self._write_sent(sent)

    def _write_sent(self, sent: Mapping[str, SentFile]) -> None:
        with replacing(self.folder / SENT) as file:
            json.dump({name: asdict(entry) for name, entry in sent.items()}, file, indent=0)


def _is_as_sent(path: Path, known: SentFile) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return (status.st_mtime_ns, status.st_size) == (known.mtime_ns, known.num_bytes)


def _steps(there: Mapping[str, Entry]) -> set[str]:
    """Return the names of checkpoints of which a store has files."""
    return {f"step-{match[1]}" for name in there if (match := _STEP.fullmatch(name))}


def bring_run(folder: Path) -> None:
    """Bring the copy of a run up to date, if `folder` is one."""
    copy = RunCopy.of(folder)
    if copy is not None:
        copy.pull()


def bring_runs(folder: Path) -> None:
    """Bring the copies of all runs below a folder up to date, if it is the copy of an address."""
    address = address_of(folder)
    if address is None:
        return
    for name in Store(address).files():
        if name == RECORD or name.endswith(f"/{RECORD}"):
            bring_run((folder / name).parent)
