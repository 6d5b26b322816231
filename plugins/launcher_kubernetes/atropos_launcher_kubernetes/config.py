"""The options of `[launcher] use = "kubernetes"`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from atropos_core.plugins.options import Options

SECRETS = "ATROPOS_POD_SECRETS"  # environment of the run's own pod: the folder with a secret for each role
POD_ADDRESS = "ATROPOS_POD_ADDRESS"  # the same: the address of the pod
ENDED = "ended"  # a file in the run directory, written when the run is over, so that waiting pods end


_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # of RFC 1123
_SUBDOMAIN = rf"(?=[^/]{{1,253}}(/|$)){_LABEL}(\.{_LABEL})*"
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"


def _of_form(form: str, says: str) -> AfterValidator:
    """Check a value when the run file is read, because Kubernetes would refuse it only when the manifests are applied."""
    known = re.compile(form)

    def check(text: str) -> str:
        if text and known.fullmatch(text) is None:
            raise ValueError(f"{text!r} is not {says}")
        return text

    return AfterValidator(check)


Label = Annotated[str, _of_form(_LABEL, "a name of Kubernetes: at most 63 of a-z, 0-9 and -, not - at an end")]
Subdomain = Annotated[str, _of_form(_SUBDOMAIN, "a name of Kubernetes: at most 253 of a-z, 0-9, - and .")]
Qualified = Annotated[
    str,
    Field(min_length=1),
    _of_form(rf"({_SUBDOMAIN}/)?{_NAME}", "a name of Kubernetes, such as nvidia.com/gpu or pool"),
]
Value = Annotated[str, _of_form(_NAME, "a label's value: at most 63 of letters, digits, -, _ and .")]
Text = Annotated[str, _of_form(r"[!-~]+", "one ASCII word without spaces and control characters")]
Place = Annotated[str, _of_form(rf"/[^:{_CONTROL}]+", "an absolute path without : and control characters")]
Printable = Annotated[str, Field(min_length=1), _of_form(rf"[^{_CONTROL}]+", "free of control characters")]


class Pod(Options):
    """The resources of a pod."""

    cpus: float = Field(1.0, ge=0.001, description="CPU cores")
    gpus: int = Field(0, ge=0, description="GPUs, which it sees as cuda:0, cuda:1 and so on")
    memory_gb: float = Field(0.0, ge=0, description="gigabytes of memory; 0: no bound")
    node_selector: dict[Qualified, Value] = Field(default_factory=dict, description="labels that its node must have")


class Workers(Pod):
    """Workers that run one environment (`atropos env`)."""

    count: int = Field(1, ge=1, description="pods")
    concurrency: int = Field(16, ge=1, description="tasks that each runs at once")


class KubernetesOptions(Options):
    """Options of the launcher "kubernetes"."""

    image: Text = Field("", description="image of every pod, with Atropos and the run's plugins")
    claim: Subdomain = Field(
        "", description="PersistentVolumeClaim that all pods share (ReadWriteMany): run directory, models"
    )
    mount: Annotated[Place, Field(min_length=2)] = Field("/shared", description="path of the claim in every pod")
    python: Printable = Field("python", description="Python of the image")
    namespace: Label = Field("", description="namespace; unset: that of your context")
    gpu: Qualified = Field("nvidia.com/gpu", description="the cluster's name for a GPU")
    loop: Pod = Field(Pod(cpus=2), description="the pod of the run itself: rollouts, hub, sinks")
    roles: dict[str, Pod] = Field(
        default_factory=dict,
        description="the pod of a process, by role: engine, engine-NAME, trainer, trainer-2; others take one CPU core",
    )
    workers: dict[str, Workers] = Field(
        default_factory=dict, description="by environment: worker pods, if the run file has an [api]"
    )
    port: int = Field(7077, ge=1, le=65535, description="of the run's pod, which the others connect to")
    server_port: int = Field(8000, ge=1, le=65535, description="of the run's pod, which workers send to")
    wait_s: Annotated[float, Field(gt=0)] = Field(
        1800.0, description="seconds that the run waits for its pods, and the pods for the run"
    )
    save_s: int = Field(300, ge=1, description="seconds to save in if the run's pod is evicted")
    submit: bool = Field(False, description="submit the manifests with kubectl apply instead of printing the command")
