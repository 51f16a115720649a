"""A run on a real SFTP server on this machine, by both packages that fsspec has for `ssh://`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import paceline
from paceline.core.cloud.store import Store
from paceline.train.fit import fit
from tests.promises.test_cloud_runs import SETTINGS, weights
from tests.train.small import SmallTask

PASSWORD = "a-password-of-a-test-0123456789"


SERVER = """
import asyncio, asyncssh, sys

class Server(asyncssh.SSHServer):
    def password_auth_supported(self):
        return True
    def validate_password(self, username, password):
        return password == sys.argv[2]

async def serve():
    keys = [asyncssh.generate_private_key("ssh-ed25519")]
    files = lambda channel: asyncssh.SFTPServer(channel, chroot=sys.argv[1].encode())
    server = await asyncssh.listen("127.0.0.1", 0, server_factory=Server, server_host_keys=keys, sftp_factory=files)
    print(server.get_port(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""
# The packages leave connections to the end of the process.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Port of a server that keeps files in a folder of its own."""
    pytest.importorskip("asyncssh", reason="asyncssh is not installed")
    command = [sys.executable, "-c", SERVER, str(tmp_path_factory.mktemp("sftp")), PASSWORD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


@pytest.fixture(params=["sshfs", "paramiko"])
def address(request, port, monkeypatch, tmp_path):
    import fsspec

    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    if request.param == "sshfs":
        from sshfs import SSHFileSystem as files
    else:
        from fsspec.implementations.sftp import SFTPFileSystem as files
    before = fsspec.registry.get("ssh")
    fsspec.register_implementation("ssh", files, clobber=True)
    monkeypatch.setitem(fsspec.config.conf, "ssh", {"password": PASSWORD})
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "first machine"))
    yield f"ssh://me@127.0.0.1:{port}/{request.param}/run"
    files.clear_instance_cache()
    if before is not None:
        fsspec.register_implementation("ssh", before, clobber=True)


def test_a_run_goes_on_on_another_machine(address, monkeypatch, tmp_path, capsys):
    undisturbed = weights(fit(SmallTask(), **SETTINGS, steps=6))
    assert fit(SmallTask(), **{**SETTINGS, "steps": 4, "out": address}).is_delivered
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "second machine"))
    result = fit(SmallTask(), **{**SETTINGS, "steps": 6, "out": address, "resume": "auto"})
    assert "resumed after step 4" in capsys.readouterr().out
    assert result.is_delivered
    assert all(map(torch.equal, weights(result), undisturbed))
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "third machine"))
    assert all(map(torch.equal, paceline.load(address, task=SmallTask()).state_dict().values(), undisturbed))


def test_of_two_that_create_a_file_one_has_it(address):
    """By paramiko nobody had it, and a start waited for ever."""
    one, other = Store(address), Store(address)
    assert one.create(".starting", b"one")
    assert not other.create(".starting", b"other")
    one.remove([".starting"])
    assert other.create(".starting", b"other")
    other.remove([".starting"])
