"""SkyRL's own FullyAsyncRayPPOTrainer.train(), unmodified, on a CPU: generation goes on while a step is trained."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.entrypoint import check
from atropos_adapter_skyrl.source import RolloutsFailed
from atropos_core.errors import ConfigError
from tests.skyrl.parts import Sevens, TableClient, TableDispatch, config, trainer_of
from tests.skyrl.test_generator import here
from tests.skyrl.test_train import SEVENS

STEPS, MINI, BEHIND = 24, 4, 1
FULLY = {
    "trainer.fully_async.enabled": True, "trainer.fully_async.max_staleness_steps": BEHIND,
    "trainer.fully_async.num_parallel_generation_workers": 2 * MINI, "trainer.algorithm.policy_loss_type": "rollout_is",
    "trainer.algorithm.loss_reduction": "token_mean",
}  # fmt: skip


class Recorded(TableDispatch):
    """Also what each step was trained on, and whether a reply was sampled meanwhile."""

    def optim_step(self, model):
        self.rows = [*getattr(self, "rows", []), len(self.batches[-1]["sequences"])]
        return super().optim_step(model)


class Tasks(Sevens):
    """Knows which of its tasks were run, how often, and how many at once."""

    def __init__(self, tasks=64):
        super().__init__(tasks)
        self.ids_run, self.now, self.most = [], 0, 0

    async def rollout(self, task, policy, *, seed):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.002 * (seed % 5))
            self.ids_run.append(task.id)
            return await super().rollout(task, policy, seed=seed)
        finally:
            self.now -= 1


def made(tmp_path, environment, source=None, rate=3.0, publisher=None, **changes):
    cfg = config(tmp_path, **(FULLY | {"trainer.max_training_steps": STEPS, "trainer.epochs": 8} | changes))
    client = TableClient()
    check(cfg, SkyRLOptions(run=tmp_path / "run.toml"))
    dispatch = Recorded(cfg, client, rate, SEVENS)
    source = source or here(client, sevens=environment)
    trainer = trainer_of(cfg, source, {"sevens": environment}, dispatch, client=client)
    trainer._cleanup_old_checkpoints = lambda: None  # SkyRL starts Ray to remove old ones
    logged = []
    trainer.tracker.log = lambda data, step, commit=False: logged.append(dict(data))
    return trainer, dispatch, logged


async def test_the_exact_expected_reward_rises_while_generation_runs_ahead_by_one_version_at_most(tmp_path):
    environment = Tasks()
    trainer, dispatch, logged = made(tmp_path, environment)
    before = dispatch.expected_sevens()
    await trainer.train()
    assert trainer.global_step == STEPS + 1 and len(dispatch.rows) == STEPS
    assert dispatch.expected_sevens() > before + 0.25
    steps = [one for one in logged if "atropos/min_policy_version" in one]
    assert len(steps) == STEPS
    lags = [at - one["atropos/min_policy_version"] for at, one in enumerate(steps)]
    assert max(lags) <= BEHIND and min(lags) >= 0 and sum(lags) > 0, lags
    assert all(at >= one["atropos/max_policy_version"] for at, one in enumerate(steps))
    assert environment.most > 8, "several generate() at once"
    assert (environment.opened, environment.closed) == (1, 1)


class Stopped(RuntimeError):
    pass


async def test_a_training_that_ended_in_an_error_resumes_and_each_task_of_the_epoch_is_trained_once(tmp_path):
    """Three of five steps are in a checkpoint; what SkyRL took or generated since is run again."""
    consumed: list[list[str]] = []

    def watched(trainer):
        mark = trainer.async_train_dataloader.mark_consumed_uids

        async def marked(uids):
            consumed.append(list(uids))
            await mark(uids)

        trainer.async_train_dataloader.mark_consumed_uids = marked

    class Dies(Recorded):
        def optim_step(self, model):
            if len(self.batches) == 6:
                raise Stopped
            return super().optim_step(model)

    saving = {"trainer.ckpt_interval": 3, "trainer.epochs": 1, "trainer.max_training_steps": None}
    first, _, _ = made(tmp_path, Tasks(), **saving)
    first.dispatch = Dies(first.cfg, first.inference_engine_client, 3.0, SEVENS)
    watched(first)
    with pytest.raises(Stopped):
        await first.train()
    saved, consumed = consumed[:3], []
    second, _, logged = made(tmp_path, Tasks(), **saving, **{"trainer.resume_mode": "latest"})
    watched(second)
    await second.train()
    assert len(consumed) == 13 and second.global_step == 17, "64 tasks by 4, less what was saved"
    trained = [uid for step in saved + consumed for uid in step]
    assert len(trained) == 64 and set(trained) == {f"sevens-{at}" for at in range(64)}
    versions = [one["atropos/max_policy_version"] for one in logged if "atropos/max_policy_version" in one]
    assert versions[0] == 3 and max(versions) <= 15


def killed_at(folder, place, step):
    """Trains until it is there, and is killed there. How many lines there are then."""
    before = len(lines_of(folder))
    process = subprocess.Popen([sys.executable, "-m", "tests.skyrl.killed_training", str(folder), place, str(step)])
    try:
        until = time.monotonic() + 180
        while not any("waits" in line for line in lines_of(folder)[before:]):
            assert process.poll() is None and time.monotonic() < until, f"it did not come {place} of step {step}"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    return len(lines_of(folder))


def lines_of(folder):
    """What the processes wrote down; a last line may be in the writing."""
    file = folder / "ledger.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    )


def test_of_a_training_that_is_killed_in_a_step_or_around_a_checkpoint_each_task_is_in_the_weights_once(tmp_path):
    """kill -9 of a real process, three times. What it had trained since its last whole checkpoint is in no weights that go on,
    and is run and trained again."""
    first = killed_at(tmp_path, "in a step", 8)
    second = killed_at(tmp_path, "in a checkpoint", 12)
    third = killed_at(
        tmp_path, "removing old checkpoints", 12
    )  # which SkyRL does before a checkpoint has all its files
    subprocess.run([sys.executable, "-m", "tests.skyrl.killed_training", str(tmp_path)], check=True, timeout=90)
    lines = lines_of(tmp_path)
    parts = [lines[:first], lines[first:second], lines[second:third], lines[third:]]
    steps = [[one["step"] for one in part if "tasks" in one] for part in parts]
    assert steps == [[1, 2, 3, 4, 5, 6, 7], [7, 8, 9, 10, 11, 12], [10, 11, 12], [13, 14, 15, 16]]
    assert lines[-1] == {"ended": 17}
    weights = {}
    for part, resumed in zip(parts, (None, 6, 9, 12), strict=True):
        assert [one["loaded"] for one in part if "loaded" in one] == [weights[at] for at in [resumed] if at], (
            "to the bit"
        )
        weights |= {one["step"]: one["weights"] for one in part if "tasks" in one}
    trained = {line["step"]: line["tasks"] for line in lines if "tasks" in line}  # what went on: the last of each step
    every = [task for tasks in trained.values() for task in tasks]
    assert len(every) == 64 and set(every) == {f"sevens-{at}" for at in range(64)}


class OneFails(Tasks):
    """Of the rollouts that begin after the hundredth one fails, while the others are in the middle of theirs."""

    late = 0

    async def rollout(self, task, policy, *, seed):
        if len(self.ids_run) < 100:
            return await super().rollout(task, policy, seed=seed)
        self.now, self.late = self.now + 1, self.late + 1
        try:
            await asyncio.sleep(0.05 if self.late == 8 else 20)
            raise ValueError("the tool is away")
        finally:
            self.now -= 1

    async def close(self):
        self.now_at_close = self.now
        await super().close()


async def test_a_rollout_that_fails_ends_the_training_with_its_cause_and_the_others_before_it_closes(tmp_path):
    environment = OneFails()
    trainer, _, _ = made(tmp_path, environment)
    others = asyncio.all_tasks()
    with pytest.raises(RolloutsFailed, match="the tool is away"):
        await trainer.train()
    assert (environment.opened, environment.closed) == (1, 1)
    assert environment.now_at_close == 0, "an environment is closed when nothing runs in it"
    ids_run = len(environment.ids_run)
    await asyncio.sleep(0.2)
    assert environment.now == 0 and len(environment.ids_run) == ids_run, "nothing goes on"
    assert not asyncio.all_tasks() - others


async def test_a_training_that_is_cancelled_ends_its_rollouts_before_it_closes(tmp_path):
    environment = OneFails()
    trainer, _, _ = made(tmp_path, environment)
    others = asyncio.all_tasks()
    training = asyncio.create_task(trainer.train())
    while environment.now < 4:
        assert not training.done()
        await asyncio.sleep(0.01)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert (environment.opened, environment.closed, environment.now_at_close) == (1, 1, 0)
    assert not asyncio.all_tasks() - others


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"trainer.placement.colocate_all": True}, "trainer.placement.colocate_all=false"),
        ({"trainer.train_batch_size": 8}, "trainer.train_batch_size=4"),
        ({"trainer.fully_async.num_parallel_generation_workers": 768}, "=768 is not from 4 .* to 8"),
        ({"trainer.algorithm.dynamic_sampling.type": "filter"}, "sample_full_batch"),
        ({"trainer.fully_async.sample_full_batch": True}, "zero_variance_filter=true"),
        ({"trainer.algorithm.policy_loss_type": "regular"}, "policy_loss_type=rollout_is"),
        ({"trainer.algorithm.policy_loss_type": "gspo"}, "policy_loss_type=rollout_is"),
        ({"trainer.fully_async.simulate_training": True}, "simulate_training=True has no effect: it trains nothing"),
    ],
)
def test_what_skyrl_would_find_after_its_engines_started_is_refused_before(tmp_path, change, wanted):
    options = SkyRLOptions(run=tmp_path / "run.toml")
    check(config(tmp_path, **FULLY), options)
    with pytest.raises(ConfigError, match=wanted):
        check(config(tmp_path, **(FULLY | change)), options)


def test_a_source_that_would_refuse_what_skyrl_allows_to_be_behind_is_refused(tmp_path):
    options = {"source": "rings", "rings": tmp_path, "run": tmp_path / "run.toml"}
    check(config(tmp_path, **FULLY), SkyRLOptions.model_validate(options | {"max_staleness": BEHIND}))
    with pytest.raises(ConfigError, match="atropos.max_staleness=1"):
        check(config(tmp_path, **FULLY), SkyRLOptions.model_validate(options))
