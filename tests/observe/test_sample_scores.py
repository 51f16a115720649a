"""Scores of samples in a file of a run."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.observe.sample_scores import SCORES, SampleScores, read_scores, write_scores


def test_written_and_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    parts = [[(2, (1, 4)), (0, (0, 3))], [(1, (2, 5))]]
    scores = SampleScores.of("ratio", parts)
    assert scores.rows.tolist() == [[0, 3], [2, 5], [1, 4]]
    assert scores.value() == 0.25
    write_scores(tmp_path, {"dev": {"wer": scores}})
    found = read_scores(tmp_path)
    assert list(found) == ["dev/wer"]
    assert found["dev/wer"].rows.tolist() == scores.rows.tolist()
    assert found["dev/wer"].is_of_the_same(scores)
    assert not scores.is_of_the_same(SampleScores.of("ratio", [[(0, (0, 3)), (1, (2, 6)), (2, (1, 4))]]))
    assert not scores.is_of_the_same(SampleScores.of("ratio", [[(0, (0, 3))]]))


def test_what_is_no_file_of_scores_is_left_out(tmp_path: Path) -> None:
    assert read_scores(tmp_path) == {}
    write_scores(tmp_path, {"dev": {"wer": SampleScores.of("ratio", [[(0, (1, 2))]])}})
    assert not (tmp_path / SCORES).exists()  # there is no run
    good = {"form": "ratio", "rows": [[1, 2]]}
    bad = [
        {},
        3,
        {"form": "other", "rows": [[1, 2]]},
        {"form": "ratio", "rows": [[1, 2, 3]]},
        {"form": "ratio", "rows": []},
    ]
    (tmp_path / SCORES).write_text(json.dumps({"dev": {"good": good, **{str(n): each for n, each in enumerate(bad)}}}))
    assert list(read_scores(tmp_path)) == ["dev/good"]
    (tmp_path / SCORES).write_text("[1, 2")
    assert read_scores(tmp_path) == {}
