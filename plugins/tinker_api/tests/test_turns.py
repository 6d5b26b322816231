"""Models take turns in the trainer, however many requests one of them has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from atropos_core.stepwise import AdamSettings, AdapterSettings, StepwiseOutput, TargetSequence
from atropos_core.types import Metrics
from atropos_tinker_api.state.checkpoints import Checkpoints
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.model import Model, ModelRecord
from atropos_tinker_api.state.samplers import Samplers
from atropos_tinker_api.work.operations import Limits
from atropos_tinker_api.work.saving import Saving
from atropos_tinker_api.work.training import Training
from tests.waiting import until

STEP = b'{"adam_params": {}}'
SETTINGS = AdapterSettings(2, 32.0, 1)


class Recording:
    """A trainer that writes down whose step it was asked for."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def create_adapter(self, name: str, settings: AdapterSettings) -> None: ...

    async def drop_adapter(self, name: str) -> None: ...

    async def forward_backward(
        self, name: str, sequences: Sequence[TargetSequence], loss: str, settings: Mapping[str, float], backward: bool
    ) -> StepwiseOutput:
        raise NotImplementedError

    async def optimizer_step(self, name: str, adam: AdamSettings) -> Metrics:
        self.steps.append(name[0])
        return {}

    async def clear_gradient(self, name: str) -> None: ...

    async def save_adapter(self, directory: Path, name: str, moments: bool) -> None: ...

    async def restore_adapter(self, directory: Path, name: str, moments: bool) -> None: ...


def model(letter: str, requests: int, directory: Path) -> Model:
    session = letter * 16
    made = Model.create(ModelRecord(f"{session}:train:0", session, "base", SETTINGS, 0.0), directory)
    for seq in range(1, requests + 1):
        made.accept(Kind.OPTIM_STEP, seq, STEP)
    return made


async def test_a_model_with_many_requests_leaves_every_second_turn_to_another(tmp_path: Path) -> None:
    trainer, checkpoints = Recording(), Checkpoints(tmp_path)
    saving = Saving(checkpoints, Samplers(tmp_path / "samplers", checkpoints, 1))
    training = Training(trainer, saving, Limits(10, 10), 2)
    greedy, late = model("a", 20, tmp_path), model("b", 3, tmp_path)
    training.wake(greedy)
    training.wake(late)
    running = asyncio.create_task(training.run())
    await until(lambda: len(trainer.steps) == 23, "all steps")
    running.cancel()
    assert "".join(trainer.steps) == "ababab" + "a" * 17
