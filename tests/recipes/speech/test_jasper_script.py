"""NeMo's command line: what the flags of its jasper.py mean here, and that both launchers of torch train the same."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from paceline.config.load import load
from paceline.config.named_sets import name_sets
from paceline.config.train_command import POSITIONAL, task_settings, train_options
from paceline.recipes.speech.settings import AsrSettings
from tests.recipes.speech import tiny
from tests.recipes.speech.network.test_config import nemo_0

SCRIPT = Path(__file__).parents[3] / "examples" / "asr" / "jasper.py"
SEED = (
    "--batch_size=64 --num_gpus=8 --num_epochs=100 --lr=0.015 --warmup_steps=8000 --weight_decay=0.001"
    " --train_manifest=/manifests/librivox-train-all.json --val_manifest1=/manifests/librivox-dev-clean.json"
    " --val_manifest2=/manifests/librivox-dev-other.json --model_config=jasper15x5SEP.yaml"
    " --exp_name=MyLARGE-ASR-EXPERIMENT"
)
"""The command of the seeds, with the launcher's part and the folders of NeMo taken off."""
COMBINED = (
    "--train_manifest=/manifests/librivox-train-all.json,/manifests/librivox-train-all-sp10pcnt.json,"
    "/manifests/cv/validated.json"
)


@pytest.fixture(scope="module")
def jasper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jasper_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def meant(jasper: ModuleType, flags: str, num_ranks: int = 8, has_gpu: bool = True) -> AsrSettings:
    """The settings that `paceline train` makes of the translation."""
    args, others = jasper.parser().parse_known_args(shlex.split(flags))
    words = jasper.translate(args, num_ranks, has_gpu) + others
    options = load(train_options(AsrSettings), words, prog="paceline train", positional=POSITIONAL)
    settings = task_settings(options, AsrSettings)
    assert isinstance(settings, AsrSettings)
    return settings


# -- values ------------------------------------------------------------------------------------------------------------


def test_the_command_of_the_seeds(jasper: ModuleType) -> None:
    settings = meant(jasper, SEED)
    assert settings.train_manifest == (Path("/manifests/librivox-train-all.json"),)
    assert settings.val_manifest == ("/manifests/librivox-dev-clean.json", "/manifests/librivox-dev-other.json")
    assert (settings.global_batch, settings.grains) == (512, 8)
    assert (settings.epochs, settings.steps) == (100, None)
    assert (settings.lr, settings.weight_decay) == (0.015, 0.001)
    assert (settings.schedule, settings.warmup_steps, settings.warmup_ratio) == ("cosine", 8000, None)
    assert (settings.optimizer, settings.betas) == ("novograd", (0.95, 0.25))
    assert settings.precision == "fp16"
    assert settings.exp_name == "MyLARGE-ASR-EXPERIMENT"
    assert settings.network.num_classes == 29
    assert [block.filters for block in settings.network.blocks][-2:] == [512, 1024]


def test_manifests_with_commas_are_one_data_set(jasper: ModuleType) -> None:
    settings = meant(jasper, f"{SEED} {COMBINED}")
    assert [path.name for path in settings.train_manifest] == [
        "librivox-train-all.json",
        "librivox-train-all-sp10pcnt.json",
        "validated.json",
    ]


def test_validation_files_with_commas_are_one_set(jasper: ModuleType) -> None:
    flags = (
        "--train_manifest=/t.json --model_config quartznet5x5 --val_manifest1=/a.json,/b.json --val_manifest2=/c.json"
    )
    settings = meant(jasper, f"{flags} --eval_datasets /d.json,/e.json /f.json")
    assert name_sets(settings.val_manifest) == {
        "val_manifest1": (Path("/a.json"), Path("/b.json")),
        "c": (Path("/c.json"),),
        "eval_dataset1": (Path("/d.json"), Path("/e.json")),
        "f": (Path("/f.json"),),
    }


def test_the_longest_utterance_is_that_of_their_file(
    jasper: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(yaml.safe_dump(nemo_0()))
    for flags, expected in (
        (f"--model_config={theirs}", "--max-seconds 16.7"),
        (f"--model_config={theirs} --max-seconds 3", "--max-seconds 3"),
        ("--model_config=quartznet5x5", ""),
    ):
        words = [*shlex.split(SEED.replace("--model_config=jasper15x5SEP.yaml", flags)), "--print_command"]
        monkeypatch.setattr(sys, "argv", ["jasper.py", *words])
        assert jasper.run() == 0
        *said, command = capsys.readouterr().out.splitlines()
        assert command.count("--max-seconds") == bool(expected)
        assert expected in command
        assert any("max_duration 16.7" in line for line in said) == (expected == "--max-seconds 16.7")


def test_the_second_seed_leaves_the_number_of_gpus_to_the_launcher(jasper: ModuleType) -> None:
    settings = meant(jasper, SEED.replace("--num_gpus=8 ", ""), num_ranks=4)
    assert (settings.global_batch, settings.grains) == (256, 4)


@pytest.mark.parametrize(
    ("flags", "has_gpu", "precision", "level"),
    [
        ("", True, "fp16", "auto"),
        ("--amp_opt_level O2", True, "fp16-master", "auto"),
        ("--amp_opt_level O3", True, "fp16-pure", "auto"),
        ("--amp_opt_level O0", True, None, 0),
        ("--disable_mixed_precision", True, None, 0),
        ("--amp_opt_level O1", False, None, 0),
    ],
)
def test_mixed_precision_where_the_device_has_it(
    jasper: ModuleType, flags: str, has_gpu: bool, precision: str | None, level: object
) -> None:
    settings = meant(jasper, f"{SEED} {flags}", has_gpu=has_gpu)
    assert (settings.precision, settings.level) == (precision, level)


def test_flags_of_the_later_script_and_of_ours(jasper: ModuleType) -> None:
    settings = meant(
        jasper,
        "--train_dataset a.json --eval_datasets b.json c.json --model_config quartznet5x5 --max_steps 70"
        " --iter_per_step 2 --batch_size 4 --lr_policy SquareAnnealing --optimizer adam_w --beta2 0.98"
        " --eval_batch_size 3 --work_dir w --eval_freq 5 --checkpoint_save_freq 6 --speed-range 0.9 1.1 --seed 3",
        num_ranks=2,
    )
    here = Path.cwd()
    assert (settings.train_manifest, settings.val_manifest) == (
        (here / "a.json",),
        (f"{here}/b.json", f"{here}/c.json"),
    )
    assert (settings.epochs, settings.steps, settings.global_batch, settings.grains) == (None, 70, 16, 4)
    assert (settings.schedule, settings.optimizer, settings.betas) == ("square", "adamw", (0.95, 0.98))
    assert (settings.eval_batch, settings.val_every_steps, settings.save_every_steps) == (3, 5, 6)
    assert (settings.warmup_steps, settings.warmup_ratio) == (0, None)
    assert (settings.speed_range, settings.seed, settings.runs_dir) == ((0.9, 1.1), 3, Path("w"))


def test_a_flag_of_ours_is_never_taken_for_the_beginning_of_one_of_theirs(jasper: ModuleType) -> None:
    """`--eval-batch` and `--val-manifest` are ours; argparse would complete `--work` or `--amp`."""
    _, others = jasper.parser().parse_known_args([*shlex.split(SEED), "--workers", "2", "--work", "x", "--amp", "O1"])
    assert others == ["--workers", "2", "--work", "x", "--amp", "O1"]


# -- for real ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speech")
    tiny.speech(made, "train", 8, seed=1)
    for seed, name in enumerate(("clean", "other", "noisy"), 2):
        tiny.speech(made, name, 3, seed=seed)
    (made / "network.yaml").write_text(yaml.safe_dump(tiny.NETWORK))
    return made


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
    "launch": ["torch.distributed.launch", "--nproc_per_node=2", "--master_port"],
}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.parametrize("names", [("torchrun",), pytest.param(("torchrun", "launch"), marks=pytest.mark.long)])
def test_launchers_of_torch_train_the_same(folder: Path, names: tuple[str, ...]) -> None:
    """That both start our ranks is seen in tests/launchers/test_one_machine.py, too."""
    runs = folder / "-".join(names)
    flags = shlex.split(
        "--batch_size=2 --num_gpus=2 --num_epochs=2 --lr=0.015 --warmup_steps=2 --weight_decay=0.001 --device cpu"
        f" --train_manifest={folder}/train.json --val_manifest1={folder}/clean.json --val_manifest2={folder}/other.json"
        f" --val_manifest3={folder}/noisy.json --model_config={folder}/network.yaml --work_dir={runs}"
        " --amp_opt_level=O1 --workers 0 --log-every 1 --threads 1 --val-every-epochs 2"
    )
    for name in names:
        command = [sys.executable, "-m", *LAUNCHERS[name], free_port(), str(SCRIPT), *flags, f"--exp_name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout.count("--amp_opt_level O1: no GPU here, training in fp32") == 1
    losses = tiny.losses_of(runs / names[0])
    assert len(losses) == 4
    (validation,) = tiny.validations_of(runs / names[0])
    for name in names:
        assert tiny.losses_of(runs / name) == losses
        assert tiny.validations_of(runs / name) == [validation]
    assert list(validation) == [
        f"{name}/{each}" for name in ("clean", "other", "noisy") for each in ("wer", "cer", "loss")
    ]


def test_it_shows_what_it_would_type(
    jasper: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jasper.py", *shlex.split(SEED), "--print_command"])
    assert jasper.run() == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("paceline train asr --network jasper15x5SEP.yaml --train-manifest /manifests/librivox-train")
    assert last.endswith("--procs 8")


def test_an_environment_that_contradicts_itself_is_said_without_a_traceback(
    jasper: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["jasper.py", *shlex.split(SEED)])
    assert jasper.run() == 2
    assert capsys.readouterr().err.startswith("error: ")
