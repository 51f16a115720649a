"""Machines to test on: network namespaces with a name, an address and a hosts file of their own, joined by a bridge."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_made = itertools.count()
# Names the process and its files; /etc/hosts and the host's name are this process's own.
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass(frozen=True)
class Host:
    """One machine; the files are those of the real one."""

    name: str
    address: str
    namespace: str
    hosts_file: Path
    cable: str
    """The bridge's end of its network cable."""

    @property
    def remote_shell(self) -> str:
        """A program that is used like ssh: `remote_shell NAME COMMAND...`."""
        return str(self.hosts_file.with_name("remote-shell"))

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs `words` there; the process that is started becomes the command itself."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        return [*enter, self.name, str(self.hosts_file), *words]


def why_not() -> str | None:
    """Why there can be no such machines here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    name = f"pl{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no network namespaces here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@contextmanager
def machines(number: int) -> Iterator[list[Host]]:
    """So many machines, named plh1, plh2, ...; gone afterwards."""
    # Linux takes its time to take down a namespace: the next machines of this process have other names.
    mark = f"{os.getpid()}{next(_made)}"
    bridge = f"plb{mark}"
    folder = Path(tempfile.mkdtemp(prefix="paceline-hosts-"))
    hosts = [
        Host(f"plh{index}", f"10.213.7.{index}", f"pl{mark}n{index}", folder / "hosts", f"{bridge}v{index}")
        for index in range(1, number + 1)
    ]
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    (folder / "hosts").write_text("\n".join([*lines, ""]))
    _write_remote_shell(hosts)
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in hosts:
            near, far = host.cable, "eth0"
            _ip("netns", "add", host.namespace)
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", host.namespace)
            _ip("link", "set", near, "master", bridge, "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", far)
            _ip("-n", host.namespace, "link", "set", far, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "link", "delete", host.cable], capture_output=True)
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)
        shutil.rmtree(folder)


def _write_remote_shell(hosts: Sequence[Host]) -> None:
    """Like ssh, it hands its words to a shell there, joined by spaces."""
    cases = [f'  {host.name}) exec {shlex.join(host.command(["sh", "-c"]))} "$*" ;;' for host in hosts]
    skip_options = 'while [ "${1#-}" != "$1" ]; do shift; done'
    lines = ["#!/bin/sh", skip_options, "name=$1", "shift", "case $name in", *cases, "esac", "exit 255", ""]
    script = Path(hosts[0].remote_shell)
    script.write_text("\n".join(lines))
    script.chmod(0o755)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
