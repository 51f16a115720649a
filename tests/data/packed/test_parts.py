"""A packing that is stopped at any step: what was there stays readable, and the same call goes on to the end."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import pytest

from paceline.core.errors import AlreadyExists
from paceline.data.packed import from_samples, parts, returnn, writer
from paceline.data.packed import pack as packing
from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.layout import Shards
from paceline.data.packed.reader import open_packed, read_layout
from paceline.data.packed.returnn import agree_on_sizes
from tests.data.packing import Sentences, assert_same, packed

BEFORE, AFTER = Sentences(9), Sentences(12)


class Killed(BaseException):
    """In place of a signal: nothing that is to be done on disk is done after it."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(make: Callable[[int], None], missing: Sequence[int], processes: int) -> Iterator[int]:
        for number in missing:
            make(number)
            yield number

    monkeypatch.setattr(from_samples, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(packing, "in_processes", here)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the machine stays up, and this is slow


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """The end comes before this step, counted from 0, of all that change what is on disk."""
    steps = itertools.count()

    def counted(real: Any) -> Any:
        def change(*words: Any, **options: Any) -> Any:
            if next(steps) >= step:
                raise Killed
            return real(*words, **options)

        return change

    for where, name in ((os, "replace"), (Path, "unlink"), (Path, "mkdir"), (shutil, "rmtree")):
        patch.setattr(where, name, counted(getattr(where, name)))
    for module in (writer, parts, returnn):
        patch.setattr(module, "sync", counted(module.sync))


def holds(out: Path, data: Any) -> bool:
    found = PackedDataset(out)
    if len(found) != len(data):
        return False
    for row in range(len(data)):
        assert_same(found[row], data[row])
    return True


def beside(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()}


def shards_of(out: Path) -> set[str]:
    found = read_layout(out)
    return {path.name for path in found.files} if isinstance(found, Shards) else set()


def sizes_of(path: Path) -> list[int]:
    with h5py.File(path, "r") as file:
        sizes = file["targets/size"].attrs
        return [int(number) for name in sorted(sizes) for number in sizes[name]]


@pytest.mark.parametrize(
    ("goes_on", "stride"),
    [(True, 9), (False, 13), *(pytest.param(each, 1, marks=pytest.mark.long) for each in (True, False))],
)
def test_stopped_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool, stride: int) -> None:
    """Either the old data or the new is there and whole; then the same call, or one with other options, ends it."""
    packed(tmp_path / "first" / "a.h5", BEFORE, shard_bytes=3000)
    assert len(shards_of(tmp_path / "first" / "a.h5")) > 2
    ends = {"old": 0, "new": 0}
    for step in itertools.count(0, stride):
        folder = shutil.copytree(tmp_path / "first", tmp_path / str(step))
        out = folder / "a.h5"
        options: dict[str, Any] = {"layout": "returnn", "shard_bytes": 4000, "force": True}
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            try:
                packed(out, AFTER, **options)
                break
            except Killed:
                pass
        ends["old" if holds(out, BEFORE) else "new"] += 1
        assert holds(out, BEFORE) or holds(out, AFTER)
        packed(out, AFTER, **(options if goes_on else {**options, "shard_bytes": 5000}))
        assert holds(out, AFTER)
        assert beside(out) - {"a.h5"} == shards_of(out), "and nothing else"
        assert len({tuple(sizes_of(folder / name)) for name in shards_of(out)}) == 1
        shutil.rmtree(folder)
    assert ends["old"] * stride > 20
    assert ends["new"] * stride > 3


def test_stopped_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call goes on without `--force`, wherever the kill came: the plan may not have its name yet."""
    for step in range(4):
        out = tmp_path / str(step) / "a.h5"
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            with pytest.raises(Killed):
                packed(out, AFTER)
        packed(out, AFTER)
        assert holds(out, AFTER)


def test_a_packed_file_may_be_packed_onto_itself(tmp_path: Path) -> None:
    out = tmp_path / "a.h5"
    packed(out, BEFORE, shard_bytes=3000)
    packed(out, PackedDataset(out), shard_bytes=2000, force=True)
    assert holds(out, BEFORE)
    assert beside(out) - {"a.h5"} == shards_of(out)


def test_files_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--force` nothing that was there is changed, whatever its name; with it, only what is replaced."""
    out = tmp_path / "a.h5"
    tokens = itertools.chain(["00000000", "00000001"], (f"{number:08x}" for number in itertools.count(2)))
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(tokens))
    others = [tmp_path / name for name in ("a-00000.h5", "a-00000000-00000.h5", "a-00000000-notes.h5")]
    for path in others:
        path.write_text("mine")
    packed(out, BEFORE, shard_bytes=3000)
    assert "a-00000001-00000.h5" in shards_of(out), "the first token was not free"
    packed(out, AFTER, force=True)
    assert beside(out) == {"a.h5", *(path.name for path in others)}
    assert all(path.read_text() == "mine" for path in others)
    (tmp_path / "b.h5.parts").mkdir()
    (tmp_path / "b.h5.parts" / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExists, match="parts of an unfinished packing"):
        packed(tmp_path / "b.h5")
    assert (tmp_path / "b.h5.parts" / "notes.txt").read_text() == "mine"


def test_a_file_in_the_place_of_an_old_shard_stays(tmp_path: Path) -> None:
    """A packed file whose shards have no token in their names: only what is a shard of it is removed with it."""
    out = tmp_path / "a.h5"
    packed(out, BEFORE, shard_bytes=3000)
    found = read_layout(out)
    assert isinstance(found, Shards)
    names = [f"a-{number:05d}.h5" for number in range(len(found.files))]
    for path, name in zip(found.files, names, strict=True):
        path.rename(tmp_path / name)
    writer.write_shards(out, list(zip(names, found.num_rows, strict=True)), found.pack)
    packed(tmp_path / "other.h5", AFTER)
    (tmp_path / "other.h5").rename(tmp_path / names[1])
    packed(out, AFTER, force=True)
    assert beside(out) == {"a.h5", names[1]}
    assert holds(tmp_path / names[1], AFTER)


def test_sizes_agree_before_shards_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only these numbers change: a file has its other bytes where they were."""
    out, before = tmp_path / "a.h5", {}

    def look(files: Sequence[Path]) -> None:
        assert beside(out) == {"a.h5.parts"}
        before.update({path: path.read_bytes() for path in files})
        agree_on_sizes(files)
        for path in files:
            after = path.read_bytes()
            changed = sum(one != other for one, other in zip(before[path], after, strict=True))
            assert changed <= 2, "at most one number in each of two streams of small numbers"

    monkeypatch.setattr(packing, "agree_on_sizes", look)
    data = [(0, row // 3 + 5, row // 3 + 7) for row in range(12)]
    packed(out, data, layout="returnn", shard_bytes=1500)
    files = [file.path for file in open_packed(out).files]
    assert len(files) > 2
    assert [sizes_of(path) for path in files] == [[9, 1, 11, 1]] * len(files)
    assert sum(path.read_bytes() != raw for path, raw in zip(files, before.values(), strict=True)) == len(files) - 1


def test_a_damaged_shard_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.h5"

    def stop(*words: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(packing, "write_shards", stop)
        with pytest.raises(Killed):
            packed(out, AFTER, shard_bytes=3000)
    [shard] = tmp_path.glob("a-*-00001.h5")
    os.truncate(shard, 3000)
    done = packed(out, AFTER, shard_bytes=3000)
    assert 0 < done.num_resumed < len(AFTER)
    assert holds(out, AFTER)
    assert beside(out) - {"a.h5"} == shards_of(out)
