"""The options of `[launcher] use = "ray"`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, model_validator

from atropos_core.plugins.options import Options


class RoleResources(Options):
    """The resources of one process."""

    cpus: float = Field(1.0, ge=0, description="CPU cores")
    gpus: float = Field(0.0, ge=0, description="GPUs, which it sees as cuda:0, cuda:1 and so on")
    memory_gb: float = Field(0.0, ge=0, description="gigabytes of memory; 0: not counted")
    other: dict[str, PositiveFloat] = Field(
        default_factory=dict, description='resources by the cluster\'s own names, such as { "disk" = 1 }'
    )

    def bundle(self) -> dict[str, float]:
        """The nonzero resources, as Ray counts them."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_gb * 1e9, **self.other}
        return {name: amount for name, amount in named.items() if amount}


class Workers(RoleResources):
    """Workers that run one environment (`atropos env`), each with these resources."""

    count: int = Field(1, ge=1, description="workers; with `least`, the most")
    least: int | None = Field(
        None,
        ge=1,
        description="fewest workers: their number then follows how long the loop waits; unset: always `count`",
    )
    concurrency: int = Field(16, ge=1, description="tasks that each runs at once")

    @model_validator(mode="after")
    def _agrees(self) -> Workers:
        if self.least is not None and self.least >= self.count:
            raise ValueError(f"least is {self.least}, but count only {self.count}: leave least out, or raise count")
        return self

    @property
    def first(self) -> int:
        """The number of workers at the start."""
        return self.least or self.count


class RayOptions(Options):
    """Options of the launcher "ray"."""

    address: str = Field(
        "auto", description="of the cluster's head, as HOST:6379; auto: the cluster that this machine is part of"
    )
    host: str = Field("", description="address of this machine for the others; unset: the one that Ray knows")
    roles: dict[str, RoleResources] = Field(
        default_factory=dict,
        description="resources of a process, by role: engine, engine-NAME, trainer, trainer-2, server; others take one CPU core",
    )
    workers: dict[str, Workers] = Field(
        default_factory=dict, description="by environment: workers that run it, if the run file has an [api]"
    )
    look_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="seconds of steps between two changes of the number of workers"
    )
    room_deadline_s: Annotated[float, Field(gt=0)] = Field(
        10.0,
        description="seconds to wait for free resources; raise it if machines are started on demand",
    )

    @model_validator(mode="after")
    def _check_effect(self) -> RayOptions:
        self.refuse_idle(
            any(one.least is not None for one in self.workers.values()), "because no workers set `least`", "look_s"
        )
        return self
