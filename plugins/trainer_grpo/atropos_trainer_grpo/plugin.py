"""What this package offers: the trainer `grpo`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.registry import Provider, RunContext
from atropos_trainer_grpo.config import GrpoOptions

if TYPE_CHECKING:
    from atropos_core.interfaces import Trainer, Transport


def build(options: GrpoOptions, context: RunContext) -> Trainer:
    from atropos_trainer_grpo.trainer import GrpoTrainer

    return GrpoTrainer(options, context)


def transports(options: GrpoOptions) -> frozenset[Transport]:
    """Both carriers of shared memory (the run's device decides which), and whole checkpoints."""
    return frozenset({"posix_shm", "cuda_ipc", "checkpoint"})


@hookimpl
def atropos_trainers() -> Iterable[Provider[Trainer]]:
    yield Provider(
        name="grpo",
        summary="GRPO, Dr.GRPO and DAPO on packed sequences; AdamW with fp32 masters",
        config=GrpoOptions,
        build=build,
        transports=transports,
        requires=frozenset({"torch", "transformers", "safetensors"}),
        runs_in="process",
    )
