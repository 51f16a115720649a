"""A Grid Engine cluster of two machines, for as long as a test needs it: a cell of its own in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.launchers.daemons import Daemons
from tests.launchers.hosts import Host

NEEDED = ("sge_qmaster", "sge_execd", "qsub", "qconf")
PACKAGES = "gridengine-master gridengine-exec gridengine-client"
# Where Debian keeps what all cells share.
_SHARED = Path("/var/lib/gridengine")
_INIT = Path("/usr/share/gridengine/scripts/init_cluster")
_BOOTSTRAP = """\
admin_user              root
default_domain          none
ignore_fqdn             false
spooling_method         berkeleydb
spooling_lib            libspoolb
spooling_params         {root}/spooldb
binary_path             /usr/sbin
qmaster_spool_dir       {root}/qmaster
security_mode           none
listener_threads        2
worker_threads          2
scheduler_threads       1
"""
_PE = """\
pe_name            mpi
slots              99
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    $round_robin
control_slaves     TRUE
job_is_first_task  FALSE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
"""
_EXEC_HOST = """\
hostname              {name}
load_scaling          NONE
complex_values        NONE
user_lists            NONE
xuser_lists           NONE
projects              NONE
xprojects             NONE
usage_scaling         NONE
report_variables      NONE
"""
_QUEUE = """\
qname                 all.q
hostlist              {names}
seq_no                0
load_thresholds       NONE
suspend_thresholds    NONE
nsuspend              1
suspend_interval      00:05:00
priority              0
min_cpu_interval      00:05:00
processors            UNDEFINED
qtype                 BATCH INTERACTIVE
ckpt_list             NONE
pe_list               mpi
rerun                 TRUE
slots                 {slots}
tmpdir                /tmp
shell                 /bin/bash
prolog                NONE
epilog                NONE
shell_start_mode      posix_compliant
starter_method        NONE
suspend_method        NONE
resume_method         NONE
terminate_method      NONE
notify                00:00:30
owner_list            NONE
user_lists            NONE
xuser_lists           NONE
subordinate_list      NONE
complex_values        NONE
projects              NONE
xprojects             NONE
calendar              NONE
initial_state         default
s_rt                  INFINITY
h_rt                  INFINITY
s_cpu                 INFINITY
h_cpu                 INFINITY
s_fsize               INFINITY
h_fsize               INFINITY
s_data                INFINITY
h_data                INFINITY
s_stack               INFINITY
h_stack               INFINITY
s_core                INFINITY
h_core                INFINITY
s_rss                 INFINITY
h_rss                 INFINITY
s_vmem                INFINITY
h_vmem                INFINITY
"""
SLOTS_PER_HOST = 2


class GridEngine:
    """The cluster as a user on its first machine sees it."""

    def __init__(self, hosts: list[Host], root: Path) -> None:
        self.hosts, self.root = hosts, root
        ports = {"SGE_QMASTER_PORT": "16444", "SGE_EXECD_PORT": "16445"}
        # SGE_ND: stay in the foreground.
        self.env = {**os.environ, **ports, "SGE_ROOT": str(root), "SGE_CELL": "default", "SGE_ND": "1"}

    def run(self, words: Sequence[str], timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.hosts[0].command(words), env=self.env, capture_output=True, text=True, timeout=timeout_s
        )

    def configure(self, option: str, text: str, name: str = "change") -> None:
        """`qconf` with a file that holds `text`; some of its options take the file's name as what to change."""
        file = self.root / name
        file.write_text(text)
        done = self.run(["qconf", option, str(file)])
        assert done.returncode == 0, f"qconf {option}: {done.stdout}{done.stderr}"

    def shown(self, *words: str, **values: str) -> str:
        """What `qconf` shows, with other values."""
        lines = self.run(["qconf", *words]).stdout.replace("\\\n", " ").splitlines()
        pairs = [line.split(maxsplit=1) for line in lines if len(line.split()) > 1]
        return "".join(f"{name} {values.get(name, value)}\n" for name, value in pairs)


def _set_up(engine: GridEngine) -> None:
    """Jobs of root, a queue over all machines that starts jobs at once, and a parallel environment over them."""
    spool = str(engine.root / "execd")
    conf = engine.shown("-sconf", min_uid="0", min_gid="0", execd_spool_dir=spool, load_report_time="00:00:01")
    engine.configure("-Mconf", conf, name="global")
    engine.configure("-Msconf", engine.shown("-ssconf", schedule_interval="0:0:1", flush_submit_sec="1"))
    engine.configure("-Ap", _PE)
    for host in engine.hosts:
        engine.run(["qconf", "-ah", host.name])
        assert engine.run(["qconf", "-as", host.name]).returncode == 0
        if host.name not in engine.run(["qconf", "-sel"]).stdout.split():
            engine.configure("-Ae", _EXEC_HOST.format(name=host.name))
    names = " ".join(host.name for host in engine.hosts)
    engine.configure("-Aq", _QUEUE.format(names=names, slots=SLOTS_PER_HOST))


def _is_up(engine: GridEngine) -> bool:
    """Whether every machine has reported its load, without which no job is put there."""
    rows = [line.split() for line in engine.run(["qhost"]).stdout.splitlines()]
    loads = {row[0]: row[3] for row in rows if len(row) > 3}
    return all(loads.get(host.name, "-") != "-" for host in engine.hosts)


@contextmanager
def cluster(hosts: list[Host]) -> Iterator[GridEngine]:
    root = Path(tempfile.mkdtemp(prefix="paceline-sge-"))
    root.chmod(0o755)
    common = root / "default" / "common"
    for folder in (common, root / "qmaster" / "job_scripts", root / "spooldb", root / "execd"):
        folder.mkdir(parents=True)
    for name in ("bin", "lib", "util", "utilbin"):
        (root / name).symlink_to(_SHARED / name)
    (common / "bootstrap").write_text(_BOOTSTRAP.format(root=root))
    (common / "act_qmaster").write_text(f"{hosts[0].name}\n")
    engine, daemons = GridEngine(hosts, root), Daemons(root)
    try:
        made = engine.run([str(_INIT), str(root), "default", str(root / "spooldb"), "root"])
        assert made.returncode == 0, made.stdout + made.stderr
        daemons.start(hosts[0].command(["sge_qmaster"]), engine.env)
        daemons.wait_until(lambda: engine.run(["qconf", "-sh"]).returncode == 0, "sge_qmaster")
        _set_up(engine)
        for host in hosts:
            daemons.start(host.command(["sge_execd"]), engine.env)
        daemons.wait_until(lambda: _is_up(engine), "sge_execd")
        yield engine
    finally:
        daemons.stop()
        shutil.rmtree(root)
