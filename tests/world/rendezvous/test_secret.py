"""Where the secret of a job comes from, and files that are refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.core.errors import Failed, InvalidSetting, PacelineError
from paceline.world.rendezvous.secret import (
    SecretUnsafe,
    find_secret,
    secret_path,
)


def test_the_environment_comes_first(tmp_path: Path) -> None:
    env = {"PACELINE_SECRET": "0123456789abcdef", "HOME": str(tmp_path)}
    assert find_secret(env, is_one_machine=False).value == b"0123456789abcdef"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidSetting, match="less than 16 characters"):
        find_secret({"PACELINE_SECRET": "guess"}, is_one_machine=True)


def test_ranks_that_start_at_once_make_one_file_that_only_the_user_reads(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: find_secret(env, is_one_machine=False), range(32)))
    assert len({secret.value for secret in found}) == 1
    assert len(found[0].value) == 64
    path = tmp_path / ".config" / "paceline" / "secret"
    assert found[0].source == str(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
    assert str(found[0].value) not in repr(found[0])
    assert secret_path({"HOME": "/a", "XDG_CONFIG_HOME": "/b"}) == Path("/b/paceline/secret")


@pytest.mark.parametrize("damage", ["group", "link", "empty", "folder"])
def test_a_file_that_is_not_the_user_s_alone_is_refused(damage: str, tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    find_secret(env, is_one_machine=True)
    path = secret_path(env)
    if damage == "group":
        path.chmod(0o640)
    elif damage == "empty":
        os.truncate(path, 0)
    else:
        path.rename(path.with_name("other"))
        path.symlink_to(path.with_name("other")) if damage == "link" else path.mkdir(mode=0o700)
    with pytest.raises(PacelineError) as caught:
        find_secret(env, is_one_machine=True)
    assert isinstance(caught.value, SecretUnsafe)
    assert str(path) in str(caught.value)
    assert "PACELINE_SECRET" in caught.value.hint


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine a folder of the user's own for temporary files will do; another user's there is refused."""
    env = {"HOME": "/proc/no such folder"}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert find_secret(env, is_one_machine=True) == find_secret(env, is_one_machine=True)
    with pytest.raises(Failed, match="cannot be stored"):
        find_secret(env, is_one_machine=False)
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o777)
    with pytest.raises(SecretUnsafe):
        find_secret(env, is_one_machine=True)
