"""Few shapes, and what padding to them changes: nothing in evaluation, nothing of the loss but batch statistics."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.keys import key
from paceline.data.fetch import seed_everything
from paceline.data.grain import Grain
from paceline.data.plan import BatchRule, Plan
from paceline.recipes.speech.data.ladder import Ladder, ladder
from paceline.recipes.speech.data.utterances import Utterance, Utterances, collate
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.sound.features import FrameRule, LogMel
from paceline.recipes.speech.task import Asr
from paceline.speed import precision
from paceline.speed.precision import Capabilities
from paceline.train.autotune.shapes import Padding, costly_shapes
from paceline.train.task import Surroundings
from tests.recipes.speech.tiny import PLAIN, losses_of, settings, speech, task, train
from tests.train.small import alone


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Asr, Utterances]:
    bare = Capabilities("cpu", "this CPU", bf16=False, tf32=False, fp16=True, compiler=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "capabilities", lambda device: bare)
    speech(tmp_path, "train", 24, 1)
    made = task()
    made.attach(Surroundings(settings(tmp_path, level=4, network=PLAIN), alone(), print, few_shapes=True))
    return made, made.train_data()


def read(data: Utterances, rows: range) -> list[Utterance]:
    found = []
    for row in rows:
        seed_everything(key(0, row))
        found.append(data[row])
    return found


def test_a_grain_stands_on_a_rung(opened: tuple[Asr, Utterances]) -> None:
    made, data = opened
    found = made.train_collate(data)
    assert isinstance(found, Ladder)
    assert pickle.loads(pickle.dumps(found)) == found  # workers get a copy
    shapes = set()
    for start in range(0, 24, 2):
        samples = read(data, range(start, start + 2))
        plain, padded = collate(samples), found(samples)
        width = plain["audio"].shape[1]
        assert 0 <= padded["audio"].shape[1] - width < found.audio_multiple
        assert padded["audio"].shape[1] % (16 * found.frames.hop_samples) == 0
        assert torch.equal(padded["audio"][:, :width], plain["audio"])
        assert not padded["audio"][:, width:].any()
        assert padded["text"].shape[1] == found.text_width == 16
        assert padded["text_lengths"].tolist() == plain["num_labels"]
        shapes.add(padded["audio"].shape)
    assert len(shapes) <= 32


def test_at_most_so_many_rungs(opened: tuple[Asr, Utterances]) -> None:
    made, data = opened
    network = made.settings.network
    data.lengths = np.array([0.5, 16.7])
    found = ladder(data, network)
    assert -(-16.7 * network.sample_rate // found.audio_multiple) <= 32
    assert found.audio_multiple == 64 * found.frames.hop_samples  # 1670 frames in 32 parts, each a multiple of 16


def test_what_is_warmed_is_what_comes(opened: tuple[Asr, Utterances]) -> None:
    """The shapes that are picked before the first step are those of the grains, each once."""
    made, data = opened
    rate = made.settings.network.sample_rate
    data.lengths = np.random.default_rng(0).integers(rate // 2, 167 * rate // 10, 400) / rate  # rungs of 64 frames
    fit = made.train_collate(data)
    assert isinstance(fit, Padding)
    plan = Plan(400, rule=BatchRule(max_samples=4), grains=1, seed=0, lengths=data.lengths, order="sorted")
    come = {fit.width(np.round(data.lengths[plan.batch(step)] * rate).astype(int)) for step in range(plan.num_steps)}
    picks = costly_shapes(plan, 1000, fit)
    widths = [fit.width(np.round(data.lengths[plan.batch(pick.step)] * rate).astype(int)) for pick in picks]
    assert sorted(widths) == sorted(come)
    assert sum(pick.share for pick in picks) == pytest.approx(1.0)


def test_frames_that_were_packed_stand_on_the_same_rungs(opened: tuple[Asr, Utterances]) -> None:
    made, data = opened
    fit = made.train_collate(data)
    assert isinstance(fit, Ladder)
    hop = fit.frames.hop_samples
    frames = replace(fit, audio_multiple=fit.audio_multiple // hop, frames=FrameRule(1), row_samples=hop)
    for seconds in (0.01, 0.6, 0.601, 5.0):
        assert frames.padded(seconds) * hop == fit.padded(seconds)


def test_one_frame_more_does_not_cost_a_rung(opened: tuple[Asr, Utterances]) -> None:
    """NeMo's count since 1.0 has a frame behind the last whole hop: audio is padded to one sample less."""
    made, data = opened
    network = made.settings.network
    newer = network.model_copy(update={"features": network.features.model_copy(update={"front_end": "nemo-1.0"})})
    fit = ladder(data, newer)
    padded = fit(read(data, range(4)))
    features, lengths = LogMel(newer.features, newer.sample_rate).eval()(padded["audio"], padded["lengths"])
    assert features.shape[2] * fit.frames.hop_samples == padded["audio"].shape[1] + 1
    assert lengths.tolist() == [1 + length // fit.frames.hop_samples for length in padded["num_samples"]]
    assert padded["out_frames"].tolist() == [newer.output_length(length) for length in lengths.tolist()]


def test_only_where_few_shapes_are_wanted(opened: tuple[Asr, Utterances], tmp_path: Path) -> None:
    made, data = opened
    made.attach(Surroundings(made.settings.model_copy(update={"level": 2}), alone(), print))
    assert made.train_collate(data) is collate


def losses(made: Asr, model: AcousticModel, data: dict[str, Any]) -> torch.Tensor:
    total, count = made.loss(model, Grain(data, 0, np.arange(3)))
    assert count == 3
    return total


def test_padding_and_tensors_alone_give_the_same_loss(opened: tuple[Asr, Utterances]) -> None:
    made, data = opened
    torch.manual_seed(0)
    model = made.model().eval()
    samples = read(data, range(3))
    padded = made.train_collate(data)(samples)
    plain = losses(made, model, collate(samples))
    assert losses(made, model, padded).item() == pytest.approx(plain.item(), rel=1e-5)
    tensors = made.recordable(Grain(padded, 0, np.arange(3)))
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    assert torch.equal(losses(made, model, tensors), losses(made, model, padded))


def test_an_unread_utterance_adds_nothing(opened: tuple[Asr, Utterances]) -> None:
    made, data = opened
    model = made.model().eval()
    samples = read(data, range(3))
    bad: Any = "train.json:2"
    unread = [samples[0], samples[1]._replace(bad=bad), samples[2]]
    fit = made.train_collate(data)
    total = losses(made, model, made.recordable(Grain(fit(unread), 0, np.arange(3))))
    apart = [made.loss(model, Grain(fit([each]), 0, np.arange(1)))[0] for each in (samples[0], samples[2])]
    assert total.item() == pytest.approx(sum(each.item() for each in apart), rel=1e-4)
    assert made._unread == {bad}


def test_training_at_level_4(opened: tuple[Asr, Utterances], tmp_path: Path) -> None:
    """Of utterances as short as these a rung is what they are padded to anyway: bitwise -O0, which was chosen; and the
    same again after an interruption."""
    plain: dict[str, Any] = {"network": PLAIN, "epochs": None, "schedule": "constant", "save_every_steps": 4}
    train(settings(tmp_path, level=0, out=tmp_path / "plain", steps=8, **plain))
    train(settings(tmp_path, level=4, out=tmp_path / "whole", steps=8, **plain))
    train(settings(tmp_path, level=4, out=tmp_path / "parts", steps=4, **plain))
    train(settings(tmp_path, level=4, out=tmp_path / "parts", steps=8, resume="auto", allow_change=True, **plain))
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "plain")
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
