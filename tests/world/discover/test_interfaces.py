"""Which interface gloo should use: decided on values; the machine's own are compared with what `ip` says."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from paceline.world.discover.environment import World
from paceline.world.discover.interfaces import (
    HostIsLoopback,
    address_of,
    address_towards,
    choose_interface,
    gloo_interface,
    list_interfaces,
)

ONE = World(1, 1, 2, 2, 0, 1, "procs", "127.0.0.1:1")
TWO = World(1, 0, 2, 1, 1, 2, "slurm", "n1:1")
HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "192.168.4.7"}


def test_one_machine_talks_to_itself() -> None:
    chosen = choose_interface(ONE, "n1", "10.0.0.7", HERE, "10.0.0.7")
    assert chosen is not None
    assert chosen.startswith("lo")


def test_machines_that_meet_at_loopback_are_one() -> None:
    for host in ("127.0.0.1", "localhost"):
        chosen = choose_interface(World(1, 0, 2, 1, 1, 2, "procs", f"{host}:1"), "n1", "127.0.1.1", HERE, "127.0.0.1")
        assert chosen is not None
        assert chosen.startswith("lo")


def test_a_name_with_an_address_is_left_to_gloo() -> None:
    assert choose_interface(TWO, "n1", "10.0.0.7", HERE, "192.168.4.7") is None


@pytest.mark.parametrize("address", [None, "127.0.0.1", "127.0.1.1"])
def test_else_the_interface_towards_the_meeting_point(address: str | None) -> None:
    assert choose_interface(TWO, "n1", address, HERE, "192.168.4.7") == "ib0"
    for own in (None, "127.0.0.1", "10.9.9.9"):
        with pytest.raises(HostIsLoopback, match=address or "no address"):
            choose_interface(TWO, "n1", address, HERE, own)


@pytest.mark.skipif(shutil.which("ip") is None, reason="`ip` is not installed (Debian: iproute2)")
def test_interfaces_are_those_that_ip_lists() -> None:
    listed = json.loads(subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, check=True).stdout)
    assert list_interfaces() == {
        entry["ifname"]: entry["addr_info"][0]["local"] for entry in listed if entry.get("addr_info")
    }


def test_addresses() -> None:
    assert address_of("localhost") == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_of("no-such-host.invalid") is None
    assert address_towards("no-such-host.invalid") is None


def test_a_named_interface_is_left_alone() -> None:
    several = World(0, 0, 2, 1, 0, 2, "slurm", "a:1")
    assert gloo_interface(several, {"GLOO_SOCKET_IFNAME": "eth1"}, lambda world: "eth0") is None
    assert gloo_interface(several, {}, lambda world: "eth0") == "eth0"
    assert gloo_interface(several, {}, lambda world: None) is None
    alone = gloo_interface(World(0, 0, 1, 1, 0, 1, "plain", None), {})
    assert alone is not None
    assert alone.startswith("lo")
