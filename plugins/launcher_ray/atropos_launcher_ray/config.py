"""What a run file may say under `[launcher] use = "ray"`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from atropos_core.plugins.provider import Options


class RoleResources(BaseModel):
    """What one process needs of a machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    cpus: float = Field(1.0, ge=0, description="CPU cores")
    gpus: float = Field(0.0, ge=0, description="GPUs, which it sees as cuda:0, cuda:1 and so on")
    memory_gb: float = Field(0.0, ge=0, description="gigabytes of memory; 0: not counted")
    other: dict[str, PositiveFloat] = Field(
        default_factory=dict, description='resources by the cluster\'s own names, as { "disk" = 1 }'
    )

    def bundle(self) -> dict[str, float]:
        """As Ray counts them: nothing that is 0."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_gb * 1e9, **self.other}
        return {name: amount for name, amount in named.items() if amount}


class RayOptions(Options):
    """Options of the launcher "ray"."""

    address: str = Field(
        "auto", description="of the cluster's head, as HOST:6379; auto: the cluster that this machine is part of"
    )
    host: str = Field(
        "", description="address of this machine that the others reach; unset: the one that Ray knows it by"
    )
    roles: dict[str, RoleResources] = Field(
        default_factory=dict,
        description="resources of a process, by role: engine, engine-NAME, trainer, trainer-2; others take one CPU core",
    )
    room_deadline_s: Annotated[float, Field(gt=0)] = Field(
        10.0,
        description="seconds to wait for room, where all of it is taken; more where machines are started by demand",
    )
