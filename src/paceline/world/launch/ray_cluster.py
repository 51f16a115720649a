"""`paceline launch --ray`: on the machines of a Ray cluster, which gives the job room and starts a launcher on each.

On every machine an actor of Ray runs `paceline launch --node-rank K` as a process of its own, so that ranks meet, fail,
save and restart as everywhere, and are no processes of Ray's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import Failed, NotFound, first_line
from paceline.world.launch.schedulers.job import join
from paceline.world.parent_process import bound
from paceline.world.rendezvous.secret import VARIABLE, new_secret


@dataclass(frozen=True)
class RayJob:
    """Ranks on the machines of a Ray cluster."""

    nodes: int
    procs_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    options: tuple[str, ...]
    """Further options of the launcher on each machine."""
    command: tuple[str, ...]
    """The paceline command, such as `train TASK`."""
    address: str | None = None
    """Of the cluster; the one that RAY_ADDRESS names, or that runs here, or one that is started here."""
    start_timeout_s: float = 300.0
    grace_s: float = 60.0

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of a machine."""
        gpus = {"GPU": float(self.gpus_per_node)} if self.gpus_per_node else {}
        return {"CPU": float(self.procs_per_node * self.cpus_per_rank), **gpus}

    def words(self, node: int, meeting: str) -> list[str]:
        """Return the command of the launcher on one machine."""
        host, _, port = meeting.rpartition(":")
        place = ["--nnodes", str(self.nodes), "--node-rank", str(node), "--master-addr", host, "--master-port", port]
        launch = [sys.executable, "-m", "paceline", "launch", "--nproc-per-node", str(self.procs_per_node)]
        return [*launch, *(place if self.nodes > 1 else []), *self.options, "--", *self.command]


def launch_on_ray(job: RayJob, write: Callable[[str], Any] = sys.stdout.write) -> int:
    """Run the job on a Ray cluster; return its exit code. What its ranks print is printed here, line by line."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    is_ours = _connect(ray, job)
    group = None
    try:
        group = placement_group([job.bundle] * job.nodes, strategy="STRICT_SPREAD" if job.nodes > 1 else "PACK")
        if not group.wait(job.start_timeout_s):
            raise Failed(
                f"the Ray cluster gave no room for {job.nodes} x {_resources(job.bundle)} "
                f"in {job.start_timeout_s:g} s; it has {_resources(ray.cluster_resources())}",
                hint="ask for fewer with `--nnodes`, `--nproc-per-node` or `--cpus-per-rank`, or wait longer: "
                "`--start-timeout-s`",
            )
        machines = [_machine(ray, group, number, job) for number in range(job.nodes)]
        return _run(ray, job, machines, write)
    finally:
        if group is not None:
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)
        if is_ours:
            ray.shutdown()


def _connect(ray: Any, job: RayJob) -> bool:
    """Connect to a cluster, or start one; return True if that is to be undone."""
    if ray.is_initialized():
        return False
    address = job.address or os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
            return True
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            ray.init(include_dashboard=False, **quiet)
    except Exception as error:  # ConnectionError, ValueError, RuntimeError and errors of its own
        raise NotFound(
            f"no Ray cluster was reached at {address or 'this machine'}: {first_line(error)}",
            hint="start one (`ray start --head`), or leave out `--ray-address` and RAY_ADDRESS to start one here",
        ) from None
    return True


def _machine(ray: Any, group: Any, number: int, job: RayJob) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    # Two calls at once: `run` streams what is printed, `stop` may come meanwhile.
    actor = ray.remote(
        num_cpus=job.bundle["CPU"], num_gpus=job.gpus_per_node, scheduling_strategy=place, max_concurrency=2
    )(Machine)
    return actor.remote()


def _run(ray: Any, job: RayJob, machines: Sequence[Any], write: Callable[[str], Any]) -> int:
    meeting = ray.get(machines[0].find_meeting.remote())
    variables = {VARIABLE: os.environ.get(VARIABLE) or new_secret()}
    folder = os.getcwd()
    streams = {
        number: machine.run.options(num_returns="streaming").remote(job.words(number, meeting), folder, variables)
        for number, machine in enumerate(machines)
    }
    codes: dict[int, int] = {}
    while len(codes) < len(machines):
        try:
            ready, _ = ray.wait([streams[number] for number in streams if number not in codes], timeout=1.0)
            for stream in ready:
                number = next(each for each, other in streams.items() if other is stream)
                item = ray.get(next(stream))
                if isinstance(item, int):
                    codes[number] = item
                else:
                    write(item)
        except KeyboardInterrupt:
            ray.get([machine.stop.remote() for machine in machines], timeout=job.grace_s)
    # The first that is no success; a code of a signal is less telling than one that the ranks chose.
    return next((code for code in sorted(codes.values(), reverse=True) if code), 0)


class Machine:
    """An actor of Ray: it runs the launcher of its machine, and hands on what that prints."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def find_meeting(self) -> str:
        """Return the address of this machine, as others reach it, with a port that is free."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> Iterator[str | int]:
        """Run a command; yield the lines that it prints, and its exit code at last."""
        environment = {**os.environ, **variables}
        if not os.path.isdir(folder):
            yield f"error: there is no folder {folder} on {socket.gethostname()}: all machines must share it\n"
            yield 2
            return
        try:
            self._process = subprocess.Popen(
                bound(list(words), signal.SIGTERM),  # an actor that Ray ends leaves no ranks behind
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            yield f"error: {join(words[:1])} on {socket.gethostname()}: {error}\n"
            yield 2
            return
        with self._process as process:
            assert process.stdout is not None
            for line in process.stdout:  # noqa: UP028 (Ray cannot go through a `yield from`)
                yield line
        yield process.returncode

    def stop(self) -> None:
        """Ask the ranks to save and leave."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts[name]:g} {name}" for name in ("CPU", "GPU") if amounts.get(name)) or "nothing"
