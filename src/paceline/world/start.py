"""Start of a rank: device, store, roll call, threads, process group, in this order."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.config.compared import shared_settings
from paceline.config.settings import WorldSettings
from paceline.core.errors import Conflict
from paceline.core.torch_private import can_set_group_timeout, set_group_timeout
from paceline.world import group_sockets
from paceline.world.consistency import check_same, installation
from paceline.world.discover.environment import World, discover
from paceline.world.discover.interfaces import GLOO_INTERFACE, gloo_interface
from paceline.world.failure import stacks
from paceline.world.failure.board import FailureBoard, Seen
from paceline.world.failure.flight_recorder import trail
from paceline.world.failure.together import remember_meeting
from paceline.world.failure.watchdog import FailureWatch
from paceline.world.guest import Guest
from paceline.world.link import Link
from paceline.world.parent_process import end_with_parent
from paceline.world.resources import OMP, DeviceChoice, backend_of, device_name, threads_by_environment, threads_of
from paceline.world.roll_call import Present, roll_call
from paceline.world.store import HashStore, PrefixStore, Store, answer_within, interrupt_waits, meet

# How long a rank of a later round dials the others.
_DIAL_S = 20.0
# Starts so far at each meeting point. All ranks start equally often, so the number keeps their keys apart.
_starts: Counter[tuple[str | None, int]] = Counter()


def from_settings(settings: WorldSettings, world: World | None = None, check: Callable[[], None] | None = None) -> Link:
    """Join the other ranks as the settings ask; `world` is what the environment says, unless it is known already.

    `check` is called while others are waited for; what it raises ends the wait.
    Raises `RanksDisagree` on all ranks where settings or installations differ.
    """
    if world is None:
        world = discover(os.environ)
        if world.launcher == "plain" and dist.is_initialized() and dist.get_world_size() > 1:
            world = _of_group()
    by_environment = threads_by_environment(os.environ, world.launcher, world.local_size)
    link = start(
        world,
        device=settings.device,
        threads=settings.threads or by_environment,
        threads_by="" if settings.threads or not by_environment else f"{OMP}={by_environment}",
        start_timeout_s=settings.start_timeout_s,
        timeout_s=settings.timeout_s,
        check=check,
    )
    with ExitStack() as undo:
        undo.enter_context(link)
        check_same(link, shared_settings(settings) | installation() | {"device": link.device.type})
        undo.pop_all()
    return link


def start(
    world: World,
    *,
    device: DeviceChoice = "auto",
    threads: int | None = None,
    threads_by: str = "",
    start_timeout_s: float = 300.0,
    timeout_s: float = 1800.0,
    share_devices: bool = False,
    group_of_one: bool = False,
    check: Callable[[], None] | None = None,
) -> Link:
    """Join the other ranks. Missing ranks are named after `start_timeout_s`; a collective waits for `timeout_s`.

    A process group that exists already is used, and stays when the link is closed.
    `threads_by` says who asked for `threads`, if that was not the user's setting.

    `share_devices` lets several ranks use one GPU, through gloo instead of NCCL: right, but slow. `group_of_one` gives
    a single process the group, and so the code and the collectives, that several have: to try NCCL on one GPU.
    `check` is called while others are waited for: where ranks may be lost, it raises when one of them was.
    """
    with ExitStack() as undo:
        guest = Guest((GLOO_INTERFACE,))
        undo.callback(guest.leave)
        trail.reset()
        stacks.send_to(None)
        if world.launcher == "procs":
            end_with_parent(signal.SIGTERM)  # the ranks then save and leave, too
        chosen = _choose_device(world, device, share_devices)
        mine = _introduce(world, chosen)
        if world.size == 1:
            alone = _join_alone(backend_of([mine], share_devices), timeout_s) if group_of_one else None
            num_threads = _set_threads(mine, [mine], threads)
            undo.pop_all()
            return Link(world, chosen, num_threads, (mine.host,), alone, guest=guest, threads_by=threads_by)
        has_group = dist.is_initialized()  # of Ray Train, or of the user's own script
        if has_group:
            world = _beside_group(world)
        interface = gloo_interface(world, os.environ)
        if interface is not None:
            os.environ[GLOO_INTERFACE] = interface
        common = meet(world, start_timeout_s)
        interrupt_waits(world, check)
        watch = FailureWatch(world, timeout_s, is_surviving=check is not None)
        undo.callback(watch.stop)
        meeting = remember_meeting(world, common, watch, timeout_s)
        _starts[world.meeting, world.attempt] += 1
        store = PrefixStore(f"start{_starts[world.meeting, world.attempt]}", common)
        FailureBoard(common).tell_place(world.rank, Seen(mine.host, 0, 0, str(trail)))
        roll = roll_call(store, mine, world.size, start_timeout_s, check or (lambda: None))
        meeting.hosts = tuple(entry.host for entry in roll)
        backend = backend_of(roll, share_devices)
        num_threads = _set_threads(mine, roll, threads)
        if not has_group:
            _form_group(world, backend, PrefixStore("group", store), chosen, timeout_s, check)
        answer_within(world, timeout_s)
        watch.follow_group(meeting.hosts, is_on_device="cuda" in backend)
        undo.pop_all()
    return Link(world, chosen, num_threads, meeting.hosts, store, watch, guest, threads_by, owns_group=not has_group)


def _of_group() -> World:
    """Return the place of this process in a group that was initialised without a launcher's variables."""
    backend = str(dist.get_backend_config())
    _check_cpu_backend(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname())
    nodes, own = list(dict.fromkeys(hosts)), hosts[rank]
    return World(
        rank=rank,
        local_rank=hosts[:rank].count(own),
        size=size,
        local_size=hosts.count(own),
        node_rank=nodes.index(own),
        nodes=len(nodes),
        launcher="group",
        # The port is chosen when the ranks meet.
        meeting=f"{'127.0.0.1' if len(nodes) == 1 else hosts[0]}:0",
        why=(f"rank {rank} of {size} in a process group that exists already; no launcher's variables are set",),
    )


def _check_cpu_backend(backend: str) -> None:
    if "cpu:" not in backend:
        raise Conflict(
            f"torch.distributed was initialised with {backend}, which carries no tensors of the CPU",
            hint="initialise it with `backend='cpu:gloo,cuda:nccl'`, or leave that to paceline",
        )


def _beside_group(world: World) -> World:
    """Return the place of this rank, with a rendezvous beside that of the process group which exists already."""
    rank, size, backend = dist.get_rank(), dist.get_world_size(), str(dist.get_backend_config())
    if (rank, size) != (world.rank, world.size):
        raise Conflict(
            f"torch.distributed was initialised as rank {rank} of {size}, but the environment says "
            f"rank {world.rank} of {world.size}",
            hint="initialise it from the environment (`init_method='env://'`), or leave that to paceline",
        )
    _check_cpu_backend(backend)
    if world.launcher_hosts_store:
        return world
    box: list[str | None] = [None]
    if rank == 0:
        host = str(world.meeting).rpartition(":")[0]
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind(("", 0))
            box = [f"{host}:{probe.getsockname()[1]}"]
    dist.broadcast_object_list(box, src=0)
    return replace(world, meeting=box[0])


def _form_group(
    world: World,
    backend: str,
    store: Store,
    device: torch.device,
    timeout_s: float,
    check: Callable[[], None] | None,
) -> None:
    """Make the process group; with `check`, which ends the wait for a rank that was lost, without dialling it long."""
    # gloo dials a peer that has just died until the time-out is over.
    dials_s = min(timeout_s, _DIAL_S) if check is not None and can_set_group_timeout() else timeout_s
    with group_sockets.noted():
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=patience(dials_s, device)
        )
        # A rank that leaves at once closes its connections, on which another that still connects would fail.
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
    if dials_s < timeout_s:
        set_group_timeout(patience(timeout_s, device))


def leave_group() -> None:
    """Give up a group of which a failed start has left no link: the next start would take it for the user's own."""
    if dist.is_initialized():
        dist.destroy_process_group()


def patience(timeout_s: float, device: torch.device) -> timedelta:
    """Return the time-out of a process group. NCCL ends the process at its own, so the watchdog acts first."""
    return timedelta(seconds=timeout_s * (1.75 if device.type == "cuda" else 1.0))


def _join_alone(backend: str, timeout_s: float) -> Store:
    store = HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    return store


def _choose_device(world: World, asked: DeviceChoice, share_devices: bool) -> torch.device:
    num_devices = 0 if asked == "cpu" else torch.cuda.device_count()
    chosen = torch.device(device_name(asked, world.local_rank, world.local_size, num_devices, share_devices))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _set_threads(mine: Present, roll: Sequence[Present], asked: int | None) -> int:
    threads = threads_of(mine, roll, asked)
    torch.set_num_threads(threads)
    return threads


def _introduce(world: World, device: torch.device) -> Present:
    return Present(
        rank=world.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(device),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpu=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
    )
