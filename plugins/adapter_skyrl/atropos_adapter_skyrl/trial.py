"""Run one group of episodes through SkyRL's own classes without a GPU, for the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_advantages_and_returns, repopulate_all_registries
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.utils.trainer_utils import validate_generator_output
from skyrl.utils.tok import get_tokenizer

from atropos_adapter_skyrl.dataset import TaskDataset
from atropos_adapter_skyrl.engine import sampling_of
from atropos_adapter_skyrl.generator import AtroposGenerator
from atropos_adapter_skyrl.signatures import batch_tensors
from atropos_adapter_skyrl.source import Here, opened
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.builtin.toy import ToyEngine
from atropos_core.interfaces import Engine, Environment
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import WeightedReward
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.parts import EvaluationParts
from atropos_core.types import Message, Split, Task

N = 4


class Letters(Environment):
    """Rewards replies with more letters."""

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(split, ({"role": "user", "content": "Say something."},))]

    async def score(self, task: Task, reply: Message) -> float:
        return float(sum(letter.isalpha() for letter in reply["content"]))


class ToyClient:
    """The part of SkyRL's inference client that a generator uses."""

    def __init__(self, model: Path) -> None:
        self._engine = ToyEngine(ToyEngineOptions(), RunContext(directory=model, model=model))

    async def generate(self, batch: Any, model: str | None = None) -> dict[str, Any]:
        params = batch["sampling_params"]
        prompt = np.array(batch["prompt_token_ids"][0], np.int32)
        [one] = await self._engine.sample(prompt, 1, sampling_of(params), [params["seed"]], 60.0)
        return {
            "response_ids": [one.tokens.tolist()],
            "response_logprobs": [one.logprobs.tolist()],
            "stop_reasons": [one.finish],
        }

    async def finish_session(self, session_id: str) -> None:
        pass


async def run_trial(model: Path) -> str:
    """Run the trial. Raises whatever fails."""
    cfg = SkyRLTrainConfig.from_cli_overrides({"generator.sampling_params.max_generate_length": 8})
    environments = {"letters": Letters()}

    async def build(engine: Engine) -> EvaluationParts:
        own = WeightedReward("environment", EnvironmentReward(), 1.0, 60.0)
        return EvaluationParts(dict(environments), [own], engine, [])

    source = Here(build, ToyClient(model), ChatTokenizer(model), deadline_s=60.0, attempts=1)
    params = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    batch, uids = prepare_generator_input([TaskDataset(environments, "train")[0]], N, params, "", "train", 1)
    async with opened(source):
        output = await AtroposGenerator(source).generate(batch)
    validate_generator_output(N, output)
    columns = [output[name] for name in ("prompt_token_ids", "response_ids")]
    rewards = [[0.0] * (len(row) - 1) + [reward] for row, reward in zip(columns[1], output["rewards"], strict=True)]
    tokenizer = get_tokenizer(str(model), padding_side="left")
    sequences, _, mask, scored, *_ = batch_tensors(
        convert_prompts_responses_to_batch_tensors, tokenizer, *columns, rewards, output["loss_masks"],
        output["rollout_logprobs"],
    )  # fmt: skip
    repopulate_all_registries()
    advantages, _ = compute_advantages_and_returns(scored, mask, np.array(uids), "grpo", cfg.trainer.algorithm)
    spread = float(advantages.abs().max())
    return f"{N} rollouts of one task: {sequences.shape[1]} tokens at most, GRPO advantages up to {spread:.2f}"
