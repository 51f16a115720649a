"""What a packing keeps until it is done: pieces and shards in a folder beside the packed file, and what it replaces.

Shards get names beside the packed file when all of them are whole. A token of the packing is in these names: they are
in nobody's way, and the packed file that is replaced stays readable until the new one has its name.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.core.disk import sync
from paceline.core.errors import PacelineError
from paceline.core.paths import near
from paceline.data.packed.errors import PackedUnreadable
from paceline.data.packed.layout import PackedFile, Shards, read_layout
from paceline.data.packed.lock import LOCK

_PLAN = "plan.json"
"""The packing's name and, each in a line, the files that it replaces."""


class OtherParts(PacelineError):
    """Parts of another data set are in the way."""

    def __init__(self, folder: Path) -> None:
        what = "parts of a packing that was not finished, of other data, code or options"
        super().__init__(f"{near(folder)} holds {what}")
        self.folder = folder
        self.hint = "give the same inputs and options to go on with it; `--force` begins anew"


class Parts:
    """The folder of one packing."""

    def __init__(self, out: Path, folder: Path, pack: str, replaced: Iterable[Path]) -> None:
        self.pack = pack
        """The packing's name, which its shards bear."""
        self._out, self._folder, self._replaced = out, folder, frozenset(replaced)

    def piece(self, number: int) -> Path:
        return self._folder / f"{number:06d}.npz"

    def shard(self, number: int) -> Path:
        """Where it is until all are there."""
        return self._folder / f"{number:05d}{self._out.suffix}"

    def named_shard(self, number: int) -> Path:
        """`train-5c3f09ab-00003.h5` beside `train.h5`."""
        return self._out.with_name(f"{self._out.stem}-{_token(self.pack)}-{number:05d}{self._out.suffix}")

    def find_shard(self, number: int) -> Path:
        """Where it is now, if it is anywhere: a kill may have come when some had their names."""
        named = self.named_shard(number)
        return self.shard(number) if self.shard(number).exists() or not named.exists() else named

    def name_shards(self, number: int) -> list[Path]:
        """Give all shards their names."""
        named = [self.named_shard(each) for each in range(number)]
        for each, path in enumerate(named):
            if self.find_shard(each) != path:
                self.shard(each).replace(path)
        sync(self._out.parent)
        return named

    def num_bytes(self) -> tuple[int, int]:
        """(of pieces, of shards) that are on the disk so far."""
        shards = [*self._folder.glob(f"*{self._out.suffix}"), *_shards_named(self._out, self.pack)]
        pieces = self._folder.glob("*.npz")
        return sum(path.stat().st_size for path in pieces), sum(path.stat().st_size for path in shards)

    def finish(self, files: Sequence[Path]) -> None:
        """The packed file has its name: what it replaced may go, and all parts."""
        for path in {*self._replaced, *_shards_named(self._out, self.pack)} - set(files):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder)


def open_parts(out: Path, identity: str, force: bool) -> Parts:
    """The folder for parts of this packing, and of no other; it is there, and locked."""
    folder = parts_folder(out)
    replaced = set(_shards_of(out))
    known, *names = _read_plan(folder)
    earlier = {out.with_name(name) for name in names}
    if known.startswith(identity):
        return Parts(out, folder, known, replaced | earlier)
    others = [path for path in folder.iterdir() if path.name not in (_PLAN, LOCK)]
    if not force and (known or others):
        raise OtherParts(folder)
    if known:
        # A kill may have come when shards had their names: nothing stands for them, unless `out` does.
        replaced |= earlier | set(_shards_named(out, known))
    for path in others:  # before the plan, which they must not seem to belong to
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    pack = _unused_name(out, identity)
    unfinished = folder / f"{_PLAN}.new"
    unfinished.write_text("\n".join([pack, *sorted(path.name for path in replaced)]))
    unfinished.replace(folder / _PLAN)
    return Parts(out, folder, pack, replaced)


def parts_folder(out: Path) -> Path:
    """`train.h5.parts`"""
    return out.with_name(f"{out.name}.parts")


def _read_plan(folder: Path) -> list[str]:
    plan = folder / _PLAN
    return (plan.read_text().splitlines() if plan.exists() else []) or [""]


def _unused_name(out: Path, identity: str) -> str:
    """Packed again, data may be other than it was: another name for the same identity, and names that are free."""
    while _shards_named(out, name := f"{identity}-{secrets.token_hex(4)}"):
        pass
    return name


def _token(pack: str) -> str:
    return pack.rpartition("-")[2]


def _shards_named(out: Path, pack: str) -> list[Path]:
    """Files whose names are those of this packing's shards."""
    begin = f"{out.stem}-{_token(pack)}-"
    return [path for path in out.parent.iterdir() if path.name.startswith(begin) and path.suffix == out.suffix]


def _shards_of(out: Path) -> list[Path]:
    """Those of the packed file that is to be replaced; a file that only has the name of one is nobody's to remove."""
    found = _layout_of(out)
    if not isinstance(found, Shards):
        return []
    return [path for path in found.files if _token(found.pack) in path.name or _is_of(path, found.pack)]


def _is_of(path: Path, pack: str) -> bool:
    found = _layout_of(path)
    return isinstance(found, PackedFile) and found.about.get("pack") == pack


def _layout_of(path: Path) -> PackedFile | Shards | None:
    try:
        return read_layout(path) if path.exists() else None
    except PackedUnreadable:
        return None
