"""Batch scripts for SLURM, Grid Engine, LSF and PBS: one writer, and a table of what differs. Pure functions.

Each script changes to the working folder, sets the environment, starts the ranks in the background and waits. When the
scheduler warns it before the end of its time, it passes the warning to the ranks as USR1; they save and leave, and the
script queues the job again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import Conflict
from paceline.core.units import counted
from paceline.world.launch.schedulers.job import NAME, BatchJob, NotForScript, job_name, join, quote
from paceline.world.rendezvous.secret import VARIABLE

REQUEUE_CODE = 99
"""Exit code of a script that Grid Engine and LSF (`-Q`) put back into the queue."""
_UNSET = "\0"
"""Value that leaves its line out."""


@dataclass(frozen=True)
class Site:
    """Choices that a scheduler leaves to the site."""

    starter: str | None = None
    """Program that starts the ranks; None for the scheduler's first one."""
    parallel_environment: str = "mpi"
    """Grid Engine's allocator of slots; its allocation rule decides on how many hosts they are."""
    gpu_resource: str = "gpu"
    """Grid Engine's resource that counts GPUs, per slot."""
    memory_resource: str = "mem_free"
    """Grid Engine's resource for memory, per slot."""


USUAL_SITE = Site()


@dataclass(frozen=True)
class Scheduler:
    """Differences between schedulers. All lines are templates; one whose values are not all set is left out."""

    marker: str
    """Beginning of a line with options of the scheduler."""
    options: tuple[str, ...]
    log: str
    """File name of the job's output."""
    not_in_log: str
    """Characters of the path of the output that the scheduler interprets."""
    starters: tuple[str, ...]
    """Programs that can start the ranks, the default one first."""
    again: tuple[str, ...]
    """Lines that queue the job again, after the ranks were told to leave and did."""
    queue_option: str = "--queue"
    address: tuple[str, ...] = ()
    """Lines that find the host of rank 0, where the ranks meet."""
    begin: tuple[str, ...] = ()
    """Lines right before the ranks start."""
    end: tuple[str, ...] = ()
    warnings: str = "USR1"
    """Signals by which the scheduler announces the end."""
    is_slot_a_rank: bool = False
    """True if a slot is a rank with all its cores, False if it is a core."""
    counts_per_slot: bool = False
    """True if GPUs and memory are requested per slot."""


def _queue_again(command: str) -> tuple[str, ...]:
    return ('if [ -n "$told" ] && [ "$code" -eq 0 ]; then', f"  {command}", "fi")


SLURM = Scheduler(
    # SLURM sends USR1 to this script only (`B:`), which passes it to `srun`, and `srun` to the ranks. A job that is
    # pre-empted or loses a node is queued again by SLURM itself.
    "#SBATCH",
    (
        "--job-name={name}",
        "--nodes={nodes}",
        "--ntasks-per-node={procs_per_node}",
        "--gpus-per-node={gpus_per_node}",
        "--cpus-per-task={cpus_per_rank}",
        "--time={days_and_clock}",  # SLURM reads fewer parts in its own way
        "--signal=B:USR1@{signal_s}",
        "--mem={memory_mib}M",
        "--partition={queue}",
        "--account={account}",
        "--output={log}",
        "--open-mode=append",
        "--{no_}requeue",
    ),
    log="slurm-%j.log",  # a % begins a pattern, a backslash says that there are none, the quotes are for spaces
    not_in_log='"\\',
    starters=("srun",),
    again=_queue_again('scontrol requeue "$SLURM_JOB_ID"'),
    queue_option="--partition",
)
GRID_ENGINE = Scheduler(
    # Grid Engine warns by USR1 at the soft time limit and before a stop, and by USR2 before a kill (`-notify`), all
    # processes of the script's group at once. The ranks handle only USR1, so they get their own group (`set -m`).
    # Ending with 99 would be shorter than to submit the job again, but Grid Engine 8.1.9 keeps a job that had several
    # hosts waiting for a clean-up of the others; it is what is left where jobs may not submit jobs.
    "#$",
    (
        "-S /bin/bash",
        "-N {name}",
        "-V",
        "-pe {parallel_environment} {slots}",
        "-q {queue}",
        "-A {account}",
        "-l h_rt={time_s},s_rt={warned_s}",
        "-l {memory_resource}={memory_per_slot_mib}M",
        "-l {gpu_resource}={gpus_per_slot}",
        "-notify",
        "-j y",
        "-o {log}",
        "-r {y_or_n}",
    ),
    log="sge-$JOB_ID.log",
    not_in_log='"\\\\$:,',  # `host:path`, several with commas between, and variables
    starters=("openmpi", "mpich"),
    again=_queue_again(f'qsub "$JOB_SCRIPT" || exit {REQUEUE_CODE}'),
    address=(
        'MASTER_ADDR=$(head -n 1 "$PE_HOSTFILE" | cut -d " " -f 1)',
        "export MASTER_ADDR",
        # Slots on several hosts would be far from each other and from the GPUs.
        'hosts=$(cut -d " " -f 1 "$PE_HOSTFILE" | sort -u)\n'
        '[ "$(wc -l <<< "$hosts")" -eq 1 ] || {{ echo {not_one_host} $hosts >&2; exit 1; }}',
    ),
    begin=("set -m",),
    warnings="USR1 USR2",
    counts_per_slot=True,
)
LSF = Scheduler(
    # LSF sends USR1 (`-wa`, `-wt`) to all processes of the job's group before the end, and USR2 at the end. With
    # `jsrun` the first host runs this script only: the ranks find the others by themselves.
    "#BSUB",
    (
        "-J {name}",
        "-nnodes {jsrun_nodes}",
        "-n {slots}",
        '-R "span[ptile={slots_per_node}]"',
        '-gpu "num={gpus_per_node}"',
        "-W {hours_and_minutes}",
        "-wa 'USR1' -wt '{signal_minutes}'",
        '-R "rusage[mem={memory_mib}MB]"',
        "-q {queue}",
        "-P {account}",
        "-o {log}",
        "-r{n}",
        '-Q "{requeue_code}"',
    ),
    log="lsf-%J.log",
    not_in_log='"\\$',
    starters=("openmpi", "mpich", "jsrun"),
    again=(f'[ -z "$told" ] || [ "$code" -ne 0 ] || exit {REQUEUE_CODE}',),
    address=("MASTER_ADDR=${{LSB_MCPU_HOSTS%% *}}{if_mpi}", "export MASTER_ADDR{if_mpi}"),
    begin=("set -m",),
    warnings="USR1 USR2",
)
PBS = Scheduler(
    # PBS has no warning before the end of the time, so the script has a clock of its own that sends it USR1. At the end
    # PBS sends TERM, by which the ranks save and leave, too, if they are given the time.
    "#PBS",
    (
        "-N {short_name}",
        "-l select={chunk}",
        "-l place={place}",
        "-l walltime={clock}",
        "-q {queue}",
        "-A {account}",
        "-j oe",
        "-o {log}",
        "-r {y_or_n}",
    ),
    log="pbs.log",
    not_in_log='"\\$:^',
    starters=("openmpi", "mpich", "pals"),
    again=_queue_again("qsub {script}"),
    address=(
        'MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")',
        "export MASTER_ADDR",
        "export WORLD_SIZE={pals_ranks}",  # which PALS does not set
    ),
    begin=("(sleep {warned_s}; kill -USR1 $$) &\nclock=$!", "set -m"),
    end=('kill "$clock" 2>/dev/null{if_timed}',),
    is_slot_a_rank=True,
)
SCHEDULERS: Mapping[str, Scheduler] = {"slurm": SLURM, "sge": GRID_ENGINE, "lsf": LSF, "pbs": PBS}


def batch_script(scheduler: Scheduler, job: BatchJob, path: Path, site: Site = USUAL_SITE) -> str:
    """Return the batch script of a job; `path` is where it is kept, from where PBS queues it again."""
    starter = site.starter or scheduler.starters[0]
    values = _values(scheduler, job, site, starter, path)
    lines = ["#!/bin/bash"]
    lines += [f"{scheduler.marker} {line}" for line in _filled(scheduler.options, values)]
    lines += [f"{scheduler.marker} {_directive(line)}" for line in job.directives]
    lines += ["", *_environment(job), *_filled(scheduler.address, values), "", *_filled(scheduler.begin, values)]
    lines += _ranks(_start(starter, job, scheduler.is_slot_a_rank), scheduler.warnings)
    lines += _filled(scheduler.end, values)
    lines += _filled(scheduler.again, values) if job.requeue else []
    return "\n".join([*lines, 'exit "$code"', ""])


def _filled(templates: Iterable[str], values: Mapping[str, object]) -> Iterator[str]:
    """Return the lines of templates whose values are all set."""
    known = {name: _UNSET if value is None else value for name, value in values.items()}
    return (line for line in (template.format_map(known) for template in templates) if _UNSET not in line)


def _values(scheduler: Scheduler, job: BatchJob, site: Site, starter: str, path: Path) -> dict[str, object]:
    """Return the values of the templates: fields of the job and the site, and what follows from them."""
    slots = job.procs_per_node * (job.cpus_per_rank or 1)
    if scheduler.counts_per_slot and job.gpus_per_node % slots:
        raise Conflict(
            f"{counted(job.gpus_per_node, 'GPU')} for {counted(slots, 'slot')} on each machine: "
            "Grid Engine counts GPUs per slot",
            hint="request as many ranks as GPUs and no --cpus-per-rank, or pass the options for GPUs of your site with "
            "--directives",
        )
    _check_names({scheduler.queue_option: job.queue, "--account": job.account})
    _check_names({f"--{name.replace('_', '-')}": text for name, text in vars(site).items()})
    mpi_words = f"error: --nodes 1, but parallel environment {site.parallel_environment} gave slots on several hosts:"
    chunk = [f"{job.nodes}", f"ncpus={slots}", f"mpiprocs={job.procs_per_node}"]
    chunk += [f"ngpus={job.gpus_per_node}"] if job.gpus_per_node else []
    chunk += [f"mem={job.memory_mib}mb"] if job.memory_mib is not None else []
    values: dict[str, object] = {
        **vars(job),
        **vars(site),
        **_times(job),
        "name": job_name(job.name),
        "short_name": job_name(job.name)[:15],  # older versions of PBS take no more letters
        "log": _log(scheduler, str(job.logs)),
        "script": quote(str(path)),
        "slots": job.nodes * slots,
        "slots_per_node": slots,
        "gpus_per_node": job.gpus_per_node or None,
        "gpus_per_slot": job.gpus_per_node // slots or None,
        "memory_per_slot_mib": None if job.memory_mib is None else -(-job.memory_mib // slots),
        "not_one_host": quote(mpi_words) if job.nodes == 1 else None,
        "chunk": ":".join(chunk),
        "place": "scatter" if job.nodes > 1 else "pack",
        "no_": "" if job.requeue else "no-",
        "n": "" if job.requeue else "n",
        "y_or_n": "y" if job.requeue else "n",
        "requeue_code": REQUEUE_CODE if job.requeue else None,
        "pals_ranks": job.ranks if starter == "pals" else None,
        "jsrun_nodes": job.nodes if starter == "jsrun" else None,
        "if_mpi": "",
    }
    unset = ("slots", "slots_per_node", "gpus_per_node", "if_mpi") if starter == "jsrun" else ()
    return values | dict.fromkeys(unset)


def _times(job: BatchJob) -> dict[str, object]:
    """Return the time of a job as schedulers write it; all None without one."""
    minutes, rest = divmod(job.time_s or 0, 60)
    days, up = minutes // 1440, minutes + (rest > 0)
    values: dict[str, object] = {
        "days_and_clock": f"{days}-{minutes // 60 % 24:02}:{minutes % 60:02}:{rest:02}",
        "clock": f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}",
        "hours_and_minutes": f"{up // 60}:{up % 60:02}",
        "signal_s": job.signal_s,
        "signal_minutes": -(-job.signal_s // 60),
        "warned_s": max((job.time_s or 0) - job.signal_s, 1),
        "if_timed": "",
    }
    return values if job.time_s is not None else dict.fromkeys(values)


def _check_names(names: Mapping[str, str | None]) -> None:
    """Refuse names with other characters than names have."""
    for option, text in names.items():
        if text is not None and not re.fullmatch(NAME, text):
            raise NotForScript(option, text, "it is no name")


def _log(scheduler: Scheduler, folder: str) -> str:
    """Return the path of the output in double quotes; a folder with characters that have a meaning is refused."""
    wrong = next((each for each in folder if each in scheduler.not_in_log or not each.isprintable()), None)
    if wrong is not None:
        advice = "choose another folder: `--out` of the run, or `--script FILE` for the script and the job's output"
        raise NotForScript("the folder", folder, f"the scheduler has a meaning of its own for {wrong!r}", advice)
    return f'"{folder.replace("%", "%%") if "%" in scheduler.log else folder}/{scheduler.log}"'


def _directive(line: str) -> str:
    """Return one line of options in the scheduler's own words, as the user typed it."""
    if not line.startswith("-") or not line.isprintable():
        why = "it must begin with a dash" if line.isprintable() else "it has characters that nobody sees"
        raise NotForScript("the option", line, why, 'type as for the scheduler: `--directives "--exclusive"`')
    return line


def _environment(job: BatchJob) -> Iterator[str]:
    yield f"cd -- {quote(str(job.folder))} || exit 1"
    for variable, value in job.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
            raise NotForScript("the variable", variable, "it is no name")
        yield f"export {variable}={quote(value)}"
    for line in job.setup:
        if re.match(r"\s*#(SBATCH|BSUB|PBS|\$)", line):
            raise NotForScript("the command", line, "it is an option of the scheduler", "give it to `--directives`")
        yield line
    # A new one in every start, in the memory of the job only.
    yield f'export {VARIABLE}="${{{VARIABLE}:-$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")}}"'


def _ranks(start: str, warnings: str) -> Iterator[str]:
    """Start the ranks, pass warnings to them as USR1, and wait; `$told` and `$code` say how it ended."""
    yield "told= ranks="
    yield f"""trap 'told=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' {warnings}"""
    yield """trap 'kill -TERM "$ranks"' TERM"""
    yield f"{start} &"
    yield "ranks=$!"
    # The warning may have come between the two.
    yield '[ -z "$told" ] || kill -USR1 "$ranks"'
    # A signal ends `wait` early; the ranks then still run.
    yield 'while wait "$ranks"; code=$?; kill -0 "$ranks" 2>/dev/null; do :; done'


def _start(starter: str, job: BatchJob, is_slot_a_rank: bool) -> str:
    """Return the command that starts the ranks."""
    ranks, per_node, cores = str(job.ranks), str(job.procs_per_node), job.cpus_per_rank
    if starter == "srun":
        # The number of cores is not inherited from the job since SLURM 22.05.
        words = ["srun", "--kill-on-bad-exit=1", *([] if cores is None else [f"--cpus-per-task={cores}"])]
    elif starter == "jsrun":
        # One resource set per rank: `jsrun` counts GPUs and cores for each.
        gpus = -(-job.gpus_per_node // job.procs_per_node)
        words = ["jsrun", "-n", ranks, "-r", per_node, "-a", "1", "-c", str(cores or 1)]
        words += [*(["-g", str(gpus)] if gpus else []), "-b", "none"]
    elif starter == "pals":
        words = ["mpiexec", "-n", ranks, "--ppn", per_node]
    elif starter == "mpich":
        words = ["mpiexec", "-np", ranks, "-ppn", per_node]
    else:
        words = _mpirun(job, is_slot_a_rank)
    return join([*words, *job.command])


def _mpirun(job: BatchJob, is_slot_a_rank: bool) -> list[str]:
    """Return the command of Open MPI, which gives ranks on other hosts only the variables that are named."""
    names = ["MASTER_ADDR", VARIABLE, *(name for name, _ in job.environment if name != VARIABLE)]
    # One slot per core: a rank then takes several. With one slot per rank, its threads are ours to choose: bound to the
    # core of its slot it could use no other.
    binding = ["--bind-to", "none"]
    if job.cpus_per_rank is not None:
        slots = f"ppr:{job.procs_per_node}:node" if is_slot_a_rank else "slot"
        binding = ["--map-by", f"{slots}:PE={job.cpus_per_rank}"]
    return ["mpirun", "-np", str(job.ranks), *binding, *(word for name in names for word in ("-x", name))]
