"""`paceline launch --nproc-per-node N -- train ...`: any command as several ranks, in torchrun's words.

On several machines the same command is typed on each, with its own `--node-rank`; started once per machine by srun or
mpirun, it finds that and the meeting point by itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paceline.cli.main import COMMANDS
from paceline.config.command_line import dashed
from paceline.config.load import load
from paceline.config.problems import Problem, SettingsInvalid
from paceline.config.settings import Positive, PositiveFloat, Section
from paceline.config.train_command import failure_problems
from paceline.world.discover.environment import MeetingPointUnknown, World, discover, world_of
from paceline.world.discover.machines import find_machine

if TYPE_CHECKING:
    from paceline.world.launch.agents import Node

PROG = "paceline launch"
RANKED = ("train", "eval", "infer", "doctor")
# The launcher itself is no rank, whatever started it.
SERVICES = ("vertex", "sagemaker", "kubeflow")
"""Launchers that start one process on each machine, and say how many machines there are."""
ALONE = World(0, 0, 1, 1, 0, 1, "plain", None)


class LaunchOptions(Section):
    """Start a paceline command as several ranks: `paceline launch --nproc-per-node 8 -- train TASK ...`."""

    nproc_per_node: Positive | Literal["auto"] = "auto"
    """Ranks on this machine; `auto` is one per GPU, one without."""
    nnodes: Positive | Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")] = 1
    """Machines; the same command is started on each of them. `2:4` begins when two are there, and two more may join
    later."""
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """Which of the machines this one is, from 0; found by itself under srun or mpirun with one process per machine."""
    master_addr: str | None = None
    """Name or address of machine 0, as the others reach it."""
    master_port: Annotated[int, Field(gt=0, lt=65536)] = 29500
    """A free port there, where the launchers and the ranks meet."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds to wait for the launchers of the other machines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks compute on, as far as `auto` and the check against the number of GPUs need to know."""
    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How many processes are started for dead ones, in all; with `--on-failure restart`, and for other commands than
    `train`, how often all ranks are started again."""
    on_failure: Literal["continue", "restart", "stop"] = "continue"
    """When a rank of `train` dies: `continue` lets the others go on, and those that are started for the dead join them;
    `restart` ends all and starts all again from the newest checkpoint, as often as `max_restarts` says; `stop` ends
    all. Other commands start again from their beginning."""
    min_ranks: Annotated[int, Field(gt=0)] = 1
    """With fewer ranks left than these, and no replacement on its way, the run is saved and ends."""
    grace_s: PositiveFloat = 60.0
    """Seconds that the ranks have to leave after SIGTERM or Ctrl-C; those that are saving get longer."""
    stopped_code: Annotated[int, Field(ge=0, le=255)] = 0
    """Exit code where a run was asked to stop before its end, and has saved. A scheduler that takes 0 for done, such as
    Kubernetes, starts it again for another."""
    ray: bool = False
    """On the machines of a Ray cluster, of which `nnodes` are taken; typed once, anywhere in the cluster."""
    ray_address: str | None = None
    """Address of the Ray cluster; if not set that of RAY_ADDRESS, or the one that runs here, or one is started here."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """With `--ray`: GPUs to ask for on each machine, one per rank as a rule."""
    cpus_per_rank: Positive = 1
    """With `--ray`: CPU cores to ask for, for each rank."""


OPTIONS, POSITIONAL = LaunchOptions, ()


def run(argv: Sequence[str]) -> int:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    option_words, command = words[:at], words[at + 1 :]
    around = _around(os.environ)
    options = _load(option_words, command, around)
    from paceline.world.failure.together import fail_together

    if options.ray:
        return fail_together(ALONE, lambda: _launch_on_ray(options, command))
    return fail_together(ALONE, lambda: _launch(options, [sys.executable, "-m", "paceline", *command], around))


def _launch_on_ray(options: LaunchOptions, command: Sequence[str]) -> int:
    from paceline.core.extras import CommandNeedsPackages
    from paceline.world.launch.ray_cluster import RayJob, launch_on_ray

    if importlib.util.find_spec("ray") is None:
        raise CommandNeedsPackages("launch --ray", "ray", "ray")
    handed_on = ("device", "max_restarts", "on_failure", "min_ranks", "grace_s", "stopped_code", "start_timeout_s")
    words = [
        word
        for name in handed_on
        if name in options.model_fields_set
        for word in (dashed(name), str(getattr(options, name)))
    ]
    procs = options.nproc_per_node if options.nproc_per_node != "auto" else max(1, options.gpus_per_node)
    job = RayJob(
        nodes=nodes_of(options)[0],
        procs_per_node=procs,
        gpus_per_node=options.gpus_per_node,
        cpus_per_rank=options.cpus_per_rank,
        options=tuple(words),
        command=tuple(command),
        address=options.ray_address,
        start_timeout_s=options.start_timeout_s,
        grace_s=options.grace_s,
    )
    return launch_on_ray(job, lambda text: (sys.stdout.write(text), sys.stdout.flush()))


def _launch(options: LaunchOptions, command: Sequence[str], around: World) -> int:
    from paceline.world.launch.decisions import Survival
    from paceline.world.launch.launcher import launch
    from paceline.world.launch.survivors import launch_surviving

    node, procs = place(options, around), options.nproc_per_node
    if options.on_failure == "continue" and trains(command):
        rules = Survival(options.max_restarts, options.min_ranks, nodes_of(options)[1])
        return launch_surviving(
            procs,
            command,
            rules=rules,
            device=options.device,
            grace_s=options.grace_s,
            stopped_code=options.stopped_code,
            node=node,
        )
    return launch(
        procs,
        command,
        device=options.device,
        max_restarts=options.max_restarts,
        grace_s=options.grace_s,
        node=node,
    )


def trains(command: Sequence[str]) -> bool:
    """Return True for a command that trains: nobody can go on with what another rank has evaluated or measured."""
    modes = {word.partition("=")[2] or after for word, after in pairwise([*command, ""]) if word.startswith("--mode")}
    return "train" in command and "--benchmark" not in command and not modes & {"eval", "infer"}


def nodes_of(options: LaunchOptions) -> tuple[int, int]:
    """Return how many machines the job begins with, and how many it may have."""
    least, _, most = str(options.nnodes).partition(":")
    return int(least), int(most or least)


def place(options: LaunchOptions, around: World) -> Node:
    """Return the place of this machine: as typed, or from the srun or mpirun that started a launcher per machine."""
    from paceline.world.launch.agents import Node

    least, most = nodes_of(options)
    if most == 1:
        return Node(timeout_s=options.start_timeout_s)
    rank, meeting = options.node_rank, f"{options.master_addr}:{options.master_port}"
    if _is_one_per_machine(options, around):
        rank = around.rank if rank is None else rank
        meeting = str(around.meeting) if options.master_addr is None else meeting
    assert rank is not None
    return Node(rank, least, meeting, options.start_timeout_s)


def _around(env: Mapping[str, str]) -> World:
    """Return what started this launcher; without a meeting point from it, the options must name one."""
    machine = find_machine(env)
    if machine is not None and "LOCAL_RANK" not in env:
        return world_of(machine, env)
    try:
        # The options say how many machines there are; TensorFlow's variable alone is none of a launcher of ours.
        return discover({name: value for name, value in env.items() if name != "TF_CONFIG"})
    except MeetingPointUnknown:
        return ALONE


def _is_one_per_machine(options: LaunchOptions, around: World) -> bool:
    return around.size == nodes_of(options)[1] == around.nodes


def _load(option_words: list[str], command: list[str], around: World) -> LaunchOptions:
    wrong = []
    if not command:
        wrong = [
            Problem("COMMAND", "is missing", f"put it behind two dashes: `{PROG} --nproc-per-node 2 -- train ...`")
        ]
    elif command[0] not in RANKED:
        what = "does not run on ranks" if command[0] in COMMANDS else "is no command"
        advice = f"commands that do: {', '.join(RANKED)}"
        if command[0] not in COMMANDS:
            advice += "; a script of your own that calls paceline: `torchrun --nproc-per-node 2 script.py`"
        wrong = [Problem(command[0], what, advice)]
    try:
        options = load(LaunchOptions, option_words, prog=PROG)
    except SettingsInvalid as invalid:
        raise SettingsInvalid([*invalid.problems, *wrong], PROG) from None
    if around.launcher in SERVICES and "nnodes" not in options.model_fields_set:
        options = options.model_copy(update={"nnodes": around.nodes})  # each machine for itself is what nobody wants
    wrong += _problems(options, around)
    if options.stopped_code and command and not (options.on_failure == "continue" and trains(command)):
        what = "is for `train` with `--on-failure continue`, whose ranks say that they were stopped"
        wrong.append(Problem("--stopped-code", what, "leave it out", str(options.stopped_code)))
    if wrong:
        raise SettingsInvalid(wrong, PROG)
    return options


def _ray_problems(options: LaunchOptions) -> list[Problem]:
    given = options.model_fields_set
    if not options.ray:
        only = [name for name in ("ray_address", "gpus_per_node", "cpus_per_rank") if name in given]
        return [Problem(dashed(name), "is for machines of a Ray cluster", "add `--ray`") for name in only]
    wrong = [name for name in ("node_rank", "master_addr", "master_port") if name in given]
    problems = [Problem(dashed(name), "is found by itself with `--ray`", "leave it out") for name in wrong]
    if ":" in str(options.nnodes):
        problems.append(Problem("--nnodes", "is one number with `--ray`", "", str(options.nnodes)))
    return problems


def _problems(options: LaunchOptions, around: World) -> list[Problem]:
    """Return what is wrong between the options, and between them and the environment."""
    rank, (least, nodes) = options.node_rank, nodes_of(options)
    wrong = failure_problems(options) + _ray_problems(options)
    if options.ray and not wrong:
        return []  # which machine is which, Ray says
    if least > nodes:
        wrong.append(Problem("--nnodes", "the first number is larger than the second", "", str(options.nnodes)))
    elif least < nodes and options.on_failure != "continue":
        hint = f"leave out `--on-failure {options.on_failure}`, or give one number"
        wrong.append(Problem("--nnodes", "machines can join only where the others go on", hint, str(options.nnodes)))
    if wrong:
        return wrong
    if rank is not None and rank >= nodes:
        return [Problem("--node-rank", f"--nnodes is {nodes}, so the last one is {nodes - 1}", "", str(rank))]
    if nodes == 1 or _is_one_per_machine(options, around):
        return []
    problems = []
    if rank is None:
        hint = "count the machines from 0; the same command is typed on each, with its own number"
        problems.append(Problem("--node-rank", "is missing", hint))
    if options.master_addr is None:
        problems.append(Problem("--master-addr", "is missing", "name machine 0, as the others reach it"))
    return problems
