"""`benchmarks/gpu/node.sh` and `node.py`, as far as they run without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline.world.link import Link
from tests.ranks import ranks

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"


def load() -> ModuleType:
    name = "paceline_benchmark_node"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / "node.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_the_last_all_reduce_is_what_a_fast_fabric_leaves() -> None:
    node = load()
    fabric = node.Fabric(bus_gb_s=100.0, call_us=10.0)
    # 2 * 7 / 8 * 40 MB at 100 GB/s are 0.7 ms, and 0.01 for the call.
    assert node.all_reduce_ms(40_000_000, 8, fabric) == pytest.approx(0.71)
    assert node.all_reduce_ms(40_000_000, 1, fabric) == 0.0
    # The first two are long done when backward ends: only the last one is left.
    buckets = [40_000_000, 40_000_000, 20_000_000]
    assert node.exposed_ms(buckets, 60.0, 8, fabric) == pytest.approx(0.36)
    assert node.expected_ms(90.0, buckets, 8, fabric) == pytest.approx(90.36)
    assert node.expected_ms(90.0, buckets, 8, fabric, overlaps=False) == pytest.approx(90 + 2 * 0.71 + 0.36)
    assert node.expected_ms(90.0, buckets, 1, fabric) == 90.0


def test_a_slow_fabric_is_busy_from_the_first_bucket_on() -> None:
    node = load()
    fabric = node.Fabric(bus_gb_s=0.1, call_us=0.0)  # 2 MB on 2 ranks: 20 ms
    # The first is there after 5 of 10 ms and takes 20, the second waits for it: 35 ms after the end of backward.
    assert node.exposed_ms([2_000_000, 2_000_000], 10.0, 2, fabric) == pytest.approx(35.0)


def test_the_buckets_are_those_of_the_engine() -> None:
    node = load()
    network = node.read_network("small")
    sizes = node.bucket_sizes(network)
    assert sum(sizes) == 4 * sum(parameter.numel() for parameter in node.Network(network).parameters())
    assert len(sizes) == 2, "a small first one, so that it starts early"


def test_one_table_of_all_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = load()
    cases = [
        node.Case("ddp-bf16", 1, 4, "small", 200.0, 0.0),
        node.Case("ddp-fp16", 1, 4, "small", 100.0, 0.0),
        node.Case("ours", 1, 4, "small", 10.0, 1.5, "-O2 + kernels + graphs", "a machine", (1_000_000,)),
        node.Case("ddp-fp16", 8, 4, "small", 160.0, 0.0),
        node.Case("ours", 8, 4, "small", 12.5, 1.5, "-O2 + kernels + graphs", "a machine", (1_000_000,)),
    ]
    for number, case in enumerate(cases):
        (tmp_path / f"{number}.json").write_text(json.dumps(asdict(case)))
    assert node.read_cases(tmp_path) == cases
    by_name = {(line.case.way, line.case.ranks): line for line in node.compared(cases)}
    assert by_name["ours", 8].case.rate == pytest.approx(2560)
    assert by_name["ours", 8].scaling == pytest.approx(10 / 12.5)
    assert by_name["ours", 8].over_ddp == pytest.approx(160 / 12.5)
    assert by_name["ours", 1].over_ddp == pytest.approx(10), "over the faster of both loops"
    assert by_name["ddp-fp16", 8].scaling == pytest.approx(100 / 160)
    assert by_name["ours", 8].expected == pytest.approx(32e3 / node.expected_ms(10.0, [1_000_000], 8, node.NVLINK))
    assert by_name["ours", 1].expected is None
    node.show_table(tmp_path)
    assert "2,560" in capsys.readouterr().out


@ranks(2)
def test_ddp_and_ours_step_on_two_ranks(link: Link) -> None:
    node = load()
    load_ = node.make_load("small", 2, torch.device("cpu"), link.world.rank, frames=96)
    loop = node.ddp(load_, torch.bfloat16)
    ours = node.ours(load_, link, None)
    assert ours.way == "-O0"
    assert sum(ours.bucket_bytes) == sum(node.bucket_sizes(load_.network))
    assert node.step_ms(loop, load_.device, 1, 1) > 0
    assert node.step_ms(ours.step, load_.device, 1, 1) > 0
    assert torch.isfinite(torch.as_tensor(ours.step().loss))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--device cpu", "say how many ranks"),
        ("--device tpu --ranks 1", "cuda or cpu"),
        ("--what 1", "is no option"),
        ("--ranks", "wants a value"),
    ],
)
def test_a_mistake_is_named(arguments: str, said: str) -> None:
    run = subprocess.run([FOLDER / "node.sh", *arguments.split()], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert said in run.stderr


def test_a_dry_run_shows_each_launch() -> None:
    words = ["--dry-run", "--ranks", "1 8", "--batches", "64", "--ways", "ddp-bf16 ours", "--network", "jasper10x5dr"]
    run = subprocess.run([FOLDER / "node.sh", *words], capture_output=True, text=True, timeout=60)
    lines = run.stdout.splitlines()
    assert run.returncode == 0
    assert len(lines) == 4
    assert "--nproc-per-node 8" in lines[3]
    assert "--way ours --batch 64 --device cuda" in lines[3]
    assert "--network jasper10x5dr" in lines[3]
