"""Pods without a cluster: what the manifests of a run say is run on machines of `tests.machines.network`, each with the files,
variables and host names that a kubelet and the cluster's DNS would give it. A test says when one ends, and when there is another."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.machines.network import Machine, Network

OVERLAY = (  # /etc with files of this machine's own
    "mount -t tmpfs none /mnt && mkdir /mnt/upper /mnt/work && "
    "mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc"
)


class Pods:
    """Of one run, by the names of their Jobs without the run's."""

    def __init__(self, folder: Path, network: Network, output: Path) -> None:
        documents = [one for path in sorted(folder.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in documents}
        [self.run] = [name for kind, name in self.objects if kind == "Service"]
        self.jobs = {
            name.removeprefix(f"{self.run}-"): one for (kind, name), one in self.objects.items() if kind == "Job"
        }
        self._network = network
        self._output = output
        self.machines: dict[str, Machine] = {}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: str) -> None:
        """A pod of it, on a machine that was not there before."""
        pod = self.jobs[job]["spec"]["template"]["spec"]
        machine = self._network.add(f"{job}-{len(self._network.machines)}")
        machine.run("sh", "-c", OVERLAY)
        self.machines[job] = machine
        self._name_the_service()
        volumes = {one["name"]: one for one in pod["volumes"]}
        [container] = pod["containers"]
        for server in pod.get("initContainers", ()):
            self._mount(machine, server, volumes)
            machine.start(
                *server["command"],
                output=self._output / f"{job}-server.out",
                environment=self._environment(server, machine),
            )
        self._mount(machine, container, volumes)
        self.started[job] = machine.start(
            *container["command"], output=self._output / f"{job}.out", environment=self._environment(container, machine)
        )

    def _name_the_service(self) -> None:
        """As the headless Service does: its name is the address of the run's pod."""
        if (loop := self.machines.get("loop")) is not None:
            line = f"{loop.address} {self.run}\n"
            for machine in self.machines.values():
                machine.run("sh", "-c", 'printf "127.0.0.1 localhost\\n%s" "$1" > /etc/hosts', "sh", line, check=False)

    def _mount(self, machine: Machine, container: Mapping[str, Any], volumes: Mapping[str, Mapping[str, Any]]) -> None:
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                machine.run("mount", "-t", "tmpfs", "none", mount["mountPath"])
            for name, text in self._files(volume).items():
                script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
                machine.run("sh", "-c", script, "sh", f"{mount['mountPath']}/{name}", input=text)

    def _files(self, volume: Mapping[str, Any]) -> Mapping[str, str]:
        if "configMap" in volume:
            return dict(self.objects["ConfigMap", volume["configMap"]["name"]]["data"])
        if "secret" not in volume:
            return {}
        kept = {one["key"] for one in volume["secret"].get("items", ())}
        found = self.objects["Secret", volume["secret"]["secretName"]]["stringData"]
        return {name: text for name, text in found.items() if not kept or name in kept}

    def _environment(self, container: Mapping[str, Any], machine: Machine) -> Mapping[str, str]:
        made = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        for one in container.get("env", ()):
            source = one.get("valueFrom", {})
            if "secretKeyRef" in source:
                made[one["name"]] = self.objects["Secret", source["secretKeyRef"]["name"]]["stringData"][
                    source["secretKeyRef"]["key"]
                ]
            else:
                made[one["name"]] = machine.address if "fieldRef" in source else one["value"]
        return made

    def text(self, job: str = "loop") -> str:
        return (self._output / f"{job}.out").read_text()

    def signal(self, job: str, number: signal.Signals) -> None:
        """To the pod's container, as a kubelet sends it: to what the command is, and to nothing that it has started."""
        [first] = psutil.Process(self.started[job].pid).children()
        first.send_signal(number)

    def wait(self, job: str, within_s: float) -> int:
        code = self.started[job].wait(within_s)
        return 128 - code if code < 0 else code

    def processes(self, job: str) -> dict[str, psutil.Process]:
        """Of its machine, by the last word of their command lines."""
        namespace = os.readlink(f"/proc/{self.machines[job].pid}/ns/net")
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            try:
                if os.readlink(f"/proc/{process.pid}/ns/net") == namespace and process.info["cmdline"]:
                    found[process.info["cmdline"][-1]] = process
            except OSError:
                continue
        return found

    def close(self) -> None:
        for machine in self.machines.values():
            machine.lose()
        for process in self.started.values():
            process.wait(10)
