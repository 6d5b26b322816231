"""The entry point that replaces SkyRL's experiment: `trainer.override_entrypoint=atropos_adapter_skyrl.entrypoint`.

Arguments that begin with `atropos.` are this adapter's options. All others are SkyRL's, which parses and checks them.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from loguru import logger
from pydantic import ValidationError
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray
from tqdm import tqdm

from atropos_adapter_skyrl import advantages, without_effect
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.dataset import TaskDataset
from atropos_adapter_skyrl.engine import sampling_of
from atropos_adapter_skyrl.generator import AtroposGenerator
from atropos_adapter_skyrl.source import GroupSource, Here, close_all, open_all
from atropos_adapter_skyrl.threaded_source import Aside
from atropos_adapter_skyrl.trainer import AroundSource, AtroposTrainer
from atropos_adapter_skyrl.weights import Publisher
from atropos_core.config.error_text import explain
from atropos_core.config.run_file import load, nest, parse_flag, read_file, read_token
from atropos_core.errors import ConfigError
from atropos_core.guards.patience import Patience
from atropos_core.interfaces import Engine, Environment
from atropos_core.launch.builder import build_for_evaluation
from atropos_core.launch.plan import make_plan
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import ResolvedModel, RunContext
from atropos_core.storage.tempdirs import owned_prefix, sweep
from atropos_core.training.parts import EvaluationParts

FLAG, OURS = "trainer.override_entrypoint=", "atropos."
SUMMED = ("grpo", "rloo", "maxrl", advantages.NAME)  # estimators that add up the rewards of a trajectory, or read none


def split(arguments: Sequence[str]) -> tuple[SkyRLOptions, list[str]]:
    """Split arguments into our options and SkyRL's. Raises ConfigError that names a wrong one."""
    given = [one.removeprefix(OURS) for one in arguments if one.startswith(OURS)]
    theirs = [one for one in arguments if not one.startswith((OURS, FLAG))]
    try:
        return SkyRLOptions.model_validate(nest(parse_flag(one) for one in given)), theirs
    except ValidationError as error:
        raise ConfigError(explain(error, SkyRLOptions, {}, OURS)) from error


def check(cfg: Any, options: SkyRLOptions) -> None:
    """Raise ConfigError for options that cannot be combined. SkyRL checks the rest."""
    step_wise = cfg.generator.step_wise_trajectories
    elsewhere = options.source != "here"
    refused = {
        "atropos.run is missing: it is the run file with the environments. `atropos adapter skyrl` writes one.":
            options.run is None,
        "the data set is made in this process: set data.dataloader.num_workers=0": cfg.data.dataloader.num_workers != 0,
        "the estimator atropos gives each token its own advantage, but step-wise training has one for each trajectory: set "
        "trainer.algorithm.advantage_estimator=grpo, or generator.step_wise_trajectories=false":
            cfg.trainer.algorithm.advantage_estimator == advantages.NAME and step_wise,
        "step-wise training takes only the reward of a trajectory's last step, so atropos.turn_rewards would lose the others: set "
        "generator.step_wise_trajectories=false, or atropos.turn_rewards=false":
            options.turn_rewards and step_wise,
        f"atropos.turn_rewards has no effect with the estimator {cfg.trainer.algorithm.advantage_estimator}, which does not read "
        "rewards token by token: set trainer.algorithm.advantage_estimator=gae or reinforce++, or atropos.turn_rewards=false":
            options.turn_rewards and cfg.trainer.algorithm.advantage_estimator in SUMMED,
        "step-wise rows are replies, so a mean over rows counts an episode once for each reply: set "
        "trainer.algorithm.loss_reduction=token_mean, or generator.merge_stepwise_output=true":
            cfg.trainer.algorithm.loss_reduction == "sequence_mean" and step_wise
            and not cfg.generator.merge_stepwise_output,
        "Atropos engines sample the trajectories, so SkyRL has no engine to share its GPUs with: set trainer.placement.colocate_all=false":
            elsewhere and cfg.trainer.placement.colocate_all,
        "adapters are not sent to Atropos engines: set trainer.policy.model.lora.rank=0, or atropos.source=here":
            elsewhere and cfg.trainer.policy.model.lora.rank > 0,
        "Atropos environments have no images: set generator.vision_language_generator=false":
            cfg.generator.vision_language_generator,
        "a group may be committed only once its checkpoint is written: set "
        "trainer.policy.megatron_config.async_dist_ckpt_save=false":
            options.source == "api" and getattr(cfg.trainer.policy.megatron_config, "async_dist_ckpt_save", False),
    }  # fmt: skip
    found = [cause for cause, holds in refused.items() if holds]
    found += without_effect.changed(cfg, SkyRLTrainConfig.from_cli_overrides([]), elsewhere)
    if cfg.trainer.fully_async.enabled:
        from atropos_adapter_skyrl import fully_async

        found += fully_async.refused(cfg, options.max_staleness if elsewhere else None)
    if found:
        raise ConfigError("\n".join(found))


class AtroposExp(BasePPOExp):  # type: ignore[misc] # SkyRL has no types
    """SkyRL's experiment over the environments of a run file."""

    def __init__(self, cfg: Any, options: SkyRLOptions) -> None:
        check(cfg, options)
        assert options.run is not None, "check() has seen to it"
        plugins = load_plugins()
        path = Path(cfg.trainer.policy.model.path)
        here = (path / "tokenizer.json").is_file()
        model = ResolvedModel(path, str(path)) if here else plugins.resolve_model(str(path))
        config = load([read_file(options.run)]).config
        self.options = options
        self.plan = make_plan(config, model, plugins, training=False, sampling=False)
        self.own_tokenizer = self.plan.tokenizer()
        sweep("skyrl")  # files of killed trainings
        self._directory = tempfile.TemporaryDirectory(prefix=owned_prefix("skyrl"))
        directory = Path(self._directory.name)
        (directory / "logs").mkdir()
        context = RunContext(directory=directory, model=model.directory, seed=config.seed, today=self.plan.today)
        chosen = self.plan.named["environment"]
        self.environments: dict[str, Environment] = {name: one.build(context) for name, one in chosen.items()}
        self._runner: asyncio.Runner | None = asyncio.Runner()  # one event loop from open() to close()
        try:
            self._runner.run(
                open_all(self.environments)
            )  # only for their tasks: the source has its own, which run rollouts
            super().__init__(cfg)
        except BaseException:
            self.close()
            raise

    def get_train_dataset(self) -> TaskDataset:
        made = TaskDataset(self.environments, "train", self.options.tasks, lasting=self.cfg.trainer.fully_async.enabled)
        if len(made) < self.cfg.trainer.train_batch_size:
            raise ConfigError(
                f"{len(made)} tasks are fewer than trainer.train_batch_size={self.cfg.trainer.train_batch_size}."
            )
        return made

    def get_eval_dataset(self) -> TaskDataset | None:
        problems = self.plan.config.evaluation.problems
        if self.cfg.trainer.eval_interval <= 0 or not problems:
            return None
        share = -(-problems // len(self.environments))
        return TaskDataset(self.environments, "test", min(share, self.options.tasks or share))

    def get_inference_client(self) -> Any:
        return super().get_inference_client() if self.options.source == "here" else None

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> AtroposGenerator:
        return AtroposGenerator(
            self.source(inference_engine_client), seed=cfg.trainer.seed,
            step_wise=cfg.generator.step_wise_trajectories,
            own_advantages=cfg.trainer.algorithm.advantage_estimator == advantages.NAME,
            turn_rewards=self.options.turn_rewards,
        )  # fmt: skip

    def source(self, client: Any) -> GroupSource:
        options = self.options
        if options.source == "rings":
            from atropos_adapter_skyrl.rings import RingGroups

            return Aside(RingGroups(options, self._patience, vocabulary=self.own_tokenizer.vocabulary))
        if options.source == "here":
            name = resolve_policy_model_name(self.cfg)
            return Here(
                self._parts, client, self.own_tokenizer,
                deadline_s=options.deadline_s, attempts=options.attempts, model=name,
                salted=self.cfg.generator.use_cache_salt,
            )  # fmt: skip
        from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend

        from atropos_adapter_skyrl.api import ApiGroups
        from atropos_trajectory_client.client import Api, SessionSpec

        assert options.url is not None, "the options' validator wants it"
        generator, token, n = self.cfg.generator, self._token(), self.cfg.generator.n_samples_per_prompt
        params = get_sampling_params_for_backend(generator.inference_engine.backend, generator.sampling_params)
        spec = SessionSpec(
            f"skyrl-{self.cfg.trainer.run_name}", group_size=n, min_group=n, sampling=sampling_of(params), batch_groups=1,
            tokenizer=self.own_tokenizer.fingerprint, vocabulary=self.own_tokenizer.vocabulary,
            model=self.cfg.trainer.policy.model.path, max_staleness=options.max_staleness, deadline_s=options.deadline_s,
        )  # fmt: skip
        return Aside(
            ApiGroups(
                Api(options.url, token, patience=self._patience), spec, options.engines,
                deadline_s=options.deadline_s, attempts=options.attempts,
            )
        )  # fmt: skip

    async def _parts(self, engine: Engine) -> EvaluationParts:
        return await build_for_evaluation(self.plan, Path(self._directory.name), engine)

    def get_trainer(self, *args: Any, **kwargs: Any) -> AroundSource:
        if self.cfg.trainer.fully_async.enabled:
            from atropos_adapter_skyrl.fully_async import FullyAsyncAtroposTrainer

            return FullyAsyncAtroposTrainer(*args, publisher=self._publisher(), **kwargs)
        return AtroposTrainer(*args, publisher=self._publisher(), **kwargs)

    def _publisher(self) -> Publisher | None:
        if self.options.source == "here":
            return None
        from atropos_trajectory_client.remote_engine import RemoteEngine

        return Publisher([RemoteEngine(url, self._token(), patience=self._patience) for url in self.options.engines])

    @property
    def _patience(self) -> Patience:
        return self.plan.config.watch.patience()

    def _token(self) -> str | None:
        return read_token(self.options.token_file) if self.options.token_file else None

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.close()

    def close(self) -> None:
        """Release everything; may be called twice. Errors are only reported: they do not change the training."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        try:
            with runner:
                runner.run(close_all(self.environments))
        finally:
            self._directory.cleanup()


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator] # as SkyRL does: not on the head node
def experiment(cfg: Any, options: SkyRLOptions) -> None:
    with task_of_ray():
        AtroposExp(cfg, options).run()


@contextmanager
def task_of_ray() -> Iterator[None]:
    """Set up a process of Ray for a training. In the end Ray kills it with all its children, including the process that would
    remove its semaphores from /dev/shm. So these are removed first: the eight of SkyRL's log. tqdm makes none."""
    advantages.register()
    tqdm.set_lock(threading.RLock())
    try:
        yield
    finally:
        logger.remove()
        gc.collect()


def main() -> None:
    """Entry point: SkyRL calls this with its own command line."""
    options, arguments = split(sys.argv[1:])
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    advantages.register()
    check(cfg, options)
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(experiment.remote(cfg, options))
