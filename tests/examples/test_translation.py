"""The toy of sequence to sequence, by the command lines of OpenSeq2Seq and RETURNN."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.observe.journal import read
from paceline.recipes.translation.settings import TranslationSettings
from tests.examples import scripts

REVERSAL = scripts.EXAMPLES / "openseq2seq" / "reversal.py"
ATTENTION = scripts.EXAMPLES / "returnn" / "attention.py"
oss = scripts.module("openseq2seq", "run")
rnn = scripts.module("returnn", "rnn")
OssRefused = scripts.module("openseq2seq", "openseq2seq_config").ParameterRefused
RnnRefused = scripts.module("returnn", "returnn_mistakes").OptionRefused


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the toy's data, where commands are typed."""
    scripts.module("translation", "toy_data").write(tmp_path / "toy_text_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_openseq2seqs_parameters() -> None:
    words, said = oss.command([f"--config_file={REVERSAL}", "--mode=train_eval"], None, False)
    settings = scripts.settings(words)
    assert isinstance(settings, TranslationSettings)
    assert words[1] == "translation"
    shape = settings.shape
    assert (shape.kind, shape.width, shape.ffn_width, shape.heads) == ("transformer", 64, 128, 4)
    assert (shape.encoder_layers, shape.decoder_layers, shape.dropout) == (2, 2, 0.0)
    assert (settings.beam, settings.length_penalty, settings.label_smoothing) == (5, 1.0, 0.1)
    assert (settings.steps, settings.schedule, settings.model_size, settings.warmup_steps) == (500, "noam", 64, 200)
    assert (settings.optimizer, settings.betas, settings.tokens) == ("adam", (0.9, 0.997), "words")
    assert (settings.batch_per_device, settings.batch_cost, settings.max_tokens) == (64, None, 56)
    assert said == ["`optimizer_params/epsilon` has no effect here"]


def test_openseq2seqs_toy_is_trained_and_used(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [f"--config_file={REVERSAL}", "--max_steps=3", "--eval_steps=3", "--save_checkpoint_steps=3"]
    monkeypatch.setattr(sys, "argv", ["run.py", *flags, "--mode=train_eval", "--eval_batch_size_per_gpu=200"])
    assert oss.run() == 0
    (record,) = read(toy / "runs" / "reversal" / "metrics.jsonl", "validation")
    assert "source/bleu" in record
    monkeypatch.setattr(sys, "argv", ["run.py", *flags, "--mode=infer", "--batch_size_per_gpu=200"])
    assert oss.run() == 0
    assert len((toy / "infer-out.txt").read_text().splitlines()) == 200


def test_returnns_options(toy: Path) -> None:
    words, said = rnn.command([str(ATTENTION)], 1, False)
    settings = scripts.settings(words)
    assert isinstance(settings, TranslationSettings)
    shape = settings.shape
    assert (shape.kind, shape.width, shape.encoder_layers, shape.decoder_layers) == ("lstm", 64, 1, 1)
    assert (settings.beam, settings.label_smoothing, settings.max_tokens) == (4, 0.1, 75)
    assert (settings.batch_cost, settings.global_batch, settings.order, settings.bins) == (1000, 100, "laplace", 8)
    assert (settings.schedule, settings.monitor, settings.monitor_mode) == ("newbob", "dev/loss", "min")
    assert [path.name for path in settings.train_source] == ["source.train.gz"]
    assert said == []


def test_returnns_toy_is_trained(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rnn.py", str(ATTENTION), "++num_epochs", "1", "++batch_size", "8000"])
    assert rnn.run() == 0
    (record,) = read(toy / "net-model" / "attention" / "metrics.jsonl", "validation")
    assert "dev/bleu" in record


def test_what_is_not_translated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OssRefused, match="`encoder` ConvS2SEncoder: is not translated"):
        oss.command([f"--config_file={REVERSAL}", "--encoder=ConvS2SEncoder"], None, False)
    with pytest.raises(OssRefused, match="`encoder_params/hidden`"):
        oss.command([f"--config_file={REVERSAL}", "--encoder_params/hidden=3"], None, False)
    config = tmp_path / "config.py"
    config.write_text("from paceline.translation import Translation\ntrain = {'class': 'HDFDataset'}\nnum_epochs = 1\n")
    with pytest.raises(RnnRefused, match="`train` is no TranslationDataset"):
        rnn.command([str(config)], 1, False)
