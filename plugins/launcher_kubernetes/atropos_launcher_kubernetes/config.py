"""What a run file may say under `[launcher] use = "kubernetes"`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atropos_core.plugins.provider import Options

SECRETS = "ATROPOS_POD_SECRETS"  # environment of the run's own pod: the folder with a secret for each role
POD_ADDRESS = "ATROPOS_POD_ADDRESS"  # the same: the address of the pod
ENDED = "ended"  # a file in the run directory: written when the run is over, so that what still waits for it ends


class Pod(Options):
    """What a pod asks for."""

    cpus: float = Field(1.0, gt=0, description="CPU cores")
    gpus: int = Field(0, ge=0, description="GPUs, which it sees as cuda:0, cuda:1 and so on")
    memory_gb: float = Field(0.0, ge=0, description="gigabytes of memory; 0: no bound")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels that its node must have")


class Workers(Pod):
    """Workers that run one environment (`atropos env`)."""

    count: int = Field(1, ge=1, description="pods")
    concurrency: int = Field(16, ge=1, description="tasks that each runs at once")


class KubernetesOptions(Options):
    """Options of the launcher "kubernetes"."""

    image: str = Field("", description="image of every pod, with Atropos and the run's plugins in it")
    claim: str = Field(
        "", description="PersistentVolumeClaim that all pods share (ReadWriteMany): run directory, models"
    )
    mount: Annotated[str, Field(pattern="^/.")] = Field("/shared", description="where it is mounted")
    python: str = Field("python", description="Python of the image")
    namespace: str = Field("", description="namespace; unset: that of your context")
    gpu: str = Field("nvidia.com/gpu", description="the cluster's name for a GPU")
    loop: Pod = Field(Pod(cpus=2), description="the pod of the run itself: rollouts, hub, sinks")
    roles: dict[str, Pod] = Field(
        default_factory=dict,
        description="the pod of a process, by role: engine, engine-NAME, trainer, trainer-2; others take one CPU core",
    )
    workers: dict[str, Workers] = Field(
        default_factory=dict, description="by environment: pods beside the run, where the run file has an [api]"
    )
    port: int = Field(7077, ge=1, le=65535, description="of the run's pod, which the others connect to")
    server_port: int = Field(8000, ge=1, le=65535, description="of the run's pod, which workers send to")
    wait_s: Annotated[float, Field(gt=0)] = Field(
        1800.0, description="seconds that the run waits for its pods, and they for the run"
    )
    save_s: int = Field(300, ge=1, description="seconds to save in, where the run's pod is evicted")
    submit: bool = Field(False, description="hand the manifests over with kubectl apply, rather than say how")
