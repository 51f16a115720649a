"""Runs at addresses: bit for bit the run in a folder, whatever happens to an upload."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.core.cloud.address import copies_root
from paceline.core.cloud.file_copy import alone
from paceline.core.cloud.run_copy import RunCopy, RunTakenOver
from paceline.core.run_folder import RunChanged
from paceline.train.fit import fit, run_mode
from tests.crash import KILLED, run_until_death
from tests.ranks import ranks
from tests.shelf import SECRET, Shelf
from tests.train.small import SmallTask

SETTINGS = {
    "global_batch": 8,
    "lr": 0.05,
    "seed": 3,
    "device": "cpu",
    "save_every_steps": 2,
    "keep_last": 2,
    "keep_best": 0,
    "progress": "lines",
    "loggers": (),
    "order": "random",
}


class Cloud:
    """A shelf, and machines that each have copies of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        monkeypatch.setenv("SHELF", str(folder / "shelf"))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        Shelf.faults, Shelf.log, Shelf.kills_at = [], [], 0
        self.move_to("first machine")

    def sleeps(self, sleep: Callable[[float], None]) -> None:
        """Do this instead of waiting."""
        self._monkeypatch.setattr("time.sleep", sleep)

    def move_to(self, machine: str) -> None:
        self._monkeypatch.setenv("PACELINE_COPIES", str(self.folder / machine))

    def copy(self) -> Path:
        """Return this machine's copy of shelf://run."""
        return copies_root() / "shelf/run"

    def files(self, run: str = "run") -> dict[str, bytes]:
        root = self.folder / "shelf" / run
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def checkpoints(self) -> list[str]:
        """Names of complete checkpoints."""
        return sorted(name.split("/")[1] for name in self.files() if name.endswith("/digests.json"))


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return Cloud(tmp_path, monkeypatch)


def train(steps: int, out: str = "shelf://run", **settings) -> paceline.Result:
    return fit(SmallTask(), **{**SETTINGS, "steps": steps, "out": out, **settings})


def weights(result: paceline.Result) -> list[torch.Tensor]:
    return [value.clone() for value in result.model.state_dict().values()]


@pytest.fixture(scope="module")
def undisturbed() -> list[torch.Tensor]:
    return weights(fit(SmallTask(), **SETTINGS, steps=12))


def same(result: paceline.Result, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, other) for ours, other in zip(weights(result), expected, strict=True))


def same_as_copy(cloud: Cloud, result: paceline.Result) -> bool:
    """Return True if the store has what the copy has, but for files of the copy itself."""
    copy = result.folder
    here = {path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    return {name: content for name, content in here.items() if name != ".sent.json"} == cloud.files()


@pytest.mark.parametrize("out", ["memory://bucket/run", "shelf://run"])
def test_a_run_at_an_address_goes_on_on_another_machine(cloud, undisturbed, out):
    first = train(5, out)
    assert (first.status, first.address, first.is_delivered) == ("finished", out, True)
    cloud.move_to("second machine")
    second = train(12, out, resume="auto")
    assert second.num_steps == 12
    assert same(second, undisturbed)
    lines = [json.loads(line) for line in (second.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "epoch"] == [2, 5, 8, 11]
    cloud.move_to("third machine")
    assert all(map(torch.equal, paceline.load(out, task=SmallTask()).state_dict().values(), undisturbed))
    if out.startswith("memory"):
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_what_is_sent_is_what_the_copy_has(cloud):
    result = train(9)
    assert cloud.checkpoints() == ["step-00000008", "step-00000009"]  # older ones are removed there, too
    assert same_as_copy(cloud, result)
    assert json.loads(cloud.files()["run.json"])["settings"]["out"] == "shelf://run"
    names = [name.removeprefix("run/") for name in Shelf.log]  # parts and the journal, then the mark that it is whole
    marked = names.index("checkpoints/step-00000009/digests.json")
    parts = [place for place, name in enumerate(names) if "step-00000009/" in name and "digests" not in name]
    assert len(parts) == 4
    assert max(parts) < marked
    assert "metrics.jsonl" in names[:marked]


def test_an_error_is_tried_again(cloud, undisturbed, capsys):
    Shelf.faults = [("step-00000012/model", "error")] * 2
    result = train(12)
    assert "could not be brought up to date" not in capsys.readouterr().out
    assert same(result, undisturbed)
    assert same_as_copy(cloud, result)


def test_half_an_object_is_noticed(cloud, undisturbed):
    Shelf.faults = [("run.json", "cut")]  # at the start: at the end it may be sent before the last checkpoint
    train(1)
    assert not Shelf.faults
    Shelf.faults = [("step-00000012/model", "cut"), ("digests.json", "cut")]
    result = train(12, resume="auto")
    assert not Shelf.faults
    assert same_as_copy(cloud, result)
    assert same(result, undisturbed)


def test_uploads_that_fail_are_said_and_the_next_save_catches_up(cloud, undisturbed, capsys):
    Shelf.faults = [("step-", "error")] * 3
    result = train(12)
    said = "".join(capsys.readouterr())
    assert said.count("shelf://run could not be brought up to date (ConnectionError") == 1
    assert "the run goes on, everything is in" in said
    assert "shelf://run is up to date again" in said
    assert SECRET not in said
    assert "AKIA" not in said
    assert same(result, undisturbed)
    assert same_as_copy(cloud, result)


def test_a_store_that_stays_away_costs_nothing(cloud, undisturbed, capsys):
    Shelf.faults = [("step-", "error")] * 100
    first = train(7)
    assert (first.status, first.is_delivered) == ("finished", False)
    assert "step-00000007" not in cloud.checkpoints()
    Shelf.faults = []
    assert same(train(12, resume="auto"), undisturbed)  # from step 7, which only the copy has
    assert "resumed after step 7" in capsys.readouterr().out


def test_what_was_not_sent_is_sent_by_the_next_start(cloud, undisturbed):
    Shelf.faults = [("step-", "error")] * 100
    train(12)
    Shelf.faults = []
    again = train(12, resume="auto")
    assert (again.num_steps, again.is_delivered) == (12, True)
    assert "step-00000012" in cloud.checkpoints()
    cloud.move_to("second machine")
    assert same(train(12, resume="auto"), undisturbed)


def test_a_store_that_cannot_be_written_to_ends_a_run_before_its_first_step(cloud):
    Shelf.faults = [("run.json", "error")] * 3
    with pytest.raises(paceline.PacelineError, match="shelf://run: writing run.json failed: ConnectionError") as failed:
        train(4)
    assert "credentials" in failed.value.hint
    assert SECRET not in str(failed.value)
    assert train(4).status == "finished"  # nothing is left that would be in the way


def killed(link, steps: int, env: dict[str, str]) -> None:
    os.environ.update(env)
    Shelf.kills_at = 2
    run_mode(SmallTask(), _config(steps), link)


def _config(steps: int, **more):
    return SmallTask.Settings(**{**SETTINGS, "steps": steps, "out": "shelf://run", **more})


def test_a_kill_in_the_middle_of_an_upload_loses_nothing(cloud, undisturbed, capsys):
    env = {name: os.environ[name] for name in ("SHELF", "PACELINE_COPIES")}
    assert run_until_death(1, killed, 12, env) == [KILLED]
    (sent,) = cloud.checkpoints()
    assert {name.split("/")[1] for name in cloud.files() if "/step-" in name} > {sent}  # one is there in part
    shutil.copytree(cloud.folder / "shelf", cloud.folder / "shelf of before")
    newest = max(path.name for path in (cloud.folder / "first machine/shelf/run/checkpoints").glob("step-*"))
    assert newest > sent
    here = train(12, resume="auto")
    assert f"resumed after step {int(newest[5:])}" in capsys.readouterr().out
    assert same(here, undisturbed)
    assert same_as_copy(cloud, here)
    # The machine is gone: another one goes on from what was sent.
    os.environ["SHELF"] = str(cloud.folder / "shelf of before")
    cloud.move_to("second machine")
    there = train(12, resume="auto")
    assert f"resumed after step {int(sent[5:])}" in capsys.readouterr().out
    assert same(there, undisturbed)


def test_an_object_that_was_cut_later_is_skipped_and_mended(cloud, undisturbed, capsys):
    train(8)
    part = cloud.folder / "shelf/run/checkpoints/step-00000008/model.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    cloud.move_to("second machine")
    second = train(12, resume="auto")
    said = capsys.readouterr().out
    assert "skipped a broken checkpoint: shelf://run/checkpoints/step-00000008/model.safetensors" in said
    assert "resumed after step 6" in said
    assert same(second, undisturbed)


def test_the_copy_mends_an_object_that_was_cut(cloud, undisturbed):
    train(8)
    part = cloud.folder / "shelf/run/checkpoints/step-00000008/model.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    train(8, resume="auto")
    assert part.read_bytes() == whole


def test_machines_that_take_turns(cloud, undisturbed, capsys):
    train(4)
    cloud.move_to("second machine")
    train(8, resume="auto")
    cloud.move_to("first machine")
    assert same(train(12, resume="auto"), undisturbed)
    assert "resumed after step 8" in capsys.readouterr().out


def test_checkpoints_that_others_did_not_wait_for_are_put_aside(cloud, undisturbed, capsys):
    Shelf.faults = [("step-00000006", "error")] * 100
    train(7)  # the store never gets step 6
    Shelf.faults = []
    cloud.move_to("second machine")
    train(8, resume="auto")
    cloud.move_to("first machine")
    assert same(train(12, resume="auto"), undisturbed)
    said = capsys.readouterr().out
    assert "has checkpoints from before others went on with the run: it was put aside as" in said
    aside = cloud.folder / "first machine" / ".aside" / "run-1" / "checkpoints"
    assert (aside / "step-00000007" / "digests.json").exists()


def test_a_run_that_was_deleted_there_is_a_new_one(cloud, capsys):
    train(4)
    shutil.rmtree(cloud.folder / "shelf" / "run")
    assert train(2).num_steps == 2
    assert "is of another run: it was put aside" in capsys.readouterr().out


def test_a_run_is_never_overwritten(cloud):
    train(2)
    cloud.move_to("second machine")
    with pytest.raises(paceline.PacelineError, match="shelf://run holds a run already"):
        train(4)


def test_two_machines_cannot_begin_at_once(cloud):
    train(2)
    copy = RunCopy.of(SmallTask.Settings(**SETTINGS, steps=1, out="shelf://run").out)
    copy.pull()
    cloud.move_to("second machine")
    train(4, resume="auto")
    with pytest.raises(RunChanged), copy.starting():
        pass
    assert not [name for name in cloud.files() if "starting" in name]


@pytest.mark.parametrize("out", ["memory://bucket/run", "shelf://run"])
def test_of_two_starts_in_the_same_second_one_goes_on(cloud, out):
    """Before, both did, and each overwrote what the other sent."""
    first = RunCopy.of(SmallTask.Settings(**SETTINGS, steps=1, out=out).out)
    first.pull()
    with first.starting():  # its record is not there yet
        cloud.move_to("second machine")
        second = RunCopy.of(SmallTask.Settings(**SETTINGS, steps=1, out=out).out)
        second.pull()
        tried = []

        def write_record_of_first(seconds: float) -> None:
            tried.append(seconds)
            with fsspec.open(f"{out}/run.json", "wb") as file:
                file.write(b"{}")

        cloud.sleeps(write_record_of_first)
        with pytest.raises(RunChanged), second.starting():
            pass
    assert len(tried) == 1
    files = fsspec.core.url_to_fs(out)[0]
    assert not [name for name in files.find(out) if "starting" in name]
    files.rm(out, recursive=True)


def test_a_start_that_was_killed_is_waited_for_once(cloud):
    lost = RunCopy.of(SmallTask.Settings(**SETTINGS, steps=1, out="shelf://run").out)
    assert lost.store.create(".starting", b"a machine that is gone")
    assert not lost.store.create(".starting", b"another")
    assert train(2).status == "finished"
    assert same_as_copy(cloud, train(4, resume="auto"))


def test_a_run_that_another_machine_goes_on_with_is_left_to_it(cloud, undisturbed, capsys):
    """Before, the first one went on sending: it renamed the checkpoints of the other and overwrote its record."""

    class MovesOn(SmallTask):
        is_alone = True

        def after_step(self, model, step, grains) -> None:
            if len(self.seen) == 5 and self.is_alone:
                self.is_alone = False
                while "step-00000004" not in cloud.checkpoints():
                    pass
                with alone(cloud.copy()):  # and whatever belongs to it is sent
                    pass
                cloud.move_to("second machine")
                others.append(train(12, resume="auto"))
                there.update(cloud.files())
                cloud.move_to("first machine")

    others, there = [], {}
    late = fit(MovesOn(), **{**SETTINGS, "steps": 12, "out": "shelf://run"})
    said = capsys.readouterr().out
    assert (late.status, late.is_delivered) == ("finished", False)
    assert said.count("shelf://run is trained by another start since") == 1
    assert "nothing more of this one is sent there" in said
    assert cloud.files() == there
    assert same(others[0], undisturbed)
    assert same(train(12, resume="auto"), undisturbed)  # the copy gives way


def test_a_machine_that_goes_on_while_a_checkpoint_is_sent_has_the_run(cloud, monkeypatch):
    """Before, whose run it is was looked at before the checkpoint alone, which may take an hour to send."""
    train(4)
    shutil.rmtree(cloud.folder / "shelf/run/checkpoints/step-00000004")
    late, others = RunCopy(cloud.copy(), "shelf://run"), []
    send_parts = RunCopy._send_parts

    def sent_parts(copy, *args) -> None:
        send_parts(copy, *args)
        if not others:
            others.append("begins")
            cloud.move_to("second machine")
            others.append(train(8, resume="auto"))
            others.append(cloud.files())
            cloud.move_to("first machine")

    monkeypatch.setattr(RunCopy, "_send_parts", sent_parts)
    with pytest.raises(RunTakenOver, match="nothing more of this one is sent"):
        late.send()
    _, result, there = others
    assert result.is_delivered
    assert cloud.files() == there


def two_ranks(link, folder: str) -> None:
    os.environ["SHELF"], os.environ["PACELINE_COPIES"] = f"{folder}/shelf", f"{folder}/copies"
    Shelf.log = []
    run_mode(SmallTask(), _config(5, grains=2), link)
    assert bool(Shelf.log) == link.is_first
    os.environ["PACELINE_COPIES"] = f"{folder}/copies of others"
    result = run_mode(SmallTask(), _config(12, grains=2, resume="auto"), link)
    assert (result.num_steps, result.address, result.is_delivered) == (12, "shelf://run", True)
    alone = run_mode(SmallTask(), _config(12, grains=2, out=f"{folder}/local"), link)
    assert all(map(torch.equal, weights(result), weights(alone)))


@ranks(2)
def test_one_rank_uploads_and_all_agree(link, tmp_path):
    two_ranks(link, str(tmp_path))


def test_commands_take_addresses(cloud, tmp_path, capsys):
    task = f"{Path(__file__).parents[1] / 'train' / 'small.py'}:SmallTask"
    words = ["--out", "shelf://runs/a", "--global-batch", "8", "--lr", "0.05", "--device", "cpu", "--steps", "4"]
    words += ["--progress", "lines"]
    assert main(["train", task, *words]) == 0
    cloud.move_to("second machine")
    assert main(["report", "shelf://runs/a"]) == 0
    assert "report in shelf://runs/a/report.html" in capsys.readouterr().out
    assert b"<html" in cloud.files("runs/a")["report.html"]
    assert main(["export", "shelf://runs/a", "shelf://exports/a"]) == 0
    assert "model.safetensors" in cloud.files("exports/a")
    assert main(["eval", "shelf://runs/a", "--device", "cpu", "--checkpoint", "last"]) == 0
    assert "shelf://runs/a/checkpoints/step-00000004" in capsys.readouterr().out
    assert main(["runs", "shelf://runs"]) == 0
    assert "finished" in capsys.readouterr().out
    start = ["--init-from", "shelf://runs/a/checkpoints/step-00000004", "--out", "shelf://runs/b"]
    assert main(["train", task, *words[2:], *start]) == 0
    assert "4 weights from shelf://runs/a/checkpoints/step-00000004" in capsys.readouterr().out
    assert main(["train", task, *words[2:], "--out", "shelf://runs/c", "--init-from", "shelf://exports/a"]) == 0
    assert main(["diff", "shelf://runs/a", "shelf://runs/b"]) == 1
    resumed = ["--resume", "shelf://runs/a/checkpoints/step-00000004", "--out", "shelf://runs/d"]
    assert main(["train", task, *words[2:], *resumed]) == 0
    assert "resumed after step 4" in capsys.readouterr().out
    assert main(["train", task, "--exp-name", "a", "--runs-dir", "shelf://runs", *words[2:]]) == 0
    assert "run.json" in cloud.files("runs/a-2")
    assert main(["report", "shelf://runs/none"]) == 2
    assert "there is no folder shelf://runs/none" in capsys.readouterr().err


def test_an_unknown_scheme_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = f"{Path(__file__).parents[1] / 'train' / 'small.py'}:SmallTask"
    assert main(["train", task, "--out", "s4://bucket/run", "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert "there is no scheme 's4'" in error
    assert "fsspec knows s3" in error
    assert not list(tmp_path.iterdir())
