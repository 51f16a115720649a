"""What is noted of a step beside its loss."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.observe.journal import read
from paceline.train.notes import notes
from tests.train.small import SmallTask, trainer


def test_the_loss_scale_is_in_the_journal_where_there_is_one(tmp_path: Path) -> None:
    plain = trainer(SmallTask(), tmp_path / "plain", epochs=1, progress="none", loggers=())
    plain.fit()
    assert all("loss_scale" not in record for record in read(tmp_path / "plain" / "metrics.jsonl"))
    half = trainer(SmallTask(), tmp_path / "half", epochs=1, log_every=1, precision="fp16", progress="none", loggers=())
    half.fit()
    scales = [record.get("loss_scale") for record in read(tmp_path / "half" / "metrics.jsonl")]
    assert None not in scales
    assert scales[-1] == half.engine.scale.current()


def test_rates_of_layers_are_noted_under_their_names(tmp_path: Path) -> None:
    trained = trainer(SmallTask(), tmp_path / "a", epochs=1, larc="clip", progress="none", loggers=())
    trained.fit()
    found = notes(trained.engine, trained.larc)
    assert found.keys() == {f"larc/{name}" for name, _ in trained.engine.model.named_parameters()}
    assert all(isinstance(rate, float) and torch.isfinite(torch.tensor(rate)) for rate in found.values())
