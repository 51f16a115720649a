from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.python_call import CallInvalid, settings_of_call
from paceline.config.settings import TrainConfig
from paceline.core.cloud.address import NotAnAddress, address_of, copies_root, local_path, shown
from paceline.core.run_folder import RunExists

PART = st.text("abcXYZ019._-", min_size=1, max_size=8).filter(lambda part: part not in (".", "..") and part != "..")


@given(st.sampled_from(["memory", "file"]), st.lists(PART, min_size=1, max_size=4))
def test_address_and_copy_give_each_other(scheme, parts):
    address = f"{scheme}://{'/'.join(parts)}"
    path = local_path(address)
    if scheme == "file":
        assert (path, address_of(path)) == (Path("/", *parts), None)
        return
    assert address_of(path) == shown(path) == address
    assert local_path(Path(address)) == path  # which has lost a slash
    assert local_path(address) / "checkpoints" == local_path(f"{address}/checkpoints")
    assert shown(f"found in {path}/run.json, and more") == f"found in {address}/run.json, and more"


def test_a_port_is_no_password():
    assert address_of(local_path("memory://host:22/a@b")) == "memory://host:22/a@b"


def test_paths_of_this_machine_stay():
    for text in ("runs/a", "/runs/a", "a:b", "s3", "C:/x"):
        assert (local_path(text), address_of(Path(text)), shown(text)) == (Path(text), None, text)
    assert address_of(copies_root() / ".aside" / "run-1") is None


def test_copies_lie_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "here"))
    assert local_path("memory://a/b") == tmp_path / "here" / "memory" / "a" / "b"


@pytest.mark.parametrize(
    ("address", "why", "hint"),
    [
        ("nosuch://bucket/run", "there is no scheme 'nosuch'", "fsspec knows s3"),
        ("memory://a/../b", "is not an address", "scheme://bucket"),
        ("s3://", "names no bucket", "scheme://bucket"),
        ("zip://x::memory://a", "is not an address", "scheme://bucket"),
        ("ssh://me:hunter22@host/run", "a password in an address", "credentials come from"),
        ("s3://AKIA:abc/hunter22+@bucket/run", "a password in an address", "credentials come from"),  # AWS has slashes
        ("s3://bucket/run?X-Amz-Signature=hunter22hunter22hunter22", "s3://bucket/run?... is not", "scheme://bucket"),
        ("simplecache::memory://bucket/run", "is a chain of file systems", "name the last one alone"),
    ],
)
def test_what_cannot_be_used_is_refused(address, why, hint):
    with pytest.raises(NotAnAddress) as refused:
        local_path(address)
    assert why in str(refused.value)
    assert hint in refused.value.hint
    with pytest.raises(CallInvalid) as invalid:
        settings_of_call(TrainConfig, {"out": address, "steps": 1}, "paceline.fit")
    assert why in str(invalid.value)
    assert hint in invalid.value.hint
    assert "hunter22" not in str(refused.value) + str(invalid.value)


def test_a_setting_that_takes_no_address_says_so():
    with pytest.raises(CallInvalid, match="is an address, and this must be a path of this machine"):
        settings_of_call(TrainConfig, {"profile_file": "s3://bucket/trace", "steps": 1}, "paceline.fit")


def test_settings_are_recorded_with_their_addresses(monkeypatch, tmp_path):
    values = {"out": "memory://runs/a", "train_files": ("memory://d/x.hdf",), "val_files": ("dev=memory://d/v.hdf",)}
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "one"))
    recorded = TrainConfig(**values, steps=1).model_dump(mode="json")
    assert [recorded["out"], *recorded["train_files"], *recorded["val_files"]] == [
        "memory://runs/a",
        "memory://d/x.hdf",
        "dev=memory://d/v.hdf",
    ]
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "two"))  # another machine
    again = TrainConfig(**recorded)
    assert again.out == tmp_path / "two" / "memory" / "runs" / "a"
    assert again.val_files == (f"dev={tmp_path}/two/memory/d/v.hdf",)


def test_messages_name_the_address():
    assert str(RunExists(local_path("memory://runs/a"))) == "memory://runs/a holds a run already"
