"""RETURNN's command line: what its options mean here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config.mode import in_mode
from paceline.config.settings import TrainConfig
from paceline.data.packed.dataset import PackedDataset
from paceline.observe.journal import read
from tests.examples import scripts

rnn = scripts.module("returnn", "rnn")
translate = scripts.module("returnn", "returnn_options").translate
Refused = scripts.module("returnn", "returnn_mistakes").OptionRefused

CONFIG = scripts.EXAMPLES / "returnn" / "config.py"
SEED = [str(CONFIG), "++use_horovod", "1"]
"""The words of the seed, with another config."""


def meant(ranks: int = 4, has_gpu: bool = True, **options: Any) -> tuple[TrainConfig, list[str]]:
    values, words = translate({"num_epochs": 3, "learning_rate": 0.1, **options}, ranks, has_gpu)
    return in_mode(TrainConfig, values, values.pop("mode")), words


# -- the config that is shipped ----------------------------------------------------------------------------------------


def test_the_command_of_the_seed() -> None:
    words, said = rnn.command(SEED, 2, False)
    chosen = {
        "epochs": 3,
        "keep_last": 3,
        "batch_cost": 400,
        "global_batch": 40,
        "grains": 2,
        "order": "laplace",
        "bins": 4,
        "level": 0,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr": 0.5,
        "clip_norm": 5.0,
        "schedule": "newbob",
        "reduce": "param",
        "sync_step": 5,
        "out": Path("net-model/network"),
        "resume": "auto",
    }
    assert scripts.settings(words) == TrainConfig(**chosen)
    assert words[1] == f"{CONFIG.with_name('recall.py')}:Recall"
    assert said == ["no effect here, where model and data are the task's: `dev`"]


def test_words_go_before_the_config() -> None:
    words = "++horovod_reduce_type grad ++batch_size 50 ++optimizer {'class':'adamw'} ++model a/b ++start_epoch 1"
    settings = scripts.settings(rnn.command([*SEED, *words.split(), "++log_verbosity", "5"], 2, False)[0])
    assert (settings.reduce, settings.batch_cost, settings.optimizer) == ("grad", 100, "adamw")
    assert (settings.out, settings.resume, settings.log_every) == (Path("a/b"), "no", 1)


def test_more_epochs_for_a_run_that_is_there(tmp_path: Path) -> None:
    words = [*SEED, "++model", str(tmp_path), "++num_epochs", "9"]
    settings = scripts.settings(rnn.command(words, 2, False)[0])
    assert (settings.resume, settings.allow_change) == ("auto", False)
    (tmp_path / "run.json").touch()
    translated, said = rnn.command(words, 2, False)
    settings = scripts.settings(translated)
    assert (settings.resume, settings.allow_change, settings.epochs) == ("auto", True, 9)
    assert said[-1].endswith("its run goes on with these settings, changed or not")


def test_ranks_without_a_reduction_are_said() -> None:
    words, said = rnn.command([str(CONFIG)], 2, False)
    assert not any(word.startswith("--reduce") for word in words)
    assert said[-1] == "`use_horovod` is off, but the launcher has started 2 ranks: they train together"


# -- options -----------------------------------------------------------------------------------------------------------


def test_horovod_by_default() -> None:
    settings, words = meant(use_horovod=True)
    assert (settings.reduce, settings.sync_step, settings.dataset_distribution) == ("grad", None, "shard")
    settings, _ = meant(use_horovod=True, horovod_reduce_type="param")
    assert (settings.reduce, settings.sync_step) == ("param", 1)
    assert words == []


def test_horovod_as_recommended() -> None:
    settings, words = meant(
        use_horovod=1,
        horovod_reduce_type="param",
        horovod_param_sync_time_diff=100.0,
        horovod_dataset_distribution="random_seed_offset",
        horovod_scale_lr=True,
    )
    assert (settings.reduce, settings.sync_step, settings.sync_seconds) == ("param", None, 100.0)
    assert (settings.dataset_distribution, settings.lr) == ("random_seed_offset", pytest.approx(0.4))
    assert words == ["learning rate: 0.1 x 4 ranks (`horovod_scale_lr`) = 0.4"]


def test_horovod_settings_do_nothing_without_horovod() -> None:
    settings, _ = meant(horovod_reduce_type="param", horovod_scale_lr=True)
    assert (settings.reduce, settings.lr) == ("grad", 0.1)


def test_torch_distributed() -> None:
    """There, each worker walks all data by default."""
    settings, words = meant(torch_distributed={})
    assert (settings.reduce, settings.dataset_distribution) == ("grad", "random_seed_offset")
    options = {"reduce_type": "param", "param_sync_step": 100, "timeout_sec": 60, "sync_on_cpu": True}
    settings, words = meant(torch_distributed=options)
    assert (settings.reduce, settings.sync_step, settings.timeout_s) == ("param", 100, 60.0)
    assert words == ["no effect here: `torch_distributed/sync_on_cpu`"]


def test_a_step_is_what_all_workers_add_up() -> None:
    settings, _ = meant(batch_size=1000, max_seqs=10, accum_grad_multiple_step=2)
    assert (settings.batch_cost, settings.global_batch, settings.grains) == (8000.0, 80, 8)
    settings, _ = meant(batch_size=1000)
    assert (settings.batch_cost, settings.global_batch, settings.grains) == (4000.0, None, 4)


def test_rates_and_updates() -> None:
    settings, words = meant(
        optimizer={"class": "AdamW", "betas": [0.9, 0.98], "weight_decay": 0.01, "epsilon": 1e-8},
        learning_rate_control="newbob",
        learning_rate_decay=0.8,
        min_learning_rate=1e-4,
        newbob_relative_error_threshold=-0.02,
        gradient_clip=0,
        gradient_clip_global_norm=2.0,
        cleanup_old_models={"keep_last_n": 5},
    )
    assert (settings.optimizer, settings.betas, settings.weight_decay) == ("adamw", (0.9, 0.98), 0.01)
    assert (settings.schedule, settings.decay, settings.min_lr) == ("newbob", 0.8, 1e-4)
    assert settings.newbob_threshold == 0.02
    assert (settings.clip_value, settings.clip_norm) == (None, 2.0)
    assert (settings.keep_last, settings.keep_best) == (5, 4)
    assert words == ["`optimizer/epsilon` has no effect here"]


@pytest.mark.parametrize(
    ("amp", "has_gpu", "level", "precision"),
    [
        (None, True, 0, None),
        ("bfloat16", True, 2, None),
        ({"dtype": "bfloat16", "grad_scaler": None}, False, 2, None),
        ("float16", True, "auto", "fp16"),
        ("float16", False, 0, None),
    ],
)
def test_precision(amp: object, has_gpu: bool, level: object, precision: str | None) -> None:
    settings, words = meant(torch_amp=amp, has_gpu=has_gpu)
    assert (settings.level, settings.precision) == (level, precision)
    assert words == (["`torch_amp` float16: no GPU here, training in fp32"] if amp == "float16" and not has_gpu else [])


@pytest.mark.parametrize(
    ("ordering", "order", "bins"),
    [("default", "none", None), ("sorted", "sorted", None), ("random", "random", None), ("laplace:20", "laplace", 20)],
)
def test_order(ordering: str, order: str, bins: int | None) -> None:
    data = {"class": "HDFDataset", "files": ["a.hdf"], "seq_ordering": ordering, "partition_epoch": 20}
    settings, _ = meant(train=data)
    assert (settings.order, settings.bins, settings.partition_epoch) == (order, bins, 20)


@pytest.mark.parametrize(("task", "mode"), [("train", "train_eval"), ("eval", "eval"), ("forward", "infer")])
def test_mode(task: str, mode: str) -> None:
    assert translate({"num_epochs": 3, "learning_rate": 0.1, "task": task, "model": "a"}, 4, True)[0]["mode"] == mode


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        ({"torch_distributed": {"reduce_typ": "param"}}, "`torch_distributed/reduce_typ`", "`reduce_type`"),
        ({"torch_distributed": {"reduce_type": "param"}}, "param_sync_step` is missing", "100"),
        ({"torch_distributed": True}, "`torch_distributed` is True, not a dictionary", "{}"),
        ({"use_horovod": True, "horovod_reduce_type": "params"}, "`horovod_reduce_type` 'params'", "param"),
        ({"accum_grad_multiple_step": lambda epoch: 2}, "here it is one whole number", ""),
        ({"learning_rate": "high"}, "`learning_rate` is 'high', not a number", ""),
        ({"learning_rates": [0.1, 0.2]}, "not translated: `learning_rates`", "docs/from-returnn.md"),
        ({"learning_rate_control": "newbob_multi_epoch"}, "'newbob_multi_epoch' is not translated", "newbob"),
        ({"optimizer": {"class": "nadam"}}, "'nadam' is not translated", "adamw"),
        ({"optimizer": "adam"}, "`optimizer` is 'adam', not a dictionary", "class"),
        ({"train": {"seq_ordering": "laplace:.1000"}}, "only laplace:BINS", ""),
        ({"start_epoch": 7}, "`start_epoch` 7", ""),
        ({"task": "trian"}, "`task` 'trian'", "train"),
    ],
)
def test_what_is_refused(options: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(Refused) as caught:
        meant(**options)
    assert what in str(caught.value)
    assert hint in caught.value.hint


# -- configs -----------------------------------------------------------------------------------------------------------


def test_names_of_the_configs_own_pass_and_misspelt_options_are_said(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "import paceline\nclass Base(paceline.Task): ...\nclass Mine(Base): ...\n"
        "num_layers = 3\nlearning_rat = 0.1\nnum_epochs = 1\nmodel = 'a'\n"
    )
    words, said = rnn.command([str(path)], 1, False)
    assert words[1] == f"{path}:Mine"
    assert said == ["`learning_rat` is no option: did you mean `learning_rate`?"]
    assert scripts.settings(words).lr == 1.0


def test_a_recipe_by_its_class(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text("from paceline.recipes.digits import Digits\nnum_epochs = 1\nmax_seqs = 8\n")
    words, _ = rnn.command([str(path)], 2, False)
    assert words[1] == "digits"
    assert scripts.settings(words).global_batch == 16


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        ([], None, "error: which config?"),
        (["missing.py"], None, "error: there is no config missing.py"),
        (["bad.py"], "num_epochs = 1 / 0", "error: bad.py fails while it is executed"),
        (["bad.py"], "num_epochs = 1", "error: bad.py is to have one subclass of paceline.Task, but has none"),
        ([*SEED, "++horovod_reduce_typ", "param"], None, "did you mean `horovod_reduce_type`?"),
        ([*SEED, "++batch_size"], None, "options are typed as ++name value"),
        ([*SEED, "-x", "1"], None, "options are typed as ++name value"),
    ],
)
def test_mistakes_are_said_without_a_traceback(
    words: list[str],
    text: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("bad.py").write_text(text)
    monkeypatch.setattr(sys, "argv", ["rnn.py", *words])
    assert rnn.run() == 2
    assert says in capsys.readouterr().err


# -- data --------------------------------------------------------------------------------------------------------------


def test_files_are_named_as_packed_data() -> None:
    hdf = {"class": "HDFDataset", "files": ["a.hdf", "b.hdf"], "use_cache_manager": True}
    sets = {"dev": {"class": "HDFDataset", "files": "dev.hdf"}, "eval_datasets": {"far": {**hdf}}}
    settings, words = meant(train={**hdf, "seq_ordering": "sorted"}, **sets)
    here = Path.cwd()
    assert settings.train_files == (here / "a.hdf", here / "b.hdf")
    assert settings.val_files == (f"dev={here / 'dev.hdf'}", f"far={here / 'a.hdf'}+{here / 'b.hdf'}")
    assert words == ["no effect here: `train/use_cache_manager`, `eval_datasets/far/use_cache_manager`"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"train": {"class": "OggZipDataset", "path": "a.zip"}}, "`train/class` 'OggZipDataset' is not read here"),
        ({"train": {"class": "HDFDataset"}}, "`train/files` is None, not a list of files"),
        ({"dev": "dev.hdf"}, "`dev` is 'dev.hdf', not a dictionary"),
        (
            {"dev": {"class": "HDFDataset", "files": ["a.hdf"]}, "eval": {}},
            "`dev` names files, and `eval` is the task's own data",
        ),
        ({"eval_datasets": {"far": {"class": "MetaDataset"}}}, "`eval_datasets/far/class` 'MetaDataset'"),
    ],
)
def test_data_that_is_not_read_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(Refused) as refused:
        meant(**options)
    assert what in str(refused.value)
    assert refused.value.hint


def test_hdf_files_are_trained_on_and_the_timeline_is_where_horovod_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recall = scripts.module("returnn", "recall")
    for name, number in (("a", 30), ("b", 20), ("dev", 10)):
        PackedDataset.write(tmp_path / f"{name}.hdf", recall.Sequences(number, seed=number), layout="returnn")
    (tmp_path / "config.py").write_text(
        f"""
import sys
sys.path.insert(0, {str(CONFIG.parent)!r})
from recall import Recall
train = {{"class": "HDFDataset", "files": ["a.hdf", "b.hdf"], "seq_ordering": "laplace:2"}}
dev = {{"class": "HDFDataset", "files": ["dev.hdf"]}}
batch_size, max_seqs, num_epochs, learning_rate, device, model = 100, 8, 2, 0.1, "cpu", "net"
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["rnn.py", "config.py"])
    monkeypatch.setenv("HOROVOD_TIMELINE", "timeline.json")
    assert rnn.run() == 0
    printed = capfd.readouterr()
    assert "50 samples" in printed.out, printed.err
    assert {name for line in read(Path("net/metrics.jsonl"), "validation") for name in line if "/" in name} == {
        "dev/loss"
    }
    assert "HOROVOD_TIMELINE: a timeline is written to timeline.json" in printed.out
    events = json.loads(Path("timeline.json").read_text())["traceEvents"]
    assert any(event.get("name") == "compute" for event in events)
