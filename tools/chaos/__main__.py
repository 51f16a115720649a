"""`python -m tools.chaos`: run campaigns and print one table; the exit code is 1 if a case was bad."""

from __future__ import annotations

import os

# Before torch is imported: forks need a process without threads, and sums of one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import argparse
import gc
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tools.chaos.campaign import Campaign, Row, Trial, join, run_trial, table, work
from tools.chaos.processes import Nursery


def campaigns() -> dict[str, Campaign]:
    """Return all campaigns by name, in the order of the table."""
    from tools.chaos.checkpoints import Checkpoints
    from tools.chaos.inputs import Cases, Inputs
    from tools.chaos.kills import Kills
    from tools.chaos.marathon import Marathon
    from tools.chaos.network import Network
    from tools.chaos.races import Races
    from tools.chaos.soak import Soak
    from tools.chaos.survivors import Survivors
    from tools.chaos.two_hosts import TwoHosts

    made: list[Campaign] = [Kills(), Survivors(), Marathon(), TwoHosts(), Cases(), Inputs()]
    made += [Checkpoints(), Network(), Races(), Soak()]
    return {campaign.name: campaign for campaign in made}


def main(argv: Sequence[str] | None = None) -> int:
    known = campaigns()
    options = _parse(argv, list(known))
    folder = Path(options.folder or tempfile.mkdtemp(prefix="paceline-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    warm_up()
    if options.replay:
        return replay(options.replay, folder)
    rows = _run_all([known[name] for name in options.campaigns or known], options, folder)
    print(f"\nseed {options.seed}, {options.jobs} job{'s' * (options.jobs > 1)}\n{table(rows)}", end="", flush=True)
    if options.keep:
        keep(rows)
    if options.json:
        Path(options.json).write_text("\n".join(row.to_json() for row in rows), encoding="utf-8")
    return int(any(row.bad for row in rows))


def replay(paths: Sequence[Path], folder: Path) -> int:
    """Run cases of `inputs` again; print a line each, and return 1 if one is bad."""
    from tools.chaos.generators import Case
    from tools.chaos.inputs import Inputs

    campaign, nursery, num_bad = Inputs(), Nursery(), 0
    shared = folder / "shared-inputs"
    shared.mkdir(exist_ok=True)
    campaign.prepare(shared, nursery)
    for path in paths:
        case = Case.from_json(path.read_text(encoding="utf-8"))
        troubles = campaign.attack(case, folder / path.stem, nursery)
        num_bad += bool(troubles)
        print(f"{'BAD' if troubles else 'good'} {path}: {'; '.join(troubles)}", flush=True)
    return int(num_bad > 0)


def keep(rows: Sequence[Row]) -> None:
    """Copy the bad inputs to the regression cases, named for what they hold."""
    import hashlib
    from dataclasses import replace

    from tools.chaos.generators import Case
    from tools.chaos.inputs import CASES

    for bad in [bad for row in rows for bad in row.bad if row.campaign == "inputs"]:
        case = Case.from_json((Path(bad.evidence) / "case.json").read_text(encoding="utf-8"))
        name = f"{case.kind}-{hashlib.sha256(case.to_json().encode()).hexdigest()[:8]}.json"
        CASES.mkdir(exist_ok=True)
        (CASES / name).write_text(replace(case, reason=bad.reason).to_json() + "\n", encoding="utf-8")


def _parse(argv: Sequence[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(names)}; all if none is named")
    parser.add_argument("--seed", type=int, default=0, help="draws the cases; the same seed draws the same ones")
    parser.add_argument("--count", type=int, help="cases per campaign; its own number if not set")
    parser.add_argument("--long", action="store_true", help="each campaign's number of cases for a long run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most, per campaign")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--beside", action="store_true", help="campaigns that mostly wait run beside the others")
    parser.add_argument("--only", type=int, help="run the case of this number alone, and keep its folder")
    parser.add_argument("--replay", nargs="+", type=Path, metavar="CASE", help="run these cases of `inputs` again")
    parser.add_argument("--keep", action="store_true", help="keep bad cases of `inputs` as regression cases")
    parser.add_argument("--folder", help="where bad cases are kept; a new one in the temporary folder if not set")
    parser.add_argument("--json", help="file for the table's rows as JSON lines")
    options = parser.parse_args(argv)
    for name in options.campaigns:
        if name not in names:
            parser.error(f"there is no campaign {name!r}; there are {', '.join(names)}")
    return options


def warm_up() -> None:
    """Import what commands import, so that a fork has it; nothing here may start a thread."""
    import importlib

    import torch

    for module in (
        "paceline.cli.train",
        "paceline.train.fit",
        "paceline.train.autotune.autotuner",
        "paceline.world.launch.launcher",
        "paceline.world.launch.survivors",
        "paceline.recipes.continual.task",
        "paceline.recipes.speech.task",
        "paceline.data.packed.dataset",
        "paceline.data.packed.from_samples",
        "torch.distributed.fsdp",
        "torch.utils.data",
        "sklearn.datasets",
        "soundfile",
        "h5py",
        "tools.chaos.tasks",
    ):
        importlib.import_module(module)
    from paceline.cli.main import COMMANDS, import_command

    for name in COMMANDS:
        import_command(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that has objects
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"


def _run_all(campaigns: Sequence[Campaign], options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run campaigns one after the other; with `--beside` those that mostly wait in a process of their own."""
    lanes = [[each for each in campaigns if each.mostly_waits is waits] for waits in (True, False)]
    if not (options.beside and all(lanes)):
        return _run_lane(campaigns, options, folder)

    made = _fork([partial(_run_lane, lane, options, folder) for lane in lanes], folder, "lanes", Nursery())
    rows = {row.campaign: row for row in made}
    return [rows[campaign.name] for campaign in campaigns]


def _run_lane(campaigns: Sequence[Campaign], options: argparse.Namespace, folder: Path) -> list[Row]:
    rows = []
    for campaign in campaigns:
        rows.append(_run(campaign, options, folder))
        for bad in rows[-1].bad:
            print(f"BAD {campaign.name}: {bad.reason}\n    {bad.repeat}\n    evidence: {bad.evidence}", flush=True)
    return rows


def _run(campaign: Campaign, options: argparse.Namespace, folder: Path) -> Row:
    reason = campaign.why_not()
    if reason is not None:
        return Row(campaign.name, skipped=reason)
    shared = folder / f"shared-{campaign.name}"
    shared.mkdir(exist_ok=True)
    nursery = Nursery()
    begun = time.monotonic()
    campaign.prepare(shared, nursery)
    if options.only is not None:
        trial = Trial(campaign.name, options.seed, options.only, folder / f"{campaign.name}-only", nursery)
        row = Row(campaign.name)
        row.add(run_trial(campaign, trial), time.monotonic() - begun)
    else:
        row = join(_share_out(campaign, options, folder, nursery))
    row.seconds = time.monotonic() - begun
    return row


def _share_out(campaign: Campaign, options: argparse.Namespace, folder: Path, nursery: Nursery) -> list[Row]:
    """Run the cases in so many processes; each takes every n-th."""
    count = options.count if options.count is not None else campaign.counts[options.long]
    until = time.monotonic() + 60 * options.minutes
    jobs = max(1, min(options.jobs, count))
    shares = [count // jobs + (number < count % jobs) for number in range(jobs)]

    def job(number: int) -> list[Row]:
        # A fork may not share its parent's nursery: it looks after its own children.
        return [work(campaign, options.seed, itertools.count(number, jobs), shares[number], until, folder, Nursery())]

    if jobs == 1:
        return [work(campaign, options.seed, itertools.count(), count, until, folder, nursery)]
    return _fork([partial(job, number) for number in range(jobs)], folder, f"jobs-{campaign.name}", nursery)


def _fork(jobs: Sequence[Callable[[], list[Row]]], folder: Path, name: str, nursery: Nursery) -> list[Row]:
    """Run functions as processes, at the same time, and return all their rows."""
    logs = folder / name
    logs.mkdir(exist_ok=True)

    def run(number: int) -> int:
        text = "\n".join(row.to_json() for row in jobs[number]())
        (logs / f"{number}.rows").write_text(text, encoding="utf-8")
        return 0

    running = [nursery.call(partial(run, number), logs, str(number)) for number in range(len(jobs))]
    nursery.wait(running, float("inf"))
    for process in running:
        sys.stdout.write(process.out)
        if process.code:
            sys.stderr.write(f"{process.err}\n{process.name} of {name} ended with {process.code}\n")
            raise SystemExit(1)
    texts = [(logs / f"{number}.rows").read_text(encoding="utf-8") for number in range(len(jobs))]
    return [Row.from_json(line) for text in texts for line in text.splitlines()]


if __name__ == "__main__":
    random.seed(0)
    sys.exit(main())
