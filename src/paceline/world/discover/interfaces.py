"""The network interfaces of this machine, and the one through which gloo should talk to other nodes."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Mapping

from paceline.core.errors import PacelineError
from paceline.world.discover.environment import World, is_loopback

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class HostIsLoopback(PacelineError):
    """The name of this machine resolves to 127.0.0.1, where gloo would send the other nodes."""

    host: str
    address: str
    sentence = "the name of this machine, {host}, means {address}, where other nodes cannot reach it"
    hint = "export GLOO_SOCKET_IFNAME=<the network interface between the nodes>; `ip -brief address` lists them"


def choose_interface(
    world: World, host: str, host_address: str | None, interfaces: Mapping[str, str], own_address: str | None
) -> str | None:
    """Return a value for GLOO_SOCKET_IFNAME; None if gloo finds it by itself, from the address of the host's name.

    That name often means loopback (Debian writes 127.0.1.1 into /etc/hosts) or nothing. Then it is the interface that
    has `own_address`, the one from which this machine reaches the meeting point.
    """
    if world.nodes == 1 or is_loopback(_meeting_host(world)):  # "nodes" that meet at 127.0.0.1 are one machine
        return "lo0" if sys.platform == "darwin" else "lo"
    if host_address is not None and not host_address.startswith("127."):
        return None
    for name, address in interfaces.items():
        if address == own_address and not address.startswith("127."):
            return name
    raise HostIsLoopback(host, host_address or "no address")


def find_interface(world: World) -> str | None:
    """Return `choose_interface` of this machine."""
    host = socket.gethostname()
    if world.nodes == 1:
        return choose_interface(world, host, None, {}, None)
    return choose_interface(world, host, address_of(host), list_interfaces(), address_towards(_meeting_host(world)))


def gloo_interface(
    world: World, env: Mapping[str, str], find: Callable[[World], str | None] = find_interface
) -> str | None:
    """Return the value that `GLOO_INTERFACE` should get; None to leave it as it is.

    gloo listens at the address of the host's name, which on many machines is missing or loopback.
    """
    return None if GLOO_INTERFACE in env else find(world)


def _meeting_host(world: World) -> str:
    return world.meeting.rpartition(":")[0] if world.meeting else ""


def address_of(host: str) -> str | None:
    """Return the IPv4 address of a name; None if it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def address_towards(host: str) -> str | None:
    """Return the address from which this machine would reach another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def list_interfaces() -> dict[str, str]:
    """Return the IPv4 addresses by interface; empty if the system is not Linux."""
    addresses: dict[str, str] = {}
    if sys.platform != "linux":
        return addresses
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
