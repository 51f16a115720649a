"""OpenSeq2Seq's command line: what its flags and parameters mean here."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config.settings import TrainConfig
from paceline.observe.journal import read
from paceline.optim.schedule import build
from tests.examples import scripts

run = scripts.module("openseq2seq", "run")
config_file = scripts.module("openseq2seq", "openseq2seq_config")
params_of = scripts.module("openseq2seq", "openseq2seq_params")
Refused = config_file.ParameterRefused

SMALL = scripts.EXAMPLES / "openseq2seq" / "small.py"
SEED = [f"--config_file={SMALL}", "--mode=train_eval", "--use_horovod=True", "--enable_logs"]
"""The flags of the seed, with another config."""
BASE: dict[str, Any] = {
    "use_horovod": True,
    "batch_size_per_gpu": 32,
    "max_steps": 100,
    "lr_policy": "fixed_lr",
    "lr_policy_params": {"learning_rate": 0.1},
}


def meant(ranks: int = 8, has_gpu: bool = True, **params: Any) -> tuple[TrainConfig, list[str]]:
    merged = {**BASE, **params}
    values, words = params_of.translate(merged, merged, ranks, has_gpu)
    return TrainConfig(**values), words


# -- the config that is shipped ----------------------------------------------------------------------------------------


def test_the_command_of_the_seed() -> None:
    words, said = run.command(SEED, 2, False)
    settings = scripts.settings(words)
    chosen = {
        "epochs": 2,
        "batch_per_device": 64,
        "grains": 2,
        "eval_batch": 90,
        "level": 0,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr": 0.1,
        "schedule": "polynomial",
        "power": 2.0,
        "min_lr": 1e-5,
        "larc": "clip",
        "larc_eta": 0.002,
        "log_every": 5,
        "save_every_steps": 20,
        "val_every_steps": 20,
        "save_every_epochs": None,
        "val_every_epochs": None,
        "out": Path("runs/openseq2seq-small"),
    }
    assert settings == TrainConfig(**chosen)
    assert words[1] == "digits"
    assert said == [
        "`num_gpus` 1 is ignored with Horovod: the launcher's number counts, 2",
        "model and data are the task's: `data_layer` not used",
    ]


def test_base_parameters_of_the_command_line_go_before_the_file() -> None:
    flags = ["--batch_size_per_gpu=16", "--larc_params/larc_eta", "0.001", "--optimizer", "SGD", "--logdir=7"]
    settings = scripts.settings(run.command([*SEED, *flags], 2, False)[0])
    assert (settings.batch_per_device, settings.larc_eta, settings.momentum) == (16, 0.001, 0.9)
    assert settings.out == Path("7")  # it was text in the file
    assert settings.eval_batch == 90  # parameters of the mode go before those of the base


def test_towers_become_processes() -> None:
    words, said = run.command([f"--config_file={SMALL}", "--num_gpus=2"], None, False)
    assert words[-1] == "--procs=2"
    assert "--grains=2" in words
    assert not any("Horovod" in word for word in said)


def test_ranks_without_horovod_are_said() -> None:
    words, said = run.command([f"--config_file={SMALL}", "--num_gpus=2"], 4, False)
    assert "--procs=2" not in words
    assert said[-1] == "`use_horovod` is off, but the launcher has started 4 ranks: they train together"


def test_modes_that_use_a_run() -> None:
    base = [f"--config_file={SMALL}", "--logdir=a/b", "--use_horovod=True"]
    words, said = run.command([*base, "--mode=infer", "--infer_output_file=x.txt"], 2, False)
    assert words == ["infer", "a/b", "--checkpoint=last", "--eval-batch=64", "--out=x.txt"]
    assert said == []
    words, _ = run.command([*base, "--mode=eval", "--restore_best_checkpoint=True"], 2, False)
    assert words == ["eval", "a/b", "--checkpoint=best", "--eval-batch=90"]


def test_a_benchmark_saves_nothing() -> None:
    settings = scripts.settings(run.command([*SEED, "--benchmark"], 2, False)[0])
    assert (settings.benchmark, settings.bench_steps, settings.bench_start) == (True, 20, 10)
    assert (settings.out, settings.validation) == (None, False)


def test_going_on_needs_a_run(tmp_path: Path) -> None:
    there = f"--logdir={tmp_path}"
    with pytest.raises(Refused, match="there is no run in"):
        run.command([*SEED, there, "--continue_learning"], 2, False)
    settings = scripts.settings(run.command([*SEED, there, "--continue_learning", "--no_dir_check"], 2, False)[0])
    assert (settings.resume, settings.allow_change) == ("auto", False)
    (tmp_path / "run.json").touch()
    settings = scripts.settings(run.command([*SEED, there, "--continue_learning"], 2, False)[0])
    assert (settings.resume, settings.allow_change) == ("auto", True)


# -- parameters --------------------------------------------------------------------------------------------------------


def test_the_jasper_recipe() -> None:
    tf = config_file.StandIn("tensorflow")
    settings, words = meant(
        num_gpus=8,
        max_steps=None,
        num_epochs=400,
        dtype="mixed",
        loss_scaling="Backoff",
        optimizer=config_file.StandIn("open_seq2seq.optimizers.novograd.NovoGrad"),
        optimizer_params={"beta1": 0.95, "beta2": 0.98, "epsilon": 1e-8},
        lr_policy=config_file.StandIn("open_seq2seq.optimizers.lr_policies.poly_decay"),
        lr_policy_params={"learning_rate": 0.02, "min_lr": 1e-5, "power": 2.0},
        larc_params={"larc_eta": 0.001},
        regularizer=tf.contrib.layers.l2_regularizer,
        regularizer_params={"scale": 0.001},
        print_loss_steps=10,
        num_checkpoints=2,
    )
    assert (settings.epochs, settings.steps, settings.batch_per_device, settings.grains) == (400, None, 32, 8)
    assert (settings.precision, settings.loss_scale) == ("fp16-master", "backoff")
    assert (settings.optimizer, settings.betas, settings.weight_decay) == ("novograd", (0.95, 0.98), 0.001)
    assert (settings.schedule, settings.lr, settings.power, settings.min_lr) == ("polynomial", 0.02, 2.0, 1e-5)
    assert (settings.larc, settings.larc_eta, settings.log_every, settings.keep_last) == ("clip", 0.001, 10, 2)
    assert words == [
        "`num_gpus` 8 is ignored with Horovod: the launcher's number counts, 8",
        "`optimizer_params/epsilon` has no effect here",
        "`regularizer` is a weight decay of 0.001, on all parameters",
    ]


def test_batches_that_are_added_up_are_grains_of_one() -> None:
    settings, _ = meant(ranks=2, iter_size=4)
    assert (settings.batch_per_device, settings.grains) == (128, 8)


def test_all_of_larc() -> None:
    params = {"larc_eta": 0.01, "larc_mode": "scale", "min_update": 1e-6, "epsilon": 1e-5}
    settings, _ = meant(larc_params=params)
    assert (settings.larc, settings.larc_eta) == ("scale", 0.01)
    assert (settings.larc_min_update, settings.larc_epsilon) == (1e-6, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "has_gpu", "level", "precision"),
    [
        (None, True, 0, None),
        ("float32", True, 0, None),
        ("float16", True, "auto", "fp16-pure"),
        ("mixed", True, "auto", "fp16-master"),
        ("mixed", False, 0, None),
    ],
)
def test_precision(dtype: str | None, has_gpu: bool, level: object, precision: str | None) -> None:
    settings, words = meant(dtype=dtype, has_gpu=has_gpu, loss_scaling=512.0)
    assert (settings.level, settings.precision) == (level, precision)
    assert settings.loss_scale == (512.0 if precision else "backoff")
    scaling = ["`loss_scaling` has no effect in fp32"] if precision is None else []
    assert (
        words
        == (["`dtype` mixed: no GPU here, training in fp32"] if dtype == "mixed" and not has_gpu else []) + scaling
    )


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "fixed_lr": ({"learning_rate": 0.3}, lambda step: 0.3),
    "exp_decay": (
        {"learning_rate": 0.3, "decay_steps": 7, "decay_rate": 0.9, "begin_decay_at": 20, "min_lr": 0.1},
        lambda step: max(0.3 * 0.9 ** (max(step - 20, 0) / 7), 0.1),
    ),
    "poly_decay": (
        {"learning_rate": 0.3, "power": 2.0, "begin_decay_at": 20, "min_lr": 0.01, "decay_steps": 80},
        lambda step: 0.29 * (1 - max(step - 20, 0) / 80) ** 2 + 0.01,
    ),
    "cosine_decay": (
        {"learning_rate": 0.3, "min_lr": 0.1},
        lambda step: 0.3 * (0.9 * 0.5 * (1 + math.cos(math.pi * step / 100)) + 0.1),
    ),
    "transformer_policy": (
        {"learning_rate": 2.0, "d_model": 64, "warmup_steps": 30, "coefficient": 1.5},
        lambda step: 1.5 * 64**-0.5 * min((step + 1) * 30**-1.5, (step + 1) ** -0.5) * 2.0,
    ),
    "piecewise_constant": (
        {"learning_rate": 0.3, "boundaries": [10, 60], "decay_rates": [0.5, 0.25]},
        lambda step: 0.3 * (1.0 if step < 10 else 0.5 if step < 60 else 0.25),
    ),
}


@pytest.mark.parametrize("policy", FORMULAS)
def test_rates_follow_their_formula(policy: str) -> None:
    params, formula = FORMULAS[policy]
    settings, _ = meant(lr_policy=policy, lr_policy_params=params)
    rate = build(settings, 100)
    assert [rate(step) for step in range(100)] == pytest.approx([formula(step) for step in range(100)], rel=1e-9)


def test_boundaries_in_epochs() -> None:
    params = {"learning_rate": 0.3, "boundaries": [1, 3], "decay_rates": [0.1, 0.01]}
    with pytest.raises(Refused, match="are epochs with `num_epochs`"):
        meant(max_steps=None, num_epochs=4, lr_policy="piecewise_constant", lr_policy_params=params)
    params["steps_per_epoch"] = 50
    settings, _ = meant(max_steps=None, num_epochs=4, lr_policy="piecewise_constant", lr_policy_params=params)
    assert settings.milestones == (50, 150)


@pytest.mark.parametrize(
    ("params", "what", "hint"),
    [
        ({"batch_size_per_gpus": 3}, "there is no parameter `batch_size_per_gpus`", "`batch_size_per_gpu`"),
        ({"larc_params": {"eta": 1.0}}, "`larc_params/eta`", "larc_eta"),
        ({"larc_params": {"larc_mode": "clip"}}, "has no `larc_eta`", "0.002"),
        ({"larc_params": 0.002}, "`larc_params` is 0.002, not a dictionary", ""),
        ({"larc_params": {"larc_eta": 0.1}, "max_grad_norm": 1.0}, "exclude each other", "keep one"),
        ({"lr_policy_params": {"learning_rat": 1.0}}, "`lr_policy_params/learning_rat`", "`learning_rate`"),
        ({"lr_policy_params": {}}, "`lr_policy_params/learning_rate` is missing", ""),
        ({"lr_policy_params": {"learning_rate": 1.0, "powr": 1}, "lr_policy": "poly_decay"}, "powr", "`power`"),
        ({"lr_policy_params": {"learning_rate": "high"}}, "is 'high'", ""),
        (
            {"lr_policy": "poly_decay", "lr_policy_params": {"learning_rate": 1.0, "decay_steps": 50}},
            "`lr_policy_params/decay_steps` 50: here rates fall until the end of the run",
            "leave it out",
        ),
        ({"lr_policy": "inv_poly_decay"}, "is not translated", "poly_decay"),
        ({"optimizer": "Ftrl"}, "`optimizer` Ftrl is not translated", "NovoGrad"),
        ({"iter_size": 0}, "`iter_size` is 0", ""),
        ({"batch_size_per_gpu": "many"}, "`batch_size_per_gpu` is 'many'", ""),
        ({"gpu_ids": 0}, "`gpu_ids` is 0, not a list", ""),
        ({"dtype": "float64"}, "`dtype` float64", ""),
    ],
)
def test_what_is_refused(params: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(Refused) as caught:
        meant(**params)
    assert what in str(caught.value)
    assert hint in caught.value.hint


# -- config files ------------------------------------------------------------------------------------------------------

THEIRS = """
from __future__ import absolute_import, division, print_function
import tensorflow
from open_seq2seq.models import Speech2Text
from open_seq2seq.data import Speech2TextDataLayer
base_model = Speech2Text
base_params = {"use_horovod": True, "batch_size_per_gpu": 4, "num_epochs": 1, "data_layer": Speech2TextDataLayer,
               "dtype": tf.float32, "lr_policy_params": {"learning_rate": 0.1},
               "initializer": tensorflow.contrib.layers.xavier_initializer(uniform=False),
               "encoder_params": {"activation_fn": lambda x: tf.minimum(tf.nn.relu(x), 20.0)}}
train_params = {"data_layer_params": {"shuffle": True}, "batch_size_per_gpu": 8}
"""


def test_a_config_of_theirs_is_read_without_their_packages(tmp_path: Path) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    before = set(sys.modules)
    config = config_file.read_config(path)
    assert not {name for name in set(sys.modules) - before if name.startswith(("tensorflow", "open_seq2seq"))}
    assert config["base_params"]["dtype"].__name__ == "tensorflow.float32"
    with pytest.raises(Refused, match="open_seq2seq.models.Speech2Text is no task"):
        run.command([f"--config_file={path}"], 2, False)


def test_a_task_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "beside_openseq2seq.py").write_text("import paceline\nclass Mine(paceline.Task): ...\n")
    path = tmp_path / "mine.py"
    path.write_text(THEIRS + "\nfrom beside_openseq2seq import Mine\nbase_model = Mine\n")
    words, _ = run.command([f"--config_file={path}"], 2, False)
    assert words[:2] == ["train", f"{tmp_path / 'beside_openseq2seq.py'}:Mine"]
    assert scripts.settings(words).batch_per_device == 8


@pytest.mark.parametrize(
    ("flags", "text", "says"),
    [
        (["--config_file=missing.py"], None, "error: there is no config file missing.py"),
        (["--config_file=bad.py"], "base_params = {}[1]", "error: bad.py fails while it is executed"),
        (["--config_file=bad.py"], "", "error: `use_horovod` is missing in base_params"),
        ([*SEED, "--larc_params/larc_etta=1"], None, "did you mean `larc_eta`?"),
        ([*SEED, "--prnt_loss_steps=1"], None, "did you mean `print_loss_steps`?"),
        (
            [*SEED, "--optimiser=x", "--larc_params/larc_etta=1"],
            None,
            "error: there is no parameter `optimiser`\n  did you mean `optimizer`?\n"
            "error: there is no parameter `larc_params/larc_etta`\n  did you mean `larc_eta`?\n",
        ),
        ([*SEED, "--print_loss_steps"], None, "base parameters are typed as --name=value"),
        ([*SEED, "--eval_steps=None"], None, "`eval_steps` is missing"),
    ],
)
def test_mistakes_are_said_without_a_traceback(
    flags: list[str],
    text: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("bad.py").write_text(text)
    monkeypatch.setattr(sys, "argv", ["run.py", *flags])
    assert run.run() == 2
    assert says in capsys.readouterr().err


def test_train_eval_evaluates_at_the_end_where_eval_steps_are_never_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after whole epochs, where no step is left over."""
    config, run = scripts.EXAMPLES / "openseq2seq" / "small.py", tmp_path / "run"
    argv = [f"--config_file={config}", "--mode=train_eval", "--eval_steps=5000", "--num_epochs=1", f"--logdir={run}"]
    monkeypatch.setattr(sys, "argv", ["run.py", *argv, "--batch_size_per_gpu=512"])
    assert scripts.module("openseq2seq", "run").run() == 0
    (record,) = read(run / "metrics.jsonl", "validation")
    assert any("/" in name for name in record)


def test_what_has_no_effect_is_said() -> None:
    words = meant(loss_scaling="Backoff", dtype="float32", optimizer_params={"beta1": 0.9}, regularizer_params={})[1]
    for name in ("`loss_scaling`", "`optimizer_params/beta1`", "`regularizer_params`"):
        assert any(name in word and "no effect" in word for word in words)
