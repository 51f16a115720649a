"""The command lines of OpenSeq2Seq and RETURNN under a real mpirun: they train as one process does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked
from tests.launchers import small
from tests.launchers.conftest import ROOT, TIMEOUT_S, need, run

RUN = ROOT / "examples" / "openseq2seq" / "run.py"
RNN = ROOT / "examples" / "returnn" / "rnn.py"
NO_CLIPPING = ("++gradient_clip_global_norm", "0")
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def mpirun(program: str, *words: str) -> str:
    need(f"{program}.openmpi", packages="openmpi-bin")
    launcher = [f"{program}.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    return run([*launcher, sys.executable, *words], env=ON_CPU).stdout


def alone(*words: str) -> str:
    """Run a script in a process that need not import torch again."""
    process = Forked("tests.run_script", words, {**os.environ, **ON_CPU})
    out, err = process.communicate(TIMEOUT_S)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


# -- seed 002: OpenSeq2Seq ---------------------------------------------------------------------------------------------


def test_openseq2seq(tmp_path: Path) -> None:
    config, often = f"--config_file={RUN.with_name('small.py')}", "--print_loss_steps=1"
    flags = ["--mode=train_eval", "--use_horovod=True", "--enable_logs", often]
    both = mpirun("mpiexec", str(RUN), config, *flags, f"--logdir={tmp_path / 'both'}")
    assert "launched by openmpi" in both
    assert both.count("`num_gpus` 1 is ignored with Horovod: the launcher's number counts, 2") == 1
    assert "batch: 64 per device x 2 ranks = 128" in both
    assert "SGD, LARC (clip), eta 0.002" in both

    alone(str(RUN), config, *flags, "--iter_size=2", f"--logdir={tmp_path / 'one'}")
    expected = small.losses(tmp_path / "one")
    assert len(expected) == 24
    assert small.losses(tmp_path / "both") == pytest.approx(expected, abs=1e-6)
    both_scores, one_scores = records(tmp_path / "both", "validation"), records(tmp_path / "one", "validation")
    assert [scores["step"] for scores in both_scores] == [19, 23]  # every 20 steps, and at the end
    wanted = [scores["unseen/loss"] for scores in one_scores]
    assert [scores["unseen/loss"] for scores in both_scores] == pytest.approx(wanted, abs=1e-6)

    without = ["--mode=train", often, "--larc_params=None", "--iter_size=2", "--num_epochs=1"]
    alone(str(RUN), config, *without, f"--logdir={tmp_path / 'without'}")
    plain = small.losses(tmp_path / "without")
    assert plain[0] == pytest.approx(expected[0], abs=1e-6)
    assert plain[1] != pytest.approx(expected[1], abs=1e-3)

    answers = tmp_path / "answers.txt"
    alone(str(RUN), config, "--mode=infer", f"--logdir={tmp_path / 'both'}", f"--infer_output_file={answers}")
    assert len(answers.read_text().splitlines()) == 360


# -- seed 004: RETURNN -------------------------------------------------------------------------------------------------


def test_returnn_averages_parameters(tmp_path: Path) -> None:
    words = [str(RNN.with_name("config.py")), "++use_horovod", "1", "++model", str(tmp_path / "run")]
    said = mpirun("mpirun", str(RNN), *words)
    assert "launched by openmpi" in said
    assert "weights averaged every 5 steps, optimizer state averaged too" in said
    spreads = [record["spread"] for record in records(tmp_path / "run", "step") if "spread" in record]
    assert spreads
    assert max(spreads) > 0  # the ranks were apart
    scores = [record["dev/loss"] for record in records(tmp_path / "run", "validation")]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3


def test_returnn_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """Averaging at every step is summing gradients for SGD with momentum, as long as nobody clips."""
    config, out = str(RNN.with_name("config.py")), "++model"
    common = [*NO_CLIPPING, "++log_verbosity", "5", "++num_epochs", "2", "++learning_rate", "0.1"]
    one = [str(RNN), config, *common, "++accum_grad_multiple_step", "2", out, str(tmp_path / "one")]
    run([sys.executable, *one], env=ON_CPU)  # its loader starts processes, which one that was forked so cannot
    expected = small.losses(tmp_path / "one")
    assert len(expected) > 30
    for words in ("++horovod_reduce_type grad", "++horovod_param_sync_step 1"):
        folder = tmp_path / words.split()[0][2:]
        said = mpirun("mpirun", str(RNN), config, "++use_horovod", "1", *words.split(), *common, out, str(folder))
        assert ("weights averaged every 1 step," in said) == ("param" in words)
        assert small.losses(folder) == pytest.approx(expected, abs=1e-6)
