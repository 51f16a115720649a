"""Batch scripts: their exact text, and that a shell reads back from it what was put in. tests/launchers queues them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.world.launch.batch_script import BatchJob, NotADuration, NotASize, mebibytes, seconds
from paceline.world.launch.sge import GpusPerSlot, GridEngine, sge_script
from paceline.world.launch.slurm import slurm_script

GOLDEN = Path(__file__).with_name("golden")
JOB = BatchJob(
    name="quartznet",
    command=("/opt/py/bin/python", "-m", "paceline", "train", "asr", "--out", "runs/quartz net", "--resume", "auto"),
    folder=Path("/home/ada/it's here"),
    logs=Path("/home/ada/it's here/runs/quartz net/batch"),
    nodes=4,
    procs_per_node=8,
    gpus_per_node=8,
    cpus_per_rank=6,
    time_s=129_600,
    memory_mib=65_536,
    queue="gpu",
    account="speech",
    environment=(("NCCL_DEBUG", "INFO"), ("NOTE", "two words, $HOME")),
    setup=("module load cuda",),
    directives=("--constraint=a100",),
)
SMALLEST = BatchJob("small", ("paceline", "train", "digits"), Path("/tmp"), Path("/tmp"), requeue=False)
SCRIPTS = {
    "slurm": slurm_script(JOB),
    "slurm-smallest": slurm_script(SMALLEST),
    "sge": sge_script(
        replace(JOB, directives=("-P speech",), cpus_per_rank=None), GridEngine("orte", gpu_resource="ngpus")
    ),
    "sge-smallest": sge_script(SMALLEST, GridEngine(mpi="mpich")),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_golden_one(name: str) -> None:
    assert SCRIPTS[name] == (GOLDEN / f"{name}.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_can_read_it(name: str) -> None:
    subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, check=True)


@pytest.mark.parametrize("scheduler", ["slurm", "sge"])
def test_words_and_variables_arrive_as_they_are(scheduler: str, tmp_path: Path) -> None:
    """With a starter that writes down what it was given."""
    words = ("a b", "it's", '"$HOME"', "`date`", "line\nbreak", "*", "\\", "")
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['NOTE']]))"
    for name in ("srun", "mpirun"):
        starter = tmp_path / name
        starter.write_text(f"#!{sys.executable}\n{show}\n")
        starter.chmod(0o755)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "hosts").write_text("n1 4 all.q@n1 UNDEFINED\n")
    note = 'it\'s $HOME "and" `more`'
    job = replace(SMALLEST, command=words, folder=tmp_path / "a folder", environment=(("NOTE", note),))
    script = slurm_script(job) if scheduler == "slurm" else sge_script(job, GridEngine())
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PE_HOSTFILE": str(tmp_path / "hosts")}
    done = subprocess.run(["bash"], input=script, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given, seen = json.loads(done.stdout)
    assert tuple(given[-len(words) :]) == words
    assert seen == note


@pytest.mark.parametrize(("scheduler", "again"), [("slurm", "scontrol requeue 7"), ("sge", "qsub /spool/7")])
def test_a_warning_reaches_the_ranks_and_the_job_goes_back(scheduler: str, again: str, tmp_path: Path) -> None:
    """The script warns itself through its starter, as a scheduler would; the ranks leave when they are told."""
    leave = "trap 'echo told; trap \"\" USR1; exit 0' USR1"
    starter = f"#!/bin/bash\n{leave}\nkill -USR1 $PPID\nfor i in {{1..200}}; do sleep 0.1; done\n"
    show = '#!/bin/bash\necho "${0##*/} $*"\n'
    for name, text in {"srun": starter, "mpirun": starter, "scontrol": show, "qsub": show}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("n1 4\n")
    job = replace(SMALLEST, requeue=True)
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(job) if scheduler == "slurm" else sge_script(job, GridEngine()))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PE_HOSTFILE": str(tmp_path / "hosts")}
    done = subprocess.run(
        ["bash", str(script)],
        env={**env, "SLURM_JOB_ID": "7", "JOB_SCRIPT": "/spool/7"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"told\n{again}\n", "")


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_that_of_the_ranks(code: int, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/bash\nexit {code}\n")
    (tmp_path / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = slurm_script(replace(SMALLEST, requeue=True))
    assert subprocess.run(["bash"], input=script, env=env, text=True).returncode == code


@given(st.integers(1, 400 * 86400))
def test_slurm_s_own_form_is_read_back(time_s: int) -> None:
    line = next(line for line in slurm_script(replace(JOB, time_s=time_s)).splitlines() if "--time" in line)
    assert seconds(line.partition("=")[2]) == time_s


def test_grid_engine_counts_per_slot() -> None:
    cores = sge_script(replace(JOB, gpus_per_node=0), GridEngine())
    assert "-pe mpi 192\n" in cores
    assert "mem_free=1366M\n" in cores
    assert "mpirun -np 32 --map-by slot:PE=6 " in cores
    with pytest.raises(GpusPerSlot, match="8 GPUs for 48 slots"):
        sge_script(JOB, GridEngine())


def test_durations() -> None:
    assert [seconds(text) for text in ("90m", "12h", "2d", "1:02:03", "1-12", "1-12:30", "0-00:00:05")] == [
        *(5400, 43_200, 172_800, 3723, 129_600, 131_400, 5)
    ]
    for text in ("90", "2:30", "0h", "1:60:00", "-1h", "12 h", "", "1-2-3"):
        with pytest.raises(NotADuration):
            seconds(text)


def test_sizes() -> None:
    assert [mebibytes(text) for text in ("800M", "64G", "64GB", "64GiB", "1T")] == [800, 65536, 65536, 65536, 1048576]
    for text in ("64", "0G", "64g", "1.5G", "G", ""):
        with pytest.raises(NotASize):
            mebibytes(text)
