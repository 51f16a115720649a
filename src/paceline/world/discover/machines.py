"""Services that start one process on each machine and say which machine it is: Vertex, SageMaker, Kubeflow.

The process is a rank by itself, or `paceline launch`, which starts the ranks of its machine. Pure functions of the
environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import PacelineError

Environment = Mapping[str, str]
PORT = 29500
"""Port where ranks meet if the service names none: machines and pods are the job's own."""


@dataclass(frozen=True)
class Machine:
    """One of the machines of a job."""

    cluster: str
    rank: int
    count: int
    meeting: str
    """`host:port` of the first one."""
    why: str
    procs: int | None = None
    """Processes that the job wants on each machine, where it says so."""


class ClusterIncomplete(PacelineError):
    """A service that started several machines, and variables that do not say which one this is."""

    cluster: str
    what: str
    advice: str
    sentence = "{cluster} {what}: the place of this process cannot be known"
    hint = "{advice}"


class ProcessesWanted(PacelineError):
    """A job that is to have several processes on each machine, of which this is the only one."""

    cluster: str
    procs: int
    name: str
    sentence = "{cluster} wants {procs:#process} on each machine ({name}), and this is one that nobody launched"
    hint = "type `paceline launch --nproc-per-node {procs} -- train ...` as the command of the job"


def find_machine(env: Environment) -> Machine | None:
    """Return the machine that a service says this is; None outside of one, or where it has started only one."""
    for find in (_from_vertex, _from_sagemaker, _from_kubeflow, _from_azureml):
        machine = find(env)
        if machine is not None and machine.count > 1:
            return machine
    return None


def _from_vertex(env: Environment) -> Machine | None:
    """Vertex AI: pools 0 and 1 train, pool 2 (reduction servers) and pool 3 (evaluators) do not."""
    if not env.get("CLUSTER_SPEC"):
        return None
    name, advice = (
        "Vertex AI",
        "CLUSTER_SPEC is JSON with `cluster` and `task`, and Vertex AI sets it; unset it elsewhere",
    )
    try:
        spec = json.loads(env["CLUSTER_SPEC"])
        pools: dict[str, Any] = spec["cluster"]
        hosts = [host for pool in ("workerpool0", "workerpool1") for host in pools.get(pool, [])]
        pool, index = str(spec["task"]["type"]), int(spec["task"]["index"])
        rank = hosts.index(pools[pool][index]) if pool in ("workerpool0", "workerpool1") else -1
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ClusterIncomplete(name, f"set a CLUSTER_SPEC that cannot be read ({error!r})", advice) from None
    if rank < 0:
        what = f"started this process in {pool}, whose machines do not train"
        raise ClusterIncomplete(name, what, "train in worker pools 0 and 1, and leave the others out")
    if not hosts:
        return None
    # The port in the specification is for other frameworks' servers, and free for us.
    meeting = _meeting(env, str(hosts[0]).rpartition(":")[0] or str(hosts[0]))
    return Machine("vertex", rank, len(hosts), meeting, f"CLUSTER_SPEC: {pool}, number {index}")


def _from_sagemaker(env: Environment) -> Machine | None:
    if not env.get("SM_HOSTS"):
        return None
    advice = "set SM_HOSTS and SM_CURRENT_HOST as the SageMaker training toolkit does, or unset both"
    try:
        hosts = [str(host) for host in json.loads(env["SM_HOSTS"])]
    except (ValueError, TypeError):
        what = f"set SM_HOSTS={env['SM_HOSTS']}, which is no list"
        raise ClusterIncomplete("SageMaker", what, advice) from None
    if len(hosts) < 2:
        return None
    current = env.get("SM_CURRENT_HOST")
    if current not in hosts:
        what = f"has {len(hosts)} hosts, and SM_CURRENT_HOST is {'not one of them' if current else 'not set'}"
        raise ClusterIncomplete("SageMaker", what, advice)
    hosts = sorted(hosts, key=_by_number)  # in one order on all hosts
    rank = hosts.index(str(current))
    return Machine("sagemaker", rank, len(hosts), _meeting(env, hosts[0]), f"SM_CURRENT_HOST={current} of {len(hosts)}")


def _by_number(host: str) -> tuple[str, int]:
    """`algo-2` before `algo-10`."""
    head, _, number = host.rpartition("-")
    return (head, int(number)) if number.isdecimal() else (host, -1)


def _from_kubeflow(env: Environment) -> Machine | None:
    """Kubeflow's PyTorchJob (RANK and WORLD_SIZE count pods) and TrainJob (only variables for torchrun, PET_...)."""
    if "PET_NNODES" in env or "PET_NODE_RANK" in env:
        return _from_torchrun_variables(env)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "KUBERNETES_SERVICE_HOST" not in env or not all(env.get(name) for name in names):
        return None
    rank, count = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    return Machine("kubeflow", rank, count, _meeting(env, env["MASTER_ADDR"]), f"pod RANK={rank} of WORLD_SIZE={count}")


def _from_torchrun_variables(env: Environment) -> Machine | None:
    nodes = env.get("PET_NNODES", "1").rpartition(":")[2]  # `2:4` is what an elastic job has at most
    wanted = env.get("PET_NPROC_PER_NODE", "")
    procs = int(wanted) if wanted.isdecimal() else None
    if nodes == "1":
        if (procs or 1) > 1:
            raise ProcessesWanted("Kubeflow", procs or 1, "PET_NPROC_PER_NODE")
        return None
    host = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    missing = [] if env.get("PET_NODE_RANK") else ["PET_NODE_RANK"]
    missing += [] if host else ["PET_MASTER_ADDR"]
    if missing:
        what = f"set {', '.join(name for name in env if name.startswith('PET_'))}, but not {', '.join(missing)}"
        advice = "set them as Kubeflow's trainer does, or start with torchrun"
        raise ClusterIncomplete("Kubeflow", what, advice)
    port = env.get("PET_MASTER_PORT") or env.get("MASTER_PORT") or str(PORT)
    rank, count = _number(env, "PET_NODE_RANK"), _number({"PET_NNODES": nodes}, "PET_NNODES")
    why = f"PET_NODE_RANK={rank} of PET_NNODES={nodes}"
    return Machine("kubeflow", rank, count, f"{host}:{port}", why, procs)


def _from_azureml(env: Environment) -> Machine | None:
    """AzureML says the place of a process only where the job has a `distribution`; without one, nobody knows it."""
    if "AZUREML_RUN_ID" not in env or "RANK" in env:
        return None
    hosts = [host for host in env.get("AZ_BATCH_HOST_LIST", "").replace(";", ",").split(",") if host]
    if len(hosts) > 1:
        what = f"has {len(hosts)} machines, and RANK is not set"
        advice = "give the job a `distribution` of type PyTorch, with `process_count_per_instance`"
        raise ClusterIncomplete("AzureML", what, advice)
    return None


def check_tensorflow(env: Environment) -> None:
    """Refuse a job of several machines that only TensorFlow's variable tells of: each would train for itself."""
    try:
        spec = json.loads(env.get("TF_CONFIG", "{}"))
        hosts = [host for kind in ("chief", "master", "worker") for host in spec.get("cluster", {}).get(kind, [])]
    except (ValueError, TypeError, AttributeError):  # not ours to judge
        return
    if len(hosts) > 1:
        what = f"started {len(hosts)} machines by TF_CONFIG, and RANK is not set"
        advice = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, use `paceline launch --nnodes`, or unset TF_CONFIG"
        raise ClusterIncomplete("The cluster", what, advice)


def _meeting(env: Environment, host: str) -> str:
    return f"{env.get('MASTER_ADDR') or host}:{env.get('MASTER_PORT') or PORT}"


def _number(env: Environment, name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ClusterIncomplete("Kubeflow", f"set {name}={env[name]!r}, which is no number", "correct it") from None
