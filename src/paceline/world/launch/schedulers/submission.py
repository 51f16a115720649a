"""A job of `paceline submit`: its options, its script, and its place in the queue."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.command_line import VERBATIM, dashed
from paceline.config.problems import Problem
from paceline.config.settings import Positive, Section
from paceline.core.disk import CannotWrite, replacing
from paceline.core.errors import Failed, NotFound, PacelineError
from paceline.world.launch.schedulers.grid_engine import choose_environment
from paceline.world.launch.schedulers.job import NAME, BatchJob, mebibytes, seconds
from paceline.world.launch.schedulers.kubernetes import Pods, manifest
from paceline.world.launch.schedulers.script import SCHEDULERS, Site, batch_script
from paceline.world.rendezvous.secret import new_secret

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


@dataclass(frozen=True)
class Command:
    """The command that the ranks will run, and the folder of its batch files."""

    words: tuple[str, ...]
    name: str
    folder: Path
    trains: bool = True
    """False for a command that no other rank can continue."""


def keep(script: str, path: Path) -> None:
    """Write the script where only its owner can read it: variables of `--env` may be keys."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            os.chmod(file.fileno(), 0o600)
            file.write(script)
    except OSError as error:
        raise CannotWrite(path, error, "choose another `--script FILE`, or another `--out` for the run") from error


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
        _STOPPED_CODE if command.trains else 0,
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


def option_problems(options: SubmitOptions) -> list[Problem]:
    """Return what is wrong between the options."""
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


def queue(scheduler: str, path: Path) -> str:
    """Give a script to a scheduler; return its answer."""
    words, from_input = _QUEUES[scheduler], scheduler == "lsf"
    try:
        # Absolute: a name may begin with a dash.
        command, text = [*words, str(path.absolute())], None
        if from_input:
            command, text = [*words], path.read_text(encoding="utf-8")
        done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise NotFound(
            f"there is no `{words[0]}` here",
            hint="submit on a machine of the cluster, or add --dry-run to see the script",
        ) from None
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()
        raise Failed(f"`{' '.join([*words, str(path)])}`: {reason}", hint=f"the script is kept in {path}")
    return done.stdout
