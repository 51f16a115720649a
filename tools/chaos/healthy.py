"""Sound inputs that the generators damage: speech, packed files, an archive, runs. Made once per campaign."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from tools.chaos.processes import Nursery
from tools.chaos.tasks import VARIANTS, pack

AUDIO = ("train/0.flac", "train/1.flac", "train/2.flac", "train/3.flac")
TRAIN_ASR: tuple[str, ...] = (
    *(
        "train",
        "asr",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--workers",
        "0",
        "--loggers",
        "none",
        "--global-batch",
        "4",
    ),
    *("--network", "network.yaml", "--train-manifest", "train.json", "--epochs", "1"),
)


def make(folder: Path, nursery: Nursery) -> Path:
    """Fill a folder with all of them, unless that was done already; return it."""
    if (folder / "done").exists():
        return folder
    folder.mkdir()
    _call(nursery, lambda: _files(folder), folder)
    _type(nursery, folder, "pack", "train.json", "speech.h5")
    _type(nursery, folder, *TRAIN_ASR, "--val-manifest", "dev.json", "--out", "asr", "--grains", "1", "--steps", "2")
    for name in ("plain", "ema"):
        words = VARIANTS[name].command(folder / name, "--steps", "8", "--keep-last", "2", "--keep-best", "1")
        _type(nursery, folder, *words)
    for name in ("asr", "plain", "ema"):
        shutil.rmtree(folder / name / "logs", ignore_errors=True)
    (folder / "done").touch()
    return folder


def _files(folder: Path) -> int:
    from tests.recipes.speech import tiny
    from tests.recipes.speech.exchange import test_nemo as nemo

    tiny.speech(folder, "train", 4, seed=1)
    tiny.speech(folder, "dev", 2, seed=2)
    (folder / "network.yaml").write_text(yaml.safe_dump(tiny.PLAIN))
    weights = nemo.saved(nemo.their_model().state_dict())
    nemo.archive(folder / "model.nemo", nemo.config(nemo.BLOCKS), weights)
    (folder / "weights.ckpt").write_bytes(weights)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(nemo.config(nemo.BLOCKS)))
    (folder / "train.yaml").write_text("global_batch: 8\nlr: 0.01\nbetas: [0.9, 0.98]\nsteps: 4\n")
    pack(folder / "samples.h5")
    return 0


def _type(nursery: Nursery, folder: Path, *words: str) -> None:
    process = nursery.start(list(words), folder, "make", cwd=folder)
    nursery.wait([process], 60.0)
    if process.code != 0:
        raise RuntimeError(f"paceline {' '.join(words)}: {process.code}\n{process.err}")


def _call(nursery: Nursery, job: Callable[[], int], folder: Path) -> None:
    process = nursery.call(job, folder, "files")
    nursery.wait([process], 60.0)
    if process.code != 0:
        raise RuntimeError(process.err)
