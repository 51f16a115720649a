"""Managed clusters and further schedulers, from environments as their documentation and their users show them."""

from __future__ import annotations

import json

import pytest

from paceline.cli.launch import _around, _load
from paceline.core.errors import NotFound, PacelineError
from paceline.world.discover.allocation import Allocation, find_allocation
from paceline.world.discover.environment import (
    EnvironmentContradicts,
    EnvironmentIncomplete,
    World,
    discover,
)
from paceline.world.discover.machines import ClusterIncomplete, ProcessesWanted

# Type PyTorch, two instances with four processes each: the second process of the second one.
AZUREML = {
    "AZUREML_RUN_ID": "run-123",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
}
# Type MPI: Open MPI's variables, and where the first machine is.
AZUREML_MPI = {
    "AZUREML_RUN_ID": "run-123",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
# The third of three pods; the operator also sets what torchrun would read.
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
TRAINJOB = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {
                "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
                "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
                "workerpool2": ["cmle-training-workerpool2-ab-0:2222"],
            },
            "task": {"type": "workerpool1", "index": 1},
            "environment": "cloud",
        }
    )
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2","algo-10"]',
    "SM_CURRENT_HOST": "algo-10",
    "SM_NUM_GPUS": "0",
}
# `jsrun -n 4 -r 2`, which sets Open MPI's variables, too.
JSRUN = {
    "LSB_JOBID": "1234",
    "LSB_MCPU_HOSTS": "batch1 1 node1 42 node2 42",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PBS_JOBID": "77.pbs",
    "PBS_NODEFILE": "/var/spool/pbs/aux/77.pbs",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
PBS_OPEN_MPI = {
    "PBS_JOBID": "77.pbs",
    "PBS_NODEFILE": "/var/spool/pbs/aux/77.pbs",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
# Ray Train 2.x, captured from a worker of TorchTrainer.
RAY = {
    "RAY_JOB_ID": "01000000",
    "MASTER_ADDR": "192.0.2.2",
    "MASTER_PORT": "42465",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "0",
    "RANK": "1",
    "WORLD_SIZE": "2",
}


def nodefile(path: str) -> str | None:
    return "node1\nnode1\nnode2\nnode2\n" if path == "/var/spool/pbs/aux/77.pbs" else None


def where(world: World) -> tuple[int, ...]:
    return world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.nodes


@pytest.mark.parametrize(
    ("env", "launcher", "place", "meeting"),
    [
        (AZUREML | {"LOCAL_WORLD_SIZE": "4"}, "azureml", (5, 8, 1, 4, 1, 2), "10.0.0.4:6105"),
        (AZUREML_MPI | {"MASTER_PORT": "6105"}, "openmpi", (5, 8, 1, 4, 1, 2), "10.0.0.4:6105"),
        (PYTORCHJOB, "kubeflow", (2, 3, 0, 1, 2, 3), "job-master-0:23456"),
        (PYTORCHJOB | {"PET_NNODES": "3", "PET_NODE_RANK": "2"}, "kubeflow", (2, 3, 0, 1, 2, 3), "job-master-0:23456"),
        (TRAINJOB, "kubeflow", (2, 3, 0, 1, 2, 3), "job-node-0-0.job:29500"),
        (VERTEX, "vertex", (2, 3, 0, 1, 2, 3), "cmle-training-workerpool0-ab-0:29500"),
        (VERTEX | {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "7"}, "vertex", None, "a:7"),
        (SAGEMAKER, "sagemaker", (2, 3, 0, 1, 2, 3), "algo-1:29500"),
        (JSRUN | {"MASTER_PORT": "5"}, "jsm", (3, 4, 1, 2, 1, 2), "node1:5"),
        (PALS | {"MASTER_PORT": "5"}, "pals", (3, 4, 1, 2, 1, 2), "node1:5"),
        (PBS_OPEN_MPI | {"MASTER_PORT": "5"}, "openmpi", (3, 4, 1, 2, 1, 2), "node1:5"),
        (RAY, "ray", (1, 2, 1, 2, 0, 1), "192.0.2.2:42465"),
    ],
)
def test_places(env, launcher, place, meeting):
    world = discover(env, nodefile)
    assert (world.launcher, world.meeting) == (launcher, meeting)
    assert where(world) == (place or (2, 3, 0, 1, 2, 3))


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "error", "hint"),
    [
        (AZUREML, NotFound, "process_count_per_instance"),
        (
            {"AZUREML_RUN_ID": "run", "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"},
            ClusterIncomplete,
            "give the job a `distribution`",
        ),
        (without(PYTORCHJOB, "MASTER_ADDR"), EnvironmentIncomplete, "set LOCAL_RANK"),
        (without(TRAINJOB, "PET_NODE_RANK"), ClusterIncomplete, "start with torchrun"),
        (without(TRAINJOB, "PET_MASTER_ADDR"), ClusterIncomplete, "start with torchrun"),
        (TRAINJOB | {"PET_NPROC_PER_NODE": "8"}, ProcessesWanted, "paceline launch --nproc-per-node 8 -- train"),
        (
            TRAINJOB | {"PET_NPROC_PER_NODE": "8", "PET_NNODES": "1", "PET_NODE_RANK": "0"},
            ProcessesWanted,
            "paceline launch --nproc-per-node 8 -- train",
        ),
        ({"CLUSTER_SPEC": "{}"}, ClusterIncomplete, "Vertex AI sets it"),
        (
            {"CLUSTER_SPEC": VERTEX["CLUSTER_SPEC"].replace('"type": "workerpool1"', '"type": "workerpool2"')},
            ClusterIncomplete,
            "pools 0 and 1",
        ),
        (VERTEX | {"RANK": "1", "WORLD_SIZE": "3"}, EnvironmentContradicts, ""),
        (without(SAGEMAKER, "SM_CURRENT_HOST"), ClusterIncomplete, "SM_CURRENT_HOST"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, ClusterIncomplete, "SM_HOSTS"),
        (without(JSRUN, "JSM_NAMESPACE_SIZE"), EnvironmentIncomplete, "set JSM_NAMESPACE_SIZE too"),
        (without(JSRUN, "JSM_NAMESPACE_RANK"), EnvironmentIncomplete, "set JSM_NAMESPACE_RANK too"),
        (without(PALS, "PMI_SIZE"), NotFound, "export WORLD_SIZE"),
        (without(PALS, "PALS_LOCAL_SIZE"), EnvironmentIncomplete, "set PALS_LOCAL_SIZE too"),
        (without(RAY, "LOCAL_WORLD_SIZE"), EnvironmentIncomplete, "set LOCAL_WORLD_SIZE too"),
        ({"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}'}, ClusterIncomplete, "unset TF_CONFIG"),
    ],
)
def test_nothing_becomes_one_silent_rank(env, error, hint):
    with pytest.raises(error) as refused:
        discover(env, nodefile)
    assert isinstance(refused.value, PacelineError)
    assert hint in refused.value.hint


def test_pals_takes_the_number_of_ranks_from_the_script():
    assert discover(without(PALS, "PMI_SIZE") | {"WORLD_SIZE": "4", "MASTER_PORT": "5"}, nodefile).size == 4


@pytest.mark.parametrize(
    ("env", "scheduler", "starter"),
    [
        ({"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "node1 4 node2 4"}, "lsf job 9 has room for 8", "jsrun or mpirun"),
        ({"PBS_JOBID": "77.pbs", "PBS_NODEFILE": "/var/spool/pbs/aux/77.pbs"}, "pbs job 77.pbs has room", "mpiexec"),
    ],
)
def test_a_script_of_a_job_is_one_process_and_says_so(env, scheduler, starter):
    world = discover(env, nodefile)
    assert (world.launcher, world.size) == ("plain", 1)
    assert scheduler in world.why[1]
    assert starter in world.why[1]


def test_hosts_of_lsf_and_pbs():
    hosts = {"LSB_JOBID": "9", "LSB_DJOB_RANKFILE": "/var/spool/pbs/aux/77.pbs"}
    assert find_allocation(hosts, nodefile) == Allocation("lsf", "9", ("node1", "node2"), 4)
    assert find_allocation(JSRUN) == Allocation("lsf", "1234", ("node1", "node2"), 84)  # without the host of the script
    assert find_allocation(PALS, nodefile) == Allocation("pbs", "77.pbs", ("node1", "node2"), 4)
    assert find_allocation({"PBS_JOBID": "1"}, nodefile) == Allocation("pbs", "1", (), None)


@pytest.mark.parametrize("env", [VERTEX, SAGEMAKER, PYTORCHJOB, TRAINJOB | {"PET_NPROC_PER_NODE": "8"}])
def test_launch_on_each_machine_finds_the_others(env):
    around = _around(env)
    options = _load(["--nproc-per-node", "8"], ["train", "digits"], around)
    assert (options.nnodes, around.rank, around.nodes) == (3, 2, 3)


def test_one_machine_of_a_service_is_one_process():
    for env in ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, {"AZUREML_RUN_ID": "run"}):
        assert discover(env).launcher == "plain"
    one = json.dumps({"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": 0}})
    assert discover({"CLUSTER_SPEC": one}).launcher == "plain"


@pytest.mark.parametrize("text", ["", "{broken", "5", '{"cluster": [1]}', '{"cluster": {"worker": ["a:1"]}}'])
def test_tensorflow_on_one_machine_is_not_ours(text):
    assert discover({"TF_CONFIG": text}).launcher == "plain"
    assert _around({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}).launcher == "plain"
    assert discover(AZUREML | {"LOCAL_WORLD_SIZE": "4", "TF_CONFIG": text}).rank == 5
