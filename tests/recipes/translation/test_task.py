"""The whole of translation, trained: the same bits at any number of ranks, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch

from paceline.data.grain import Grain
from paceline.observe.journal import read
from paceline.observe.sample_scores import read_scores
from paceline.recipes.translation.network.scores import smoothed_loss
from paceline.recipes.translation.settings import TranslationSettings
from paceline.recipes.translation.task import Translation
from paceline.recipes.translation.text.vocabulary import FILE, PAD
from paceline.train.loop import train
from paceline.train.run import open_run
from paceline.train.task import Surroundings
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.recipes.translation import toy
from tests.train.small import alone

TIMEOUT_S = 300.0


def test_smoothed_loss_against_float64() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 24, requires_grad=True)
    truth = torch.randint(4, 24, (3, 5))
    truth[0, 3:] = PAD
    smoothing, total = 0.1, 0.0
    scores, wanted_gradient = logits.detach().double().numpy(), np.zeros((3, 5, 24))
    for row, place in np.argwhere(truth.numpy() != PAD):
        log_probs = scores[row, place] - np.log(np.exp(scores[row, place]).sum())
        wanted = np.full(24, smoothing / 24)
        wanted[truth[row, place]] += 1 - smoothing
        total -= float((wanted * log_probs).sum())
        wanted_gradient[row, place] = np.exp(log_probs) - wanted
    loss = smoothed_loss(logits, truth, smoothing)
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-6)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), wanted_gradient, atol=1e-6)


def test_smoothed_loss_of_half_precision() -> None:
    """Weights in fp16 (`--precision fp16-master`) have scores in fp16, whose sums over tokens and units are no fp16."""
    logits = torch.randn(64, 32, 600, generator=torch.Generator().manual_seed(0))
    truth = torch.randint(4, 600, (64, 32), generator=torch.Generator().manual_seed(1))
    expected = smoothed_loss(logits.double(), truth, 0.1).item()
    for dtype in (torch.float16, torch.bfloat16):
        loss = smoothed_loss(logits.to(dtype), truth, 0.1)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected, rel=1e-3)


def trained(link: Link, data: Path, out: Path, changes: dict[str, Any]) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return metrics and the bytes of all weights."""
    settings = {"epochs": 2, "log_every": 1, "workers": 0, "out": out / str(link.world.size), **changes}
    task = Translation()
    task.spec = "translation"
    trainer = open_run(task, TranslationSettings(**toy.settings(data, **settings)), link)
    train(trainer)
    state = trainer.stepper.model.state_dict() if settings.get("shard", "none") == "none" else {}
    weights = {name: tensor.float().numpy().tobytes() for name, tensor in state.items()}
    return trainer.validation.metrics, weights


def losses_of(run: Path) -> list[float]:
    return [record["loss"] for record in read(run / "metrics.jsonl")]


def test_one_two_and_four_ranks_agree_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, batches by tokens, and units that the first rank has learnt."""
    changes = {"global_batch": None, "batch_cost": 200, "tokens": "bpe", "vocabulary": 288}
    (one, weights), *_ = run_ranks(1, trained, tmp_path, tmp_path, changes, timeout_s=TIMEOUT_S)
    assert set(one) == {"val/bleu", "val/chrf", "val/loss", "val/nll"}
    for size in (2, 4):
        for metrics, others in run_ranks(size, trained, tmp_path, tmp_path, changes, timeout_s=TIMEOUT_S):
            assert metrics == one
            assert others == weights
        assert losses_of(tmp_path / str(size)) == losses_of(tmp_path / "1")
        assert (tmp_path / str(size) / FILE).read_text() == (tmp_path / "1" / FILE).read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": "full", "checkpoint_form": "sharded"},
        {"level": 4, "pad_multiple": 4},
        {"model": "lstm", "ema": 0.9},
        {"packed": True},
    ],
    ids=["shards", "fastest", "lstm", "packed"],
)
def test_ways_of_training_give_the_weights_of_one_rank(tmp_path: Path, changes: dict[str, Any]) -> None:
    (expected,) = run_ranks(1, trained, tmp_path, tmp_path, {**changes, "epochs": 1}, timeout_s=TIMEOUT_S)
    for metrics, _ in run_ranks(2, trained, tmp_path, tmp_path, {**changes, "epochs": 1}, timeout_s=TIMEOUT_S):
        assert metrics == expected[0]
    assert losses_of(tmp_path / "2") == losses_of(tmp_path / "1")


def test_a_run_goes_on_within_an_epoch_on_other_ranks(tmp_path: Path) -> None:
    changes = {"save_every_steps": 1, "keep_last": 99}
    metrics, weights = trained(alone(), tmp_path, tmp_path, changes)
    middle = tmp_path / "1" / "checkpoints" / "step-00000003"
    assert len(losses_of(tmp_path / "1")) == 8
    for found in run_ranks(2, trained, tmp_path, tmp_path, {**changes, "resume": middle}, timeout_s=TIMEOUT_S):
        assert found == (metrics, weights)
    assert losses_of(tmp_path / "2") == losses_of(tmp_path / "1")[3:]


@pytest.mark.parametrize("model", ["transformer", "lstm"])
def test_it_learns_to_reverse(tmp_path: Path, model: str) -> None:
    """Scores are sacreBLEU's of what is shown."""
    task = Translation()
    changes = {"model": model, "width": 32, "steps": 60, "lr": 0.01, "out": tmp_path / "run", "dropout": 0.0}
    settings = TranslationSettings(**toy.settings(tmp_path, **changes, val_every_epochs=None))
    trainer = open_run(task, settings, alone())
    train(trainer)
    losses = losses_of(tmp_path / "run")
    assert losses[-1] < 0.75 * losses[0]
    (record,) = read(tmp_path / "run" / "metrics.jsonl", "validation")
    samples = record["samples"]["val"]
    assert all(set(sample) == {"source", "reference", "hypothesis"} for sample in samples)
    assert samples[0]["source"].split() == samples[0]["reference"].split()[::-1]
    with trainer.stepper.evaluating():
        data = task.val_data()["val"]
        grain = task.collate([data[row] for row in range(len(data))])
        hypotheses = task.predict(trainer.stepper.model, _as_grain(grain))
    references = [grain["reference"]]
    assert record["val/bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, references, force=True).score)
    assert read_scores(tmp_path / "run")["val/bleu"].value() == pytest.approx(record["val/bleu"])
    assert record["analysis"]["val"]["reference_words"] == sum(len(each.split()) for each in grain["reference"])
    assert record["val/chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, references).score)


def _as_grain(data: dict[str, Any]) -> Grain:
    return Grain(data, 0, np.arange(len(data["text"])))


def test_dropped_pairs_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    task = Translation()
    settings = TranslationSettings(**toy.settings(tmp_path, epochs=1, max_tokens=3, max_ratio=1.5))
    task.attach(Surroundings(settings, alone(), said.append))
    data = task.train_data()
    dropped = sum(len(source.split()) > 3 for source, _ in toy.pairs(64))
    assert said == [f"train: {64 - dropped} of 64 pairs; dropped {dropped} longer than 3 tokens"]
    assert len(data) == 64 - dropped
    assert int(data.lengths.max()) == 8


def test_settings() -> None:
    known = {"train_source": ["a"], "train_target": ["b"], "epochs": 1}
    settings = TranslationSettings(**known, schedule="noam", size="base")
    assert settings.model_size == 512
    assert settings.batch_cost == 4096
    assert TranslationSettings(**known, global_batch=8).batch_cost is None
    modes = [TranslationSettings(**known, monitor=f"val/{name}").monitor_mode for name in ("loss", "nll", "bleu")]
    assert modes == ["min", "min", "max"]
    assert TranslationSettings(**known, warmup_ratio=0.1).warmup_steps == 0
    assert json.loads(settings.model_dump_json())["train_source"][0].endswith("/a")


def test_settings_without_effect_are_said() -> None:
    known = {"train_source": ["a"], "train_target": ["b"], "epochs": 1}
    assert list(TranslationSettings(**known, heads=8, vocabulary=500).idle()) == []
    lines = list(
        TranslationSettings(**known, model="lstm", heads=8, norm="post", tokenizer="run", tokens="words").idle()
    )
    assert lines == [
        "`heads` and `norm` have no effect: `--model lstm` has no such part",
        "`tokens` has no effect: units are those of `--tokenizer`",
    ]


def test_small_letters_against_capitals_are_said() -> None:
    known = {"train_source": ["a"], "train_target": ["b"], "epochs": 1, "lowercase": True}
    sets = {"val_source": ["c"], "val_target": ["d"]}
    (line,) = TranslationSettings(**known, **sets).cautions()
    assert line.endswith("set `--bleu-lowercase`, too")
    assert list(TranslationSettings(**known, **sets, bleu_lowercase=True).cautions()) == []
    assert list(TranslationSettings(**known).cautions()) == []
