"""Defaults < files < words; every spelling of a value; every mistake at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.config.load import as_yaml, load
from paceline.config.problems import SettingsInvalid
from paceline.config.settings import GroupSettings, Section, TrainConfig


class Fetch(Section):
    """A command with positional words."""

    run: Path
    files: tuple[Path, ...] = ()
    fast: bool = False


def read(*words: object) -> TrainConfig:
    return load(TrainConfig, ["--epochs", "1", *map(str, words)], prog="paceline train")


def wrong(*words: object) -> list[str]:
    with pytest.raises(SettingsInvalid) as caught:
        read(*words)
    return [str(problem) for problem in caught.value.problems]


def test_words_go_before_files_and_later_files_before_earlier(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr: 0.1\nmomentum: 0.5\nwarmup-steps: 7\n")
    (tmp_path / "b.yaml").write_text("lr: 0.2\nmomentum: 0.6\n")
    config = read("--momentum", 0.7, "--config", tmp_path / "a.yaml", f"--config={tmp_path / 'b.yaml'}")
    assert (config.warmup_steps, config.lr, config.momentum) == (7, 0.2, 0.7)
    assert config.model_fields_set == {"epochs", "lr", "momentum", "warmup_steps"}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("-O2", "level", 2),
        ("-O 0", "level", 0),
        ("--code_optimization auto", "level", "auto"),
        ("--global_batch=64", "global_batch", 64),
        ("--newbob-threshold -0.5", "newbob_threshold", -0.5),
        ("--seed=-3", "seed", -3),
        ("--lr 1e-3", "lr", 0.001),
        ("--betas 0.9 0.99", "betas", (0.9, 0.99)),
        ("--betas 0.9,0.99", "betas", (0.9, 0.99)),
        ("--betas none", "betas", None),
        ("--milestones 10 20,30", "milestones", (10, 20, 30)),
        ("--milestones 10 --milestones 20", "milestones", (10, 20)),
        ("--loggers none", "loggers", ()),
        ("--order none", "order", "none"),
        ("--clip-norm none", "clip_norm", None),
        ("--workers auto", "workers", "auto"),
        ("--profile 20:25", "profile", "20:25"),
        ("--profile", "profile", "auto"),
        ("--profile --lr 1", "profile", "auto"),
        ("--profile=true", "profile", "auto"),
        ("--profile-ranks 0 3", "profile_ranks", (0, 3)),
        ("--workers 3", "workers", 3),
        ("--loss-scale 128", "loss_scale", 128.0),
        ("--resume a/b", "resume", Path("a/b")),
        ("--resume no", "resume", "no"),
        ("--regrain", "regrain", True),
        ("--no-rank-logs", "rank_logs", False),
        ("--rank-logs=false", "rank_logs", False),
        ('--freeze ["a{1,2}"]', "freeze", ("a{1,2}",)),
        ("--groups match=a,lr-scale=2", "groups", (GroupSettings(match="a", lr_scale=2),)),
        ('--groups {"match":"a"} match=b', "groups", (GroupSettings(match="a"), GroupSettings(match="b"))),
        ('--groups [{"match":"a","weight_decay":0}]', "groups", (GroupSettings(match="a", weight_decay=0),)),
    ],
)
def test_ways_to_type_a_value(words: str, name: str, value: object) -> None:
    assert getattr(read(*words.split()), name) == value


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("resume: no", "resume", "no"),
        ("lr: 1e-3", "lr", 0.001),
        ("exp_name: 5", "exp_name", "5"),
        ("profile: 20:25", "profile", "20:25"),  # not 1225 seconds
        ("clip-norm:", "clip_norm", None),
        ("regrain: yes", "regrain", True),
        ("betas: [0.8, 0.9]", "betas", (0.8, 0.9)),
        ("freeze: ['a,b']", "freeze", ("a,b",)),
        ("groups: [{match: a, lr-scale: 2}]", "groups", (GroupSettings(match="a", lr_scale=2),)),
    ],
)
def test_ways_to_write_a_value(line: str, name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(line + "\n")
    assert getattr(read("--config", tmp_path / "a.yaml"), name) == value


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--lr", "--lr: needs a value"),
        ("--lr x", "--lr x: must be a number"),
        ("--lr=0", "--lr 0: must be above 0"),
        ("--ema 1", "--ema 1: must be below 1"),
        ("--steps 1.5", "--steps 1.5: must be a whole number"),
        ("--decay 2", "--decay 2: must be at most 1"),
        ("--rank-logs=maybe", "--rank-logs maybe: must be true or false"),
        ("--betas 0.9", "--betas 0.9: needs 2 values"),
        ("--betas 0.9 x", "--betas 0.9 x: value 2 must be a number"),
        ("--loggers tensorbord", "--loggers tensorbord: value 1 must be one of tensorboard, wandb or mlflow"),
        ("--groups lr_scale=2", "--groups lr_scale=2: entry 1: match is missing"),
        ("--groups what", "--groups what: cannot be understood"),
        ("--level 1 -O2", "-O2: given twice, first as --level 1"),
        ("-x", "-x: there is no such option"),
        ("loose", "loose: belongs to no option"),
    ],
)
def test_what_a_mistake_is_called(words: str, problem: str) -> None:
    assert wrong(*words.split()) == [problem]


def test_a_yaml_file_that_is_none(tmp_path: Path) -> None:
    for text, problem in {
        "- 1\n": "a.yaml:1: must hold lines of the form `name: value`",
        "lr: [1\nseed: 3\n": "a.yaml:2:5: is not YAML: expected ',' or ']', but got ':'",
        "\tlr: 1\n": "a.yaml:1:1: is not YAML: found character '\\t' that cannot start any token",
        "epochs: true\n": "a.yaml:1: epochs true: must be a whole number",
    }.items():
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(SettingsInvalid) as caught:
            load(TrainConfig, ["--config", str(tmp_path / "a.yaml")], prog="paceline train")
        assert str(caught.value) == f"{tmp_path}/{problem}"
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert wrong("--config", tmp_path / "a.yaml") == [f"--config {tmp_path}/a.yaml: is not a text file (UTF-8)"]
    assert wrong("--config", tmp_path) == [f"--config {tmp_path}: is a folder, not a file"]
    (tmp_path / "a.yaml").write_text("")
    assert read("--config", tmp_path / "a.yaml") == TrainConfig(epochs=1)


def test_what_follows_from_a_mistake_is_not_a_mistake_of_its_own(tmp_path: Path) -> None:
    """Without `epochs` the model would ask for it: but it was set, only wrongly."""
    for words in (["--epochs", "x"], ["--epochs"], ["--epoch", "3"], ["--config", str(tmp_path / "absent.yaml")]):
        with pytest.raises(SettingsInvalid) as caught:
            load(TrainConfig, words, prog="paceline train")
        assert len(caught.value.problems) == 1, words


def test_mistakes_between_fields_are_found_beside_those_of_fields() -> None:
    assert wrong("--lr", 0, "--clip-norm", 1, "--clip-value", 1) == [
        "--lr 0: must be above 0",
        "--clip-norm 1, --clip-value 1: set --clip-norm or --clip-value, not both",
    ]


def test_all_mistakes_between_fields_are_found() -> None:
    assert wrong("--reduce", "param", "--sync-step", 4, "--shard", "full", "--sync-batchnorm", "all") == [
        "--sync-batchnorm all, --reduce param: --sync-batchnorm needs --reduce grad: with param, ranks do not meet in a"
        " step",
        "--shard full, --reduce param: --shard full needs --reduce grad: with param, every rank has a whole model",
    ]
    assert wrong("--sync-step", 4, "--wire", "int8", "--outer", "nesterov") == [
        "--wire int8: --wire int8 is for --reduce param; gradients travel as full, fp16 or bf16",
        "--sync-step 4, --outer nesterov: --sync-step and --outer: for --reduce param, too",
    ]
    several = wrong("--clip-norm", 1, "--clip-value", 1, "--precision", "fp64", "-O3", "--scale-lr", "sqrt")
    assert [problem.partition(":")[0] for problem in several] == [
        "-O3, --precision fp64",
        "--clip-norm 1, --clip-value 1",
        "--scale-lr sqrt",
    ]


def test_an_option_without_its_value_says_which_there_are() -> None:
    with pytest.raises(SettingsInvalid) as caught:
        load(TrainConfig, ["--epochs", "1", "--horovod_scale_lr"], prog="paceline train")
    assert str(caught.value) == "--horovod_scale_lr: needs a value"
    assert caught.value.hint == "one of none, linear, sqrt"


def test_positional_words() -> None:
    words = ["runs/a", "--fast", "--", "x.wav", "-y.wav"]
    options = load(Fetch, words, prog="paceline fetch", positional=("run", "files"))
    assert options == Fetch(run=Path("runs/a"), files=(Path("x.wav"), Path("-y.wav")), fast=True)
    with pytest.raises(SettingsInvalid, match="RUN: is missing"):
        load(Fetch, ["--fast"], prog="paceline fetch", positional=("run", "files"))


@example(lr=1.0, name="NULL", freeze=[], resume="no", groups=[])
@given(
    lr=st.floats(1e-30, 1e30),
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1),
    freeze=st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126)), max_size=3),
    resume=st.sampled_from(["no", "auto"]),
    groups=st.lists(
        st.builds(GroupSettings, match=st.sampled_from(["*", "a: b", "no"]), lr_scale=st.just(0.1)), max_size=2
    ),
)
def test_settings_written_down_are_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    lr: float,
    name: str,
    freeze: list[str],
    resume: str,
    groups: list[GroupSettings],
) -> None:
    config = TrainConfig.model_validate(
        {"steps": 3, "lr": lr, "exp_name": name, "freeze": freeze, "resume": resume, "groups": groups}
    )
    path = tmp_path_factory.mktemp("settings") / "a.yaml"
    path.write_text(as_yaml(config), encoding="utf-8")
    assert load(TrainConfig, ["--config", str(path)], prog="paceline train") == config
