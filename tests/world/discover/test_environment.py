"""Every launcher, from environments as the launchers leave them."""

from __future__ import annotations

import pytest

from paceline.core.errors import Unreadable
from paceline.world.discover.allocation import Allocation, find_allocation, parse_hostfile
from paceline.world.discover.environment import (
    OWN_RUN_ID,
    EnvironmentContradicts,
    EnvironmentIncomplete,
    MeetingPointUnknown,
    World,
    discover,
    expand_tasks_per_node,
)

# Captured from torch 2.13, the second of two agents with 4 ranks each; torch.distributed.launch sets the same.
TORCHRUN = {
    "RANK": "5",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_RANK": "1",
}
# Captured from Open MPI 4.1.4, `mpirun -np 2`, without the parts that say nothing of places.
OPEN_MPI = {
    "OMPI_COMMAND": "python",
    "OMPI_MCA_orte_hnp_uri": "527826944.0;tcp://192.0.2.2:59197;tcp6://[fd00::2]:38459",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_MCA_ess_base_jobid": "527826945",
    "OMPI_MCA_ess_base_vpid": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "527826945",
    "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "vm",
}
# Captured from MPICH 4.0.2, `mpirun.mpich -np 2`.
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "1",
    "PMI_FD": "8",
    "PMI_SIZE": "2",
    "PWD": "/home/ada",
}
# Captured from SLURM 22.05.8, `srun -N2 -n3`: two tasks on the first node, one on the second.
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "plh[1-2]",
    "SLURM_NODELIST": "plh[1-2]",
    "SLURM_STEP_NODELIST": "plh[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_SRUN_COMM_HOST": "10.213.7.1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.213.7.1",
    "SLURMD_NODENAME": "plh2",
}
# Captured from Grid Engine 8.1.9, `qsub -pe mpi 4` over two hosts: the script, and what mpirun adds for rank 2, on the
# second host, where Grid Engine knows only that host's slots and the list of hosts is not.
GRID_ENGINE = {
    "JOB_ID": "1",
    "JOB_NAME": "j.sh",
    "NHOSTS": "2",
    "NQUEUES": "2",
    "NSLOTS": "4",
    "PE": "mpi",
    "PE_HOSTFILE": "/var/spool/gridengine/execd/plh1/active_jobs/1.1/pe_hostfile",
    "QUEUE": "all.q",
    "RESTARTED": "0",
    "SGE_TASK_ID": "undefined",
}
HOSTFILE = "plh1 2 all.q@plh1 UNDEFINED\nplh2 2 all.q@plh2 UNDEFINED\n"
GRID_ENGINE_RANK = {
    **GRID_ENGINE,
    "NHOSTS": "1",
    "NSLOTS": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "632160256.0;tcp://10.213.7.1:57983",
    "OMPI_MCA_orte_num_nodes": "2",
    "PMIX_NAMESPACE": "632160257",
}
SLURM_ONE_NODE = {
    **SLURM,
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3",
}


def place(world: World) -> tuple[int, ...]:
    return (world.rank, world.local_rank, world.size, world.local_size, world.node_rank, world.nodes)


def test_nothing_set_is_one_process() -> None:
    world = discover({"PATH": "/bin"})
    assert place(world) == (0, 0, 1, 1, 0, 1)
    assert (world.launcher, world.meeting) == ("plain", None)
    assert world.why


def test_torchrun() -> None:
    world = discover(TORCHRUN)
    assert place(world) == (5, 1, 8, 4, 1, 2)
    assert (world.launcher, world.meeting) == ("torchrun", "node0:29400")
    assert (world.attempt, world.launcher_hosts_store) == (1, True)
    assert "RANK=5" in world.why[0]
    assert world.global_rank == 5


def test_torchrun_wins_over_the_scheduler_it_runs_in() -> None:
    world = discover({**SLURM, **OPEN_MPI, **TORCHRUN})
    assert (world.rank, world.launcher) == (5, "torchrun")
    assert any("SLURM_PROCID" in reason for reason in world.why)


def test_what_is_printed_under_mpirun_is_passed_on() -> None:
    """Also what torchrun's ranks print, where mpirun started torchrun once per machine."""
    assert [discover(env).is_relayed for env in (OPEN_MPI, MPICH, TORCHRUN | OPEN_MPI)] == [True, True, True]
    assert [discover(env).is_relayed for env in ({}, TORCHRUN)] == [False, False]


def test_our_own_launcher_has_our_name() -> None:
    world = discover(TORCHRUN | {"TORCHELASTIC_RUN_ID": OWN_RUN_ID})
    assert world.why[0] == "RANK=5 of WORLD_SIZE=8, set by paceline"


def test_variables_by_hand_on_one_machine() -> None:
    world = discover({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert place(world) == (1, 1, 2, 2, 0, 1)
    assert (world.launcher, world.launcher_hosts_store) == ("environment", False)


def test_open_mpi_meets_on_a_port_of_the_job() -> None:
    world = discover(OPEN_MPI)
    assert place(world) == (1, 1, 2, 2, 0, 1)
    other = {name: "0" if name.endswith("RANK") else value for name, value in OPEN_MPI.items()}
    assert discover(other).meeting == world.meeting
    assert discover({**OPEN_MPI, "PMIX_NAMESPACE": "99"}).meeting != world.meeting
    host, port = str(world.meeting).split(":")
    assert host == "127.0.0.1"
    assert 20_000 <= int(port) < 32_768


def test_open_mpi_on_several_nodes_meets_where_mpirun_runs() -> None:
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    world = discover(env)
    assert place(world) == (1, 0, 2, 1, 1, 2)
    assert str(world.meeting).startswith("192.0.2.2:")
    assert any("where mpirun runs" in reason for reason in world.why)
    assert discover({**env, "MASTER_ADDR": "a", "MASTER_PORT": "1234"}).meeting == "a:1234"
    # In a job, the scheduler's first host; its names are reachable from all machines of the job.
    assert str(discover({**env, **SLURM}).meeting).startswith("plh1:")
    with pytest.raises(MeetingPointUnknown, match="2 node") as refused:
        discover({name: value for name, value in env.items() if "uri" not in name})
    assert "MASTER_ADDR" in refused.value.hint


def test_mpich() -> None:
    world = discover(MPICH)
    assert place(world) == (1, 1, 2, 2, 0, 1)
    assert world.launcher == "mpich"
    with pytest.raises(MeetingPointUnknown):
        discover({**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"})


def test_slurm_step_on_uneven_nodes() -> None:
    world = discover(SLURM)
    assert place(world) == (2, 0, 3, 1, 1, 2)
    assert world.launcher == "slurm"
    assert str(world.meeting).startswith("plh1:")
    assert str(discover({**SLURM, "MASTER_ADDR": "n7"}).meeting).startswith("n7:")
    # The step's hosts, not the job's: a step may run on some of them.
    assert str(discover({**SLURM, "SLURM_STEP_NODELIST": "plh[07-08]"}).meeting).startswith("plh07:")
    with pytest.raises(MeetingPointUnknown):
        discover({name: value for name, value in SLURM.items() if "NODELIST" not in name})


def test_slurm_step_with_pmi_is_slurm() -> None:
    assert discover({**SLURM_ONE_NODE, "PMI_RANK": "2", "PMI_SIZE": "3"}).launcher == "slurm"
    assert place(discover(SLURM_ONE_NODE)) == (2, 2, 3, 3, 0, 1)


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_a_shell_or_batch_script_in_a_slurm_job_is_one_process(step: str | None) -> None:
    env = {name: value for name, value in SLURM.items() if "STEP" not in name}
    if step is not None:
        env["SLURM_STEP_ID"] = step
    assert discover(env).launcher == "plain"


def test_world_size_exported_beside_a_scheduler_must_agree() -> None:
    assert discover({**SLURM_ONE_NODE, "WORLD_SIZE": "3"}).launcher == "slurm"
    with pytest.raises(EnvironmentContradicts, match="WORLD_SIZE"):
        discover({**SLURM_ONE_NODE, "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["RANK"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_LOCAL_RANK"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["MPI_LOCALRANKID"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, ["SLURM_LOCALID"]),
    ],
)
def test_half_an_environment_is_refused(env: dict[str, str], names: list[str]) -> None:
    with pytest.raises(EnvironmentIncomplete) as refused:
        discover(env)
    assert set(names) <= set(refused.value.missing)
    assert all(name in str(refused.value) for name in names)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"RANK": "8"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "one"}, "RANK"),
        ({"WORLD_SIZE": "8.0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str], name: str) -> None:
    with pytest.raises(EnvironmentContradicts, match=name):
        discover({**TORCHRUN, **change})


def test_a_place_by_hand_must_fit_into_the_launcher_s() -> None:
    def by_hand(rank: int, size: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

    # The same place, or an even share of the launcher's process: ranks 2 and 3 of 4 inside its second.
    for env in (OPEN_MPI, MPICH):
        assert discover({**env, **by_hand(1, 2)}).rank == 1
        assert discover({**env, **by_hand(3, 4)}).rank == 3
    cases = [(0, 1), (0, 2), (1, 4), (1, 3)]
    for env, names in (
        (OPEN_MPI, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]),
        (MPICH, ["PMI_RANK", "PMI_SIZE"]),
        (SLURM, ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"]),
    ):
        for rank, size in cases:
            with pytest.raises(EnvironmentContradicts) as refused:
                discover({**env, **by_hand(rank, size)})
            assert refused.value.names == ["RANK", "WORLD_SIZE", *names]
            assert all(name in str(refused.value) for name in refused.value.names)


def test_one_mpirun_inside_another_is_refused() -> None:
    assert discover({**OPEN_MPI, **MPICH}).launcher == "openmpi"
    with pytest.raises(EnvironmentContradicts, match=r"OMPI_COMM_WORLD_RANK.*PMI_RANK"):
        discover({**OPEN_MPI, **MPICH, "PMI_SIZE": "4"})


def test_grid_engine_by_itself_is_one_process() -> None:
    def read(path: str) -> str:
        assert path == GRID_ENGINE["PE_HOSTFILE"]
        return HOSTFILE

    world = discover(GRID_ENGINE, read)
    assert (world.launcher, world.size) == ("plain", 1)
    assert "sge job 1 has room for 4" in world.why[1]
    # A variable that anything may use is no job.
    assert len(discover({"JOB_ID": "1", "NSLOTS": "4"}, read).why) == 1


def test_ranks_of_mpirun_in_a_grid_engine_job() -> None:
    second = discover(GRID_ENGINE_RANK, lambda path: None)
    assert place(second) == (2, 0, 4, 2, 1, 2)
    assert str(second.meeting).startswith("10.213.7.1:")
    first = {**GRID_ENGINE_RANK, "OMPI_COMM_WORLD_RANK": "0", "NHOSTS": "2", "NSLOTS": "4"}
    world = discover(first, lambda path: HOSTFILE)
    assert str(world.meeting).startswith("plh1:")
    # Name or address, it is the same machine, and the port is the job's.
    assert str(world.meeting).rpartition(":")[2] == str(second.meeting).rpartition(":")[2]


def test_grid_engine_s_list_of_hosts() -> None:
    assert parse_hostfile("n1 4 a.q@n1 UNDEFINED\n\nn2 2 a.q@n2\nn1 1 b.q@n1 <NULL>\n") == {"n1": 5, "n2": 2}
    for text in ("n1", "n1 four a.q"):
        with pytest.raises(Unreadable, match="n1"):
            parse_hostfile(text)
    found = find_allocation(GRID_ENGINE, lambda path: HOSTFILE)
    assert found == Allocation("sge", "1", ("plh1", "plh2"), 4)
    assert find_allocation(SLURM) == Allocation("slurm", "1", ("plh1", "plh2"), 3)
    assert find_allocation({}) is None


def test_tasks_per_node() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks_per_node("4") == [4]
    with pytest.raises(EnvironmentContradicts):
        expand_tasks_per_node("2x3")
