"""What the tests give to SkyRL: environments, a policy of one table, SkyRL's engine interface over it, its dispatch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, repopulate_all_registries
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils.tracking import Tracking
from skyrl.utils.tok import get_tokenizer

from atropos_adapter_skyrl.dataset import TaskDataset
from atropos_adapter_skyrl.engine import sampling_of
from atropos_adapter_skyrl.fully_async import FullyAsyncAtroposTrainer
from atropos_adapter_skyrl.generator import AtroposGenerator
from atropos_adapter_skyrl.source import open_all
from atropos_adapter_skyrl.trainer import AroundSource, AtroposTrainer
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.builtin.toy import ToyEngine
from atropos_core.conversation import Conversation
from atropos_core.interfaces import Environment
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import WeightedReward
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.parts import EvaluationParts
from atropos_core.types import Score, Task

SEVEN = int(ChatTokenizer(TOY_MODEL).encode("7")[0])
CONTEXT = RunContext(directory=Path("."), model=TOY_MODEL)


class Sevens(Environment):
    """Of two characters, how many are sevens. One reply."""

    def __init__(self, tasks: int = 64) -> None:
        self.count = tasks
        self.opened = self.closed = 0

    def tasks(self, split: str) -> list[Task]:
        return [
            Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 to {n}"},), answer="77")
            for n in range(self.count)
        ]

    async def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def score(self, task: Task, reply: Any) -> Score:
        return Score(reply["content"].count("7") / 2, metrics={"letters": float(len(reply["content"]))})


class Adder(Environment):
    """Three replies, with what a tool says between them: the running count of digits."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # the tool's calls, once each

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"count to {n}"},)) for n in range(16)]

    async def rollout(self, task: Task, policy: Any, *, seed: int) -> Any:
        talk = Conversation(policy, seed=seed)
        reply = await talk.reply(*task.messages)
        digits = 0
        for _turn in range(2):
            await asyncio.sleep(0)
            self.calls.append(f"{seed}")
            digits += sum(letter.isdigit() for letter in reply["content"])
            reply = await talk.reply({"role": "tool", "content": str(digits)})
        digits += sum(letter.isdigit() for letter in reply["content"])
        return talk.episode(Score(digits / 6, metrics={"digits": float(digits)}))


def plain(output: Any) -> Any:
    """A GeneratorOutput whose arrays are lists."""
    return {
        name: [one.tolist() if isinstance(one, np.ndarray) else one for one in column]
        if isinstance(column, list)
        else column
        for name, column in output.items()
    }


async def parts_of(engine: Any, **environments: Environment) -> EvaluationParts:
    """Open."""
    await open_all(environments)
    return EvaluationParts(
        dict(environments), [WeightedReward("environment", EnvironmentReward(), 1.0, 60.0)], engine, []
    )


class TableClient(InferenceEngineInterface):
    """SkyRL's own interface over the toy engine."""

    model_name = "toy"

    def __init__(self, latency_s: float = 0.0) -> None:
        self.engine = ToyEngine(ToyEngineOptions(latency_s=latency_s), CONTEXT)
        self.requested: list[dict[str, Any]] = []
        self.finished: list[str] = []
        self.weight_version = 0

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        self.requested.append(input_batch)
        params = input_batch["sampling_params"]
        prompts = input_batch["prompt_token_ids"]
        assert all(type(prompt) is list for prompt in prompts)
        got = [
            (await self.engine.sample(np.array(prompt, np.int32), 1, sampling_of(params), [params["seed"]], 60.0))[0]
            for prompt in prompts
        ]
        return {
            "responses": [""] * len(got),
            "response_ids": [one.tokens.tolist() for one in got],
            "response_logprobs": [one.logprobs.tolist() for one in got],
            "stop_reasons": [one.finish for one in got],
            "prompt_logprobs": None,
            "rollout_expert_indices": None,
        }

    async def finish_session(self, session_id: str) -> None:
        self.finished.append(session_id)

    def increment_weight_version(self) -> None:
        self.weight_version += 1

    async def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing of ours calls this")

    def get_endpoint_url(self) -> str:
        raise AssertionError("nothing of ours calls this")

    chat_completion = render_chat_completion = completion = wake_up = sleep = _unused
    init_weight_update_communicator = update_named_weights = teardown = reset_prefix_cache = _unused
    pause_generation = resume_generation = get_world_size = _unused


class TableDispatch:
    """What SkyRL's WorkerDispatch does, for a table of logits in torch, in this process, with SkyRL's own loss. Its sync
    copies the table into the engine, as SkyRL's broadcast does."""

    def __init__(self, cfg: SkyRLTrainConfig, client: TableClient | None, rate: float, sevens: float = 0.0) -> None:
        self.cfg = cfg
        size = ChatTokenizer(TOY_MODEL).vocabulary
        self.table = torch.zeros(size, size, dtype=torch.float64, requires_grad=True)
        self.table.data[:, SEVEN] = sevens
        self.optimizer = torch.optim.SGD([self.table], lr=rate)
        self.client = client
        self.synced: list[int] = []
        self.batches: list[Any] = []
        repopulate_all_registries()

    def init_weight_sync_state(self, client: Any) -> None:
        assert client is self.client

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        assert self.client is not None, "SkyRL refuses this as well"
        self.client.engine.weights["table"][:] = self.table.detach().numpy()
        self.client.increment_weight_version()

    def save_hf_model(self, model: str, directory: str, tokenizer: Any) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)  # a killed run left part of it
        np.save(Path(directory) / "table.npy", self.table.detach().numpy())

    def save_checkpoint(self, model: str, directory: str, tokenizer: Any) -> None:
        self.save_hf_model(model, directory, tokenizer)

    def load_checkpoint(self, model: str, directory: str, **others: Any) -> None:
        self.table.data[:] = torch.from_numpy(np.load(Path(directory) / "table.npy"))

    def finalize_pending_saves(self, model: str) -> None:
        """What came after SkyRL 0.3.0 waits here for a checkpoint that is still being written."""

    def get_node_ids(self) -> list[str]:
        return []

    def get_lcm_dp_size(self) -> int:
        return 1

    def empty_cache(self, model: str | None = None) -> None:
        pass

    def logprobs(self, data: Any) -> torch.Tensor:
        """[S, R] of the tokens of the responses, which stand at the end."""
        sequences, length = data["sequences"], data.metadata["response_length"]
        all_of = torch.log_softmax(self.table, dim=-1)[sequences[:, :-1]]  # [S, T - 1, V]
        return all_of.gather(-1, sequences[:, 1:, None])[..., 0][:, -length:]

    def forward(self, model: str, data: Any) -> WorkerOutput:
        with torch.no_grad():
            rows = [{"logprobs": row.tolist()} for row in self.logprobs(data)]
        return WorkerOutput(loss_fn_output_type="scalar", loss_fn_outputs=rows, metrics={})

    forward_from_staged = forward

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        if "advantages" in data:
            self.batches.append(data)
        return [data[begin:end] for begin, end in boundaries]

    def forward_backward_from_staged(self, model: str, data: Any) -> WorkerOutput:
        algorithm = self.cfg.trainer.algorithm
        loss, reported = PolicyLossRegistry.get(algorithm.policy_loss_type)(
            self.logprobs(data), data["action_log_probs"], data["advantages"], config=algorithm,
            loss_mask=data["loss_mask"], rollout_logprobs=data["rollout_logprobs"],
        )  # fmt: skip
        total = (loss * data["loss_mask"]).sum() if loss.ndim else loss
        total.backward()
        return WorkerOutput(
            loss_fn_output_type="scalar", loss_fn_outputs=[], metrics={"loss": total.item(), **reported}
        )

    def optim_step(self, model: str) -> float:
        norm = float(self.table.grad.norm())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def expected_sevens(self) -> float:
        """The exact mean reward of `Sevens` under the table as it is: every reply of at most two tokens, by its chance."""
        end, start = 0, 2  # <|end|>, <|assistant|>
        chance = torch.softmax(self.table.detach(), dim=-1)
        first = chance[start]
        second = chance.clone()
        second[end] = 0.0  # nothing follows the end
        return float((first[SEVEN] + (first[:, None] * second)[:, SEVEN].sum()) / 2)


def config(tmp_path: Path, **changes: Any) -> SkyRLTrainConfig:
    """SkyRL's configuration of a small run on a CPU."""
    return SkyRLTrainConfig.from_cli_overrides(
        {
            "trainer.policy.model.path": str(TOY_MODEL),
            "trainer.train_batch_size": 4,
            "trainer.policy_mini_batch_size": 4,
            "trainer.eval_batch_size": 8,
            "trainer.eval_interval": -1,
            "trainer.eval_before_train": False,
            "trainer.ckpt_interval": -1,
            "trainer.hf_save_interval": -1,
            "trainer.resume_mode": "none",
            "trainer.logger": "console",
            "trainer.print_example_interval": -1,
            "trainer.max_training_steps": 2,
            "trainer.ckpt_path": str(tmp_path / "ckpts"),
            "trainer.export_path": str(tmp_path / "exports"),
            "trainer.placement.colocate_all": False,
            "trainer.algorithm.use_kl_loss": False,
            "generator.n_samples_per_prompt": 8,
            "generator.eval_n_samples_per_prompt": 2,
            "generator.inference_engine.enable_ray_prometheus_stats": False,
            "generator.sampling_params.max_generate_length": 2,
            "generator.eval_sampling_params.max_generate_length": 2,
            "data.dataloader.num_workers": 0,
            **changes,
        }
    )


def trainer_of(
    cfg: SkyRLTrainConfig, source: Any, environments: Any, dispatch: Any, *, client: Any = None, publisher: Any = None
) -> AroundSource:
    generator = AtroposGenerator(
        source, seed=cfg.trainer.seed, step_wise=cfg.generator.step_wise_trajectories,
        own_advantages=cfg.trainer.algorithm.advantage_estimator == "atropos",
    )  # fmt: skip
    lasting = cfg.trainer.fully_async.enabled
    kind = FullyAsyncAtroposTrainer if lasting else AtroposTrainer
    made = kind(
        cfg=cfg, tracker=Tracking("test", "test", "console"), tokenizer=get_tokenizer(str(TOY_MODEL), padding_side="left"),
        train_dataset=TaskDataset(environments, "train", lasting=lasting), eval_dataset=TaskDataset(environments, "test", 8),
        inference_engine_client=client, generator=generator, publisher=publisher,
    )  # fmt: skip
    made.dispatch = dispatch
    return made
