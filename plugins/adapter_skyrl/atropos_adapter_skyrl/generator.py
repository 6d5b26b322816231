"""SkyRL's generator over an Atropos source: rows in, rows out in the same order; no rollouts are kept between calls."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput

from atropos_adapter_skyrl.dataset import Block, blocks_of
from atropos_adapter_skyrl.rows import output_of
from atropos_adapter_skyrl.source import GroupRequest, GroupSource
from atropos_core.errors import DataError
from atropos_core.seeds import derive

_ID_BITS = 61  # a draw's id is below 2**62 on the wire; what a process before this one requested has other ids


class AtroposGenerator(GeneratorInterface):  # type: ignore[misc] # SkyRL has no types
    """A generator that requests each group under a new id, so that no stale group can match.

    SkyRL's own ids repeat in every epoch, in evaluations and in dynamic sampling. Seeds derive from a row's place in the run."""

    def __init__(
        self,
        source: GroupSource,
        *,
        seed: int = 0,
        step_wise: bool = False,
        own_advantages: bool = False,
        turn_rewards: bool = False,
    ) -> None:
        self.source = source
        self._seed = seed
        self._step_wise = step_wise
        self._own_advantages = own_advantages
        self._turn_rewards = turn_rewards
        self._next = secrets.randbits(_ID_BITS)
        self._requested: Counter[tuple[str, Block]] = (
            Counter()
        )  # in the present step, so that one that comes again is run anew
        self._step: dict[str, int] = {}

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return the rows of all groups. Raises RolloutsFailed if a group cannot be produced; it returns no filler rows."""
        params = input_batch.get("sampling_params")
        if params is None:
            raise DataError("generate() was given no sampling_params: how long may a reply be?")
        metadata = input_batch.get("batch_metadata")
        phase, step = (metadata.training_phase, metadata.global_step or 0) if metadata else ("train", 0)
        blocks = blocks_of(input_batch)
        requests = [
            GroupRequest(block.draw(self._fresh(), self._seed_of(phase, step, block)), block.n, phase == "train")
            for block in blocks
        ]
        results = await self.source.fetch(requests, params, step_wise=self._step_wise)
        for block, one in zip(blocks, results, strict=True):
            if len(one.trajectories) != block.n:
                raise DataError(f"a group of {block.n} came with {len(one.trajectories)} trajectories")
        output: Any = output_of(
            [rows for one in results for rows in one.trajectories],
            input_batch["trajectory_ids"],
            [one.seconds for one in results for _ in one.trajectories],
            step_wise=self._step_wise,
            own_advantages=self._own_advantages and phase == "train",
            turn_rewards=self._turn_rewards and phase == "train",
            arrays=phase == "train"
            and not self._step_wise,  # evaluations may be written as JSON, and steps are joined as lists
        )
        output["draw_ids"] = [
            one.draw.id
            for one, group in zip(requests, results, strict=True)
            for rows in group.trajectories
            for _ in rows
        ]
        output["rollout_metrics"]["atropos/requeued"] = float(sum(one.requeued for one in results))
        return output

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def _seed_of(self, phase: str, step: int, block: Block) -> int:
        if self._step.get(phase) != step:
            self._step[phase] = step
            for known in [one for one in self._requested if one[0] == phase]:
                del self._requested[known]
        self._requested[phase, block] += 1
        return seed_of(self._seed, phase, step, block, self._requested[phase, block] - 1)


def seed_of(seed: int, phase: str, step: int, block: Block, again: int) -> int:
    """Return the draw's seed for the `again`-th equal block of this step."""
    return derive(seed, "skyrl", phase, step, block.environment, block.split, block.index, again)
