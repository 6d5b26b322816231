"""The options of `[launcher] use = "slurm"`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from atropos_core.plugins.options import Options


def _line(text: str) -> str:
    if any((ord(one) < 0x20 and one != "\t") or ord(one) == 0x7F for one in text):
        raise ValueError("a line of a script must not contain line breaks or other control characters")
    return text


def _option(text: str) -> str:
    if not re.match(r"--[a-z][a-z-]*(=|$)", text):
        raise ValueError(
            "an option of sbatch must begin with two dashes and have its value after an equals sign: one option in each text"
        )
    return text


Line = Annotated[str, AfterValidator(_line)]
SbatchOption = Annotated[str, AfterValidator(_line), AfterValidator(_option)]


class Resources(Options):
    """The resources of a process or a node."""

    cpus: int = Field(1, ge=1, description="CPU cores, as Slurm counts them")
    gpus: int = Field(0, ge=0, description="GPUs, which a process sees as cuda:0, cuda:1 and so on")
    memory_gb: float = Field(0.0, ge=0, description="gigabytes of memory; 0: what the cluster gives by default")

    def says(self) -> str:
        named = {"CPU cores": self.cpus, "GPUs": self.gpus, "GB of memory": self.memory_gb}
        return ", ".join(f"{amount:g} {name}" for name, amount in named.items() if amount)


class Workers(Options):
    """Workers that run one environment (`atropos env`), as a separate job array."""

    count: int = Field(1, ge=1, description="workers")
    cpus: int = Field(1, ge=1, description="CPU cores of each")
    memory_gb: float = Field(0.0, ge=0, description="gigabytes of memory of each; 0: the cluster's default")
    concurrency: int = Field(16, ge=1, description="tasks that each runs at once")
    partition: Line = Field("", description="partition; unset: the cluster's default")


class SlurmOptions(Options):
    """Options of the launcher "slurm"."""

    nodes: int = Field(1, ge=1, description="nodes of the job")
    node: Resources = Field(Resources(cpus=4), description="resources that the job takes of each node")
    loop: Resources = Field(
        Resources(cpus=1), description="reserved on the first node for the run itself: rollouts, hub, sinks"
    )
    roles: dict[str, Resources] = Field(
        default_factory=dict,
        description="resources of a process, by role: engine, engine-NAME, trainer, trainer-2; others take one CPU core",
    )
    workers: dict[str, Workers] = Field(
        default_factory=dict, description="by environment: workers outside the job, if the run file has an [api]"
    )
    time: Line = Field("", description="time limit, such as 12:00:00; unset: the partition's")
    partition: Line = Field("", description="partition; unset: the cluster's default")
    account: Line = Field("", description="account; unset: your default")
    sbatch: tuple[SbatchOption, ...] = Field((), description='more options of sbatch, each such as "--constraint=h100"')
    setup: tuple[Line, ...] = Field((), description='first lines of bash in each script, such as "module load cuda"')
    save_s: int = Field(300, ge=10, description="seconds before the time limit at which the run saves and queues again")
    host: str = Field("", description="address of the first node for the others; unset: the one that Slurm knows")
    room_deadline_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="seconds to wait for srun to start a process"
    )
    submit: bool = Field(False, description="submit the files with sbatch instead of printing the command")


def megabytes(memory_gb: float) -> str:
    """A size in the form that Slurm reads. It is never 0M, which would mean all memory of the node."""
    return f"{max(1, round(memory_gb * 1000))}M"
