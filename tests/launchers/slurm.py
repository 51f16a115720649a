"""A SLURM cluster of two machines, for as long as a test needs it: slurmctld, two slurmd and munge of its own."""

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

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
PACKAGES = "slurmctld slurmd slurm-client munge"
_CONF = """\
ClusterName=paceline
SlurmctldHost={first}
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=requeue_delay=1,bf_interval=1,sched_interval=1,default_queue_depth=10
ReturnToService=2
SwitchType=switch/none
KillWait=5
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


class Slurm:
    """The cluster as a user on its first machine sees it."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, words: Sequence[str], timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.hosts[0].command(words), env=self.env, capture_output=True, text=True, timeout=timeout_s
        )

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says, by name."""
        shown = self.run(["scontrol", "--oneliner", "show", "job", number]).stdout
        pairs = [word.partition("=") for word in shown.split()]
        return {name: value for name, separator, value in pairs if separator}


@contextmanager
def cluster(hosts: list[Host]) -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-slurm-"))
    (folder / "state").mkdir()
    for host in hosts:
        (folder / f"spool-{host.name}").mkdir()
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=2 RealMemory=4000 State=UNKNOWN" for host in hosts]
    names = ",".join(host.name for host in hosts)
    text = _CONF.format(first=hosts[0].name, folder=folder, nodes="\n".join(nodes), names=names)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    slurm, daemons = Slurm(hosts, folder), Daemons(folder)
    try:
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        daemons.start(["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files])
        daemons.wait_until(lambda: (folder / "munge.socket").exists(), "munged")
        daemons.start(hosts[0].command(["slurmctld", "-D"]), slurm.env)
        for host in hosts:
            daemons.start(host.command(["slurmd", "-D", "-N", host.name]), slurm.env)
        idle = ["sinfo", "--noheader", "--format=%T %D"]
        daemons.wait_until(lambda: slurm.run(idle).stdout.split() == ["idle", str(len(hosts))], "slurm")
        yield slurm
    finally:
        daemons.stop()
        shutil.rmtree(folder)
