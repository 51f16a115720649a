"""`paceline demo`: speech recognition from nothing, on all cores, from one command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli import train
from paceline.cli.options import train_options
from paceline.config.words import asks_for_help, read_words
from paceline.observe.journal import read
from paceline.observe.progress import clock_time

CORPUS = "demo-speech"
"""Beside the runs: kept for the next demo."""
MOST_PROCS = 4
SETTINGS: dict[str, Any] = {
    "network": "small",
    "epochs": 4,
    "global_batch": 32,
    "grains": MOST_PROCS,
    "lr": 0.02,
    "device": "cpu",
}
NUM_SHOWN = 5


def run(argv: Sequence[str]) -> int:
    """`paceline train asr` on a spoken corpus, with settings that suit it unless others are given."""
    from paceline.recipes.asr.settings import AsrSettings

    given = read_words(train_options(AsrSettings), argv).given
    if asks_for_help(argv):
        return train.run(["asr", *argv])
    began = time.monotonic()
    runs = Path(str(given["runs_dir"].raw)) if "runs_dir" in given else Path("runs")
    out = Path(str(given["out"].raw)) if "out" in given else runs / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    corpus = runs / CORPUS
    chosen = {
        **SETTINGS,
        "procs": min(len(os.sched_getaffinity(0)), MOST_PROCS),
        "train_manifest": corpus / "train.json",
        "val_manifest": f"unseen-voices={corpus / 'val-unseen.json'},seen-voices={corpus / 'val-seen.json'}",
        "out": out,
    }
    words = ["asr"]
    for name, value in chosen.items():
        if name not in given:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += argv
    if "print_config" not in given:
        _speak(corpus)
        sys.stdout.write(f"paceline train {' '.join(words)}\n")
        sys.stdout.flush()
    code = train.run(words)
    if code == 0 and (out / "metrics.jsonl").exists():
        sys.stdout.write("\n".join(["", *closing(out, corpus, time.monotonic() - began), ""]))
    return code


def _speak(folder: Path) -> None:
    from paceline.observe.bars import SideBar
    from paceline.recipes.asr.speak import CorpusSettings, find_corpus, make_corpus

    if find_corpus(folder, CorpusSettings()) is None:
        sys.stdout.write(f"espeak-ng speaks a corpus into {folder}\n")
        sys.stdout.flush()
    with SideBar("utterances") as bar:
        spoken = make_corpus(folder, progress=bar.show)
    again = "as made before" if spoken.reused else "new"
    sys.stdout.write(f"corpus: {spoken.num_utterances:,} utterances, {spoken.hours:.2f} hours, {again}\n")


def closing(out: Path, corpus: Path, seconds: float) -> list[str]:
    """What came out, and where to look next."""
    journal = out / "metrics.jsonl"
    last, epochs = read(journal, "validation")[-1], read(journal, "epoch")
    lines = [
        f"word error rate: {100 * last['unseen-voices/wer']:.1f} % on voices never heard in training, "
        f"{100 * last['seen-voices/wer']:.1f} % on voices heard",
        "",
    ]
    for sample in last.get("samples", {}).get("unseen-voices", [])[:NUM_SHOWN]:
        lines += [f"  said   {sample['reference']}", f"  heard  {sample['hypothesis']}"]
    ranks = [rank for epoch in epochs for rank in epoch["seconds"]]
    elapsed, waited = sum(sum(rank.values()) for rank in ranks), sum(rank.get("data", 0.0) for rank in ranks)
    num_steps = sum(epoch["steps"] for epoch in epochs)
    training_time = clock_time(elapsed / max(1, len(epochs[-1]["seconds"])))
    return [
        *lines,
        "",
        f"trained {len(epochs)} epochs, {num_steps} steps in {training_time} "
        f"({100 * (1 - waited / elapsed):.1f}% computing time); everything took {clock_time(seconds)}",
        "",
        "next:",
        f"  paceline infer {out} {corpus / 'val-unseen' / '00000.flac'}",
        f"  paceline eval {out} --decoder beam",
        f"  tensorboard --logdir {out}",
        "  paceline train asr --help",
    ]
