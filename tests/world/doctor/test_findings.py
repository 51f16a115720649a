"""The doctor's judgements on values, and its measurements on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.world.discover.allocation import Allocation
from paceline.world.discover.environment import World
from paceline.world.doctor import findings, measure
from paceline.world.doctor.facts import Facts, Gpu, collect
from paceline.world.doctor.findings import Finding
from paceline.world.doctor.measure import Reduction, SharedFolder
from paceline.world.link import Link
from tests.ranks import ranks

ONE = World(0, 0, 1, 1, 0, 1, "plain", None, ("one process",))
TWO = World(0, 0, 2, 1, 0, 2, "slurm", "n1:1", ("srun",))
GPU = Gpu("H200", 143_771, 143_000)
FACTS = Facts(
    rank=0,
    host="n1",
    python="3.11.7",
    paceline="0.1.0",
    torch="2.13.0",
    cuda="13.0",
    nccl="2.29",
    driver="580.1",
    backends=("gloo", "nccl"),
    gpus=(GPU, GPU),
    cores=(0, 1, 2, 3),
    machine_cores=8,
    threads=4,
    load=3.5,
    host_address="10.0.0.1",
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    gloo_interface=None,
    nccl_interface=None,
    interface_problem=None,
    shm_mib=64_000,
    shm_free_mib=60_000,
    disk_free_mib=500_000,
    packages={"tensorboard": "2.21"},
)
OTHER = replace(FACTS, rank=1, host="n2", host_address="10.0.0.2")


def verdicts(found: object) -> list[tuple[str, str]]:
    return [(each.what, each.verdict) for each in found]  # type: ignore[attr-defined]


def bad(found: object) -> list[Finding]:
    return [each for each in found if each.verdict != "ok"]  # type: ignore[attr-defined]


def test_a_sound_pair_of_machines() -> None:
    roll = [FACTS, OTHER]
    found = [*findings.ranks(TWO, roll, None), *findings.versions(roll), *findings.devices(roll)]
    found += [
        *findings.cores(roll),
        *findings.load(roll),
        *findings.network(TWO, roll),
        *findings.space(roll),
        findings.packages(roll),
    ]
    found += [findings.clocks([0.0, -0.002], roll), *findings.folder(SharedFolder("runs", None, fsync_s=0.01), roll)]
    found += findings.speed([Reduction(4, 1e-4, 2), Reduction(1 << 26, 0.1, 2)], TWO, "cuda")
    assert bad(found) == []
    assert "2 on n[1-2], by slurm" in found[0].found


def test_one_process_in_a_large_allocation() -> None:
    (first, second) = findings.ranks(ONE, [FACTS], Allocation("slurm", "7", ("n1", "n2"), 8))
    assert (first.verdict, second.found) == ("warning", "slurm job 7: n[1-2]")
    assert "srun paceline doctor" in first.todo


@pytest.mark.parametrize(("name", "verdict"), [("torch", "problem"), ("nccl", "problem"), ("driver", "warning")])
def test_versions_must_agree(name: str, verdict: str) -> None:
    (found,) = bad(findings.versions([FACTS, replace(OTHER, **{name: "9"})]))
    assert (found.what, found.verdict) == (name, verdict)
    assert "9: n2" in found.found


def test_gpus() -> None:
    three = [replace(FACTS, rank=rank) for rank in range(3)]
    (found,) = bad(findings.devices(three))
    assert (found.verdict, found.todo) == ("problem", "start at most 2 ranks there, not 3")
    alone = [replace(FACTS, rank=rank, gpus=(GPU,)) for rank in range(3)]
    assert bad(findings.devices(alone)) == []  # each rank is shown a GPU of its own
    (busy,) = bad(findings.devices([replace(FACTS, gpus=(replace(GPU, free_mib=1000),))]))
    assert busy.verdict == "warning"
    (unused,) = bad(findings.devices([replace(FACTS, gpus=(), cuda=None)]))
    assert "built without CUDA" in unused.found
    (hidden,) = bad(findings.devices([replace(FACTS, gpus=())]))
    assert "CUDA_VISIBLE_DEVICES" in hidden.todo
    assert bad(findings.devices([replace(FACTS, gpus=(), cuda=None, driver=None)])) == []
    (lacking,) = bad(findings.devices([replace(FACTS, backends=("gloo",))]))
    assert lacking.what == "NCCL"


def test_levels() -> None:
    same = findings.levels([FACTS, OTHER], ["H200: -O0, -O1"] * 2)
    assert (same.verdict, same.found) == ("ok", "H200: -O0, -O1")
    other = findings.levels([FACTS, OTHER], ["H200: -O0, -O1", "V100: -O0"])
    assert (other.verdict, other.found) == ("warning", "H200: -O0, -O1: n1; V100: -O0: n2")


def test_cores() -> None:
    (bound,) = bad(
        findings.cores([replace(FACTS, cores=(0,), threads=1), replace(FACTS, rank=1, cores=(1,), threads=1)])
    )
    assert "--bind-to none" in bound.todo
    (crowded,) = bad(findings.cores([FACTS, replace(FACTS, rank=1)]))
    assert "4 of 8 for 2 ranks, 8 threads" in crowded.found


def test_network() -> None:
    loopback = replace(OTHER, host_address="127.0.1.1", gloo_interface="eth0")
    assert verdicts(findings.network(TWO, [loopback])) == [("interfaces", "ok"), ("host name", "ok")]
    unknown = replace(OTHER, host_address=None, interface_problem="n2 means nothing")
    assert verdicts(findings.network(TWO, [unknown]))[0] == ("interfaces", "problem")
    for named in ("lo", "ib7"):
        (found,) = bad(findings.network(TWO, [replace(OTHER, gloo_interface=named)]))
        assert "GLOO_SOCKET_IFNAME" in found.todo
    assert bad(findings.network(ONE, [replace(FACTS, host_address="127.0.0.1", gloo_interface="lo")])) == []


def test_clocks() -> None:
    found = findings.clocks([0.0, -90.0], [FACTS, OTHER])
    assert (found.verdict, found.found) == ("warning", "90 s between n1 and n2")


def test_folder() -> None:
    roll = [FACTS, OTHER]
    for shared in (SharedFolder("runs", None, blind=(1,)), SharedFolder("runs", None, unseen=(1,))):
        (found,) = findings.folder(shared, roll)
        assert (found.verdict, found.found) == ("problem", "runs is another folder on n2")
    (found,) = findings.folder(SharedFolder("runs", "rank 1: read-only"), roll)
    assert found.verdict == "problem"
    slow = SharedFolder("runs", None, fsync_s=2.0, has_locks=False)
    assert verdicts(bad(findings.folder(slow, roll))) == [("locks", "warning"), ("fsync", "warning")]


def test_space() -> None:
    def judged(**changes: int) -> list[tuple[str, str]]:
        return verdicts(bad(findings.space([FACTS, replace(OTHER, **changes)])))

    assert judged(disk_free_mib=100) == [("disk", "problem")]
    assert judged(disk_free_mib=5000) == [("disk", "warning")]
    assert judged(shm_mib=64, shm_free_mib=64) == [("shared memory", "warning")]


def test_speed() -> None:
    # 1 MiB to each of 4 ranks in 1 ms: a ring sends 1.5 MiB through every link.
    assert Reduction(1 << 20, 1e-3, 4).bytes_per_s == pytest.approx(1.5 * (1 << 20) / 1e-3)
    slow = findings.speed([Reduction(4, 0.1, 2), Reduction(1 << 26, 2.0, 2)], TWO, "cpu")
    assert [verdict for _, verdict in verdicts(slow)] == ["warning", "warning"]


@ranks(1, 2)
def test_measured_on_real_ranks(link: Link, tmp_path: Path) -> None:
    shared = measure.shared_folder(link, tmp_path / "not" / "yet")
    assert (shared.folder, shared.problem) == (str(tmp_path), None)
    assert (shared.blind, shared.unseen, shared.has_locks) == ((), (), True)
    assert shared.fsync_s > 0
    link.barrier()
    assert list(tmp_path.iterdir()) == []
    offsets = measure.clock_offsets(link, rounds=3)
    assert len(offsets) == link.world.size
    assert offsets[0] == 0.0
    facts = link.gather_objects(collect(link.world, tmp_path, link.threads))
    assert [entry.rank for entry in facts] == list(range(link.world.size))
    if link.world.size > 1:
        found = measure.reductions(link, torch.device("cpu"), sizes=(4, 4096))
        assert [entry.num_bytes for entry in found] == [4, 4096]
        assert all(entry.bytes_per_s > 0 for entry in found)


@ranks(2)
def test_a_folder_that_cannot_be_written(link: Link, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    shared = measure.shared_folder(link, file / "below")
    assert shared.problem is not None
    assert shared.problem.startswith("rank 0: ")
