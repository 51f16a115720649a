"""Word error rates for the same seconds of a GPU: a FastConformer with subwords beside QuartzNet 15x5, several seeds.

    python benchmarks/gpu/speech_quality.py DATA OUT [--seconds 105] [--seeds 1 2 3] [--trials 3] [--json]
    python benchmarks/gpu/speech_quality.py DATA OUT --trials 4 --only-search --epochs fastconformer=160 quartznet=80
    python benchmarks/gpu/speech_quality.py DATA OUT --lr fastconformer=0.001 quartznet=0.03 [--epochs ...]
    python benchmarks/gpu/speech_quality.py DATA OUT --seconds 2 --device cpu    dry run, with networks of a few weights

DATA has mini-librispeech/train.json, which is trained on, and librispeech/test.json, which is validated on. Runs of one
kind train side by side, one process each (through MPS where that is), and nothing else beside them. A few epochs say
first how long an epoch takes; then each kind gets as many as fill `--seconds`, or as many as `--epochs` says. Both have
the same batches, speed perturbation and EMA, and masks as their recipes have them. With `--trials 3` rates are searched
for first, for both kinds alike: so many factors, a quarter of the epochs each, on all but every 20th utterance of the
training text, which validate; the test set is not seen by it. The language model is a 3-gram of the training text, made
by `paceline lm`, with default weights.
`paceline compare` has the p-values of greedy decoding; those with the language model are Welch's, of the same runs.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from mps import shared_gpu
from table import Row, machine, parser, show

COMMON: dict[str, Any] = {
    "global_batch": 32,
    "grains": 1,
    "order": "bucket",
    "speed_range": [0.9, 1.1],
    "ema": 0.99,  # of a few thousand steps; 0.999 would keep some of the first weights
    "log_every": 20,
    "loggers": [],
    "progress": "none",
    "check_audio": False,
    "save_every_epochs": 100_000,
}
CONFORMER: dict[str, Any] = {
    "d_model": 256,
    "n_layers": 8,
    "n_heads": 4,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 256,
    "conv_kernel_size": 9,
    "dropout_att": 0.1,
    "dropout_emb": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "fastconformer": {
        "network": {
            "features": {"num_mels": 80, "window_s": 0.025, "n_fft": 512, "pad_to": 0},
            "spec_augment": {"freq_masks": 2, "freq_width": 27, "time_masks": 5, "time_width": 0.05},
            "conformer": CONFORMER,
        },
        "vocabulary": 128,
        "optimizer": "adamw",
        "betas": [0.9, 0.98],
        "lr": 0.001,
        "weight_decay": 0.01,
        "clip_norm": 5,
        "schedule": "cosine",
        "warmup_ratio": 0.1,
        "interctc_layers": [4],
    },
    "quartznet": {"network": "quartznet15x5", "lr": 0.015},
}
TINY: dict[str, dict[str, Any]] = {
    "fastconformer": {
        "network": {"conformer": {**CONFORMER, "d_model": 8, "n_layers": 1, "subsampling_conv_channels": 4}},
        "vocabulary": 120,
        "interctc_layers": [],
    },
    "quartznet": {"network": "small"},
}
"""Instead, in a dry run."""
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
"""Of the learning rate, in the order in which trials have them."""
WARM_EPOCHS = 4
IS_TRAINING = ("data", "transfer", "compute", "communication", "optimizer", "logging", "other")
BASELINE, RIVAL = "quartznet", "fastconformer"


@dataclass
class Bench:
    """Files and processes of the experiment; every line that it prints begins with the seconds since it began."""

    data: Path
    out: Path
    device: str
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    began: float = field(default_factory=time.monotonic)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:.0f} s] {line}", flush=True)

    def paceline(self, name: str, *words: Any) -> subprocess.Popen[bytes]:
        """Start a command, its output in a log of that name."""
        with (self.out / f"{name}.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "paceline", *map(str, words)]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=dict(self.environment))

    def wait(self, running: Mapping[str, subprocess.Popen[bytes]]) -> None:
        """Wait for all; the first that failed ends the experiment, with the end of its log."""
        codes = {name: process.wait() for name, process in running.items()}
        for name, code in codes.items():
            if code:
                end = (self.out / f"{name}.log").read_text(encoding="utf-8")[-3000:]
                raise SystemExit(f"{name} ended with {code}:\n{end}")

    def train(self, names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> None:
        """Train runs side by side."""
        running = {}
        for name, values in zip(names, settings, strict=True):
            config = self.out / f"{name}.yaml"
            config.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
            running[name] = self.paceline(name, "train", "asr", "--config", config, "--out", self.out / name)
        self.wait(running)

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        lines = (self.out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def epoch_seconds(self, name: str) -> list[float]:
        """Return the seconds of each epoch, without set-up, validation and checkpoints."""
        found = [record["seconds"][0] for record in self.records(name, "epoch")]
        return [sum(seconds.get(phase, 0.0) for phase in IS_TRAINING) for seconds in found]

    def last_loss(self, name: str) -> float:
        """Return the mean training loss of the last epoch: what differs where a trial writes no words yet."""
        return float(self.records(name, "epoch")[-1]["loss"])

    def word_error_rate(self, name: str) -> float:
        """Return the percentage of the last validation."""
        return 100 * float(self.records(name, "validation")[-1]["test/wer"])


def epochs_within(seconds: float, epoch_s: float) -> int:
    """Return how many epochs fill the seconds; at least two."""
    return max(2, round(seconds / epoch_s))


def measured_epochs(bench: Bench, options: Any, data: tuple[Path, Path]) -> dict[str, int]:
    """Return how many epochs of each kind fill the seconds, by runs of a few."""
    numbers = {}
    for kind in KINDS:
        names = [f"warm-{kind}-{seed}" for seed in options.seeds]
        bench.train(names, [settings_of(kind, bench, data, seed, WARM_EPOCHS) for seed in options.seeds])
        epoch_s = statistics.median(value for name in names for value in bench.epoch_seconds(name)[1:])
        numbers[kind] = epochs_within(options.seconds, epoch_s)
        bench.say(f"{kind}: {epoch_s:.2f} s per epoch, {len(names)} runs side by side; {numbers[kind]} epochs")
    return numbers


def split(manifest: Path, out: Path) -> tuple[Path, Path]:
    """Write all but every 20th line of a manifest, and those, with absolute paths."""
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    for row in rows:
        row["audio_filepath"] = str(manifest.parent / row["audio_filepath"])
    paths = out / "most.json", out / "rest.json"
    for path, is_rest in zip(paths, (False, True), strict=True):
        chosen = [row for number, row in enumerate(rows) if (number % 20 == 0) == is_rest]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in chosen), encoding="utf-8")
    return paths


def settings_of(
    kind: str, bench: Bench, data: tuple[Path, Path], seed: int, epochs: int, **more: Any
) -> dict[str, Any]:
    """Return the settings of a run on (training, validation) data."""
    is_dry = bench.device == "cpu"
    dry: dict[str, Any] = {**TINY[kind], "device": "cpu", "level": 0, "global_batch": 4} if is_dry else {}
    files = {"train_manifest": str(data[0]), "val_manifest": [f"test={data[1]}"]}
    return {**COMMON, **KINDS[kind], **files, "seed": seed, "epochs": epochs, "val_every_epochs": epochs, **dry, **more}


def search(bench: Bench, options: Any, epochs: Mapping[str, int]) -> dict[str, float]:
    """Return the learning rate of each kind with the lowest word error rate on held-out training speech."""
    most, rest = split(options.data / "mini-librispeech" / "train.json", bench.out)
    packed = bench.out / "most.h5"
    bench.wait({"pack-most": bench.paceline("pack-most", "pack", most, packed)})
    few = {kind: max(2, round(number / 4)) for kind, number in epochs.items()}
    trials = {
        f"trial-{kind}-{lr:g}": settings_of(kind, bench, (packed, rest), 0, few[kind], lr=lr)
        for kind in KINDS
        for lr in (KINDS[kind]["lr"] * factor for factor in FACTORS[: options.trials])
    }
    bench.train(list(trials), list(trials.values()))  # nothing is timed, so all of them at once
    rates = {}
    for kind in KINDS:
        names = {settings["lr"]: name for name, settings in trials.items() if name.startswith(f"trial-{kind}-")}
        found = {lr: bench.word_error_rate(name) for lr, name in names.items()}
        rates[kind] = min(found, key=lambda lr: (found[lr], bench.last_loss(names[lr])))
        losses = {
            lr: bench.records(name, "validation")[-1].get("test/loss", float("nan")) for lr, name in names.items()
        }
        line = ", ".join(f"{lr:g}: {wer:.2f} % (loss {losses[lr]:.3g})" for lr, wer in found.items())
        bench.say(f"{kind}, {few[kind]} epochs, on held-out speech: {line}; taken: {rates[kind]:g}")
    return rates


def with_lm(bench: Bench, options: Any, names: Sequence[str]) -> dict[str, float]:
    """Return word error rates of beam search with a 3-gram model of the training text."""
    model = bench.out / "lm.arpa"
    texts = options.data / "mini-librispeech" / "train.json"
    bench.wait({"lm": bench.paceline("lm", "lm", texts, model, "--order", 3, "--force")})
    words = ("--decoder", "beam", "--beam", 16, "--lm", model, "--device", bench.device, "--json")
    processes = {f"beam-{name}": bench.paceline(f"beam-{name}", "eval", bench.out / name, *words) for name in names}
    bench.wait(processes)
    return {name: _wer_in((bench.out / f"beam-{name}.log").read_text(encoding="utf-8")) for name in names}


def _wer_in(text: str) -> float:
    """Return the word error rate that `paceline eval --json` printed, after other lines, in percent."""
    return 100 * float(json.loads(text[text.index("{") :])["metrics"]["test/wer"])


def rows_of(kind: str, metric: str, values: Sequence[float]) -> list[Row]:
    rows = [Row(kind, metric, statistics.mean(values), "%")]
    if len(values) > 1:
        rows.append(Row(kind, f"{metric}, from {min(values):.2f} to", max(values), "%"))
    return rows


def measure(bench: Bench, options: Any) -> list[Row]:
    from paceline.lab.compare.significance import welch

    data = bench.out / "train.h5", options.data / "librispeech" / "test.json"
    if not data[0].exists():
        manifest = options.data / "mini-librispeech" / "train.json"
        bench.wait({"pack": bench.paceline("pack", "pack", manifest, data[0])})
        bench.say("packed")
    rows: list[Row] = []
    numbers = options.epochs or measured_epochs(bench, options, data)
    rates = search(bench, options, numbers) if options.trials else options.lr
    if options.only_search:
        return [Row(kind, "learning rate with the fewest errors", rate, "") for kind, rate in rates.items()]
    runs: dict[str, list[str]] = {}
    for kind in KINDS:
        epochs = numbers[kind]
        runs[kind] = [f"{kind}-{seed}" for seed in options.seeds]
        more = {"lr": rates[kind]} if kind in rates else {}
        bench.train(runs[kind], [settings_of(kind, bench, data, seed, epochs, **more) for seed in options.seeds])
        greedy = [bench.word_error_rate(name) for name in runs[kind]]
        spent = statistics.mean(sum(bench.epoch_seconds(name)) for name in runs[kind])
        bench.say(f"{kind}: {epochs} epochs in {spent:.0f} s, WER {', '.join(f'{wer:.2f}' for wer in greedy)} %")
        rows += [
            Row(kind, "epochs", epochs, ""),
            Row(kind, f"training, {len(greedy)} runs side by side", spent, "s"),
            Row(kind, "GPU time of a run", spent / len(greedy), "s"),
            *rows_of(kind, "WER, greedy", greedy),
        ]
    found = with_lm(bench, options, [name for names in runs.values() for name in names])
    beam = {kind: [found[name] for name in names] for kind, names in runs.items()}
    for kind, values in beam.items():
        bench.say(f"{kind}, with the language model: WER {', '.join(f'{wer:.2f}' for wer in values)} %")
        rows += rows_of(kind, "WER, beam 16 and 3-gram", values)
    judged = welch(beam[BASELINE], beam[RIVAL])
    if judged is not None:
        rows.append(Row(f"{RIVAL} against {BASELINE}", "p with the language model, Welch", judged.p, ""))
    compared = [bench.out / name for kind in (BASELINE, RIVAL) for name in runs[kind]]
    how = ["--metric", "test/wer", "--mode", "min", "--group", "vocabulary"]
    processes = {
        name: bench.paceline(name, "compare", *compared, *how, *more_words)
        for name, more_words in (("compare", []), ("compare-json", ["--json"]))
    }
    for name, process in processes.items():
        process.wait()
        print((bench.out / f"{name}.log").read_text(encoding="utf-8"), flush=True)
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("data", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seconds", type=float, default=105.0, help="of training, all runs of a kind side by side")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--trials", type=int, default=0, choices=range(len(FACTORS) + 1), help="of learning rates")
    arguments.add_argument("--only-search", action="store_true", help="only the trials")
    arguments.add_argument("--epochs", nargs="+", default=[], metavar="KIND=NUMBER", help="instead of measuring them")
    arguments.add_argument("--lr", nargs="+", default=[], metavar="KIND=RATE")
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = arguments.parse_args()
    options.epochs = {kind: int(number) for kind, _, number in (each.partition("=") for each in options.epochs)}
    options.lr = {kind: float(rate) for kind, _, rate in (each.partition("=") for each in options.lr)}
    for values in (options.epochs, options.lr):
        if values and set(values) != set(KINDS):
            arguments.error(f"--epochs and --lr name each of {', '.join(KINDS)}")
    if options.only_search and not options.trials:
        arguments.error("--only-search has nothing to do without --trials")
    options.data = options.data.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.data, options.out.resolve(), options.device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that MPS ends, too
    print(machine(), flush=True)
    if options.device == "cpu":
        bench.say("dry run on a CPU: no figures")
    with shared_gpu(bench.out) if options.device == "cuda" else nullcontext(dict(os.environ)) as environment:
        bench.environment = environment
        rows = measure(bench, options)
    show(rows, f"{options.seconds:g} s of training on 5.3 h of speech", options.json)


if __name__ == "__main__":
    main()
