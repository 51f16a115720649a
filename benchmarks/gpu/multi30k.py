"""Multi30k on one GPU: a tiny Transformer from scratch, several seeds and directions at once, scored on test2016.

    python benchmarks/gpu/multi30k.py DATA OUT [--seeds 0 1 2] [--directions en-de de-en] [--set dropout=0.3 ...]
    python benchmarks/gpu/multi30k.py DATA OUT --score [--json]

DATA has train, val and test_2016_flickr as .en.gz and .de.gz. The recipe is that of Wu et al. 2021 (4 + 4 layers,
width 128, dropout 0.3, labels smoothed by 0.1, inverse square root with a peak of 0.005 after 2,000 steps, the mean of
the last ten checkpoints, beam 5). All runs train at once, each a process of its own. The length penalty is the one of
`PENALTIES` with which the validation set scores best. `tokenised` is BLEU as that paper has it: in small letters, cut
by Moses' tokeniser (sacremoses), byte-pair units joined; `cased` is sacreBLEU's own on plain text, of runs that keep
capitals (`--set lowercase=false`). Processes share the GPU through MPS where that is installed. Translations lie in
OUT; `--score` scores them once more, where sacremoses may be.
"""

from __future__ import annotations

import gzip
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from mps import shared_gpu
from table import Row, parser, show

PENALTIES = (0.6, 1.0, 1.4)
RECIPE = {
    "size": "tiny",
    "vocabulary": "10000",
    "lowercase": "true",
    "bleu_lowercase": "true",
    "batch_cost": "16384",
    "steps": "8000",
    "lr": "0.005",
    "warmup_steps": "2000",
    "keep_last": "10",
    "val_every_epochs": "100000",
    "progress": "none",
    "workers": "2",
}


def lines_of(data: Path, name: str, language: str) -> list[str]:
    with gzip.open(data / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def command(data: Path, out: Path, direction: str, seed: int, settings: dict[str, str]) -> list[str]:
    source, target = direction.split("-")
    files = {"train_source": f"train.{source}.gz", "train_target": f"train.{target}.gz"}
    files |= {"val_source": f"val.{source}.gz", "val_target": f"val.{target}.gz"}
    chosen = {**settings, **{name: str(data / file) for name, file in files.items()}, "seed": str(seed)}
    words = [sys.executable, "-m", "paceline", "train", "translation", "--out", str(out)]
    for name, value in chosen.items():
        option = name.replace("_", "-")
        words += (
            [f"--{option}"] if value == "true" else [f"--no-{option}"] if value == "false" else [f"--{option}", value]
        )
    return words


def train(
    data: Path,
    out: Path,
    directions: Sequence[str],
    seeds: Sequence[int],
    changes: dict[str, str],
    head_start_s: float,
    environment: dict[str, str],
) -> float:
    """Train all runs at once; return the seconds."""
    began, running = time.monotonic(), []
    for direction in directions:
        for seed in seeds:
            folder = out / f"{direction}.{seed}"
            with (out / f"{direction}.{seed}.log").open("w", encoding="utf-8") as log:
                words = command(data, folder, direction, seed, {**RECIPE, **changes})
                running.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment))
            if len(running) == 1 and len(directions) * len(seeds) > 1:
                time.sleep(head_start_s)
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"runs ended with {codes}: see {out}/*.log")
    seconds = time.monotonic() - began
    print(f"trained in {seconds:.0f} s, all runs at once", flush=True)
    return seconds


def translate_all(data: Path, out: Path, average: int, environment: dict[str, str]) -> None:
    """Write translations of all runs, each in a process of its own."""
    runs = sorted(path for path in out.glob("*-*.*") if path.is_dir())
    words = [sys.executable, __file__, str(data), str(out), "--average", str(average), "--translate"]
    processes = [subprocess.Popen([*words, run.name], env=environment) for run in runs]
    if any(process.wait() for process in processes):
        raise SystemExit("not all runs could be translated with")


def translate(data: Path, out: Path, run: str, average: int) -> None:
    """Write translations by a run with each length penalty."""
    from paceline.translation import load

    translator = load(out / run, checkpoint="last", average=average)
    for name in ("val", "test_2016_flickr"):
        lines = lines_of(data, name, run.partition("-")[0])
        for penalty in PENALTIES:
            written = translator.translate(lines, beam=5, length_penalty=penalty)
            (out / f"{run}.{name}.{penalty}.txt").write_text("\n".join(written) + "\n", encoding="utf-8")


def score(data: Path, out: Path) -> list[Row]:
    import sacrebleu

    def tokenised(texts: Sequence[str], language: str) -> list[str]:
        from sacremoses import MosesTokenizer

        cut = MosesTokenizer(language)
        return [cut.tokenize(text.lower(), return_str=True, escape=False) for text in texts]

    def bleu(texts: Sequence[str], references: Sequence[str], **how: Any) -> float:
        return float(sacrebleu.corpus_bleu(list(texts), [list(references)], **how).score)

    def scores(run: str, name: str, penalty: float) -> dict[str, float]:
        language = run.partition("-")[2].partition(".")[0]
        texts = (out / f"{run}.{name}.{penalty}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        references = lines_of(data, name, language)
        found = {"13a, small letters": bleu(texts, references, lowercase=True), "cased": bleu(texts, references)}
        try:
            cut = tokenised(texts, language), tokenised(references, language)
        except ImportError:
            print("no scores of tokenised text: `pip install sacremoses` (it is in the extra `bench`)", file=sys.stderr)
            return found
        return {"tokenised": bleu(*cut, tokenize="none", force=True), **found}

    rows = []
    runs = sorted({path.name.partition(".val")[0] for path in out.glob("*.val.*.txt")})
    for direction in sorted({run.partition(".")[0] for run in runs}, reverse=True):
        mine = [run for run in runs if run.startswith(f"{direction}.")]
        by_penalty = {
            penalty: statistics.mean(scores(run, "val", penalty)["13a, small letters"] for run in mine)
            for penalty in PENALTIES
        }
        best = max(by_penalty, key=lambda penalty: by_penalty[penalty])
        found = [scores(run, "test_2016_flickr", best) for run in mine]
        for name in found[0]:
            values = [each[name] for each in found]
            case = f"{direction}, {len(mine)} seeds, penalty {best}"
            rows.append(Row(case, f"BLEU {name}", statistics.mean(values), ""))
            if len(values) > 1:
                rows.append(Row(case, f"BLEU {name}, from {min(values):.2f} to", max(values), ""))
        rows.append(Row(direction, "BLEU of validation, 13a, small letters", by_penalty[best], ""))
    return rows


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("data", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--directions", nargs="+", default=["en-de", "de-en"])
    arguments.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    help_ = "seconds that the first run has to compile kernels, which the others then find"
    arguments.add_argument("--head-start-s", type=float, default=15.0, help=help_)
    arguments.add_argument("--average", type=int, default=10, help="checkpoints whose mean translates")
    arguments.add_argument("--score", action="store_true")
    arguments.add_argument("--translate", metavar="RUN", help="only this: one run of OUT")
    options = arguments.parse_args()
    if options.translate:
        translate(options.data, options.out, options.translate, options.average)
        return
    rows: list[Row] = []
    if not options.score:
        options.out.mkdir(parents=True, exist_ok=True)
        changes = dict(each.split("=", 1) for each in options.set)
        with shared_gpu(options.out) as environment:
            seconds = train(
                options.data, options.out, options.directions, options.seeds, changes, options.head_start_s, environment
            )
            began = time.monotonic()
            translate_all(options.data, options.out, options.average, environment)
        print(f"translated in {time.monotonic() - began:.0f} s", flush=True)
        rows += [Row("training, all runs at once", "time", seconds / 60, "min")]
        rows += [Row("translating", "time", (time.monotonic() - began) / 60, "min")]
        (options.out / "recipe.json").write_text(json.dumps({**RECIPE, **changes}), encoding="utf-8")
    show([*rows, *score(options.data, options.out)], "Multi30k, test2016", options.json)


if __name__ == "__main__":
    main()
