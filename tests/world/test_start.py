"""What `start` decides from the roll call, without processes; the rest is seen at work in the other tests here."""

from __future__ import annotations

import pytest
import torch

from paceline.world import start as module
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.resources import MoreRanksThanDevices, NoCudaDevice
from paceline.world.roll_call import Present
from tests.ranks import ranks

PLAIN = World(0, 0, 1, 1, 0, 1, "plain", None)


def entry(rank: int, host: str = "a", cores: tuple[int, ...] = (0, 1, 2, 3), gpu: str | None = None) -> Present:
    return Present(rank, host, 1, "cpu", cores, gpu)


def test_backend_follows_the_devices() -> None:
    assert module._backend([entry(0), entry(1)], False) == "gloo"
    assert module._backend([entry(0, gpu="x"), entry(1, gpu="y")], False) == "cpu:gloo,cuda:nccl"
    # Two nodes may have GPUs of equal number, even of equal name.
    assert module._backend([entry(0, "a", gpu="x"), entry(1, "b", gpu="x")], False) == "cpu:gloo,cuda:nccl"
    shared = [entry(0, gpu="x"), entry(1, gpu="x"), entry(2, gpu="y")]
    assert module._backend(shared, True) == "cpu:gloo,cuda:gloo"
    with pytest.raises(MoreRanksThanDevices, match=r"3 ranks.* 2 CUDA"):
        module._backend(shared, False)


def test_threads_are_shared_only_with_ranks_on_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    roll = [entry(0), entry(1), entry(2, host="b")]
    assert module._set_threads(roll[0], roll, None) == 2
    bound = [entry(0, cores=(0, 1)), entry(1, cores=(2, 3))]
    assert module._set_threads(bound[0], bound, None) == 2
    assert module._set_threads(bound[0], bound, 5) == 5


@ranks(2)
def test_threads_are_set_for_real(link: Link) -> None:
    assert link.threads == torch.get_num_threads() == 1


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NoCudaDevice):
        module.start(PLAIN, device="cuda")


def test_gloo_interface_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env: dict[str, str] = {}
    module._choose_interface(PLAIN, env)
    assert env["GLOO_SOCKET_IFNAME"].startswith("lo")
    several = World(0, 0, 2, 1, 0, 2, "slurm", "a:1")
    module._choose_interface(several, named := {"GLOO_SOCKET_IFNAME": "eth1"})
    assert named == {"GLOO_SOCKET_IFNAME": "eth1"}
    monkeypatch.setattr(module, "find_interface", lambda world: None)
    module._choose_interface(several, untouched := {})
    assert untouched == {}


@pytest.mark.gpu
def test_cuda_is_chosen_and_needs_no_group_alone() -> None:
    with module.start(PLAIN, device="auto", threads=1) as link:
        assert link.device == torch.device("cuda:0")
        tensor = torch.ones(2, device=link.device)
        link.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
