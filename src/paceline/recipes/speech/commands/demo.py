"""`paceline demo`: speech recognition from nothing, on a GPU or all cores, from one command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from pydantic import create_model

from paceline.config.command_line import asks_for_help, dashed, read_words
from paceline.config.load import load
from paceline.config.parse import Given
from paceline.config.train_command import POSITIONAL as POSITIONAL
from paceline.config.train_command import TRAIN_OPTIONS, TrainCommand, train_options
from paceline.config.yaml_file import read_file
from paceline.core.language import translate
from paceline.core.run_folder import METRICS
from paceline.core.terminal import tell
from paceline.core.units import counted
from paceline.observe.journal import read
from paceline.observe.progress import clock_time
from paceline.observe.report.write import PAGE, write_report
from paceline.train import command as training

OPTIONS = TRAIN_OPTIONS
CORPUS = "demo-speech"
"""Beside the runs: kept for the next demo."""
MOST_PROCS = 4
SETTINGS: dict[str, Any] = {
    "network": "small",
    "epochs": 4,
    "global_batch": 32,
    "grains": MOST_PROCS,
    "lr": 0.02,
}
NUM_SHOWN = 5


SETS = {"unseen-voices": "voices never heard in training", "seen-voices": "voices heard"}
"""The validation sets of the demo, and what they are."""


def run(argv: Sequence[str]) -> int:
    """`paceline train asr` on a spoken corpus, with settings that suit it unless others are given."""
    from paceline.recipes.speech.settings import AsrSettings

    if asks_for_help(argv):
        _show_help(train_options(AsrSettings))
    began = time.monotonic()
    options = train_options(AsrSettings)
    given = _given(options, argv)
    runs = Path(str(given.get("runs_dir", "runs")))
    corpus, out = runs / CORPUS, run_folder(given, runs, time.strftime("%Y%m%d-%H%M%S"))
    words = ["asr", *own_words(given, corpus, out, len(os.sched_getaffinity(0)), uses_gpu(given, _count_gpus())), *argv]
    load(options, words, prog="paceline demo", positional=POSITIONAL)  # mistakes, before anything is spoken
    if "print_config" not in given:
        if not given.keys() >= {"train_manifest", "val_manifest"}:
            _speak(corpus)
        tell(f"paceline train {' '.join(words)}\n")
        sys.stdout.flush()
    code = training.run(words)
    if code == 0 and out is not None and (out / METRICS).exists():
        tell("\n".join(["", *closing(out, corpus, time.monotonic() - began, _report(out)), ""]))
    return code


def _show_help(options: type[TrainCommand]) -> NoReturn:
    """Show the options of training with the demo's own defaults; the task is always speech recognition."""
    from paceline.config.help import show_help

    corpus = Path("runs") / CORPUS
    own = {
        **SETTINGS,
        "train_manifest": (corpus / "train.json",),
        "val_manifest": (f"unseen-voices={corpus / 'val-unseen.json'}", f"seen-voices={corpus / 'val-seen.json'}"),
    }
    changed: dict[str, Any] = {name: (options.model_fields[name].annotation, value) for name, value in own.items()}
    shown = create_model(
        "DemoOptions", __base__=options, __doc__=translate("Let espeak-ng speak a corpus, and train on it."), **changed
    )
    show_help(shown, prog="paceline demo", hidden=POSITIONAL)


def _given(options: type[TrainCommand], argv: Sequence[str]) -> dict[str, Any]:
    """Return what the user sets, in files or as words; training reports mistakes in them when it reads them."""
    typed = read_words(options, argv)
    given: dict[str, Given] = {}
    for file in typed.files:
        given |= read_file(options, file)[0]
    return {name: entry.raw for name, entry in (given | typed.given).items()}


def run_folder(given: Mapping[str, Any], runs: Path, moment: str) -> Path | None:
    """Return the run's folder; None if it is not known yet (a name may get a number), or if there is none."""
    if given.get("out") is not None:
        return Path(str(given["out"]))
    return None if given.keys() & {"exp_name", "benchmark"} else runs / f"demo-{moment}"


def uses_gpu(given: Mapping[str, Any], num_gpus: int) -> bool:
    """Return True if the demo runs on a GPU: where there is one, unless the user wants the CPU, or more processes."""
    procs = str(given.get("procs", 1))
    return given.get("device") != "cpu" and num_gpus >= (int(procs) if procs.isdigit() else 1) > 0


def own_words(
    given: Collection[str], corpus: Path, out: Path | None, num_cores: int, on_gpu: bool = False
) -> list[str]:
    """Return the demo's own settings, without those that the user has set.

    One GPU does what else all cores do; the grains are the same.
    """
    chosen = {
        **SETTINGS,
        "device": "cuda" if on_gpu else "cpu",
        "procs": 1 if on_gpu else min(num_cores, MOST_PROCS),
        "train_manifest": corpus / "train.json",
        "val_manifest": f"unseen-voices={corpus / 'val-unseen.json'},seen-voices={corpus / 'val-seen.json'}",
        **({} if out is None else {"out": out}),
    }
    words = [(dashed(name), str(value)) for name, value in chosen.items() if name not in given]
    return [word for pair in words for word in pair]


def _count_gpus() -> int:
    import torch  # late: `--help` does without

    return torch.cuda.device_count()


def _speak(folder: Path) -> None:
    from paceline.observe.bars import SideBar
    from paceline.recipes.speech.demo.speak import CorpusSettings, find_corpus, make_corpus

    spoken = find_corpus(folder, CorpusSettings())
    again = "new" if spoken is None else "as made before"
    if spoken is None:
        tell(f"espeak-ng speaks a corpus into {folder}\n")
        sys.stdout.flush()
        with SideBar("utterances") as bar:
            spoken = make_corpus(folder, progress=bar.show)
    tell(f"corpus: {counted(spoken.num_utterances, 'utterance')}, {spoken.hours:.2f} hours, {again}\n")


def _report(out: Path) -> list[str]:
    """Write the report of this run, if plotly is installed; return lines about it."""
    if find_spec("plotly") is None or not read(out / METRICS):
        return []
    return [write_report([out], out / PAGE), ""]


def closing(out: Path, corpus: Path, seconds: float, report: Sequence[str] = ()) -> list[str]:
    """Return the closing lines: results, and commands to try next."""
    validations, epochs = read(out / METRICS, "validation"), read(out / METRICS, "epoch")
    lines = error_rates(validations[-1]) if validations else []
    example = corpus / "val-unseen" / "00000.flac"
    return [
        *lines,
        training_time(epochs, seconds),
        "",
        *report,
        "next:",
        f"  paceline infer {out} {example if example.exists() else 'FILE.flac'}",
        *([f"  paceline eval {out} --decoder beam"] if validations else []),
        f"  tensorboard --logdir {out}",
        f"  paceline predict {out} --nodes 8",
        "  paceline train asr --help",
    ]


def error_rates(record: Mapping[str, Any]) -> list[str]:
    """Return lines with the error rates of all validation sets, and some samples of the first."""
    rates = {name.removesuffix("/wer"): rate for name, rate in record.items() if name.endswith("/wer")}
    shown = [
        f"{'unknown' if rate is None else f'{100 * rate:.1f} %'} on {SETS.get(name, name)}"
        for name, rate in rates.items()
    ]
    samples: list[dict[str, str]] = next(iter((record.get("samples") or {}).values()), [])[:NUM_SHOWN]
    lines = [f"word error rate: {', '.join(shown)}", ""] if shown else []
    for sample in samples:
        lines += [f"  said   {sample['reference']}", f"  heard  {sample['hypothesis']}"]
    return [*lines, ""] if samples else lines


def training_time(epochs: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """Return a line with the time of training, the share of computing in it, and the time of everything."""
    everything = f"everything took {clock_time(seconds)}"
    ranks = [rank for epoch in epochs for rank in epoch["seconds"]]
    elapsed, waited = sum(sum(rank.values()) for rank in ranks), sum(rank.get("data", 0.0) for rank in ranks)
    if not elapsed:
        return everything
    num_steps = sum(epoch["steps"] for epoch in epochs)
    return (
        f"trained {counted(len(epochs), 'epoch')}, {counted(num_steps, 'step')} in "
        f"{clock_time(elapsed / len(epochs[-1]['seconds']))} "
        f"({100 * (1 - waited / elapsed):.1f}% computing time); {everything}"
    )
