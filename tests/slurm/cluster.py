"""A real Slurm on machines of `tests.machines`: a controller on `head`, a node daemon on each of the others."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.machines.network import Network

CONF = """\
ClusterName=test
SlurmctldHost=head({head})
SlurmUser=root
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MessageTimeout=20
SwitchType=switch/none
"""


class Slurm:
    """`nodes`: name -> what its line in slurm.conf says."""

    def __init__(self, folder: Path, network: Network, nodes: dict[str, str], partitions: Sequence[str]) -> None:
        self.folder = folder
        self.network = network
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", *(f"spool-{node}" for node in nodes)):
            (folder / name).mkdir(mode=0o755)
        self.conf = folder / "slurm.conf"
        lines = [CONF.format(head=network["head"].address, folder=folder)]
        lines += [f"NodeName={node} NodeAddr={network[node].address} {says}\n" for node, says in nodes.items()]
        lines += [f"PartitionName={line}\n" for line in partitions]
        self.conf.write_text("".join(lines))
        (folder / "gres.conf").write_text(
            "".join(f"NodeName={n} Name=gpu File=/dev/zero,/dev/null\n" for n, s in nodes.items() if "gpu" in s)
        )
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        subprocess.run(
            ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/munged.pid",
             f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"], check=True,
        )  # fmt: skip
        self.environment = {"SLURM_CONF": str(self.conf)}
        self._start("head", "slurmctld", "-D")
        for node in nodes:
            self.start(node)
        self._wait_for_nodes(len(nodes))

    def start(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def _start(self, machine: str, *command: str) -> None:
        self.daemons[machine] = self.network[machine].start(
            *command, output=self.folder / f"{machine}.out", environment=self.environment
        )

    def _wait_for_nodes(self, count: int) -> None:
        until = time.monotonic() + 120
        while (
            seen := self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split()
        ) is not None and len(set(seen)) < count:
            assert time.monotonic() < until, f"only {seen} are there: {self.run('sinfo', '-N', '-l', check=False)}"
            time.sleep(0.2)

    def run(self, *command: str, check: bool = True) -> str:
        """On the head."""
        done = self.network["head"].run(*command, check=check, env={**os.environ, **self.environment})
        return done.stdout if check else done.stdout + done.stderr

    def close(self) -> None:
        self.network.close()
        for daemon in self.daemons.values():
            daemon.wait(10)
        os.kill(int((self.folder / "munged.pid").read_text()), 15)
