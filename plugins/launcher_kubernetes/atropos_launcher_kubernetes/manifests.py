"""The manifests of a run: a Job for the run itself, one for each engine and the trainer, one for the workers of each environment. All exist
from the start. Their processes connect to the pod of the run, by a name from a headless Service.

Core Kubernetes (1.31 or later) is enough: the cluster needs no additional software, and no pod may call its API.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core.errors import FitError
from atropos_core.launchers import (
    PlannedRun,
    SchedulerFiles,
    refuse_idle_workers,
    refuse_missing_workers,
    refuse_other_gpus,
    refuse_unprintable,
    section_of,
)
from atropos_core.processes.dialing import SECRET
from atropos_launcher_kubernetes.config import POD_ADDRESS, SECRETS, KubernetesOptions, Pod, Workers
from atropos_launcher_kubernetes.yaml_text import dump

FOLDER = "manifests"
RUN_FILE = "/etc/atropos/run/run.toml"
SECRETS_FOLDER = "/etc/atropos/secrets"
SERVER_TOKEN = "token"
TRIES = 6  # of a pod that fails for its own reasons
SAVED, KILLED = 130, (137, 143)  # exit codes after which the run continues in a new pod
PACKAGE = "atropos_launcher_kubernetes"
KEY = re.compile(r"[A-Za-z0-9_.-]{1,253}")  # of a Secret
LABEL_CHARACTERS = 63
RUN_CHARACTERS = 40  # of the name of a run, so that its objects can be named after it


def files(options: KubernetesOptions, run: PlannedRun) -> SchedulerFiles:
    """The manifests. Raises FitError for a run that could not work in the cluster."""
    _check(options, run)
    made = _Manifests(options, run)
    text = {
        f"{FOLDER}/run.yaml": _documents([made.run_file(), made.service(), made.loop()]),
        f"{FOLDER}/roles.yaml": _documents([made.role(role) for role in run.roles]),
        **(
            {f"{FOLDER}/workers.yaml": _documents([made.workers(*one) for one in options.workers.items()])}
            if options.workers
            else {}
        ),
        f"{FOLDER}/secrets.yaml": _documents([made.secrets()]),
    }
    return SchedulerFiles(text, ("kubectl", "apply", "-f", _file_name(run.directory / FOLDER)), options.submit)


def _check(options: KubernetesOptions, run: PlannedRun) -> None:
    named = {"the name of a process": "".join(run.roles), "the name of an environment": "".join(options.workers)}
    refuse_unprintable({"the run directory": str(run.directory), **named})
    for role in run.roles:
        if KEY.fullmatch(role) is None:
            raise FitError(
                f"{section_of(role)} cannot have a pod: {role!r} names its secret, and Kubernetes allows at most 253 of letters, digits, "
                "-, _ and . for that.",
                remedy="Choose such a name.",
            )
    for name, why in (
        ("image", "from which the pods are made"),
        ("claim", "on which all pods share the run directory"),
    ):
        if not getattr(options, name):
            raise FitError(f"launcher.{name} is not set, {why}.", remedy=f'Set launcher.{name} = "...".')
    if unknown := sorted(set(options.roles) - set(run.roles)):
        raise FitError(
            f"launcher.roles.{unknown[0]} has no effect: there is no such role.",
            remedy=f"Choose one of: {', '.join(run.roles)}.",
        )
    refuse_other_gpus(run, {role: one.gpus for role, one in options.roles.items()})
    refuse_missing_workers(run, options.workers)
    refuse_idle_workers(run, options.workers, '"http://127.0.0.1:8000".')


class _Manifests:
    def __init__(self, options: KubernetesOptions, run: PlannedRun) -> None:
        self.options = options
        self.run = run
        self.name = label(run.directory.name, RUN_CHARACTERS)
        self.directory = f"{options.mount.rstrip('/')}/runs/{run.directory.name}"

    def run_file(self) -> Mapping[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(""),
            "data": {"run.toml": self.run.run_file},
        }

    def secrets(self) -> Mapping[str, Any]:
        """One for each role, so that none can pose as another, and the token that workers show the server."""
        made = {role: secrets.token_hex(32) for role in self.run.roles}
        if self.options.workers:
            made[SERVER_TOKEN] = secrets.token_urlsafe(32)
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(""),
            "type": "Opaque",
            "stringData": made,
        }

    def service(self) -> Mapping[str, Any]:
        """A name for the pod of the run, whatever its address is."""
        ports = {"run": self.options.port} | ({"server": self.options.server_port} if self.options.workers else {})
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(""),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": self._labels("loop"),
                "ports": [{"name": name, "port": port} for name, port in ports.items()],
            },
        }

    def loop(self) -> Mapping[str, Any]:
        """The run's Job. If its pod is evicted or killed, it continues in a new one; every other end is the run's."""
        options = self.options
        serving = ["--server-port", str(options.server_port)] if options.workers else []
        command = [options.python, "-m", f"{PACKAGE}.loop", RUN_FILE, self.directory, *serving]
        container = self._container("loop", command, options.loop) | {
            "env": [
                {"name": SECRETS, "value": SECRETS_FOLDER},
                {"name": POD_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            ],
            "ports": [{"name": "run", "containerPort": options.port}],
        }
        container["volumeMounts"] += [
            {"name": "run-file", "mountPath": "/etc/atropos/run", "readOnly": True},
            {"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True},
        ]
        volumes = [
            {"name": "run-file", "configMap": {"name": self.name}},
            {"name": "secrets", "secret": {"secretName": self.name}},
        ]
        policy = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "loop", "operator": "NotIn", "values": [0, SAVED, *KILLED]},
                },
            ]
        }
        pod = self._pod("loop", container, options.loop, volumes) | {"terminationGracePeriodSeconds": options.save_s}
        if options.workers:
            pod["initContainers"] = [self._server()]
        return self._job("loop", pod, {"podFailurePolicy": policy})

    def _server(self) -> Mapping[str, Any]:
        """The server next to the run, which ends with it."""
        port = self.options.server_port
        serve = (
            f"umask 077; cat {SECRETS_FOLDER}/{SERVER_TOKEN} > /tmp/token; exec {shlex.quote(self.options.python)} -m atropos_core serve "
            f"--host 0.0.0.0 --port {port} --dir {shlex.quote(f'{self.directory}/api')} --token-file /tmp/token"
        )
        made = self._container("server", ["sh", "-c", serve], Pod()) | {
            "restartPolicy": "Always",
            "ports": [{"name": "server", "containerPort": port}],
        }
        made["volumeMounts"].append({"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True})
        return made

    def role(self, role: str) -> Mapping[str, Any]:
        requested = self.options.roles.get(role, Pod())
        where = f"{self.name}:{self.options.port}"
        wait = ["--wait-s", f"{self.options.wait_s:g}"]
        command = [self.options.python, "-m", f"{PACKAGE}.holder", role, where, self.directory, *wait]
        reference = {"secretKeyRef": {"name": self.name, "key": role}}
        container = self._container("role", command, requested) | {"env": [{"name": SECRET, "valueFrom": reference}]}
        return self._job(role, self._pod(role, container, requested, [], restart="OnFailure"), {})

    def workers(self, name: str, workers: Workers) -> Mapping[str, Any]:
        """A Job with `parallelism` workers, which you can change while they run."""
        token = f"{SECRETS_FOLDER}/{SERVER_TOKEN}"
        command = [
            self.options.python, "-m", f"{PACKAGE}.until_end", self.directory,
            self.options.python, "-m", "atropos_core", "env", "--api", f"http://{self.name}:{self.options.server_port}",
            "--token-file", token, "--file", RUN_FILE, "--concurrency", str(workers.concurrency), "--", name,
        ]  # fmt: skip
        container = self._container("worker", command, workers)
        container["volumeMounts"] += [
            {"name": "run-file", "mountPath": "/etc/atropos/run", "readOnly": True},
            {"name": "token", "mountPath": SECRETS_FOLDER, "readOnly": True},
        ]
        token_alone = {"secretName": self.name, "items": [{"key": SERVER_TOKEN, "path": SERVER_TOKEN}]}
        volumes = [{"name": "run-file", "configMap": {"name": self.name}}, {"name": "token", "secret": token_alone}]
        role = f"workers-{name}"
        pod = self._pod(role, container, workers, volumes, restart="OnFailure")
        return self._job(role, pod, {"parallelism": workers.count})

    def _job(self, role: str, pod: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
        spec = {"backoffLimit": TRIES, **more, "template": {"metadata": {"labels": self._labels(role)}, "spec": pod}}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata(role), "spec": spec}

    def _pod(
        self,
        role: str,
        container: Mapping[str, Any],
        requested: Pod,
        volumes: Sequence[Mapping[str, Any]],
        *,
        restart: str = "Never",
    ) -> dict[str, Any]:
        shared = {"name": "shared", "persistentVolumeClaim": {"claimName": self.options.claim}}
        memory = {"name": "memory", "emptyDir": {"medium": "Memory"}}  # 64 MB by default, too little for torch
        return {
            "restartPolicy": restart,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"nodeSelector": dict(requested.node_selector)} if requested.node_selector else {}),
            "containers": [container],
            "volumes": [shared, memory, *volumes],
        }

    def _container(self, name: str, command: Sequence[str], requested: Pod) -> dict[str, Any]:
        wanted: dict[str, Any] = {"cpu": f"{round(requested.cpus, 3)!r}".removesuffix(".0")}
        bounds: dict[str, Any] = {}
        if requested.memory_gb:
            wanted["memory"] = bounds["memory"] = f"{max(1, round(requested.memory_gb * 1000))}M"
        if requested.gpus:
            wanted[self.options.gpu] = bounds[self.options.gpu] = str(requested.gpus)
        return {
            "name": name,
            "image": self.options.image,
            "command": [word.replace("$", "$$") for word in command],  # otherwise $(NAME) would be expanded
            "resources": {"requests": wanted, **({"limits": bounds} if bounds else {})},
            "volumeMounts": [
                {"name": "shared", "mountPath": self.options.mount},
                {"name": "memory", "mountPath": "/dev/shm"},
            ],
        }

    def _metadata(self, role: str) -> Mapping[str, Any]:
        named = {"name": f"{self.name}-{label(role, LABEL_CHARACTERS - len(self.name) - 1)}" if role else self.name}
        where = {"namespace": self.options.namespace} if self.options.namespace else {}
        return {**named, **where, "labels": self._labels(role)}

    def _labels(self, role: str) -> Mapping[str, str]:
        return {"app.kubernetes.io/part-of": "atropos", "atropos/run": self.name} | (
            {"atropos/role": label(role)} if role else {}
        )


def label(text: str, most: int = LABEL_CHARACTERS) -> str:
    """Return a name of an object or host for a text: a-z, 0-9 and -, beginning with a letter (RFC 1035). A text that had to be changed
    ends in a digest of itself, so that two texts never have the same name."""
    made = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    if not made[:1].isalpha():
        made = f"run-{made}".strip("-")
    if made == text and len(made) <= most:
        return made
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{made[: most - len(digest) - 1].strip('-')}-{digest}"


def _file_name(path: Path) -> str:
    """The path as an argument of `kubectl -f`, which reads a list of names in CSV."""
    text = str(path)
    return '"' + text.replace('"', '""') + '"' if re.search('[,"]', text) else text


def _documents(made: Sequence[Mapping[str, Any]]) -> str:
    return "---\n".join(dump(one) for one in made)
