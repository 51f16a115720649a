"""The data plan of 10 million samples: time to build, time for one rank's share of a step, memory.

Every case runs in a fresh process, so that none finds the memory another one left. `memory` is the peak resident size
of that process while it builds, less the resident size before; the lengths themselves are there before. The peer is
torch's DistributedSampler building the index list of one of 4 ranks; it has no lengths, no cost and no seek.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from table import Row, parser, show

from paceline.data.plan import BatchRule, Plan

PEER = "DistributedSampler"
BATCH, GRAINS, RANKS, SHARES = 256, 8, 4, 1000
PLANS: dict[str, dict[str, Any]] = {
    "plan-random": {"rule": BatchRule(BATCH), "order": "random"},
    "plan-cost": {"rule": BatchRule(2**31 - 1, max_cost=9000.0), "order": "random"},
    "plan-bucket": {"rule": BatchRule(BATCH), "order": "bucket"},
}


def resident_bytes(peak: bool) -> int:
    """Resident size of this process, now or at its highest (where there is no /proc: the highest both times)."""
    status = Path("/proc/self/status")
    if status.exists():
        field = "VmHWM:" if peak else "VmRSS:"
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(field))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Linux starts VmHWM anew from the present size; elsewhere the peak stays, and growth may read too small."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def measure(build: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    gc.collect()
    forget_peak()
    before = resident_bytes(peak=False)
    start = time.perf_counter()
    built = build()
    return built, {"build": time.perf_counter() - start, "memory": (resident_bytes(peak=True) - before) / 1e6}


def run_plan(case: str, num_samples: int) -> dict[str, float]:
    lengths = np.random.default_rng(0).gamma(4.0, 3.0, num_samples)  # float64 seconds, 12 on average
    plan, numbers = measure(lambda: Plan(num_samples, grains=GRAINS, seed=1, lengths=lengths, **PLANS[case]))
    times_us = []
    for step in np.random.default_rng(1).integers(0, plan.num_steps, SHARES).tolist():
        start = time.perf_counter()
        plan.share(step, 1, RANKS)
        times_us.append((time.perf_counter() - start) * 1e6)
    return {**numbers, "share": statistics.median(times_us)}


def run_peer(num_samples: int) -> dict[str, float]:
    from torch.utils.data import DistributedSampler

    sampler: DistributedSampler[int] = DistributedSampler(range(num_samples), num_replicas=RANKS, rank=1, seed=1)  # type: ignore[arg-type]
    indices, numbers = measure(lambda: list(sampler))
    assert len(indices) == -(-num_samples // RANKS)
    return numbers


def in_fresh_process(case: str, num_samples: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", case, "--samples", str(num_samples)]
    numbers: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return numbers


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--samples", type=int, default=10_000_000, help="samples in the data set (10 million)")
    arguments.add_argument("--only", choices=[*PLANS, PEER], help="measure one case in this process, print plain JSON")
    chosen = arguments.parse_args()
    if chosen.only:
        print(json.dumps(run_peer(chosen.samples) if chosen.only == PEER else run_plan(chosen.only, chosen.samples)))
        return
    peer = in_fresh_process(PEER, chosen.samples)
    rows = []
    for case in PLANS:
        numbers = in_fresh_process(case, chosen.samples)
        rows.append(Row(case, "build", numbers["build"], "s", PEER, numbers["build"] / peer["build"]))
        rows.append(Row(case, "share", numbers["share"], "us"))
        rows.append(Row(case, "memory", numbers["memory"], "MB", PEER, numbers["memory"] / peer["memory"]))
    rows += [Row(PEER, "build", peer["build"], "s"), Row(PEER, "memory", peer["memory"], "MB")]
    title = f"{chosen.samples:,} samples with lengths; batch {BATCH}, {GRAINS} grains, {RANKS} ranks"
    import torch  # noqa: F401  its version belongs on the machine line: it is the peer's

    show(rows, title, chosen.json)


if __name__ == "__main__":
    main()
