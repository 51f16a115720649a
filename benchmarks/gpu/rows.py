"""Rows of benchmarks/results on the GPU of this machine: named jobs, within a budget of seconds.

    python benchmarks/gpu/rows.py --list [--area quartznet]
    python benchmarks/gpu/rows.py quartznet jasper [--data DATA] [--out rows] [--caches CACHES] [--budget-s 560]
    python benchmarks/gpu/rows.py --area translation --data DATA --budget-s 560
    python benchmarks/gpu/rows.py --device cpu --data DATA    all jobs with tiny sizes, as a dry run: no figures

Jobs run in the order in which they are named. Those that time something have the machine to themselves; others that
follow each other (tests, training for quality, compilation ahead) run side by side, as far as there are cores. A job
begins if its usual seconds are left of the budget, and is ended with all its children at its bound or at the end of the
budget, whichever comes first; what it printed stands. Its lines go to OUT/NAME.log and to the output, its files to
OUT/NAME (NAME-2 where an earlier call has left some). Jobs share the caches of compiled code of Triton and of torch in
CACHES, which may be kept for a later call. DATA has the folders librispeech, mini-librispeech and multi30k; jobs whose
data is not there are left out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
GRACE_S = 3.0
"""Between asking a job to end and ending it."""
TAIL = 4
"""Lines of a job in the summary."""


@dataclass(frozen=True)
class Job:
    """One command of the list."""

    name: str
    area: str
    about: str
    """What it measures, with the figure to expect."""
    words: str
    """After `python benchmarks/gpu/`, or a whole command; {data}, {out} and {packed} are filled in."""
    usual_s: int
    """With warm caches, as far as it is known."""
    bound_s: int
    """With cold caches, and then some."""
    dry: str | None = None
    """The same with tiny sizes on a CPU; None where there is nothing to run there."""
    is_timing: bool = True
    """It needs the machine to itself."""
    cores: int = 16
    """That it keeps busy, where others may run beside it."""
    data: tuple[str, ...] = ()
    """Folders of DATA that it reads."""


NOISE = "{packed}/noise-2048.h5"
MORE_NOISE = "{packed}/noise-4096.h5"
EPOCHS = "end_to_end.py epochs --level auto --epochs 20"
PERTURBED = "--speed-range 0.9 1.1 --gain-db -6 6"
DRY_STEP = "--device cpu --network small --batches 2 --frames 160 --labels 8 --steps 1"
DRY_EPOCHS = "end_to_end.py epochs --device cpu --level 0 --network small --batch 2 --utterances 6 --epochs 2"
DRY_TRANSLATION = "translation.py --device cpu --size tiny --budgets 300 --batches 1 --vocabulary 100"
DRY_CONFORMER = (
    "conformer.py --device cpu --networks fastconformer-s --layers 1 --batches 2 --frames 96 --subwords 2 --steps 1"
)
DRY_START = "startup.py --device cpu --networks small --batch 2 --utterances 6 --epochs 2"
PYTEST = "python -m pytest -m gpu -q --no-header -p no:cacheprovider -p no:benchmark --tb=short --show-capture=no -rf"
JOBS = (
    Job(
        "quartznet", "quartznet", "QuartzNet 15x5 bare: 2,700 at 64, 3,100 at 256, plain ways beside",
        "quartznet.py --only O2+kernels+graphs bf16 fp16 --batches 64 256", 60, 120,
        f"quartznet.py {DRY_STEP} --only O2+kernels+graphs bf16 fp16",
    ),
    Job(
        "jasper", "quartznet", "Jasper10x5dr 380, found by -O4 itself; steady rate",
        "quartznet.py --network jasper10x5dr --batches 64 --only O4 O2+kernels+graphs", 100, 150,
        f"quartznet.py {DRY_STEP} --only O4",
    ),
    Job(
        "jasper-steady", "quartznet", "Jasper10x5dr 380, the way that -O4 found, without a pause",
        "quartznet.py --network jasper10x5dr --batches 64 --only O2+kernels+graphs", 30, 80,
        f"quartznet.py {DRY_STEP} --only O2+kernels+graphs",
    ),
    *(
        Job(
            f"noise-{number}{name}", "quartznet", "packed noise ahead of the jobs that read it",
            f"end_to_end.py pack --utterances {number} --packed {file}{more}", 20, 60,
            f"end_to_end.py pack --utterances 4 --packed {{out}}/noise.h5{more}",
            is_timing=False, cores=1,
        )
        for number, name, file, more in (
            (2048, "", NOISE, ""),
            (4096, "", MORE_NOISE, ""),
            (2048, "-letters", "{packed}/noise-4-letters.h5", " --labels-per-s 4"),
        )
    ),
    Job(
        "epochs-64", "quartznet", "end to end 95 % of the bare step, batch 64",
        f"{EPOCHS} --batch 64 --utterances 2048 --packed {NOISE}", 50, 90, DRY_EPOCHS,
    ),
    Job(
        "epochs-256", "quartznet", "end to end 95 % of the bare step, batch 256",
        f"{EPOCHS} --batch 256 --utterances 4096 --packed {MORE_NOISE}", 65, 110, DRY_EPOCHS,
    ),
    Job(
        "perturbed-64", "quartznet", "90 % with --speed-range and --gain-db, batch 64",
        f"{EPOCHS} --batch 64 --utterances 2048 --packed {NOISE} {PERTURBED}", 45, 90, f"{DRY_EPOCHS} {PERTURBED}",
    ),
    Job(
        "perturbed-256", "quartznet", "90 % with --speed-range and --gain-db, batch 256",
        f"{EPOCHS} --batch 256 --utterances 4096 --packed {MORE_NOISE} {PERTURBED}", 60, 110,
        f"{DRY_EPOCHS} {PERTURBED}",
    ),
    Job("no-level", "quartznet", "no level typed: 95 % of -O4", "startup.py auto", 80, 130, f"{DRY_START} auto"),
    Job(
        "startup", "quartznet", "first step: QuartzNet 25 s cold, 8 s warm; Jasper 60 s cold",
        "startup.py first --utterances 256", 90, 140, f"{DRY_START} first",
    ),
    Job(
        "fp16", "quartznet", "fp16: first epoch half as fast as the second, 2 steps skipped",
        "startup.py fp16", 85, 130,
        f"{DRY_START} fp16",
    ),
    Job(
        "curve", "quartznet", "500 steps of real speech within the spread of three seeds",
        "end_to_end.py curve --data {data}/librispeech --level auto --batch 8 --steps 500 --lr 0.005"
        " --csv {out}/curve.csv", 140, 240,
        "end_to_end.py curve --data {data}/librispeech --batch 2 --steps 2 --device cpu --level 0 --network small"
        " --csv {out}/curve.csv",
        is_timing=False, cores=4, data=("librispeech",),
    ),
    Job(
        "group", "quartznet", "NCCL group of one rank: 1.05 times the step without",
        'group.py --ways alone group "alone, clipping and EMA" "group, clipping and EMA"', 45, 80,
        f"group.py {DRY_STEP} --ways alone group",
    ),
    Job(
        "node", "quartznet", "node.sh with one GPU: DDP, Lightning and ours",
        "bash {here}/node.sh --batches 64 --out {out}", 90, 140,
        "bash {here}/node.sh --device cpu --ranks 1 --network small --batches 2 --frames 160 --steps 1 --rounds 1"
        ' --ways "ddp-bf16 ours" --out {out}',
    ),
    Job(
        "tests-speed", "quartznet", "kernels against float64",
        f"{PYTEST} -n 6 tests/speed tests/recipes", 160, 280, None,
        is_timing=False, cores=6,
    ),
    Job(
        "tests-optim", "quartznet", "updates against float64",
        f"{PYTEST} -n 2 tests/optim", 40, 90, None, is_timing=False,
        cores=2,
    ),
    Job(
        "tests-sharding", "quartznet", "shards with levels, wire, masters",
        f"{PYTEST} -n 6 tests/parallel/sharded/test_strategy_gpu.py",
        110, 220, None, is_timing=False, cores=6,
    ),
    Job(
        "translation", "translation", "1,400,000 and 2,000,000 tokens/s, 1.5 times the best plain way",
        "translation.py --only O2+kernels+graphs bf16 hf bf16-graphs bf16-compile", 230, 300,
        f"{DRY_TRANSLATION} --only O2+kernels+graphs bf16 hf",
    ),
    Job(
        "translation-big", "translation", "Transformer big: 250,000 target tokens/s",
        "translation.py --size big --budgets 25000 --only O2+kernels+graphs bf16", 35, 70,
        f"{DRY_TRANSLATION} --only O2+kernels+graphs bf16",
    ),
    Job(
        "translation-epochs", "translation", "end to end from files 95 % of the bare step",
        "translation_epochs.py --budgets 25000 100000 --pairs 60000 --epochs 4", 70, 120,
        "translation_epochs.py --device cpu --level 0 --size tiny --budgets 400 --pairs 40 --vocabulary 100 --epochs 2",
    ),
    Job(
        "multi30k", "translation", "en-de BLEU 41.0, three seeds",
        "multi30k.py {data}/multi30k {out} --directions en-de", 200, 480,
        "multi30k.py {data}/multi30k {out} --directions en-de --seeds 0 1 --head-start-s 0 --average 2 --set"
        " device=cpu level=0 steps=4 vocabulary=300 batch_cost=400 warmup_steps=2 save_every_steps=2 workers=0",
        is_timing=False, cores=6, data=("multi30k",),
    ),
    Job(
        "multi30k-6000", "translation", "the same with 6,000 units",
        "multi30k.py {data}/multi30k {out} --directions en-de --set vocabulary=6000", 200, 480,
        "multi30k.py {data}/multi30k {out} --directions en-de --seeds 0 --head-start-s 0 --average 2 --set"
        " device=cpu level=0 steps=4 vocabulary=200 batch_cost=400 warmup_steps=2 save_every_steps=2 workers=0",
        is_timing=False, cores=3, data=("multi30k",),
    ),
    Job(
        "muon", "translation", "Muon needs fewer steps than AdamW, same search, three seeds",
        "muon_steps.py {data}/multi30k {out} --steps 400", 110, 300,
        "muon_steps.py {data}/multi30k {out} --steps 2 --rates 0.001 --set device=cpu level=0 size=tiny"
        " vocabulary=300 batch_cost=400 workers=0",
        is_timing=False, cores=10, data=("multi30k",),
    ),
    Job(
        "conformer-ahead", "conformer", "compilation ahead of the plain ways",
        "conformer.py --networks fastconformer-l --batches 64 --only bf16-layers bf16-compile --compile-only", 150, 230,
        f"{DRY_CONFORMER} --only bf16 --compile-only", is_timing=False, cores=4,
    ),
    Job(
        "conformer-m", "conformer", "FastConformer-M, batch 64: 2 times the best plain way",
        "conformer.py --networks fastconformer-m --batches 64 --only O2+kernels+graphs bf16 bf16-layers-graphs"
        " bf16-compile --profile", 70, 160, f"{DRY_CONFORMER} --only O2+kernels+graphs bf16",
    ),
    Job(
        "conformer-l", "conformer", "FastConformer-L, batch 64: 2 times the best plain way",
        "conformer.py --networks fastconformer-l --batches 64 --only O2+kernels+graphs bf16 bf16-layers-graphs"
        " bf16-compile", 55, 90, f"{DRY_CONFORMER} --only O2+kernels+graphs bf16",
    ),
    Job(
        "conformer-256", "conformer", "FastConformer-M and -L, batch 256: 2 times the best plain way",
        "conformer.py --batches 256 --only O2+kernels+graphs bf16 bf16-layers-graphs", 90, 170,
        f"{DRY_CONFORMER} --only O2+kernels+graphs bf16",
    ),
    Job(
        "conformer-epochs", "conformer", "FastConformer: the whole run at 95 % of the bare step",
        "end_to_end.py epochs --network fastconformer-m --level auto --batch 64 --utterances 2048 --epochs 10"
        " --labels-per-s 4 --packed {packed}/noise-4-letters.h5", 55, 100,
        "end_to_end.py epochs --device cpu --level 0 --network fastconformer-s --batch 2 --utterances 2 --epochs 2"
        " --labels-per-s 4",
    ),
    Job(
        "speech-trials", "conformer", "learning rates of FastConformer and QuartzNet by four trials each",
        "speech_quality.py {data} {out} --trials 4 --only-search --epochs fastconformer=160 quartznet=80", 150, 420,
        "speech_quality.py {data} {out} --trials 2 --only-search --epochs fastconformer=2 quartznet=2 --device cpu",
        is_timing=False, cores=8, data=("mini-librispeech", "librispeech"),
    ),
    Job(
        "speech-quality", "conformer", "FastConformer with BPE beats QuartzNet for equal GPU seconds (p-value)",
        "speech_quality.py {data} {out} --lr fastconformer=0.001 quartznet=0.015"
        " --epochs fastconformer=160 quartznet=83", 490, 580,
        "speech_quality.py {data} {out} --lr fastconformer=0.001 quartznet=0.015"
        " --epochs fastconformer=1 quartznet=1 --seeds 1 2 --device cpu",
        is_timing=False, cores=6, data=("mini-librispeech", "librispeech"),
    ),
    Job(
        "speech-quality-tuned", "conformer", "the same, learning rates of both found by three trials each",
        "speech_quality.py {data} {out} --seconds 90 --trials 3", 395, 470,
        "speech_quality.py {data} {out} --seconds 1 --seeds 1 2 --trials 2 --device cpu",
        data=("mini-librispeech", "librispeech"),
    ),
)  # fmt: skip


# -- decisions -----------------------------------------------------------------------------------------------------


class UnknownJobs(Exception):
    """Names that no job has."""


def chosen(jobs: Sequence[Job], names: Sequence[str], area: str | None) -> list[Job]:
    """Return the jobs by name, in that order, or those of an area, or all."""
    by_name = {job.name: job for job in jobs}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UnknownJobs(f"no job is called {', '.join(unknown)}; there are {', '.join(by_name)}")
    some = [by_name[name] for name in dict.fromkeys(names)] if names else list(jobs)
    return [job for job in some if area is None or job.area == area]


def next_jobs(waiting: Sequence[Job], running: Collection[Job], cores: int, left_s: float) -> list[Job]:
    """Return the jobs that begin now.

    A timing begins alone, when nothing runs. Others begin beside each other while there are cores (one always does), up
    to the next timing. Jobs that no longer fit into the budget are passed over.
    """
    if any(job.is_timing for job in running):
        return []
    begin: list[Job] = []
    for job in waiting:
        if job.usual_s > left_s:
            continue
        busy = sum(each.cores for each in (*running, *begin))
        if job.is_timing:
            return begin or ([] if running else [job])
        if not busy or busy + job.cores <= cores:
            begin.append(job)
    return begin


def limit_s(job: Job, left_s: float) -> float:
    """Return the seconds after which a job that begins now is ended."""
    return max(0.0, min(job.bound_s, left_s - GRACE_S))


def fresh(folder: Path, name: str) -> Path:
    """Return a path in the folder that an earlier call has not written to."""
    number, path = 1, folder / name
    while path.exists() or path.with_name(f"{path.name}.log").exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path


def missing(job: Job, data: Path | None) -> list[str]:
    """Return the folders of data that a job needs and that are not there."""
    return [name for name in job.data if data is None or not (data / name).is_dir()]


# -- processes -----------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A job that has begun, and what it left."""

    job: Job
    out: Path
    process: subprocess.Popen[str]
    began: float
    limit_s: float
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None
    seconds: float = 0.0
    code: int | None = None
    is_cut: bool = False


def descendants(pid: int) -> list[int]:
    """Return a process and all that it, or one of them, has started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):  # it has just ended
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def end(process: subprocess.Popen[str]) -> None:
    """End a process with its children, those in sessions of their own included."""
    family = descendants(process.pid)
    for how, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for pid in dict.fromkeys([*family, *descendants(process.pid)]):
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


class Runner:
    """Starts jobs, writes what they print, and ends those that take too long."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.out: Path = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        caches: Path = options.caches.resolve()
        self.fields = {
            "data": str(options.data.resolve()) if options.data else "",
            "packed": str(caches / "packed"),
            "here": str(HERE),
        }
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": "2",
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        }

    @property
    def left_s(self) -> float:
        return float(self.options.budget_s - (time.monotonic() - self.began))

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {line}", flush=True)

    def command(self, job: Job, out: Path) -> str:
        """Return what the shell runs."""
        words = (job.words if self.options.device == "cuda" else job.dry or "").format(out=out, **self.fields)
        first, _, rest = words.partition(" ")
        if first.endswith(".py"):
            return f"exec {sys.executable} {HERE / first} {rest}"
        return f"exec {sys.executable} {rest}" if first == "python" else f"PYTHON={sys.executable} exec {words}"

    def start(self, job: Job) -> Running:
        out = fresh(self.out, job.name)
        out.mkdir()
        process = subprocess.Popen(
            self.command(job, out), shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=self.environment, cwd=HERE.parents[1], start_new_session=True,
        )  # fmt: skip
        # A dry run may take as long as the CPU needs.
        limit = limit_s(job, self.left_s) if self.options.device == "cuda" else self.left_s
        running = Running(job, out, process, time.monotonic(), limit)
        self.say(f"{job.name} begins, at most {running.limit_s:.0f} s")
        running.reader = threading.Thread(target=self._read, args=(running,), daemon=True)
        running.reader.start()
        return running

    def _read(self, running: Running) -> None:
        assert running.process.stdout is not None
        path = running.out.with_name(f"{running.out.name}.log")
        with running.process.stdout as lines, path.open("w", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                if line.strip():
                    running.lines.append(line.rstrip())
                    self.say(f"{running.job.name}: {line.rstrip()[:200]}")

    def finish(self, running: Running) -> None:
        """Note how a job ended; end it if it has not."""
        if running.process.poll() is None:
            running.is_cut = True
            end(running.process)
        with suppress(ProcessLookupError):  # what a job that failed has left would disturb the next one
            os.killpg(running.process.pid, signal.SIGKILL)
        running.seconds = time.monotonic() - running.began
        running.code = running.process.returncode
        if running.reader is not None:
            running.reader.join(GRACE_S)
        how = "was ended at its limit" if running.is_cut else f"ended with {running.code}"
        self.say(f"{running.job.name} {how} after {running.seconds:.0f} s")

    def run(self, jobs: Sequence[Job], cores: int) -> list[Running]:
        """Run all that fit into the budget."""
        waiting, running, done = list(jobs), list[Running](), list[Running]()
        try:
            while waiting or running:
                for job in next_jobs(waiting, [each.job for each in running], cores, self.left_s):
                    waiting.remove(job)
                    running.append(self.start(job))
                if not running:
                    break  # nothing that is left fits
                time.sleep(0.05)
                for each in list(running):
                    is_over = time.monotonic() - each.began > each.limit_s
                    if each.process.poll() is not None or is_over:
                        self.finish(each)
                        running.remove(each)
                        done.append(each)
        finally:
            for each in running:
                self.finish(each)
        for job in waiting:
            self.say(f"{job.name} was not begun: it takes {job.usual_s} s, {self.left_s:.0f} s are left")
        return done


def show_list(jobs: Sequence[Job]) -> None:
    table = Table(title_justify="left", title=f"{len(jobs)} jobs, {sum(job.usual_s for job in jobs)} s one by one")
    for name in ("job", "area", "usual s", "bound s", "alone", "data", "measures"):
        table.add_column(name, no_wrap=True)
    for job in jobs:
        alone = "yes" if job.is_timing else f"{job.cores} cores"
        values = job.name, job.area, str(job.usual_s), str(job.bound_s), alone, " ".join(job.data), job.about
        table.add_row(*values)
    Console(width=180).print(table)


def show_summary(done: Sequence[Running], runner: Runner) -> None:
    table = Table(title="what ran", title_justify="left")
    for name in ("job", "seconds", "exit code", "last lines"):
        table.add_column(name, overflow="fold")
    for each in done:
        code = f"{each.code}, cut" if each.is_cut else str(each.code)
        table.add_row(each.job.name, f"{each.seconds:.0f}", code, "\n".join(line[:130] for line in each.lines[-TAIL:]))
    Console(width=180).print(table)
    runner.say("done")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", metavar="JOB")
    arguments.add_argument("--area")
    arguments.add_argument("--list", action="store_true", help="only show the jobs")
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: dry runs, no figures")
    arguments.add_argument("--data", type=Path)
    arguments.add_argument("--out", type=Path, default=Path("runs/rows"))
    arguments.add_argument("--caches", type=Path, default=Path("runs/caches"))
    arguments.add_argument("--budget-s", type=float, default=560.0)
    arguments.add_argument("--cores", type=int, default=os.cpu_count(), help="that jobs side by side may take")
    options = arguments.parse_args()
    try:
        jobs = chosen(JOBS, options.names, options.area)
    except UnknownJobs as error:
        arguments.error(str(error))
    if options.list:
        show_list(jobs)
        return 0
    runner = Runner(options)
    ready = []
    for job in jobs:
        lacking = missing(job, options.data)
        if lacking:
            runner.say(f"{job.name} is left out: {', '.join(lacking)} is not in --data {options.data}")
        elif options.device == "cpu" and job.dry is None:
            runner.say(f"{job.name} is left out: it has no dry run")
        else:
            ready.append(job)
    if options.device == "cpu":
        runner.say("dry run on a CPU: no figures")
    done = runner.run(ready, options.cores or 1)
    show_summary(done, runner)
    return 1 if any(each.code for each in done) else 0


if __name__ == "__main__":
    sys.exit(main())
