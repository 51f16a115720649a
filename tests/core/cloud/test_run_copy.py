import os
import signal

from paceline.core.cloud.file_copy import alone
from paceline.core.cloud.run_copy import outdated, relation
from paceline.core.cloud.store import Patience, without_secrets


def test_how_a_copy_stands_to_its_run():
    one, two, other = {"time": "1"}, {"time": "2"}, {"time": "3"}
    assert relation(None, None) == relation(None, [one]) == "none"
    assert relation([one], [one]) == relation([one, two], [one]) == "ahead"
    assert relation([one], [one, two]) == "behind"
    assert relation([one, two], [one, other]) == relation([one], None) == "apart"


def test_checkpoints_that_are_no_longer_kept():
    assert outdated(set(), {"step-00000001"}) == (set(), set())  # nothing is kept yet: nothing is removed
    assert outdated({"step-00000004"}, {"step-00000002", "step-00000004"}) == ({"step-00000002"}, set())
    assert outdated({"step-00000004"}, {"step-00000006", "step-00000004"}) == (set(), {"step-00000006"})


def test_a_process_that_was_forked_does_not_keep_the_lock(tmp_path, monkeypatch):
    """As a loader worker that is started while a checkpoint is being sent."""
    monkeypatch.setenv("PACELINE_COPIES", str(tmp_path))
    reader, writer = os.pipe()
    with alone(tmp_path / "run"):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    os.close(reader)
    try:
        signal.alarm(20)
        with alone(tmp_path / "run"):
            pass
    finally:
        signal.alarm(0)
        os.close(writer)
        os.waitpid(child, 0)


def test_pauses_double():
    assert Patience(4, 0.5).pauses() == [0.5, 1.0, 2.0]


def test_secrets_of_the_environment_are_masked():
    environment = {"AWS_SECRET_ACCESS_KEY": "abcd/efgh+12345678", "HOME": "/home/somebody"}
    text = "ClientError: abcd/efgh+12345678 of /home/somebody, AKIAIOSFODNN7EXAMPLE, https://me:pass@host/x"
    shown = without_secrets(text, environment)
    assert "abcd" not in shown
    assert "AKIA" not in shown
    assert "pass" not in shown
    assert "/home/somebody" in shown
