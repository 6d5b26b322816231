"""A few machines on one network, out of Linux namespaces: each has an address, a loopback, a host name, and a table of processes, which all
end with its first. Files are shared, as by a file system of a cluster, but for what a test hides.

They hang on a bridge in a namespace of its own: nothing is seen of it in the network of this machine, and nothing of it reaches out."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
_FIRST = (
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "private",
)
_WAITS = ("sh", "-c", "echo ready; exec sleep infinity")  # until it is killed


@functools.cache
def why_not() -> str:
    """Why this machine can make none; empty where it can."""
    done = subprocess.run(
        [*_FIRST, "ip", "link", "add", "x", "type", "veth", "peer", "name", "y"], capture_output=True, check=False
    )
    return done.stderr.decode(errors="replace").strip().splitlines()[-1:][0] if done.returncode else ""


class Machine:
    """One of them. `address`: by which the others reach it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._first = subprocess.Popen([*_FIRST, *_WAITS], stdout=subprocess.PIPE, start_new_session=True)
        assert self._first.stdout is not None and self._first.stdout.readline() == b"ready\n", why_not()
        [self.pid] = map(int, Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split())
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    def command(self, *command: str) -> list[str]:
        """That runs `command` there."""
        return [
            "nsenter",
            f"--target={self.pid}",
            "--net",
            "--uts",
            "--mount",
            "--pid",
            f"--wd={os.getcwd()}",
            *command,
        ]

    def run(
        self, *command: str, deadline_s: float = 60.0, check: bool = True, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*command), capture_output=True, text=True, timeout=deadline_s, check=False, **more
        )
        assert not check or done.returncode == 0, (
            f"{command} on {self.name}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def start(
        self, *command: str, output: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            return subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {})},
            )

    def hide(self, folder: Path) -> None:
        """What is in `folder` on the other machines is not on this one."""
        self.run("mount", "-t", "tmpfs", "none", str(folder))

    def lose(self) -> None:
        """As if its power failed: every process of it is killed, and its network card is gone."""
        self._first.kill()
        self._first.wait(10)


class Network:
    """Machines that reach each other, and nothing else."""

    def __init__(self, names: Sequence[str]) -> None:
        self._hub = Machine("hub", "")
        self.machines: dict[str, Machine] = {}
        self._hub.run("ip", "link", "add", "bridge", "type", "bridge")
        self._hub.run("ip", "link", "set", "bridge", "up")
        for name in names:
            self.add(name)

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def add(self, name: str) -> Machine:
        """One more, or one again that was lost: with the same address."""
        number = [*self.machines, name].index(name) + 1
        machine = Machine(name, f"{NETWORK}.{number}")
        port = f"port{number}"
        self._hub.run("ip", "link", "delete", port, check=False)
        self._hub.run("ip", "link", "add", port, "type", "veth", "peer", "name", f"card{number}")
        self._hub.run("nsenter", f"--target={self._hub.pid}", "true", check=False)
        self._hub.run("ip", "link", "set", port, "master", "bridge", "up")
        self._move(f"card{number}", machine)
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", f"card{number}")
        machine.run("ip", "link", "set", f"card{number}", "up")
        self.machines[name] = machine
        return machine

    def _move(self, card: str, machine: Machine) -> None:
        """By a process that is in the hub's network and sees this machine's processes, whose numbers it is given."""
        subprocess.run(
            ["nsenter", f"--target={self._hub.pid}", "--net", "ip", "link", "set", card, "netns", str(machine.pid)],
            check=True,
        )

    def close(self) -> None:
        for machine in (*self.machines.values(), self._hub):
            machine.lose()
        time.sleep(0)
