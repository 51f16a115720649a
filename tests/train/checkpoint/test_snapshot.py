"""Snapshots against the safetensors library, which reads what we wrote."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from paceline.train.checkpoint import snapshot as snapshot_module
from paceline.train.checkpoint.snapshot import DTYPE_NAMES, NotStorable, Snapshot, digest_of, refill


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


def written(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    kept: dict[str, Snapshot] = {}
    refill(kept, {"part": tensors})
    kept["part"].write(path)
    return load_file(path)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        raw = [side.contiguous().reshape(-1).view(torch.uint8) for side in (found[name], tensor.detach())]
        assert torch.equal(*raw), name


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=str)
def test_every_dtype_is_read_back_by_the_safetensors_library(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "matrix": values(dtype, (5, 3)),
        "scalar": values(dtype, ()),
        "empty": values(dtype, (0, 4)),
        "one_byte_before": torch.ones(3, dtype=torch.uint8),
    }
    assert_same(written(tensors, tmp_path / "a.safetensors"), tensors)


def test_strided_shared_and_trainable_tensors_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    weight = nn.Parameter(torch.randn(3, 3))
    tensors = {
        "transposed": base.t(),
        "column": base[:, 2],
        "expanded": torch.ones(1).expand(7),
        "weight": weight,
        "tied": weight,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    assert_same(written(tensors, tmp_path / "a.safetensors"), tensors)


def test_a_part_without_tensors_is_a_valid_file(tmp_path: Path) -> None:
    assert written({}, tmp_path / "a.safetensors") == {}


@given(
    st.lists(
        st.tuples(st.sampled_from(list(DTYPE_NAMES)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=12
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture_of_dtypes_and_shapes_is_laid_out_without_holes(
    tmp_path: Path, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    tensors = {f"t{index}": values(dtype, tuple(shape)) for index, (dtype, shape) in enumerate(kinds)}
    path = tmp_path / "a.safetensors"
    path.unlink(missing_ok=True)
    assert_same(written(tensors, path), tensors)
    raw = path.read_bytes()
    head = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + head])
    del header["__metadata__"]
    assert (8 + head) % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % max(1, tensors[name].element_size()) == 0


def test_names_with_any_characters_survive(tmp_path: Path) -> None:
    tensors = {'a "quoted"\\name\n': torch.ones(1), "größe.重": torch.zeros(2), "": torch.ones(3)}
    assert_same(written(tensors, tmp_path / "a.safetensors"), tensors)


def test_chunks_join_to_the_same_file_and_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(10000), "b": torch.randn(77).bfloat16()}
    part = Snapshot("part", tensors)
    part.fill(tensors)
    whole = part.write(tmp_path / "whole")
    monkeypatch.setattr(snapshot_module, "CHUNK_BYTES", snapshot_module.BLOCK_BYTES)
    assert part.write(tmp_path / "cut") == whole == digest_of(tmp_path / "whole")
    raw = (tmp_path / "cut").read_bytes()
    assert raw == (tmp_path / "whole").read_bytes()
    assert (whole.num_bytes, whole.xxh3_128) == (len(raw), xxhash.xxh3_128_hexdigest(raw))


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_disk_that_refuses_direct_writes_gets_the_same_file(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.randn(10000)}
    part = Snapshot("part", tensors)
    part.fill(tensors)
    direct = part.write(tmp_path / "direct")
    opened = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            opened(path, flags & ~os.O_DIRECT, mode)
            raise OSError(refusal, os.strerror(refusal))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert part.write(tmp_path / "cached") == direct
    assert (tmp_path / "cached").read_bytes() == (tmp_path / "direct").read_bytes()


def test_buffers_are_kept_until_a_shape_changes() -> None:
    kept: dict[str, Snapshot] = {}
    tensors = {"w": torch.zeros(4, 4)}
    refill(kept, {"model": tensors, "ema": tensors})
    first = dict(kept)
    refill(kept, {"model": {"w": torch.ones(4, 4)}, "ema": {"w": torch.zeros(5, 4)}})
    assert kept["model"] is first["model"]
    assert kept["ema"] is not first["ema"]
    refill(kept, {"model": tensors})
    assert list(kept) == ["model"]


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("w", torch.zeros(2, dtype=torch.complex128), "complex128"),
        ("w", torch.zeros(2, 2).to_sparse(), "sparse"),
        ("w", torch.zeros(2, device="meta"), "meta"),
        ("__metadata__", torch.zeros(2), "reserves"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(name: str, tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(NotStorable, match=why) as failure:
        Snapshot("model", {name: tensor})
    assert (failure.value.part, failure.value.name) == ("model", name)


@pytest.mark.gpu
def test_gpu_tensors_go_through_page_locked_memory_and_survive_later_changes(tmp_path: Path) -> None:
    tensors = {"big": torch.randn(2**24, device="cuda"), "strided": torch.randn(512, 300, device="cuda").t()}
    tensors["half"] = torch.randn(33, device="cuda").bfloat16()
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    kept: dict[str, Snapshot] = {}
    for _ in range(2):
        refill(kept, {"part": tensors, "host": {"step": torch.tensor(3.0)}})
    for tensor in tensors.values():
        tensor.zero_()
    kept["part"].write(tmp_path / "a.safetensors")
    assert kept["part"]._image.is_pinned()
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        for name, tensor in expected.items():
            assert torch.equal(file.get_tensor(name), tensor), name
