"""A further rank of the trainer on one machine: `python -m atropos_trainer_grpo.rank DESCRIPTOR ROLE`, started only by `ranks`."""

from __future__ import annotations

from typing import Any

from atropos_core.guards.collector import without_collector
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child_main import Host, main
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.process_group import ProcessGroup


class Rank(Host):
    async def build(self, wanted: dict[str, Any]) -> None:
        """`wanted`: options, the fields of a RunContext as `context`, rank and size."""
        with without_collector():
            from atropos_trainer_grpo.trainer import GrpoTrainer

        group, context = ProcessGroup(wanted["rank"], wanted["size"]), RunContext.from_record(wanted["context"])
        trainer = GrpoTrainer(GrpoOptions.model_validate(wanted["options"]), context, group)

        self.offer("trainer", trainer)
        self.peer.handlers["join"] = trainer.join


if __name__ == "__main__":
    main(Rank)
