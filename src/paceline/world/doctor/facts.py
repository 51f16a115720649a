"""Facts of a rank and its machine for `paceline doctor`: looked up, not judged."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.core import plugins
from paceline.core.extras import extras
from paceline.core.provenance import version_of
from paceline.world.discover.environment import World
from paceline.world.discover.interfaces import HostIsLoopback, address_of, find_interface, list_interfaces
from paceline.world.discover.plugin_launchers import split

_MIB = 2**20
_CORE_PACKAGES = {"tensorboard": "logs", "triton": "compiled GPU kernels"}


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    memory_mib: int
    free_mib: int


@dataclass(frozen=True)
class Facts:
    """One rank and its machine."""

    rank: int
    host: str
    python: str
    paceline: str
    torch: str
    cuda: str | None
    """The CUDA that torch was built for."""
    nccl: str | None
    driver: str | None
    """NVIDIA's driver on this machine, usable by torch or not."""
    backends: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    """CPU cores this rank may run on."""
    machine_cores: int
    threads: int
    load: float | None
    """Processes of the whole machine that ran or wanted to, mean of the last minute; None where it is not known."""
    host_address: str | None
    interfaces: Mapping[str, str]
    gloo_interface: str | None
    """The one that gloo is told to use, None: the one of the host's address."""
    nccl_interface: str | None
    """NCCL_SOCKET_IFNAME; None: NCCL chooses."""
    interface_problem: str | None
    shm_mib: int | None
    shm_free_mib: int | None
    disk_free_mib: int
    packages: Mapping[str, str]
    """Versions of the optional packages that are installed."""
    missing_packages: Mapping[str, str] = field(default_factory=dict)
    """Optional packages that are not installed, and what needs them."""
    plugins: tuple[plugins.Plugin, ...] = ()
    """Plugins of other packages, none of which is imported."""
    plugin_problems: tuple[str, ...] = ()
    """What is wrong with them."""


def collect(
    world: World, folder: Path, threads: int, built_in: Mapping[plugins.Group, Collection[str]] | None = None
) -> Facts:
    """Return the facts of this rank; `folder` is the folder of runs, `built_in` are names that plugins may not have."""
    interface, problem = _interface(world)
    needed_by = optional_packages()
    versions = {name: version for name in needed_by if (version := version_of(name)) is not None}
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Facts(
        rank=world.rank,
        host=socket.gethostname(),
        python=".".join(map(str, sys.version_info[:3])),
        paceline=version_of("paceline") or "unknown",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=_nccl(),
        driver=_driver(),
        backends=tuple(name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)),
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        machine_cores=os.cpu_count() or 1,
        threads=threads,
        load=_load(),
        host_address=address_of(socket.gethostname()),
        interfaces=list_interfaces(),
        gloo_interface=interface,
        nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME"),
        interface_problem=problem,
        shm_mib=shm.total // _MIB if shm is not None else None,
        shm_free_mib=shm.free // _MIB if shm is not None else None,
        disk_free_mib=shutil.disk_usage(existing(folder)).free // _MIB,
        packages=versions,
        missing_packages={name: need for name, need in needed_by.items() if name not in versions},
        plugins=plugins.installed().others,
        plugin_problems=_plugin_problems(built_in or {}),
    )


def optional_packages() -> dict[str, str]:
    """Return the packages of the core and of the extras of registered recipes, and what needs them."""
    recipes = sorted({plugin.name for plugin in plugins.installed().of("recipes")} & extras().keys())
    return _CORE_PACKAGES | {package: f"recipe {name}" for name in recipes for package in sorted(extras()[name])}


def _plugin_problems(built_in: Mapping[plugins.Group, Collection[str]]) -> tuple[str, ...]:
    catalog = plugins.installed()
    launchers = [each for each in catalog.of("launchers") if not all(split(each))]
    return (
        *(str(clash) for clash in plugins.clashes(built_in)),
        *(f"{package}: {why}" for package, why in catalog.unreadable),
        *(f"{each.title}: its entry point must be named NAME.VARIABLE" for each in launchers),
    )


def _interface(world: World) -> tuple[str | None, str | None]:
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named is not None:
        return named, None
    try:
        return find_interface(world), None
    except HostIsLoopback as error:
        return None, str(error)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return path


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _nccl() -> str | None:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    words = text.splitlines()[0].split()
    return next((word for word in words if word[0].isdigit()), "unknown")


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(properties.name, total // _MIB, free // _MIB)
