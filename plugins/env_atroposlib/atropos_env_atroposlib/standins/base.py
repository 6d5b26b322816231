"""`BaseEnv` and its configuration, as far as environment files use them. The run replaces atroposlib's own loop.

Methods here that do nothing are the run's work: workers, queues, batches and the server's protocol have no counterpart.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, NotRequired, TypedDict

import numpy as np
from pydantic import BaseModel, ConfigDict

from atropos_core.errors import ConfigError, DataError
from atropos_env_atroposlib.standins.link import link
from atropos_env_atroposlib.standins.managed import ManagedServerAdapter
from atropos_env_atroposlib.standins.names import Item, Message
from atropos_env_atroposlib.standins.servers import (
    APIServer,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManager,
    ServerManagerConfig,
)

_OFFERED = (  # as they are imported from here
    APIServer,
    APIServerConfig,
    Item,
    Message,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManager,
    ServerManagerConfig,
)

ENV_NAMESPACE, OPENAI_NAMESPACE, NAMESPACE_SEP = "env", "openai", "."
logger = logging.getLogger("atroposlib")


class ScoredDataGroup(TypedDict):
    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: NotRequired[Any]
    ref_logprobs: NotRequired[Any]
    messages: NotRequired[Any]
    generation_params: NotRequired[Any]
    inference_logprobs: NotRequired[Any]
    group_overrides: NotRequired[Any]
    overrides: NotRequired[Any]
    images: NotRequired[Any]
    distill_token_ids: NotRequired[Any]
    distill_logprobs: NotRequired[Any]


class ScoredDataItem(TypedDict):
    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: NotRequired[Any]
    ref_logprobs: NotRequired[Any]
    messages: NotRequired[Any]
    inference_logprobs: NotRequired[Any]
    group_overrides: NotRequired[Any]
    overrides: NotRequired[Any]
    images: NotRequired[Any]


class EvalHandlingEnum(Enum):
    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(BaseModel):
    """The fields that files set and read. Those for queues and workers are kept but have no effect."""

    model_config = ConfigDict(protected_namespaces=())

    group_size: int = 4
    max_num_workers: int = -1
    max_eval_workers: int = 16
    max_num_workers_per_node: int = 8
    steps_per_eval: int = 100
    max_token_length: int = 2048
    eval_handling: EvalHandlingEnum = EvalHandlingEnum.STOP_TRAIN
    eval_limit_ratio: float = 0.5
    inference_weight: float = 1.0
    batch_size: int = -1
    max_batches_offpolicy: int = 3
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
    use_wandb: bool = True
    rollout_server_url: str = "http://localhost:8000"
    total_steps: int = 1000
    wandb_name: str | None = None
    num_rollouts_to_keep: int = 32
    num_rollouts_per_group_for_logging: int = 1
    ensure_scores_are_not_same: bool = True
    data_path_to_save_groups: str | None = None
    data_dir_to_save_evals: str | None = None
    min_items_sent_before_logging: int = 2
    include_messages: bool = False
    min_batch_allocation: float | None = None
    worker_timeout: float = 600
    thinking_mode: bool = False
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    custom_thinking_prompt: str | None = None


class BaseEnv(ABC):
    name: str | None = None
    env_config_cls: Any = BaseEnvConfig
    server_cls: Any = APIServer

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        self.config = config
        self.server = ServerManager(server_configs, slurm=slurm, testing=testing, server_class=self.server_cls)
        self.server_configs = server_configs if isinstance(server_configs, list) else [server_configs]
        self.client = ManagedServerAdapter(self.server)  # as evaluation files have it, which set none
        self.tokenizer = link().tokenizer
        self.curr_step = 0
        self.max_token_len = config.max_token_length
        self.max_num_workers = config.max_num_workers
        self.status_dict: dict[str, Any] = {"current_step": 0, "queue_size": 0}
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[Any] = []
        self.eval_workers: set[Any] = set()
        self.workers: set[Any] = set()
        self.backlog: list[Any] = []
        self.running_items: dict[Any, Any] = {}
        self.wandb_prepend = config.wandb_name or type(self).__name__
        self.wandb_group = self.wandb_project = None
        self.process_mode = False
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.env_id = 0
        self.saved_data: dict[str, Any] | None = None  # what save_checkpoint() wrote last, or what is to be loaded
        self.sent: list[Any] = []  # groups that were sent instead of returned
        self.logged: dict[str, Any] = {}  # the latest values of wandb_log() and evaluate_log()

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        """Load nothing. (Upstream's raises; evaluation files call it through super().)"""

    @abstractmethod
    async def get_next_item(self) -> Item: ...

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...

    async def collect_trajectory(self, item: Item) -> tuple[Any, list[Item]]:
        raise NotImplementedError(f"{type(self).__name__} has neither collect_trajectory() nor collect_trajectories()")

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """Collect `group_size` single trajectories into one group."""
        found = await asyncio.gather(*(self.collect_trajectory(item) for _ in range(self.config.group_size)))
        backlog = [one for _, left in found for one in left or ()]
        items = [item for item, _ in found if item is not None]
        if wrong := next((one for one in items if not isinstance(one, dict)), None):
            raise DataError(f"collect_trajectory() returned {wrong!r:.100}, but a trajectory must be a dict or None")
        if not items:
            return None, backlog
        group: dict[str, Any] = {}
        for key in {key for one in items for key in one}:
            values = [one.get(key) for one in items]
            if key == "group_overrides":
                group[key] = {name: value for one in values for name, value in (one or {}).items()}
            elif all(value is not None for value in values):
                group[key] = values
        return group, backlog

    async def postprocess_histories(self, trajectories: Any) -> Any:
        return trajectories

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item = None) -> None:
        most = self.config.num_rollouts_per_group_for_logging
        kept = len(scored_data["tokens"]) if most == -1 else most
        rows = zip(scored_data["tokens"][:kept], scored_data["scores"], strict=False)
        self.rollouts_for_wandb.append([(self.tokenizer.decode(tokens), score) for tokens, score in rows])
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Does nothing: a run records all of its rollouts."""
        return wandb_metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = dict(wandb_metrics or {})
        if self.completion_lengths:
            metrics["train/completion_lengths"] = float(np.mean(self.completion_lengths))
        metrics = await self.create_rollout_table(metrics)
        self.rollouts_for_wandb, self.completion_lengths = [], []
        self.logged |= metrics

    async def evaluate_log(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.logged |= metrics

    def perf_stats(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return metrics

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Keep `data`. Raises TypeError if it is not JSON."""
        if data is not None:
            self.saved_data = json.loads(json.dumps(data))

    def load_checkpoint(self) -> None:
        for key, value in (self.saved_data or {}).items():
            setattr(self, key, value)

    async def setup_wandb(self) -> None: ...
    async def cleanup(self) -> None: ...
    async def close(self) -> None: ...

    async def env_step_checks(self) -> None:
        """Called when the trainer has reached another step. (The run does evaluations and checkpoints.)"""
        if self.curr_step != self.status_dict["current_step"]:
            self.curr_step = self.status_dict["current_step"]
            await self.wandb_log({})

    async def handle_send_to_api(self, scored_data: Any, item: Item = None, *ignored: Any, **more: Any) -> None:
        """Keep groups that a file sends. The run takes groups of collect_trajectories() as they are returned."""
        self.sent += scored_data if isinstance(scored_data, list) else [scored_data]

    @classmethod
    def cli(cls) -> None:
        raise ConfigError(f"{cls.__name__} has no command line here: run it with `atropos run --env atroposlib:FILE`.")


class TeacherDistillationConfig(BaseEnvConfig):
    teacher_enabled: bool = False
    teacher_top_k: int = 0


class TeacherDistillationEnv(BaseEnv):
    """Refuses `teacher_enabled`: in a run, teachers are set in the run file ([teacher.NAME])."""

    env_config_cls = TeacherDistillationConfig

    def __init__(
        self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False, **ignored: Any
    ) -> None:
        if getattr(config, "teacher_enabled", False):
            raise ConfigError(
                "the environment has its own teacher (teacher_enabled), which is not supported.",
                remedy="Set config.teacher_enabled = false, and name a [teacher.NAME] in the run file.",
            )
        super().__init__(config, server_configs, slurm, testing)


BaseLanguageEnv = BaseEnv
