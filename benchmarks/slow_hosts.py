"""Hosts that are network namespaces of this machine, on a bridge whose links can be made slow. Needs root."""

from __future__ import annotations

import subprocess
from pathlib import Path

INTERFACE, NETWORK, BRIDGE = "eth0", "10.77.0", "slowlink"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def host(rank: int) -> str:
    return f"{BRIDGE}{rank}"


def build_network(number: int) -> None:
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "link", "set", BRIDGE, "up")
    for rank in range(number):
        name = host(rank)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        run("ip", "link", "set", name, "master", BRIDGE, "up")
        run("ip", "-n", name, "address", "add", f"{NETWORK}.{rank + 1}/24", "dev", INTERFACE)
        run("ip", "-n", name, "link", "set", INTERFACE, "up")
        run("ip", "-n", name, "link", "set", "lo", "up")


def limit(number: int, rate: str, queue: str = "50ms", segment: int = 32_768) -> None:
    """Both directions of every host; `queue` is the time in a full queue, beyond which packets are dropped.

    A burst holds two segments: larger ones would be cut into packets, which takes a core.
    """
    shape = ("root", "tbf", "rate", rate, "burst", f"{max(16_384, 2 * segment)}b", "latency", queue)
    for rank in range(number):
        run("ip", "-n", host(rank), "link", "set", INTERFACE, "gso_max_size", str(segment))
        run("tc", "qdisc", "replace", "dev", host(rank), *shape)
        run("tc", "-n", host(rank), "qdisc", "replace", "dev", INTERFACE, *shape)


def remove_network(number: int) -> None:
    for rank in range(number):
        # A namespace takes its interfaces with it only some time later: the link first, so that it can be made again.
        subprocess.run(["ip", "link", "del", host(rank)], capture_output=True)
        subprocess.run(["ip", "netns", "del", host(rank)], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def sent_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == INTERFACE:
            return int(rest.split()[8])
    raise AssertionError(f"no {INTERFACE} here")
