"""A run in a real S3, served by moto on this machine: killed in the middle of an upload, and resumed elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.core.cloud.store import Store
from paceline.train.fit import fit, run_mode
from tests.crash import KILLED, run_until_death
from tests.promises.test_cloud_runs import SETTINGS, weights
from tests.train.small import SmallTask

SECRET = "a-secret-of-a-test-0123456789"
NAMES = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "PACELINE_COPIES")


@pytest.fixture(scope="module")
def endpoint():
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto with its server is not installed")
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    running.stop()


@pytest.fixture
def bucket(endpoint, tmp_path, monkeypatch):
    values = (endpoint, "AKIAIOSFODNN7EXAMPLE", SECRET, "us-east-1", str(tmp_path / "first machine"))
    for name, value in zip(NAMES, values, strict=True):
        monkeypatch.setenv(name, value)
    import s3fs

    files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    name = f"bucket-{os.getpid()}"
    files.mkdir(name)
    yield files, f"s3://{name}/runs/a"
    files.rm(name, recursive=True)


def killed_in_upload(link, out: str, variables: dict[str, str]) -> None:
    """Train until a certain part of a checkpoint is being sent."""
    os.environ.update(variables)
    from s3fs import S3FileSystem

    whole, steps = S3FileSystem._put_file, set()

    async def dies(self, lpath, rpath, *rest, **more):
        steps.update(part for part in rpath.split("/") if part.startswith("step-"))
        if len(steps) == 2 and "optimizer" in rpath:
            os.kill(os.getpid(), signal.SIGKILL)
        return await whole(self, lpath, rpath, *rest, **more)

    S3FileSystem._put_file = dies
    run_mode(SmallTask(), SmallTask.Settings(**{**SETTINGS, "steps": 12, "out": out}), link)


def test_a_run_in_s3_survives_a_kill_in_the_middle_of_an_upload(bucket, tmp_path, monkeypatch, capfd):
    files, out = bucket
    undisturbed = weights(fit(SmallTask(), **SETTINGS, steps=12))
    assert run_until_death(1, killed_in_upload, out, {name: os.environ[name] for name in NAMES}) == [KILLED]
    there = [name.partition("/checkpoints/")[2].split("/") for name in files.find(out) if "/checkpoints/" in name]
    (sent,) = [step for step, file in there if file == "digests.json"]
    assert {step for step, _ in there} > {sent}  # one is there in part
    # Another machine goes on from what was sent.
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "second machine"))
    result = fit(SmallTask(), **{**SETTINGS, "steps": 12, "out": out, "resume": "auto"})
    assert result.is_delivered
    assert all(map(torch.equal, weights(result), undisturbed))
    # And a third one uses it.
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path / "third machine"))
    assert all(map(torch.equal, paceline.load(out, task=SmallTask()).state_dict().values(), undisturbed))
    assert main(["report", out, "--out", str(tmp_path / "report.html")]) == 0
    assert main(["runs", out.rpartition("/")[0]]) == 0
    said = "".join(capfd.readouterr()) + "".join(path.read_text(errors="replace") for path in _texts(tmp_path))
    assert f"resumed after step {int(sent[5:])}" in said
    assert SECRET not in said
    assert "AKIAIOSFODNN7EXAMPLE" not in said


def _texts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".log", ".html")]


def test_of_two_that_create_a_file_in_s3_one_has_it(bucket):
    _, out = bucket
    one, other = Store(out), Store(out)
    assert one.create(".starting", b"one")
    assert not other.create(".starting", b"other")
    assert one.create(".starting", b"one")  # its answer was lost
    one.remove([".starting"])
    assert other.create(".starting", b"other")
    other.remove([".starting"])


def test_a_bucket_that_is_not_there_is_said_before_the_first_step(bucket):
    with pytest.raises(paceline.PacelineError, match="s3://no-such-bucket-here/run: ") as failed:
        fit(SmallTask(), **{**SETTINGS, "steps": 4, "out": "s3://no-such-bucket-here/run"})
    assert SECRET not in str(failed.value)
