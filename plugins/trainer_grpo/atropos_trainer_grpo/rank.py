"""A further rank of the trainer: `python -m atropos_trainer_grpo.rank DESCRIPTOR ROLE`, started by `ranks` alone."""

from __future__ import annotations

from typing import Any

from atropos_core.guards.collector import without_collector
from atropos_core.interfaces import ModelInfo
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child_main import Host, main
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.process_group import ProcessGroup


class Rank(Host):
    async def build(self, wanted: dict[str, Any]) -> None:
        """`wanted`: options, the fields of a RunContext as `context`, rank, size, and the port to meet at."""
        with without_collector():
            from atropos_trainer_grpo.trainer import GrpoTrainer

        group, context = ProcessGroup(wanted["rank"], wanted["size"]), RunContext.from_record(wanted["context"])
        trainer = GrpoTrainer(GrpoOptions.model_validate(wanted["options"]), context, group)

        async def join_and_open() -> ModelInfo:
            with without_collector():
                await trainer.join(wanted["port"])
                return await trainer.open()

        self.offer("trainer", trainer)
        self.peer.handlers["open"] = join_and_open


if __name__ == "__main__":
    main(Rank)
