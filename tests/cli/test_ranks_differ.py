"""Two ranks that were started by hand, with different words: refused by name, with exit code 2 and nothing written."""

from __future__ import annotations

from pathlib import Path

from tests.commands import Ended, run_by_hand

TASK = Path(__file__).with_name("tasks_for_tests.py")
QUICK = ["--epochs", "1", "--device", "cpu", "--workers", "0", "--progress", "none"]


def train(out: Path, *words_by_rank: str, tasks: tuple[Path, Path] = (TASK, TASK)) -> list[Ended]:
    common = ["--out", str(out), *QUICK]
    return run_by_hand(
        [["train", f"{task}:Good", *common, *words.split()] for task, words in zip(tasks, words_by_rank, strict=True)]
    )


def refused(ended: list[Ended]) -> str:
    """The message of two ranks that refused: each console has it, one with the word that it came from the other."""
    assert [each.code for each in ended] == [2, 2], ended
    messages = [each.err for each in ended]
    assert [message.count("error: ranks differ") for message in messages] == [1, 1], "once on each console"
    assert "Traceback" not in "".join(messages)
    (first,) = [message for message in messages if "ends too: rank" not in message]
    (other,) = [message for message in messages if "ends too: rank" in message]
    assert other.endswith(first)
    return first


def test_settings_that_change_the_result(tmp_path: Path) -> None:
    first = "--lr 0.1 --optimizer sgd --clip-norm 1 --weight-decay 0.1 --seed 0 --ema 0.9 --threads 1"
    second = "--lr 0.2 --optimizer adamw --clip-norm 2 --weight-decay 0.2 --seed 1 --ema 0.99 --threads 2"
    message = refused(train(tmp_path / "run", first, second))
    for line in (
        "--lr is 0.1 on rank 0 and 0.2 on rank 1",
        "--optimizer is sgd on rank 0 and adamw on rank 1",
        "--clip-norm is 1.0 on rank 0 and 2.0 on rank 1",
        "--weight-decay is 0.1 on rank 0 and 0.2 on rank 1",
        "--seed is 0 on rank 0 and 1 on rank 1",
        "--ema is 0.9 on rank 0 and 0.99 on rank 1",
    ):
        assert line in message
    assert "--threads" not in message, "each rank may have its own"
    assert "same command" in message
    assert not (tmp_path / "run").exists()


def test_the_code_of_the_task(tmp_path: Path) -> None:
    copies = (tmp_path / "a" / "task.py", tmp_path / "b" / "task.py")
    for copy, dropout in zip(copies, ("0.2", "0.3"), strict=True):
        copy.parent.mkdir()
        copy.write_text(TASK.read_text().replace("Dropout(0.2)", f"Dropout({dropout})"))
    message = refused(train(tmp_path / "run", "", "", tasks=copies))
    assert "code of task.py is" in message
    assert not (tmp_path / "run").exists()


def test_a_mode_or_a_folder_of_one_rank_alone(tmp_path: Path) -> None:
    words = [["train", f"{TASK}:Good", *QUICK] for _ in range(2)]
    words[0] += ["--out", str(tmp_path / "run")]
    words[1] += ["--mode", "train"]  # and no folder: the first rank's is taken
    message = refused(run_by_hand(words))
    assert "--validation is true on rank 0 and false on rank 1" in message
    assert "--out" not in message
