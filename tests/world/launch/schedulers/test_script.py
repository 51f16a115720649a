"""Batch scripts: their exact text, and that a shell reads back from it what was put in. tests/launchers queues them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import Conflict
from paceline.world.launch.schedulers.job import BatchJob, NotForScript, seconds
from paceline.world.launch.schedulers.script import (
    GRID_ENGINE,
    LSF,
    PBS,
    SCHEDULERS,
    SLURM,
    USUAL_SITE,
    Scheduler,
    Site,
    batch_script,
)

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
KEPT_AT = Path("/tmp/job.sh")


def slurm_script(job: BatchJob) -> str:
    return batch_script(SLURM, job, KEPT_AT)


def sge_script(job: BatchJob, site: Site = USUAL_SITE) -> str:
    return batch_script(GRID_ENGINE, job, KEPT_AT, site)


SCRIPTS = {
    "slurm": slurm_script(JOB),
    "slurm-smallest": slurm_script(SMALLEST),
    "sge": sge_script(
        replace(JOB, directives=("-P speech",), cpus_per_rank=None),
        Site(parallel_environment="orte", gpu_resource="ngpus"),
    ),
    "sge-smallest": sge_script(SMALLEST, Site("mpich")),
    "lsf": batch_script(LSF, replace(JOB, directives=("-x",)), KEPT_AT),
    "lsf-jsrun": batch_script(LSF, replace(JOB, directives=()), KEPT_AT, Site("jsrun")),
    "lsf-smallest": batch_script(LSF, SMALLEST, KEPT_AT, Site("mpich")),
    "pbs": batch_script(PBS, replace(JOB, directives=("-m e",)), Path("/home/ada/it's here/pbs.sh")),
    "pbs-pals": batch_script(PBS, replace(JOB, directives=()), Path("/home/ada/job.sh"), Site("pals")),
    "pbs-smallest": batch_script(PBS, SMALLEST, KEPT_AT, Site("mpich")),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_golden_one(name: str) -> None:
    assert SCRIPTS[name] == (GOLDEN / f"{name}.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_can_read_it(name: str) -> None:
    subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, check=True)


class Starters:
    """`srun`, `mpirun` and `mpiexec` that write down what they were given; one bash runs a script with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("srun", "mpirun", "mpiexec"):
            (self.bin / name).write_text('#!/bin/bash\nprintf "%s\\0" "$PWD" "$NOTE" "$@" > "$ARGUMENTS"\n')
            (self.bin / name).chmod(0o755)
        (folder / "hosts").write_text("n1 4 all.q@n1 UNDEFINED\n")

    def run(self, script: str) -> tuple[str, str, tuple[str, ...]]:
        """Return the working folder, the variable NOTE and the arguments that the starter saw."""
        seen = self.folder / "seen"
        seen.unlink(missing_ok=True)
        more = {"PE_HOSTFILE": str(self.folder / "hosts"), "ARGUMENTS": str(seen), "NOTE": "unset"}
        env = {**os.environ, **more, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        text = script.encode("utf-8")
        done = subprocess.run(["bash"], input=text, env=env, cwd=self.folder, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), script
        folder, note, *words = seen.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        return folder, note, tuple(words)


@pytest.fixture(scope="module")
def starters(tmp_path_factory: pytest.TempPathFactory) -> Starters:
    return Starters(tmp_path_factory.mktemp("starters"))


def scheduler_lines(script: str) -> list[str]:
    """What the scheduler reads: SLURM up to the first command, Grid Engine in the whole script."""
    return [line for line in script.split("\n") if line.startswith(("#SBATCH", "#$"))]


hostile = st.lists(
    st.one_of(
        st.sampled_from(
            (
                *(
                    "\n#SBATCH --uid=0\n",
                    "\n#$ -l hostname=x\n",
                    "$(touch owned)",
                    "`touch owned`",
                    ";touch owned;",
                    "&",
                    "|",
                ),
                *("'", '"', "\\", "$'", "\\'", "${IFS}", "*", "~", "#", "!!", "%j", "-", "--", "x" * 5000, "é", "中"),
                *("\r\n", "\t", "\u2028", "\u2029", "\x85", "\x1b[31m", "\udcff"),
            )
        ),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6),
    ),
    max_size=4,
).map("".join)


@settings(max_examples=60)
@given(st.sampled_from(["slurm", "sge", "sge-mpich"]), st.lists(hostile, max_size=4), hostile, hostile)
def test_a_shell_reads_back_exactly_what_was_put_in(
    starters: Starters, kind: str, words: list[str], note: str, name: str
) -> None:
    """On ce01e4b a line break made `#$` lines, which Grid Engine obeys, of words."""

    def script(job: BatchJob) -> str:
        return slurm_script(job) if kind == "slurm" else sge_script(job, Site(kind.partition("-")[2] or None))

    plain = replace(SMALLEST, folder=starters.folder)
    job = replace(plain, command=("x", *words), environment=(("NOTE", note),), name=name)
    _, seen, arguments = starters.run(script(job))
    assert arguments[len(arguments) - len(words) :] == tuple(words)
    assert seen == note
    lines = scheduler_lines(script(job))
    assert len(lines) == len(scheduler_lines(script(plain)))
    assert all(line.isprintable() for line in lines)
    assert not (starters.folder / "owned").exists()


@settings(max_examples=60)
@given(st.sampled_from(["name", "queue", "account", "logs", "directive", "environment"]), hostile)
def test_what_a_line_of_the_scheduler_cannot_hold_is_refused(where: str, text: str) -> None:
    text = text.strip("/") or "x"
    changed = {
        "name": replace(SMALLEST, name=text),
        "queue": replace(SMALLEST, queue=text),
        "account": replace(SMALLEST, account=text),
        "logs": replace(SMALLEST, logs=Path("/tmp") / text),
        "directive": replace(SMALLEST, directives=(text,)),
        "environment": replace(SMALLEST, environment=((text, "1"),)),
    }[where]
    for make in (slurm_script, sge_script):
        before = len(scheduler_lines(make(SMALLEST)))
        try:
            script = make(changed)
        except NotForScript:
            continue
        more = scheduler_lines(script)
        assert len(more) == before + (where in ("queue", "account", "directive"))
        assert all(line.isprintable() for line in more)


def test_the_folder_of_the_job_may_have_any_name(starters: Starters) -> None:
    for name in ("-a b", "it's\n#$ -x", "$(x)`y`", "\u2028é"):
        folder = starters.folder / name
        folder.mkdir()
        assert starters.run(slurm_script(replace(SMALLEST, folder=folder)))[0] == str(folder)


def test_what_is_no_name_or_path_for_the_scheduler_is_said() -> None:
    for job, words in (
        (replace(SMALLEST, queue="a\n#SBATCH --uid=0"), r"--partition 'a\\n#SBATCH --uid=0' cannot stand in a batch"),
        (replace(SMALLEST, account="-x"), "--account '-x' cannot stand in a batch script: it is no name"),
        (replace(SMALLEST, logs=Path('/tmp/a"b')), """the scheduler has a meaning of its own for '"'"""),
        (replace(SMALLEST, logs=Path("/tmp/a\nb")), r"meaning of its own for '\\n'"),
        (replace(SMALLEST, directives=("exclusive",)), "it must begin with a dash"),
        (replace(SMALLEST, setup=("#SBATCH --exclusive",)), "it is an option of the scheduler"),
        (replace(SMALLEST, environment=(("A;B", "1"),)), "the variable 'A;B' cannot stand"),
    ):
        with pytest.raises(NotForScript, match=words):
            slurm_script(job)
    with pytest.raises(NotForScript, match="for ':'"):
        sge_script(replace(SMALLEST, logs=Path("/tmp/a:b")))
    assert '#SBATCH --output="/tmp/100%%/slurm-%j.log"' in slurm_script(replace(SMALLEST, logs=Path("/tmp/100%")))


def test_a_job_for_one_machine_that_got_two_ends(starters: Starters) -> None:
    script = sge_script(replace(SMALLEST, procs_per_node=4), Site(parallel_environment="smp"))
    hosts = starters.folder / "two"
    hosts.write_text("n1 2 a.q@n1 UNDEFINED\nn2 2 a.q@n2 UNDEFINED\n")
    env = {**os.environ, "PE_HOSTFILE": str(hosts)}
    done = subprocess.run(["bash"], input=script, env=env, text=True, capture_output=True)
    assert done.returncode == 1
    assert "parallel environment smp gave slots on several hosts: n1 n2" in done.stderr
    hosts.write_text("n1 2 a.q@n1 UNDEFINED\nn1 2 b.q@n1 UNDEFINED\n")
    assert subprocess.run(["bash"], input=script.replace("mpirun", "true"), env=env, text=True).returncode == 0


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
    script.write_text(slurm_script(job) if scheduler == "slurm" else sge_script(job))
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
    cores = sge_script(replace(JOB, gpus_per_node=0))
    assert "-pe mpi 192\n" in cores
    assert "mem_free=1366M\n" in cores
    assert "mpirun -np 32 --map-by slot:PE=6 " in cores
    with pytest.raises(Conflict, match="8 GPUs for 48 slots"):
        sge_script(JOB)


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_line_is_left_out_where_its_value_is_not_set(scheduler: Scheduler) -> None:
    bare, full = (
        batch_script(scheduler, job, KEPT_AT) for job in (SMALLEST, replace(JOB, cpus_per_rank=None, directives=()))
    )
    assert "None" not in bare + full
    assert "\0" not in bare + full
    assert len(full.splitlines()) > len(bare.splitlines())
