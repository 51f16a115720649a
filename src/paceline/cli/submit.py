"""`paceline submit slurm|sge|lsf|pbs|k8s -- train ...`: write a batch script, keep it with the run, and queue it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.cli.launch import RANKED, trains
from paceline.config.command_line import VERBATIM, asks_for_help, dashed, resolve
from paceline.config.load import load
from paceline.config.problems import Problem, SettingsInvalid
from paceline.config.run_path import run_folder
from paceline.config.settings import Positive, Section, TrainConfig
from paceline.config.train_command import POSITIONAL as OF_TRAIN
from paceline.config.train_command import TRAIN_OPTIONS, take_task, task_settings, train_options
from paceline.core.cloud.address import address_of, shown
from paceline.core.cloud.file_copy import exists
from paceline.core.cloud.run_copy import bring_run
from paceline.core.disk import CannotWrite, replacing
from paceline.core.errors import PacelineError
from paceline.core.run_folder import BATCH, RunFolder
from paceline.core.terminal import emit, tell
from paceline.world.launch.schedulers.grid_engine import choose_environment
from paceline.world.launch.schedulers.job import NAME, BatchJob, mebibytes, seconds
from paceline.world.launch.schedulers.kubernetes import Pods, manifest
from paceline.world.launch.schedulers.script import SCHEDULERS, Site, batch_script
from paceline.world.rendezvous.secret import new_secret

PROG = "paceline submit"
_QCONF_TIMEOUT_S = 10.0
_STOPPED_CODE = 75  # of `sysexits.h`: try again later
_Name = Annotated[str, Field(pattern=f"^{NAME}$")]


class SubmitOptions(Section):
    """Queue a paceline command: `paceline submit slurm --nodes 4 --gpus-per-node 8 --time 12h -- train TASK ...`."""

    scheduler: Literal["slurm", "sge", "lsf", "pbs", "k8s"]
    """slurm, sge for Grid Engine, lsf, pbs, or k8s for Kubernetes."""
    nodes: Positive = 1
    """Machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs on each machine."""
    procs_per_node: Positive | None = None
    """Ranks on each machine; one per GPU if not set, one without."""
    cpus_per_rank: Positive | None = None
    """CPU cores for each rank."""
    time: str | None = None
    """How long the job may take: `90m`, `12h`, `2d` or `1-12:00:00`. Before the end the ranks save and leave."""
    memory: str | None = None
    """Main memory on each machine: `64G`."""
    partition: _Name | None = None
    """Of SLURM."""
    queue: _Name | None = None
    """Of Grid Engine, LSF or PBS."""
    account: _Name | None = None
    """Whom the time is charged to."""
    env: str = Field("", json_schema_extra=VERBATIM)
    """Variables for the ranks, as a shell would read them: `"NCCL_DEBUG=INFO NOTE='two words'"`."""
    setup: str = Field("", json_schema_extra=VERBATIM)
    """Shell commands before the ranks start: `"module load cuda; source ~/env.sh"`."""
    signal_s: Positive = 120
    """Seconds before the end of the time at which the ranks are told to save and leave."""
    requeue: bool = True
    """Put the job back into the queue when its time was over or it was pre-empted; the run then goes on."""
    directives: str = Field("", json_schema_extra=VERBATIM)
    """More options for the scheduler, in its own words: `"--constraint=a100 --exclusive"`."""
    job_name: _Name | None = None
    """The job's name; that of the run's folder if not set."""
    parallel_environment: _Name | None = None
    """Of Grid Engine: what gives slots (`qconf -spl` lists them). If not set, for one machine one that keeps all slots
    there (`smp`, or as `qconf` knows), for several `mpi`."""
    mpi: Literal["openmpi", "mpich", "jsrun", "pals"] | None = None
    """What starts the ranks in a job of Grid Engine, LSF or PBS: `mpirun` of `openmpi` (if not set) or `mpich`, LSF's
    `jsrun`, or the `mpiexec` of `pals` in PBS."""
    gpu_resource: _Name | None = None
    """The name for GPUs at your site; `gpu` in Grid Engine and `nvidia.com/gpu` in Kubernetes if not set."""
    memory_resource: _Name | None = None
    """Grid Engine's name for memory at your site; `mem_free` if not set."""
    image: _Name | None = None
    """Of Kubernetes: the container, with paceline and your task in it."""
    kind: Literal["job", "pytorchjob"] | None = None
    """Of Kubernetes: `job` (if not set), which every cluster has, or `pytorchjob` of Kubeflow."""
    namespace: _Name | None = None
    """Of Kubernetes."""
    volume: str | None = None
    """Of Kubernetes: `CLAIM:/path`, a volume that all pods share, for a run folder below that path."""
    secrets: str | None = None
    """Of Kubernetes: names of secrets, with commas between, whose keys become variables: credentials of a store."""
    service_account: _Name | None = None
    """Of Kubernetes."""
    script: Path | None = None
    """Where to keep the script; `batch/` in the run's folder if not set."""
    dry_run: bool = False
    """Print the script; keep and queue nothing."""


_ONLY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "partition": (("slurm",), "the word of others is --queue"),
    "queue": (("sge", "lsf", "pbs"), "SLURM's word is --partition; Kubernetes has namespaces"),
    "account": (("slurm", "sge", "lsf", "pbs"), "Kubernetes has namespaces"),
    "parallel_environment": (("sge",), "only Grid Engine has them"),
    "mpi": (("sge", "lsf", "pbs"), "SLURM starts the ranks by srun, Kubernetes by `paceline launch`"),
    "gpu_resource": (("sge", "k8s"), "the scheduler knows GPUs by itself"),
    "memory_resource": (("sge",), "the scheduler knows memory by itself"),
    "image": (("k8s",), "it is Kubernetes' container"),
    "kind": (("k8s",), "it is one of Kubernetes' objects"),
    "namespace": (("k8s",), "it is one of Kubernetes"),
    "volume": (("k8s",), "it is one of Kubernetes"),
    "secrets": (("k8s",), "they are Kubernetes'"),
    "service_account": (("k8s",), "it is one of Kubernetes"),
}
"""Options that only some schedulers have, and what to say for another."""
_QUEUES = {
    "slurm": ("sbatch",),
    "sge": ("qsub",),
    "lsf": ("bsub",),
    "pbs": ("qsub",),
    "k8s": ("kubectl", "apply", "-f"),
}


OPTIONS, POSITIONAL = SubmitOptions, ("scheduler",)


class SchedulerMissing(PacelineError):
    """The scheduler's command is not on this machine."""

    program: str
    sentence = "there is no `{program}` here"
    hint = "submit on a machine of the cluster, or add --dry-run to see the script"


class SchedulerRefused(PacelineError):
    """The scheduler did not take the job."""

    words: Sequence[str]
    answer: str
    script: Path
    sentence = "`{command}`: {reason}"
    hint = "the script is kept in {script}"

    @property
    def command(self) -> str:
        return " ".join(self.words)

    @property
    def reason(self) -> str:
        return self.answer.strip()


class RunIsThere(PacelineError):
    """A queued job resumes its run by itself, so the first one needs `--resume auto` where there is a run."""

    folder: Path
    sentence = "{folder} holds a run already"
    hint = "add `--resume auto` to go on with it, or choose another `--out`"


class ResumesFromFile(PacelineError):
    """A job that is put back into the queue would start from the same checkpoint again."""

    sentence = "`--resume CHECKPOINT` in a job that may be put back into the queue"
    hint = "add `--no-requeue`, or use `--init-from` for weights to begin with"


class LostWithPod(PacelineError):
    """A run in the file system of a container."""

    folder: Path
    sentence = "the run folder {folder} would be inside of the pods, and lost with them"
    hint = "give the run an address (`--out s3://bucket/run`), or a volume (`--volume CLAIM:/runs`, `--out /runs/NAME`)"


@dataclass(frozen=True)
class Command:
    """The command that the ranks will run, and the folder of its batch files."""

    words: tuple[str, ...]
    name: str
    folder: Path


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = _load(words[:at], words[at + 1 :])
    command = _prepare(words[at + 1 :], options)
    moment = time.strftime("%Y%m%d-%H%M%S")
    ending = "yaml" if options.scheduler == "k8s" else "sh"
    path = options.script or command.folder / f"{options.scheduler}-{moment}.{ending}"
    text = script(options, command, Path.cwd(), path)
    if options.dry_run:
        emit(text)
        return 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            os.chmod(file.fileno(), 0o600)  # variables of `--env` may be keys
            file.write(text)
    except OSError as error:
        raise CannotWrite(path, error, "choose another `--script FILE`, or another `--out` for the run") from error
    answer = _queue(list(_QUEUES[options.scheduler]), path, from_input=options.scheduler == "lsf")
    tell(f"{answer.strip()}\nscript {path}\n")
    return 0


def script(options: SubmitOptions, command: Command, folder: Path, path: Path) -> str:
    """Return the batch script, which is kept at `path`, or the manifest for Kubernetes."""
    job = BatchJob(
        name=options.job_name or command.name,
        # In a container there is another Python, and `paceline launch` starts the command.
        command=command.words if options.scheduler == "k8s" else (sys.executable, "-m", "paceline", *command.words),
        folder=folder,
        logs=path.parent.absolute(),
        nodes=options.nodes,
        procs_per_node=options.procs_per_node or options.gpus_per_node or 1,
        gpus_per_node=options.gpus_per_node,
        cpus_per_rank=options.cpus_per_rank,
        time_s=seconds(options.time) if options.time is not None else None,
        memory_mib=mebibytes(options.memory) if options.memory is not None else None,
        queue=options.partition or options.queue,
        account=options.account,
        environment=tuple(read_env(options.env)),
        setup=tuple(options.setup.split("\n")) if options.setup else (),
        signal_s=options.signal_s,
        requeue=options.requeue,
        directives=tuple(filter(None, map(str.strip, options.directives.split("\n")))),
    )
    if options.scheduler == "k8s":
        return manifest(job, _pods(options, command), new_secret())
    names = {
        name: getattr(options, name)
        for name in ("gpu_resource", "memory_resource")
        if getattr(options, name) is not None
    }
    if options.scheduler == "sge":
        names["parallel_environment"] = choose_environment(options.parallel_environment, _allocation_rules(), job)
    return batch_script(SCHEDULERS[options.scheduler], job, path.absolute(), Site(options.mpi, **names))


def _pods(options: SubmitOptions, command: Command) -> Pods:
    assert options.image is not None
    claim, _, mounted = (options.volume or "").partition(":")
    return Pods(
        options.image,
        options.kind or "job",
        options.namespace,
        (claim, mounted) if options.volume is not None else None,
        tuple(filter(None, map(str.strip, (options.secrets or "").split(",")))),
        options.gpu_resource or "nvidia.com/gpu",
        options.service_account,
        _STOPPED_CODE if trains(command.words) else 0,
    )


def _allocation_rules() -> dict[str, str] | None:
    """Return the allocation rule of each parallel environment of this Grid Engine; None where it cannot be asked."""
    names = _answer("qconf", "-spl")
    if names is None:
        return None
    rules = {}
    for name in names.split():
        for line in (_answer("qconf", "-sp", name) or "").splitlines():
            if line.startswith("allocation_rule"):
                rules[name] = line.split(maxsplit=1)[1].strip()
    return rules


def _answer(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_QCONF_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _load(option_words: list[str], command: list[str]) -> SubmitOptions:
    wrong = []
    if not command and not asks_for_help(option_words):
        wrong = [Problem("COMMAND", "is missing", f"put it behind two dashes: `{PROG} slurm --nodes 2 -- train ...`")]
    elif command and command[0] not in RANKED:
        wrong = [Problem(command[0], "does not run on ranks", f"commands that do: {', '.join(RANKED)}")]
    try:
        options = load(SubmitOptions, option_words, prog=PROG, positional=POSITIONAL)
    except SettingsInvalid as invalid:
        raise SettingsInvalid([*map(_with_place, invalid.problems), *wrong], PROG) from None
    wrong += _problems(options)
    if wrong:
        raise SettingsInvalid(wrong, PROG)
    return options


def _with_place(problem: Problem) -> Problem:
    """Return a problem with the right hint where an option of the training stands before the two dashes."""
    name = problem.where.lstrip("-")
    if not problem.is_unknown or name == "procs" or resolve(TRAIN_OPTIONS, name.removeprefix("no-")) is None:
        return problem  # `--procs` is `--procs-per-node` here
    option = " ".join(filter(None, [problem.where, problem.given]))
    hint = f"it is one of `paceline train`, and belongs behind the two dashes: `{PROG} ... -- train TASK {option}`"
    return replace(problem, what="is no option of submit", hint=hint)


def _problems(options: SubmitOptions) -> list[Problem]:
    found = []
    for name, (schedulers, hint) in _ONLY.items():
        if options.scheduler not in schedulers and getattr(options, name) is not None:
            found.append(Problem(dashed(name), f"has no meaning for {options.scheduler}", hint))
    if options.mpi is not None and options.scheduler in _ONLY["mpi"][0]:
        starters = SCHEDULERS[options.scheduler].starters
        if options.mpi not in starters:
            what = f"does not start ranks in jobs of {options.scheduler}"
            found.append(Problem("--mpi", what, f"there: {', '.join(starters)}", options.mpi))
    if options.scheduler == "k8s":
        found += _k8s_problems(options)
    for name, read in (("time", seconds), ("memory", mebibytes)):
        text = getattr(options, name)
        try:
            if text is not None:
                read(text)
        except PacelineError as error:
            found.append(Problem(dashed(name), str(error), error.hint))
    if options.time is not None and not found and seconds(options.time) <= options.signal_s:
        found.append(Problem("--time", f"is over before the ranks are warned, {options.signal_s} s before its end"))
    try:
        read_env(options.env)
    except ValueError as error:
        found.append(Problem("--env", str(error), "type `--env \"A=1 B='two words'\"`"))
    return found


def _k8s_problems(options: SubmitOptions) -> list[Problem]:
    found = []
    if options.image is None:
        found.append(Problem("--image", "is missing", "name the container, with paceline and your task in it"))
    if options.volume is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:/\S+", options.volume):
        found.append(Problem("--volume", "is not CLAIM:/path", "type `--volume runs-claim:/runs`", options.volume))
    if options.directives:
        found.append(Problem("--directives", "has no meaning for k8s", "edit the YAML: `--dry-run > job.yaml`"))
    return found


def read_env(text: str) -> list[tuple[str, str]]:
    """Return the pairs of `A=1 B='two words'`."""
    pairs = []
    for word in shlex.split(text):
        match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL | re.ASCII)
        if match is None:
            raise ValueError(f"{word!r} is not NAME=VALUE")
        pairs.append((match[1], match[2]))
    return pairs


def _prepare(words: list[str], options: SubmitOptions) -> Command:
    """Check the command as it will be run, so that mistakes do not wait in the queue; a training gets its folder."""
    if words[0] != "train":
        return Command(tuple(words), words[0], Path())
    settings, task = _read_training(words[1:])
    if settings.benchmark:
        return Command(tuple(words), task, Path())
    folder = run_folder(settings, task=task, moment=time.strftime("%Y%m%d-%H%M%S"), exists=exists)
    bring_run(folder)
    if options.scheduler == "k8s":
        _check_outlives_pod(folder, options)
    if settings.resume == "no" and RunFolder(folder).is_run:
        raise RunIsThere(folder)
    if isinstance(settings.resume, Path) and options.requeue:
        raise ResumesFromFile
    more = _option("--out", shown(folder)) if settings.out is None else []
    if settings.resume == "no":
        more += ["--resume", "auto"]
    if settings.progress == "auto":
        more += ["--progress", "lines"]  # what Open MPI's ranks write to looks like a terminal, but is a log
    return Command((*words, *more), folder.name, folder / BATCH)


def _check_outlives_pod(folder: Path, options: SubmitOptions) -> None:
    """Refuse a run folder inside of a container, which is gone when its pod is."""
    mounted = (options.volume or "").partition(":")[2]
    if address_of(folder) is None and not (mounted and Path(mounted) in (folder, *folder.parents)):
        raise LostWithPod(folder)


def _option(name: str, value: str) -> list[str]:
    """Return an option with its value, attached where it could be taken for an option itself."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def _read_training(words: list[str]) -> tuple[TrainConfig, str]:
    """Return the settings that `paceline train` would read from these words, and a short name of the task."""
    from paceline.train import command as train
    from paceline.train.find_task import find_task

    name, rest = take_task(words)
    if name is None:
        load(TRAIN_OPTIONS, words, prog=train.PROG, positional=OF_TRAIN)  # says what is missing
    assert name is not None
    task_class = find_task(name)
    options = load(train_options(task_class.Settings), [name, *rest], prog=train.PROG, positional=OF_TRAIN)
    if options.procs != 1:
        hint = f"`{PROG} {dashed('procs_per_node')} N` says how many"
        raise SettingsInvalid([Problem("--procs", "the scheduler starts the ranks", hint, str(options.procs))], PROG)
    return task_settings(options, task_class.Settings), re.sub(r"\W+", "-", name.rpartition(":")[2] or name).strip("-")


def _queue(words: list[str], path: Path, *, from_input: bool = False) -> str:
    try:
        # Absolute: a name may begin with a dash.
        command, text = [*words, str(path.absolute())], None
        if from_input:
            command, text = words, path.read_text(encoding="utf-8")
        done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise SchedulerMissing(words[0]) from None
    if done.returncode != 0:
        raise SchedulerRefused([*words, str(path)], done.stderr or done.stdout, path)
    return done.stdout
