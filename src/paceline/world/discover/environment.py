"""Rank of this process, from the variables that launchers set. No other module reads them.

Everything here is a pure function of the variables it is given (and of the file that Grid Engine names in one of them):
every launcher is tested with captured ones. Launchers are asked in order; torchrun's variables win over a scheduler's,
because torchrun may run inside its job. A scheduler by itself starts one process: Grid Engine's ranks come from mpirun.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.core.errors import NotFound, PacelineError
from paceline.world.discover.allocation import ReadText, find_allocation, read_text
from paceline.world.discover.machines import Machine, ProcessesWanted, check_tensorflow, find_machine
from paceline.world.discover.plugin_launchers import from_plugins

Environment = Mapping[str, str]

# Run id of our own launcher, by which ranks tell it from torchrun.
OWN_RUN_ID = "paceline-procs"
# Below the ports that Linux hands out by itself (from 32768), so that a derived port is rarely taken.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
# Step numbers from here on are SLURM's own (batch script, interactive shell, extern), not `srun` steps.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_STARTERS = {"slurm": "srun", "lsf": "jsrun or mpirun", "pbs": "mpiexec"}
"""Command that starts ranks in an allocation; elsewhere `mpirun`."""


@dataclass(frozen=True)
class World:
    """The place of this process among all processes of the job."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    node_rank: int
    nodes: int
    launcher: str
    meeting: str | None
    """Rendezvous of the ranks, as `host:port`; None for a single process."""
    why: tuple[str, ...] = ()
    """Reasons for this result, one sentence each."""
    attempt: int = 0
    """Number of restarts by an elastic launcher."""
    launcher_hosts_store: bool = False
    """True if the launcher serves the store at `meeting`; otherwise rank 0 does."""
    is_relayed: bool = False
    """True if an mpirun passes on the output of this process, even if that looks like a terminal."""

    @property
    def global_rank(self) -> int:
        return self.rank


class EnvironmentIncomplete(PacelineError):
    """A launcher's variables are there only in part."""

    present: list[str]
    missing: list[str]
    sentence = "{all_present} set, but not {all_missing}: the place of this process cannot be known"
    hint = "set {all_missing} too, or unset {all_present} to run as one process"

    @property
    def all_present(self) -> str:
        return _and(self.present)

    @property
    def all_missing(self) -> str:
        return _and(self.missing)


class EnvironmentContradicts(PacelineError):
    """Variables that cannot all be true."""

    names: list[str]
    why: str
    sentence = "{variables}: {why}"
    hint = "start with one launcher (torchrun, mpirun, srun or --procs N), or correct these variables"

    @property
    def variables(self) -> str:
        return _and(self.names)


class MeetingPointUnknown(PacelineError):
    """Several nodes, and no variable names the machine of rank 0."""

    launcher: str
    nodes: int
    missing: list[str]
    sentence = "{launcher} started ranks on {nodes:#node}, and {variables} is not set: no meeting point"
    hint = "export MASTER_ADDR=<name of rank 0's machine> and MASTER_PORT=<a free port there> for all ranks"

    @property
    def variables(self) -> str:
        return _and(self.missing)


def discover(env: Environment, read: ReadText = read_text) -> World:
    """Return the world that the environment describes; a single process if it names no launcher."""
    finders = (
        _from_torch,
        _from_plugin,
        _from_jsm,
        _from_pals,
        _from_open_mpi,
        _from_mpich,
        _from_slurm,
        _from_machines,
    )
    for find in finders:
        world = find(env, read)
        if world is not None:
            # `srun` needs no word here: it gives its tasks pipes, and with `--pty` the user's own terminal.
            return replace(world, is_relayed="OMPI_COMM_WORLD_RANK" in env or "MPI_LOCALRANKID" in env)
    halves = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    if halves:
        raise EnvironmentIncomplete(halves, [name for name in ("RANK", "WORLD_SIZE") if name not in env])
    check_tensorflow(env)
    why = ["no launcher's variables are set: one process"]
    allocation = find_allocation(env, read)
    if allocation is not None and (allocation.slots or 1) > 1:
        starter = _STARTERS.get(allocation.scheduler, "mpirun")
        why.append(
            f"{allocation.scheduler} job {allocation.job} has room for {allocation.slots}: {starter} starts them"
        )
    return World(0, 0, 1, 1, 0, 1, "plain", None, tuple(why))


def _from_torch(env: Environment, read: ReadText) -> World | None:
    """torchrun, torch.distributed.launch, our own `--procs`, or the same variables set by hand."""
    if "RANK" not in env or "WORLD_SIZE" not in env or _counts_machines(env):
        return None
    elastic = "TORCHELASTIC_RUN_ID" in env
    launcher = _named(env) if not elastic else "procs" if env["TORCHELASTIC_RUN_ID"] == OWN_RUN_ID else "torchrun"
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if size == 1 or ("LOCAL_RANK" not in env and is_loopback(env.get("MASTER_ADDR", ""))):
        local_rank, local_size = _integer(env, "LOCAL_RANK", rank), _integer(env, "LOCAL_WORLD_SIZE", size)
    else:
        _require_local_place(env)
        local_rank, local_size = _integer(env, "LOCAL_RANK"), _integer(env, "LOCAL_WORLD_SIZE")
    nodes = _integer(env, "GROUP_WORLD_SIZE", -(-size // max(local_size, 1)))
    setter = "paceline" if launcher == "procs" else launcher
    why = [f"RANK={rank} of WORLD_SIZE={size}" + (f", set by {setter}" if elastic else "")]
    if not elastic:
        _check_outer(env, rank, size)
    others = [name for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if name in env]
    if others:
        why.append(f"{_and(others)} not used: RANK and WORLD_SIZE win")
    return _checked(
        World(
            rank=rank,
            local_rank=local_rank,
            size=size,
            local_size=local_size,
            node_rank=_integer(env, "GROUP_RANK", rank // max(local_size, 1)),
            nodes=nodes,
            launcher=launcher,
            meeting=_meeting(env, read, launcher, size, nodes, job=None, why=why),
            why=tuple(why),
            attempt=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
            launcher_hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        ),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    )


def _from_plugin(env: Environment, read: ReadText) -> World | None:
    """A launcher that an installed plugin knows; it may start its ranks through an mpirun or a scheduler."""
    world = from_plugins(env)
    return None if world is None else _checked(world, ("rank", "size", "local_rank", "local_size"))


def _require_local_place(env: Environment) -> None:
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in env]
    if missing == ["LOCAL_WORLD_SIZE"] and "AZUREML_RUN_ID" in env:
        raise NotFound(
            "RANK, WORLD_SIZE and LOCAL_RANK are set, but not LOCAL_WORLD_SIZE: the ranks per machine are unknown",
            hint="set LOCAL_WORLD_SIZE to the job's `process_count_per_instance`, under its `environment_variables`",
        )
    if missing:
        raise EnvironmentIncomplete(["RANK", "WORLD_SIZE"], missing)


def _counts_machines(env: Environment) -> bool:
    """Return True if RANK and WORLD_SIZE, where a service has set them, count machines."""
    return "LOCAL_RANK" not in env and "TORCHELASTIC_RUN_ID" not in env and find_machine(env) is not None


def _named(env: Environment) -> str:
    """Return who has set RANK and WORLD_SIZE, where that can be known."""
    if "RAY_JOB_ID" in env:
        return "ray"
    return "azureml" if "AZUREML_RUN_ID" in env else "environment"


def _from_jsm(env: Environment, read: ReadText) -> World | None:
    """`jsrun`, the job step manager of LSF on IBM's machines. It sets Open MPI's variables, too."""
    names = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
    if not any(name in env for name in names):
        return None
    return _from_mpi(env, read, "jsm", names, ("LSB_JOBID", "PMIX_NAMESPACE", "JSM_JSRUN_ID"))


def _from_pals(env: Environment, read: ReadText) -> World | None:
    """`mpiexec` of PALS, in PBS jobs on Cray's machines. Only PMI_SIZE tells the number of ranks, if it is set."""
    if "PALS_RANKID" not in env:
        return None
    size_name = "PMI_SIZE" if "PMI_SIZE" in env else "WORLD_SIZE"
    if size_name not in env:
        raise NotFound(
            "PALS_RANKID is set, but not PMI_SIZE or WORLD_SIZE: the number of ranks is unknown",
            hint="export WORLD_SIZE=<the number behind `mpiexec -n`> in the job's script, before mpiexec",
        )
    names = ("PALS_RANKID", size_name, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
    world = _from_mpi(env, read, "pals", names, ("PBS_JOBID", "PALS_APID"))
    return replace(world, node_rank=_integer(env, "PALS_NODEID", world.node_rank))


def _from_machines(env: Environment, read: ReadText) -> World | None:
    """One process per machine, as Vertex, SageMaker and Kubeflow start it."""
    machine = find_machine(env)
    if machine is None:
        return None
    if (machine.procs or 1) > 1:
        raise ProcessesWanted("Kubeflow", machine.procs or 1, "PET_NPROC_PER_NODE")
    return world_of(machine, env)


def world_of(machine: Machine, env: Environment) -> World:
    """Return the world of a job with one process on each machine."""
    why = [machine.why, "one process on this machine: `paceline launch` starts one per GPU"]
    world = World(machine.rank, 0, machine.count, 1, machine.rank, machine.count, machine.cluster, machine.meeting)
    if not 0 <= machine.rank < machine.count:
        raise EnvironmentContradicts(["RANK", "WORLD_SIZE"], f"machine {machine.rank} of {machine.count}")
    if machine.cluster in ("vertex", "sagemaker") and "RANK" in env and "WORLD_SIZE" in env:
        _check_same_place(env, machine)
    return replace(world, why=tuple(why))


def _check_same_place(env: Environment, machine: Machine) -> None:
    stated = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if stated != (machine.rank, machine.count):
        raise EnvironmentContradicts(
            ["RANK", "WORLD_SIZE"],
            f"rank {stated[0]} of {stated[1]}, and {machine.cluster} says {machine.rank} of {machine.count}",
        )


def _from_open_mpi(env: Environment, read: ReadText) -> World | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if names[0] not in env:
        return None
    _same_place(env, *names[:2])
    return _from_mpi(
        env, read, "openmpi", names, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    )


def _from_mpich(env: Environment, read: ReadText) -> World | None:
    """MPICH, Intel MPI and others that start through Hydra. `srun` may set PMI_RANK too, but no MPI_LOCALRANKID."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if names[0] not in env or ("MPI_LOCALRANKID" not in env and _in_srun_step(env)):
        return None
    # Hydra gives no job number; two jobs of one user, size and folder then need MASTER_PORT, and are told so.
    return _from_mpi(env, read, "mpich", names, ("PMI_JOBID", "USER", "PWD", "PMI_SIZE"))


def _from_mpi(
    env: Environment, read: ReadText, launcher: str, names: tuple[str, str, str, str], job_names: tuple[str, ...]
) -> World:
    missing = [name for name in names if name not in env]
    if missing:
        raise EnvironmentIncomplete([name for name in names if name in env], missing)
    rank, size, local_rank, local_size = (_integer(env, name) for name in names)
    nodes = -(-size // max(local_size, 1))
    why = [f"{names[0]}={rank} of {names[1]}={size}"]
    job = "|".join(env.get(name, "") for name in job_names)
    world = World(
        rank=rank,
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        # Exact where ranks are dealt node by node, the default of both; mpirun has no variable that says it.
        node_rank=rank // max(local_size, 1),
        nodes=nodes,
        launcher=launcher,
        meeting=_meeting(env, read, launcher, size, nodes, job, why),
        why=tuple(why),
    )
    return _checked(world, names, env)


def _from_slurm(env: Environment, read: ReadText) -> World | None:
    """Return the world of a task of an `srun` step. A batch script has some of these variables but is one process."""
    if not _in_srun_step(env) or "SLURM_PROCID" not in env:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    tasks_name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in env else "SLURM_TASKS_PER_NODE"
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_NODEID", nodes_name, tasks_name)
    missing = [name for name in names if name not in env]
    if missing:
        raise EnvironmentIncomplete([name for name in names if name in env], missing)
    rank, size, nodes = _integer(env, "SLURM_PROCID"), _integer(env, size_name), _integer(env, nodes_name)
    node_rank = _integer(env, "SLURM_NODEID")
    tasks_per_node = expand_tasks_per_node(env[tasks_name])
    if node_rank >= len(tasks_per_node) or sum(tasks_per_node) != size:
        raise EnvironmentContradicts(
            [size_name, "SLURM_NODEID", tasks_name], f"{size} tasks, node {node_rank}, but {env[tasks_name]!r} per node"
        )
    why = [f"SLURM_PROCID={rank} of {size_name}={size}, in an srun step"]
    job = f"slurm|{env.get('SLURM_JOB_ID', '')}|{env['SLURM_STEP_ID']}"
    world = World(
        rank=rank,
        local_rank=_integer(env, "SLURM_LOCALID"),
        size=size,
        local_size=tasks_per_node[node_rank],
        node_rank=node_rank,
        nodes=nodes,
        launcher="slurm",
        meeting=_meeting(env, read, "slurm", size, nodes, job, why),
        why=tuple(why),
    )
    return _checked(world, ("SLURM_PROCID", size_name, "SLURM_LOCALID", tasks_name), env)


def expand_tasks_per_node(text: str) -> list[int]:
    """SLURM's short form of tasks per node, written out: `2(x3),1` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise EnvironmentContradicts(["SLURM_TASKS_PER_NODE"], f"{text!r} is not of the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _in_srun_step(env: Environment) -> bool:
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _meeting(
    env: Environment, read: ReadText, launcher: str, size: int, nodes: int, job: str | None, why: list[str]
) -> str | None:
    """Return `host:port` from MASTER_ADDR and MASTER_PORT; missing parts are derived from the job's number."""
    if size == 1:
        return None
    host = env.get("MASTER_ADDR") or None
    port = _integer(env, "MASTER_PORT") if env.get("MASTER_PORT") else None
    if host is None and job is not None:
        host = "127.0.0.1" if nodes == 1 else _first_host(env, read, why)
    if port is None and job is not None:
        port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
        why.append(f"port {port} derived from the job, as MASTER_PORT is not set")
    if host is None or port is None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        raise MeetingPointUnknown(launcher, nodes, missing)
    if not 0 < port < 65536:
        raise EnvironmentContradicts(["MASTER_PORT"], f"{port} is not a port number")
    return f"{host}:{port}"


def _first_host(env: Environment, read: ReadText, why: list[str]) -> str | None:
    """Return the machine of rank 0: the first that the scheduler names, else the one where Open MPI's mpirun runs."""
    allocation = find_allocation(env, read)
    if allocation is not None and allocation.hosts:
        why.append(f"ranks meet at {allocation.hosts[0]}, the first host of the {allocation.scheduler} job")
        return allocation.hosts[0]
    # AzureML: `10.0.0.4:6105`, or the name alone.
    master = env.get("AZ_BATCH_MASTER_NODE") or env.get("AZ_BATCHAI_MPI_MASTER_NODE")
    if master:
        why.append(f"ranks meet at {master.partition(':')[0]}, the first machine of the AzureML job")
        return master.partition(":")[0]
    # `4711.0;tcp://10.0.0.1,192.168.1.1:59197;tcp6://...`: all addresses of mpirun's machine.
    match = re.search(r"tcp://([\d.,]+):\d+", env.get("OMPI_MCA_orte_hnp_uri", ""))
    addresses = [address for address in match[1].split(",") if not is_loopback(address)] if match else []
    if not addresses:
        return None
    why.append(f"ranks meet at {addresses[0]}, where mpirun runs: export MASTER_ADDR if rank 0 is elsewhere")
    return addresses[0]


def _check_outer(env: Environment, rank: int, size: int) -> None:
    """RANK and WORLD_SIZE set by hand inside a launcher's process: the same place, or an even share of it."""
    pairs = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
    if _in_srun_step(env):
        pairs.append(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"))
    for rank_name, size_name in pairs:
        if rank_name not in env or size_name not in env:
            continue
        outer_rank, outer_size = _integer(env, rank_name), _integer(env, size_name)
        share = size // max(outer_size, 1)
        if share == 0 or share * outer_size != size or rank // share != outer_rank:
            raise EnvironmentContradicts(
                ["RANK", "WORLD_SIZE", rank_name, size_name],
                f"rank {rank} of {size}, and rank {outer_rank} of {outer_size}",
            )


def _same_place(env: Environment, rank_name: str, size_name: str) -> None:
    """Open MPI's place beside that of MPICH: one mpirun inside another's process knows only itself."""
    theirs = ("PMI_RANK", "PMI_SIZE")
    if "MPI_LOCALRANKID" not in env or not all(name in env for name in (*theirs, rank_name, size_name)):
        return
    if [env[rank_name], env[size_name]] != [env[name] for name in theirs]:
        raise EnvironmentContradicts(
            [rank_name, size_name, *theirs],
            (f"rank {env[rank_name]} of {env[size_name]}, and rank {env['PMI_RANK']} of {env['PMI_SIZE']}"),
        )


def _checked(world: World, names: tuple[str, ...], env: Environment | None = None) -> World:
    """Refuse numbers that contradict each other, also a WORLD_SIZE exported beside a scheduler's count."""
    if not 0 <= world.rank < world.size:
        raise EnvironmentContradicts([names[0], names[1]], f"rank {world.rank} of {world.size}")
    if not 0 <= world.local_rank < world.local_size or world.local_size > world.size:
        raise EnvironmentContradicts(
            list(names[1:]),
            f"rank {world.local_rank} of {world.local_size} on this node, {world.size} in all",
        )
    if env is not None and "WORLD_SIZE" in env and _integer(env, "WORLD_SIZE") != world.size:
        raise EnvironmentContradicts(["WORLD_SIZE", names[1]], f"{env['WORLD_SIZE']} and {world.size}")
    return world


def _integer(env: Environment, name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise EnvironmentContradicts([name], f"{env[name]!r} is not a whole number") from None


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _and(names: list[str]) -> str:
    return ", ".join(names)
