"""A launcher: `flux run -n 4 paceline train ...`. The entry point names the variable by which it is recognised."""

from __future__ import annotations

from collections.abc import Mapping

from paceline import World


def discover(env: Mapping[str, str]) -> World | None:
    """Return the place of this process among the tasks of a Flux job on one node."""
    rank, size = int(env["FLUX_TASK_RANK"]), int(env["FLUX_JOB_SIZE"])
    if int(env.get("FLUX_JOB_NNODES", "1")) > 1:
        return None  # MASTER_ADDR would have to come from the resource set
    port = 20_000 + sum(map(ord, env.get("FLUX_JOB_ID", ""))) % 10_000
    return World(
        rank=rank,
        local_rank=int(env.get("FLUX_TASK_LOCAL_ID", rank)),
        size=size,
        local_size=size,
        node_rank=0,
        nodes=1,
        launcher="flux",
        meeting=f"127.0.0.1:{port}" if size > 1 else None,
        why=(f"FLUX_TASK_RANK={rank} of FLUX_JOB_SIZE={size}",),
    )
