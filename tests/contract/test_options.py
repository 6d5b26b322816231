"""Every option of every component that is installed, and of the run file, has an effect or is refused.

An option that is new has no entry, and fails `test_there_is_an_entry_for_every_option`. An entry is one of three:
`CHANGED`, where the option is changed here and what comes out must differ (`observed` has what is looked at); `SEEN_IN`, the test
that has its effect, which must be there and name the option; `READ`, for the few whose effect only another machine would show:
some code beside the options must read it, which is the least. The trainer's are in its own tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from inspect import isawaitable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from atropos_core.config.health_options import HealthSection
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import ConfigError
from atropos_core.health.checks import checks
from atropos_core.interfaces import TaskSource
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Task
from atropos_testing.samples import make_group, make_groups
from tests.conftest import REPOSITORY
from tests.contract import observed
from tests.unit.health.test_checks import FROM_THE_START, SICK, healthy

ROOT = Path(__file__).parents[2]
CURRICULA = ("easy_first", "competence", "learning_progress", "prioritized", "window")


# -- what there is


def models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


def leaves(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        inner = list(models(field.annotation))
        if not inner:
            yield f"{prefix}.{name}", model
        for one in inner:
            yield from leaves(one, f"{prefix}.{name}")


@cache
def every_option() -> dict[str, type[BaseModel]]:
    """ "kind name.option" -> the model that has it."""
    found = dict(leaves(RunConfig, "run"))
    for offer in load_plugins().registry.offers():
        if (offer.kind, offer.provider.name) != ("trainer", "grpo") and offer.distribution.startswith("atropos"):
            found |= dict(leaves(offer.provider.options, f"{offer.kind} {offer.provider.name}"))
    return found


# -- changed here

PRIOR = {"prior": {"field": "hard"}}
BY_REWARD = {"success": "reward"}
ADAPTIVE = {
    "prior.field": (PRIOR, {"prior": {"field": "other"}}),
    "prior.meaning": ({"prior": {"field": "rate"}}, {"prior": {"field": "rate", "meaning": "success"}}),
    "prior.bins": (PRIOR, {"prior": {"field": "hard", "bins": 2}}),
    "prior.read": (PRIOR, {"prior": {"field": "hard", "read": 20}}),
    "prior.read_ahead": (
        {"prior": {"field": "hard", "read": 20}},
        {"prior": {"field": "hard", "read": 20, "read_ahead": 0}},
    ),
    "success": ({}, BY_REWARD),
    "reward_range": (BY_REWARD, {**BY_REWARD, "reward_range": (-3.0, 2.0)}),
    "memory": ({}, {"memory": 0.9}),
    "prior_weight": (PRIOR, {**PRIOR, "prior_weight": 30.0}),
    "explore": ({}, {"explore": 0.9}),
}
JUDGE = {"model": "m", "retries": 0}
TWO = {"members": {"exact": {}, "numeric": {}}, "combine": "mean"}
VETO = {"members": {"numeric": {}, "format": {"patterns": ["####", "absent"], "veto": True}}, "combine": "veto"}
TEACHER = {"model": "tiny-teacher"}
SERVED = {"url": "http://h/v1", "tokenizer": "tiny"}
BONUS = {"length": {"free": 100, "limit": 900}, "format": {}}
ROLL = {
    "gpus": ({}, {"gpus": 2}),
    "reward.format.weight": ({"reward": BONUS}, {"reward": {**BONUS, "format": {"weight": 0.7}}}),
    "reward.length.weight": ({"reward": BONUS}, {"reward": {**BONUS, "length": {**BONUS["length"], "weight": 0.7}}}),
    "reward.length.at_least": ({"reward": BONUS}, {"reward": {**BONUS, "length": {**BONUS["length"], "at_least": 7}}}),
    "reward.length.free": ({"reward": BONUS}, {"reward": {**BONUS, "length": {**BONUS["length"], "free": 7}}}),
    "reward.length.limit": ({"reward": BONUS}, {"reward": {**BONUS, "length": {**BONUS["length"], "limit": 7000}}}),
}
SKYRL = {"source": "api", "url": "http://h"}
REFUSED = {"curriculum learning_progress.prior.meaning": {"prior": {"field": "rate", "meaning": "success"}}}
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"curriculum {name}.{option}": change for name in CURRICULA for option, change in ADAPTIVE.items()},
    "curriculum easy_first.solved": ({}, {"solved": 0.2}),
    "curriculum easy_first.sharpness": (PRIOR, {**PRIOR, "sharpness": 0.1}),
    "curriculum competence.draws": (PRIOR, {**PRIOR, "draws": 10}),
    "curriculum competence.start": (PRIOR, {**PRIOR, "start": 0.9}),
    "curriculum competence.solved": (PRIOR, {**PRIOR, "solved": 0.1}),
    "curriculum learning_progress.prior_weight": ({}, {"prior_weight": 30.0}),
    "curriculum learning_progress.slow": ({}, {"slow": 0.01}),
    "curriculum learning_progress.power": ({}, {"power": 0.1}),
    "curriculum learning_progress.floor": ({}, {"floor": 3.0}),
    "curriculum prioritized.power": ({}, {"power": 0.1}),
    "curriculum prioritized.floor": ({}, {"floor": 0.9}),
    "curriculum window.low": (PRIOR, {**PRIOR, "low": 0.6}),
    "curriculum window.high": (PRIOR, {**PRIOR, "high": 0.4}),
    "transform group_advantage.baseline": ({}, {"baseline": "none"}),
    "transform group_advantage.divide_by_std": ({}, {"divide_by_std": False}),
    "transform length_penalty.form": ({}, {"form": "token", "cost": 0.1}),
    "transform length_penalty.weight": ({}, {"weight": 3.0}),
    "transform length_penalty.cost": ({"form": "token", "cost": 0.1}, {"form": "token", "cost": 0.2}),
    "transform length_penalty.free_tokens": ({"form": "token", "cost": 0.1}, {"form": "token", "cost": 0.1, "free_tokens": 9}),
    "transform length_penalty.correct_above": ({}, {"correct_above": 100.0}),
    "transform equal_group.free_tokens": ({"free_tokens": 1, "limit_tokens": 50}, {"free_tokens": 9, "limit_tokens": 50}),
    "transform equal_group.limit_tokens": ({"free_tokens": 1, "limit_tokens": 50}, {"free_tokens": 1, "limit_tokens": 90}),
    "transform equal_group.weight": (
        {"free_tokens": 1, "limit_tokens": 50}, {"free_tokens": 1, "limit_tokens": 50, "weight": 3.0}
    ),
    "transform equal_group.correct_above": (
        {"free_tokens": 1, "limit_tokens": 50}, {"free_tokens": 1, "limit_tokens": 50, "correct_above": 100.0}
    ),
    "transform turn_returns.baseline": ({}, {"baseline": "group"}),
    "transform turn_returns.outcome_weight": ({}, {"outcome_weight": 0.5}),
    "transform turn_returns.divide_by_std": ({"baseline": "group"}, {"baseline": "group", "divide_by_std": True}),
    "transform turn_gae.outcome_weight": ({}, {"outcome_weight": 0.5}),
    "transform gigpo.step_weight": ({}, {"step_weight": 0.5}),
    "transform gigpo.divide_by_std": ({}, {"divide_by_std": True}),
    "transform maxrl.correct_above": ({}, {"correct_above": 100.0}),
    "transform zscore.scope": ({"warm_up": 2}, {"warm_up": 2, "scope": "global"}),
    "transform zscore.center": ({"warm_up": 2}, {"warm_up": 2, "center": False}),
    "transform zscore.scale": ({"warm_up": 2}, {"warm_up": 2, "scale": False}),
    "transform zscore.half_life": ({"warm_up": 2}, {"warm_up": 2, "half_life": 3.0}),
    "transform zscore.warm_up": ({"warm_up": 2}, {"warm_up": 20}),
    "transform zscore.clip": ({"warm_up": 2}, {"warm_up": 2, "clip": 0.1}),
    "environment gsm8k.problems": ({}, {"problems": 9}),
    "environment gsm8k.held_out": ({}, {"held_out": 9}),
    "environment gsm8k.seed": ({}, {"seed": 1}),
    "environment gsm8k.instruction": ({}, {"instruction": "Answer."}),
    "engine vllm.enforce_eager": ({}, {"enforce_eager": False}),
    "engine vllm.max_model_len": ({}, {"max_model_len": 99}),
    "engine vllm.max_num_seqs": ({}, {"max_num_seqs": 9}),
    "engine vllm.kv_cache_gb": ({}, {"kv_cache_gb": 2.0}),
    "engine vllm.enable_sleep_mode": ({}, {"enable_sleep_mode": True}),
    "engine vllm.prefix_caching": ({}, {"prefix_caching": False}),
    "engine vllm.extra_args": ({}, {"extra_args": ["--block-size", "32"]}),
    "engine toy.latency_s": ({}, {"latency_s": 5.0}),
    "engine remote.url": ({"url": "http://h/a"}, {"url": "http://h/b"}),
    "engine remote.token_file": ({"url": "http://h/a"}, {"url": "http://h/a", "token_file": "token"}),
    "environment gsm8k.grading": ({}, {"grading": "lenient"}),
    "environment gsm8k.grading_deadline_s": ({}, {"grading_deadline_s": 1e-5}),
    "bridge checkpoint.save_deadline_s": ({}, {"save_deadline_s": 7.0}),
    "bridge delta.deadline_s": ({}, {"deadline_s": 7.0}),
    "bridge lora.save_deadline_s": ({}, {"save_deadline_s": 7.0}),
    "bridge ipc.connect_deadline_s": ({}, {"connect_deadline_s": 7.0}),
    "reward ensemble.threshold": (VETO, {**VETO, "threshold": 0.4}),
    "reward ensemble.members.runs_in": (TWO, {"members": {**TWO["members"], "numeric": {"runs_in": "process"}}}),
    "reward judge.url": ({**JUDGE, "url": "http://h/a/v1"}, {**JUDGE, "url": "http://h/b/v1"}),
    "teacher distillation.sequences_at_once": (TEACHER, {**TEACHER, "sequences_at_once": 2}),
    "teacher distillation.deadline_s": (TEACHER, {**TEACHER, "deadline_s": 7.0}),
    "teacher distillation.engine.use": (TEACHER, {**TEACHER, "engine": {"use": "vllm"}}),
    "teacher distillation.engine.devices": (TEACHER, {**TEACHER, "engine": {"use": "hf", "devices": ["cuda:0"]}}),
    "teacher distillation.engine.threads": (TEACHER, {**TEACHER, "engine": {"use": "hf", "threads": 7}}),
    "teacher distillation.key_variable": (SERVED, {**SERVED, "key_variable": "PATH"}),
    **{f"adapter roll.{option}": change for option, change in ROLL.items()},
    **{f"adapter skyrl.{option}": (SKYRL, {**SKYRL, **change}) for option, change in {
        "source": {"source": "rings", "rings": "/r", "url": None},
        "token_file": {"token_file": "/t"}, "engines": {"engines": ["http://e"]}}.items()},
}  # fmt: skip


def drawn(name: str, options: Any, provider: Any) -> object:
    """Twenty steps of eight draws, of tasks that are harder the higher their number."""
    data = [
        Task(str(at), (), data={"hard": at, "other": (at * 7) % 60, "rate": at / 60, "environment": "a"})
        for at in range(60)
    ]
    one = provider.build(options, RunContext(Path("/"), Path("/"), seed=3))
    one.open({"a": TaskSource(60, 1.0, data)})
    random, seen = np.random.default_rng(0), []
    for _ in range(20):
        for draw in one.draw(8):
            seen.append((draw.index, draw.seed))
            right = int(random.binomial(8, 1 - draw.index / 60))
            group = make_group(draw.id, [1.0] * right + [0.0] * (8 - right))
            if right % 2:  # some groups whose rewards are not what the environment calls correct
                group = replace(group, rewards=group.rewards * np.float32(0.5))
            one.settle(draw, "trained" if 0 < right < 8 else "flat", replace(group, draw=draw))
    return seen


async def transformed(name: str, options: Any, provider: Any) -> object:
    context = RunContext(
        Path("/"), Path("/"), announced={"advantages": {"by": "group_advantage", "baseline": "none", "undoes": {}}}
    )
    one, found = provider.build(options, context), []
    for step in range(3):
        alike = make_group(90 + step, [1.0] * 4)
        apart = replace(
            make_group(95 + step, [4.0, 1.0, 9.0]), draw=replace(alike.draw, id=99 + step, environment="another")
        )
        for group in await one([*make_groups(step * 8), alike, apart]):
            found.append((group.rewards.tolist(), None if group.advantages is None else group.advantages.tolist()))
    return found


def commanded(name: str, options: Any, provider: Any) -> object:
    from atropos_engine_vllm.command import flags

    return flags(options, RunContext(ROOT, ROOT), "float32")


OBSERVED = {  # by kind, or by component
    "curriculum": drawn, "transform": transformed, "environment": observed.graded, "engine vllm": commanded,
    "engine toy": observed.slept, "engine remote": observed.called, "bridge": observed.connected, "adapter": observed.exported,
    "reward ensemble": observed.rated, "reward judge": observed.called, "teacher": observed.taught,
}  # fmt: skip


for option in REFUSED:
    del CHANGED[option]

CACHE: dict[str, object] = {}


async def seen_with(component: str, values: dict[str, Any]) -> object:
    """Once for each component and values."""
    if (key := f"{component} {values}") not in CACHE:
        kind, name = component.split()
        provider = load_plugins().registry.find(kind, name).provider
        look = OBSERVED.get(component) or OBSERVED[kind]
        made = look(name, provider.options.model_validate(values), provider)
        CACHE[key] = await made if isawaitable(made) else made
    return CACHE[key]


@pytest.mark.parametrize("option", list(CHANGED))
async def test_changing_an_option_changes_what_comes_out(option):
    before, after = [await seen_with(option.partition(".")[0], values) for values in CHANGED[option]]
    assert before != after


UNSTEADY = {"environment.watched.use": "tests.contract.watched_tasks:Unsteady", "evaluation.problems": 0}
ODD = {**UNSTEADY, "environment.watched.fails": True, "training.group_size": 4}
OFF = {**UNSTEADY, "environment.watched.off_nats": 0.01}
SLOW = {**UNSTEADY, "environment.watched.slow_s": 0.2}
FLAT = {"environment.watched.flat": True, "training.groups_per_step": 4, "curriculum.use": "sequential"}
LIVE = {"evaluation.temperature": 1.0}
HF = {"engine.use": "hf", "trainer.use": "grpo", "bridge.use": "checkpoint", "model": "tiny"}
IN_A_RUN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is seen of a whole run of the toy policy
    "run.model": ({}, {"model": observed.ANOTHER}),
    "run.seed": ({}, {"seed": 1}),
    "run.oversubscribe": ({"hub.size_mb": 1e9}, {"oversubscribe": True}),
    "run.plot": ({}, {"plot": "always"}),
    "run.bridge.use": ({}, {"bridge.use": "ipc"}),
    "run.launcher.use": ({}, {"launcher.use": f"{ROOT}/tests/contract/broken_parts.py:LeavesRunning"}),
    "run.checkpoint.every": ({}, {"checkpoint.every": 1}),
    "run.curriculum.use": ({}, {"curriculum.use": "sequential"}),
    "run.environment.use": ({}, {"environment.watched.use": "tests.contract.watched_tasks:Constant"}),
    "run.evaluation.every": ({}, {"evaluation.every": 1}),
    "run.evaluation.problems": ({}, {"evaluation.problems": 3}),
    "run.evaluation.top_k": (LIVE, {"evaluation.top_k": 1}),
    "run.evaluation.min_p": (LIVE, {"evaluation.min_p": 1.0}),
    "run.health.rescore_every": ({}, {"health.rescore_every": 0}),
    "run.health.rescore_groups": ({"training.groups_per_step": 4}, {"health.rescore_groups": 4}),
    "run.reward.use": ({"reward.one.use": "environment"}, {"reward.one.use": "format"}),
    "run.reward.weight": ({"reward.one.use": "environment"}, {"reward.one.weight": 3.0}),
    "run.sampling.max_tokens": ({}, {"sampling.max_tokens": 9}),
    "run.sampling.stop": ({}, {"sampling.stop": [" ", "e"]}),
    "run.sampling.temperature": ({}, {"sampling.temperature": 0.1}),
    "run.sampling.min_p": (HF, {"sampling.min_p": 0.9}),
    "run.sampling.top_k": ({}, {"sampling.top_k": 2}),
    "run.sampling.top_p": ({}, {"sampling.top_p": 0.1}),
    "run.sink.use": ({}, {"sink.jsonl.use": "csv"}),
    "run.training.group_size": ({}, {"training.group_size": 4}),
    "run.training.groups_per_step": ({}, {"training.groups_per_step": 3}),
    "run.training.max_logprob_diff": (OFF, {"training.max_logprob_diff": 0.1}),
    "run.training.max_staleness": ({}, {"training.max_staleness": 1}),
    "run.training.min_group": (ODD, {"training.min_group": 4}),
    "run.training.refill_rounds": (FLAT, {"training.refill_rounds": 2}),
    "run.training.rollout_deadline_s": (SLOW, {"training.rollout_deadline_s": 0.05}),
    "run.training.steps": ({}, {"training.steps": 3}),
    "run.transform.use": ({"transform.one.use": "drop_flat"}, {"transform.one.use": "zscore"}),
    "sink jsonl.rollouts_every": ({}, {"sink.jsonl.rollouts_every": 2}),
    "sink jsonl.tokens": ({}, {"sink.jsonl.tokens": False}),
    "sink jsonl.tokens_max_mb": ({}, {"sink.jsonl.tokens_max_mb": 0.001}),
    "trainer toy.learning_rate": ({}, {"trainer.learning_rate": 9.0}),
}
API = {"api.url": "http://h/a", "api.wait_s": 5, "evaluation.problems": 0}
AT_A_SERVER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "run.api.url": (API, {"api.url": "http://h/b"}),
    "run.api.token_file": (API, {"api.token_file": "FOLDER/token"}),
}
AT_THE_ADDRESS = {
    "run.api.engine_address": ({"api.engine_address": "127.0.0.1:0"}, {"api.engine_address": "localhost:0"})
}
IN_A_PLAN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # and of what its components would be built with
    "run.date": (HF, {"date": "2024-02-29"}),
    "run.engine.use": (HF, {"engine.use": "vllm"}),
    "run.engine.devices": (HF, {"engine.devices": ["cuda:0"]}),
    "run.engine.threads": (HF, {"engine.threads": 7}),
    "run.trainer.use": ({}, {"trainer.use": "grpo", "engine.use": "hf", "bridge.use": "checkpoint", "model": "tiny"}),
    "run.trainer.devices": (HF, {"trainer.devices": ["cuda:0"]}),
    "run.trainer.threads": (HF, {"trainer.threads": 7}),
    "run.teacher.use": (HF, {"teacher.big.use": "distillation", "teacher.big.model": "tiny", "trainer.distillation.kind": "forward"}),
}  # fmt: skip


OF_A_RUN = {
    option: (look, *entry)
    for look, entries in (
        (observed.ran, IN_A_RUN), (observed.planned, IN_A_PLAN), (observed.requested, AT_A_SERVER), (observed.opened, AT_THE_ADDRESS)
    )
    for option, entry in entries.items()
}  # fmt: skip


@pytest.mark.parametrize("option", list(OF_A_RUN))
def test_changing_an_option_changes_a_run(option):
    look, values, change = OF_A_RUN[option]
    before, after = look(values), look({**values, **change})
    assert before != after


def test_a_run_that_is_run_twice_leaves_the_same():
    """Or the test above shows nothing."""
    assert observed.ran({}) == observed.ran({})


FOR_ANOTHER_COMMAND = [  # of an adapter: options that its export, or its doctor, has no use for
    ("skyrl", "export", {"run": "run.toml"}), ("skyrl", "doctor", {"attempts": 9}),
    ("roll", "export", {"trial_environment": "gsm8k"}), ("roll", "doctor", {"gpus": 2}), ("roll", "doctor", {"max_turns": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "command", "options"), FOR_ANOTHER_COMMAND)
def test_an_option_that_a_command_of_an_adapter_has_no_use_for_is_refused(name, command, options, tmp_path):
    provider = load_plugins().registry.find("adapter", name).provider
    made = provider.build(provider.options.model_validate(options), RunContext(tmp_path, Path("tiny")))
    with pytest.raises(ConfigError, match=f"{next(iter(options))} has no effect on"):
        made.doctor() if command == "doctor" else made.export(RunConfig(), tmp_path)


NO_USE = [("engine", "toy"), ("trainer", "toy"), ("engine", "remote")]


@pytest.mark.parametrize("placed", [{"threads": 2}, {"devices": ["cuda:0"]}], ids=str)
@pytest.mark.parametrize(("kind", "name"), NO_USE)
def test_devices_and_threads_that_a_component_has_no_use_for_are_refused(kind, name, placed):
    url = {"engine.url": "http://h", "bridge.use": "checkpoint"} if name == "remote" else {}
    [(option, value)] = placed.items()
    with pytest.raises(ConfigError, match=rf"{kind}.{option} has no effect on {kind} '{name}'"):
        observed.planned({f"{kind}.use": name, **url, f"{kind}.{option}": value})


def test_a_resumed_run_may_name_the_devices_that_it_was_given():
    """Its config.toml names those that "auto" stood for."""
    assert observed.planned({"engine.devices": ["cpu"], "trainer.devices": ["cpu"]}) == observed.planned({})


@pytest.mark.parametrize(
    ("engine", "device", "options", "message"),
    [
        ("vllm", "cpu", {"memory_share": 0.3}, "engine.memory_share has no effect on cpu: it is of a GPU's memory"),
        ("vllm", "cuda:0", {"kv_cache_gb": 3.0}, "engine.kv_cache_gb has no effect on cuda:0: it is for a CPU"),
        ("vllm", "cpu", {"kv_cache_gb": 3.0}, ""),
        ("vllm", "cuda:0", {"memory_share": 0.3}, ""),
        ("hf", "cpu", {"cuda_graphs": True}, "engine.cuda_graphs has no effect on cpu: only a GPU has CUDA graphs"),
        ("hf", "cuda:0", {"cuda_graphs": True}, ""),
    ],
)
def test_an_option_for_another_kind_of_device_is_reported(engine, device, options, message, capsys):
    given = {f"engine.{name}": value for name, value in options.items()}
    observed.planned({**HF, "engine.use": engine, "engine.devices": [device], **given})
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed if message else "has no effect" not in printed


@pytest.mark.parametrize("option", list(REFUSED))
def test_an_option_that_a_component_has_no_use_for_is_refused(option):
    kind, name = option.partition(".")[0].split()
    with pytest.raises(ValidationError, match=f"{option.rpartition('.')[2]} has no effect"):
        load_plugins().registry.find(kind, name).provider.options.model_validate(REFUSED[option])


IDLE = [  # that are refused beside others; the trainer's own are in its tests
    ("environment gsm8k", {"source": "hub", "problems": 9}), ("environment gsm8k", {"dataset": "mine/own"}),
    ("curriculum window", {"success": "correct", "reward_range": (0.0, 2.0)}),
    ("curriculum window", {"prior": {"file": "x.npy", "read": 9}}),
    ("curriculum window", {"prior": {"field": "x", "read": "all", "read_ahead": 9}}),
    ("curriculum learning_progress", {"prior": {"field": "x"}, "slow": 0.1}),
    ("curriculum learning_progress", {"prior": {"field": "x"}, "memory": 0.1}),
    ("curriculum learning_progress", {"prior": {"field": "x"}, "prior_weight": 3.0}),
    *(("reward ensemble", {"members": {"exact": {}, "numeric": {}, "format": {}}, **idle}) for idle in (
        {"threshold": 0.9}, {"trim": 0.3}, {"categories": 9}, {"downweight": 0.5}, {"combine": "first_of", "horizon": 9})),
    ("reward ensemble", {"members": {"exact": {}, "numeric": {}}, "tolerance": 1.2}),
    ("reward judge", {"url": "http://h/v1", "model": "m", "retries": 0, "backoff_s": 3.0}),
    ("run", {"sampling": {"temperature": 0.0, "top_p": 0.5}}), ("run", {"sampling": {"temperature": 0.0, "top_k": 5}}),
    ("run", {"sampling": {"temperature": 0.0, "min_p": 0.5}}), ("run", {"evaluation": {"min_p": 0.5}}),
    *(("adapter skyrl", idle) for idle in ({"url": "http://h"}, {"rings": "/r"}, {"stash_mb": 9.0}, {"token_file": "/t"},
        {"engines": ["http://e"]}, {"max_staleness": 1}, {"source": "api", "url": "http://h", "stash_mb": 9.0})),
    ("run", {"api": {"url": "http://h"}, "hub": {"size_mb": 9.0}}),
    ("run", {"api": {"url": "http://h"}, "evaluation": {"problems": 9}}),
    ("run", {"evaluation": {"top_p": 0.5}}), ("run", {"evaluation": {"top_k": 5}}),
]  # fmt: skip


@pytest.mark.parametrize(("component", "options"), IDLE, ids=str)
def test_an_option_that_does_nothing_beside_another_is_refused(component, options):
    config = RunConfig if component == "run" else load_plugins().registry.find(*component.split()).provider.options
    with pytest.raises(ValidationError, match="has no effect"):
        config.model_validate(options)


BOUNDS = {  # of a check of health: what is tried in place of the default
    "steps": (1, 5), "share": (0.001, 0.99), "ratio": (1.01, 1e6), "tolerance": (1e6,), "floor_nats": (0.0, 1e6), "fall": (0.01, 0.99),
    "cut_off": (0.01, 1.0), "floor_s": (0.0, 1e6), "after_s": (1.0, 1e6), "nats": (0.001, 1e6), "action": ("off",), "z": (0.1, 1e6),
    "correlation": (0.01, 0.99), "rise_nats": (0.1, 1e6), "canary_rise": (0.95,),
}  # fmt: skip
FURTHER = {
    "policy_collapse": {"reward/mean": 0.3, "policy/probe_shift_nats": 30.0},
    "length": {"rollouts/cut_off": 0.3},
    "answer_format": {"replies/answered": 0.03},
    "entropy": {"entropy/sampled": 0.002},
    "stale_share": {"groups/stale": 3.0},
}
HEALTH = [
    option
    for option in every_option()
    if re.fullmatch(r"run\.health\.\w+\.\w+", option)
    and not option.endswith((".rollback_weight", ".rollbacks", ".least"))
]


def looked_at(section: HealthSection, name: str, numbers: dict[str, float]) -> list[str]:
    looks = [check for check in checks(section) if check.name == name]
    before = (
        [] if name in FROM_THE_START else [healthy(step) for step in range(1, 7)]
    )  # which are about the first step on
    after = before + [healthy(0) | numbers] * 4
    return [repr(check.look(step, seen)) for check in looks for step, seen in enumerate(after, 1)]


@pytest.mark.parametrize("option", HEALTH)
def test_a_threshold_of_health_decides_when_a_check_falls_ill(option):
    _, _, name, threshold = option.split(".")
    tried = []
    for value in BOUNDS[threshold]:
        changed = HealthSection.model_validate({name: {threshold: value}})
        for numbers in (SICK[name], FURTHER.get(name, SICK[name])):
            tried.append(looked_at(changed, name, numbers) != looked_at(HealthSection(), name, numbers))
    assert any(tried)


# -- seen elsewhere: the file, its test, and the options

SEEN_IN = """
tests/unit/health/test_gold_reward.py::test_how_far_the_rewards_must_part_is_an_option
  run: health.reward_hacking.least
tests/unit/rollouts/test_gold_tasks.py::test_a_fixed_share_of_the_training_tasks_is_chosen_and_none_of_the_others
  run: reward.gold.share reward.gold.hold_back
tests/e2e/test_rollback.py::test_a_finding_that_cannot_be_answered_by_a_rollback_pauses_the_run_and_says_why
  run: health.reward_hacking.rollback_weight health.reward_hacking.rollbacks
plugins/credit/tests/test_transforms.py::test_options_that_groups_of_one_turn_do_not_show_change_advantages_of_several
  transform turn_returns: discount turn_weight state
plugins/credit/tests/test_transforms.py::test_options_that_groups_of_one_turn_do_not_show_change_advantages_of_several
  transform turn_gae: discount turn_weight gae_lambda
plugins/credit/tests/test_transforms.py::test_options_that_groups_of_one_turn_do_not_show_change_advantages_of_several
  transform gigpo: discount state
plugins/env_dataset/tests/test_completions.py::test_columns_may_have_other_names_and_a_system_message
  run: warmup.prompt warmup.completion
plugins/env_dataset/tests/test_completions.py::test_each_epoch_has_every_row_once_in_an_order_of_the_seed
  run: warmup.epochs warmup.steps warmup.rows_per_step
plugins/env_dataset/tests/test_completions.py::test_held_out_rows_are_not_trained
  run: warmup.held_out
plugins/env_dataset/tests/test_completions.py::test_the_rate_is_that_of_transformers_schedulers
  run: warmup.schedule warmup.rise
tests/e2e/test_warmup.py::test_a_run_killed_within_its_warm_start_resumes_to_the_same_bits
  run: warmup.data warmup.learning_rate warmup.max_tokens
plugins/agent_api/tests/test_environment.py::test_a_model_elsewhere_answers_in_the_policys_place_and_nothing_is_trained
  environment agent: baseline.url baseline.model baseline.key_variable
plugins/agent_api/tests/test_bubblewrap.py::test_the_option_visible_shows_a_folder_and_nobody_can_write_there
  sandbox bubblewrap: visible
plugins/agent_api/tests/test_bubblewrap.py::test_the_option_visible_shows_a_folder_and_nobody_can_write_there
  sandbox local: visible
plugins/agent_api/tests/test_environment.py::test_what_a_program_finds
  environment agent: command env files.text files.template files.copy_of stdin here tasks
plugins/agent_api/tests/test_environment.py::test_a_function_is_a_program_too
  environment agent: function
plugins/agent_api/tests/test_environment.py::test_tasks_are_held_out_by_share_or_by_file
  environment agent: test_tasks held_out
plugins/agent_api/tests/test_environment.py::test_rewards_are_functions_plugins_and_the_environment_of_the_tasks
  environment agent: tasks_from.use reward.function reward.plugin.use
plugins/agent_api/tests/test_environment.py::test_a_command_scores_a_copy_of_what_was_left
  environment agent: reward.command
plugins/agent_api/tests/test_environment.py::test_a_reward_that_is_late_fails_the_rollout
  environment agent: reward.deadline_s
plugins/agent_api/tests/test_environment.py::test_a_program_that_makes_grading_fail_gets_the_worst_score_and_why_is_recorded
  environment agent: reward.worst
plugins/agent_api/tests/test_environment.py::test_a_reward_that_fails_can_fail_the_rollout
  environment agent: reward.on_error
plugins/agent_api/tests/test_environment.py::test_the_answer_is_the_last_reply_or_what_was_printed
  environment agent: answer
plugins/agent_api/tests/test_environment.py::test_a_program_that_fails_is_graded_as_it_left_things_or_fails_its_rollout
  environment agent: on_failure
plugins/agent_api/tests/test_environment.py::test_a_program_ends_at_its_limits
  environment agent: limits.wall_s limits.output_mb
plugins/agent_api/tests/test_environment.py::test_limits_reach_the_sandbox
  environment agent: limits.disk_mb limits.memory_mb limits.processes
plugins/agent_api/tests/test_environment.py::test_a_session_ends_at_its_limits
  environment agent: limits.calls limits.tokens
plugins/agent_api/tests/test_environment.py::test_so_many_programs_run_at_once_and_no_more
  environment agent: concurrency
plugins/agent_api/tests/test_environment.py::test_so_many_folders_of_streams_are_kept
  environment agent: keep_streams
plugins/agent_api/tests/test_environment.py::test_a_format_that_there_is_not_is_refused
  environment agent: format
plugins/agent_api/tests/test_environment.py::test_only_calls_that_are_to_be_trained_are
  environment agent: trained trained_agents untrained_models
plugins/agent_api/tests/test_environment.py::test_history_is_as_sampled_or_as_sent
  environment agent: history
plugins/agent_api/tests/test_environment.py::test_what_a_call_wants_of_sampling_is_overruled_or_refused
  environment agent: sampling
plugins/agent_api/tests/test_environment.py::test_a_sandbox_that_cannot_hold_a_program_to_the_api_is_refused_where_it_was_named
  environment agent: sandbox.use network
plugins/agent_api/tests/test_external.py::test_a_token_of_ones_own_and_an_address_of_ones_own
  sandbox external: host port token_file
plugins/agent_api/tests/test_external.py::test_where_nobody_comes_the_rollouts_fail_by_name
  sandbox external: patience_s
plugins/agent_api/tests/test_docker.py::test_a_container_has_the_limits_and_the_network_of_its_program
  sandbox docker: image python
plugins/adapter_roll/tests/test_recipe.py::test_a_run_file_becomes_rolls_keys
  adapter roll: sequence_length split reward.format.markers
plugins/adapter_roll/tests/test_recipe.py::test_the_weight_of_the_environments_own_score_is_carried_over
  adapter roll: reward.environment
plugins/adapter_roll/tests/test_advantages.py::test_every_reply_of_an_episode_gets_what_the_episode_deserves
  adapter roll: manager max_turns
plugins/adapter_roll/tests/test_reward.py::test_without_right_first_a_bonus_may_win_and_a_warning_says_so
  adapter roll: reward.right_first
tests/roll/test_adapter.py::test_the_doctor_runs_the_environment_that_it_is_given_and_says_what_fails
  adapter roll: trial_environment
plugins/adapter_skyrl/tests/test_rings.py::test_without_a_worker_a_group_is_late_and_raised
  adapter skyrl: rings deadline_s attempts
plugins/adapter_skyrl/tests/test_rings.py::test_a_group_of_weights_that_are_too_old_is_requested_again_and_raised_in_the_end
  adapter skyrl: max_staleness
plugins/adapter_skyrl/tests/test_rings.py::test_a_stash_that_is_too_small_is_an_error_with_what_to_do
  adapter skyrl: stash_mb
plugins/adapter_skyrl/tests/test_rows.py::test_turn_rewards_are_at_their_tokens_and_the_outcome_is_on_the_last
  adapter skyrl: turn_rewards
plugins/adapter_skyrl/tests/test_rows.py::test_a_source_without_its_address_is_refused
  adapter skyrl: url
plugins/adapter_skyrl/tests/test_rows.py::test_the_data_set_is_the_tasks_of_all_environments_and_a_row_says_which_it_is
  adapter skyrl: tasks
plugins/bridge_checkpoint/tests/test_bridge.py::test_with_every_the_versions_that_it_divides_are_published_and_the_first_of_a_connection
  bridge checkpoint: every keep
plugins/bridge_delta/tests/test_bridge.py::test_an_engine_that_another_run_has_left_begins_with_the_model_on_its_own_disk
  bridge delta: every
plugins/bridge_delta/tests/test_bridge.py::test_where_no_engine_tells_its_dtype_the_option_does
  bridge delta: dtype
plugins/bridge_nccl/tests/test_bridge.py::test_after_each_broadcast_every_engine_samples_from_the_weights_of_the_trainer
  bridge nccl: every
plugins/bridge_nccl/tests/test_bridge.py::test_an_engine_that_is_stuck_is_named_at_the_deadline
  bridge nccl: deadline_s
plugins/bridge_ipc/tests/test_copying.py::test_the_option_decides_what_the_bridge_carries
  bridge ipc: copies
plugins/bridge_lora/tests/test_bridge.py::test_stale_adapters_go_at_connect_and_older_ones_once_there_are_more_than_keep
  bridge lora: keep
plugins/curriculum/tests/test_curriculum.py::test_a_prior_file_gives_the_same_bins_as_the_field
  curriculum *: prior.file
plugins/engine_hf/tests/test_memory.py::test_options_bound_the_memory_plan
  engine hf: max_batch kv_cache_gb
plugins/engine_hf/tests/test_refusals.py::test_a_decoder_that_is_not_exact_is_refused_with_its_number_and_the_one_that_is
  engine hf: decode
plugins/engine_hf/tests/test_quantization.py::test_the_plan_counts_packed_weights_and_the_whole_model_while_it_opens
  engine hf: quantization
plugins/engine_hf/tests/test_graphs.py::test_the_plan_counts_what_graphs_keep
  engine hf: cuda_graphs
plugins/engine_hf/tests/test_memory.py::test_sixteen_bits_take_half
  engine hf: dtype
plugins/engine_hf/tests/test_sampling.py::test_more_rows_than_slots_all_get_their_turn
  engine hf: prefill_tokens
plugins/engine_vllm/tests/test_options.py::test_auto_is_the_checkpoints_own_precision_but_float32_on_a_cpu
  engine vllm: dtype
plugins/engine_vllm/tests/test_options.py::test_options_that_cannot_be_are_refused
  engine vllm: url
plugins/engine_vllm/tests/test_options.py::test_a_server_on_gpus_has_them_alone
  engine vllm: memory_share
plugins/engine_vllm/tests/test_options.py::test_what_trainer_and_bridge_tell_reaches_the_server
  engine vllm: max_loras
plugins/engine_vllm/tests/test_named_adapters.py::test_the_options_of_adapters_become_flags
  engine vllm: max_cpu_loras max_lora_rank
plugins/engine_vllm/tests/test_speculation.py::test_a_server_speculates_only_if_the_option_says_so
  engine vllm: speculation speculative_tokens prompt_lookup_min prompt_lookup_max
plugins/env_atroposlib/tests/test_environment.py::test_what_a_run_file_says_reaches_the_environment
  environment atroposlib: config datasets items evaluates
plugins/env_atroposlib/tests/test_environment.py::test_no_group_for_so_many_items_in_turn_is_a_failure
  environment atroposlib: tries
plugins/env_atroposlib/tests/test_environment.py::test_a_setup_that_never_ends_is_given_up
  environment atroposlib: open_deadline_s
plugins/env_atroposlib/tests/test_own_clients.py::test_a_url_that_is_named_is_the_policys
  environment atroposlib: policy_urls
plugins/env_atroposlib/tests/test_environment.py::test_what_is_wrong_is_one_error
  environment atroposlib: file
plugins/env_gsm8k/tests/test_grading.py::test_the_hub_source_loads_a_data_set_with_the_datasets_library
  environment gsm8k: dataset source
plugins/env_gsm8k/tests/test_grading.py::test_a_folder_that_is_missing_names_the_other_sources
  environment gsm8k: path
tests/worlds/test_gem.py::test_all_rollouts_of_a_task_begin_alike_and_tasks_differ_by_the_option_seed
  environment gem: id seed
tests/worlds/test_gem.py::test_parameters_reach_gem
  environment gem: parameters
libs/env_kit/tests/test_stepping.py::test_the_action_is_put_into_the_template_and_one_that_is_not_found_is_empty_and_counted
  environment gem: action pattern template
libs/env_kit/tests/test_stepping.py::test_the_system_message_comes_first_and_an_episode_is_cut_off_at_max_turns
  environment gem: system max_turns
libs/env_kit/tests/test_stepping.py::test_a_score_of_success_is_correct
  environment gem: success
libs/env_kit/tests/test_stepping.py::test_tasks_are_seeds_that_differ_by_split_index_and_option
  environment gem: tasks held_out
tests/worlds/test_gem.py::test_a_step_that_takes_too_long_fails_by_name
  environment gem: step_deadline_s
tests/ray/test_runs.py::test_a_cluster_that_is_not_there_is_named
  launcher ray: address
tests/ray/test_runs.py::test_an_address_that_is_of_another_machine_is_refused
  launcher ray: host
tests/ray/test_runs.py::test_what_cannot_be_there_at_once_is_refused_and_says_what_is_free
  launcher ray: room_deadline_s
plugins/launcher_ray/tests/test_options.py::test_resources_in_rays_words
  launcher ray: roles.cpus roles.gpus roles.memory_gb roles.other
plugins/launcher_ray/tests/test_workers.py::test_what_a_worker_is_started_with
  launcher ray: workers.concurrency workers.cpus workers.gpus workers.memory_gb workers.other
plugins/launcher_ray/tests/test_workers.py::test_how_many_there_are_at_the_start
  launcher ray: workers.count workers.least
plugins/launcher_ray/tests/test_workers.py::test_between_the_bounds_and_on_little_evidence_it_stays
  launcher ray: look_s
tests/slurm/test_runs.py::test_an_address_that_is_no_address_of_the_node_is_refused
  launcher slurm: host
tests/slurm/test_runs.py::test_what_finds_no_room_in_time_is_named_inside_a_job_that_is_there
  launcher slurm: room_deadline_s
tests/slurm/test_runs.py::test_submit_submits_the_files
  launcher slurm: submit
plugins/launcher_slurm/tests/test_files.py::test_what_a_site_wants_is_in_the_script
  launcher slurm: partition account time save_s sbatch setup nodes node.cpus node.memory_gb
plugins/launcher_slurm/tests/test_files.py::test_devices_that_a_role_does_not_get_are_refused
  launcher slurm: node.gpus
plugins/launcher_slurm/tests/test_files.py::test_workers_need_an_api_and_an_environment_of_the_run
  launcher slurm: workers.count workers.cpus workers.memory_gb workers.concurrency workers.partition
plugins/launcher_slurm/tests/test_placing.py::test_the_largest_is_placed_first_and_the_loop_keeps_its_part_of_the_first_node
  launcher slurm: loop.cpus roles.cpus
plugins/launcher_slurm/tests/test_placing.py::test_gpus_and_memory_are_counted
  launcher slurm: roles.gpus roles.memory_gb loop.gpus loop.memory_gb
plugins/launcher_kubernetes/tests/test_manifests.py::test_the_options_of_the_cluster_are_in_the_manifests
  launcher kubernetes: namespace mount python gpu port wait_s save_s
plugins/launcher_kubernetes/tests/test_manifests.py::test_the_options_of_the_cluster_are_in_the_manifests
  launcher kubernetes: roles.cpus roles.gpus roles.memory_gb roles.node_selector loop.cpus loop.gpus loop.memory_gb loop.node_selector
tests/machines/test_trainer.py::test_two_machines_train_as_two_ranks_of_one_machine_do
  run: trainer.machines
plugins/launcher_kubernetes/tests/test_manifests.py::test_what_could_not_run_is_refused
  launcher kubernetes: image claim
plugins/launcher_kubernetes/tests/test_manifests.py::test_workers_are_as_many_as_requested_and_know_the_servers_token_alone
  launcher kubernetes: server_port workers.count workers.concurrency workers.cpus workers.gpus workers.memory_gb workers.node_selector
tests/kubernetes/test_pods.py::test_submit_applies_the_manifests
  launcher kubernetes: submit
plugins/env_dataset/tests/test_dataset.py::test_a_tenth_is_the_test_split_by_a_hash_of_the_prompts
  environment dataset: tasks held_out
plugins/env_dataset/tests/test_dataset.py::test_a_file_of_its_own_is_the_test_split_and_columns_are_named
  environment dataset: test_tasks prompt answer instruction
plugins/env_dataset/tests/test_dataset.py::test_rows_with_long_prompts_are_left_out_by_their_tokens_and_keep_their_numbers
  environment dataset: max_prompt_tokens
plugins/env_dataset/tests/test_dataset.py::test_unreadable_rows_are_listed_and_left_out_if_that_is_asked_for
  environment dataset: leave_out_unreadable
plugins/env_dataset/tests/test_dataset.py::test_a_data_set_of_the_hub_is_read_by_datasets
  environment dataset: hub subset split test_split
plugins/env_dataset/tests/test_dataset.py::test_a_reply_is_compared_with_the_answer
  environment dataset: score pattern
plugins/env_dataset/tests/test_dataset.py::test_what_is_not_compared_in_time_is_wrong_and_counted
  environment dataset: math_deadline_s
plugins/env_dataset/tests/test_dataset.py::test_several_scores_are_added_up_by_weight
  environment dataset: score_weights
tests/worlds/test_openenv.py::test_openenvs_own_template_echoes
  environment openenv: url field shown max_turns
tests/worlds/test_openenv.py::test_constant_fields_are_part_of_every_action
  environment openenv: fields
tests/worlds/test_openenv.py::test_tools_of_a_server_are_called_and_answered
  environment openenv: tools system
tests/worlds/test_openenv.py::test_no_more_episodes_at_once_than_the_server_holds
  environment openenv: sessions
tests/worlds/test_openenv.py::test_a_step_that_is_late_fails_its_rollout_and_its_session_begins_anew
  environment openenv: step_deadline_s
plugins/env_openenv/tests/test_options.py::test_a_server_that_never_answers_is_given_up
  environment openenv: connect_deadline_s
libs/env_kit/tests/test_stepping.py::test_the_action_is_put_into_the_template_and_one_that_is_not_found_is_empty_and_counted
  environment openenv: action pattern template
libs/env_kit/tests/test_stepping.py::test_a_score_of_success_is_correct
  environment openenv: success
libs/env_kit/tests/test_stepping.py::test_tasks_are_seeds_that_differ_by_split_index_and_option
  environment openenv: tasks held_out seed
tests/verifiers/test_v0.py::test_its_arguments_reach_load_environment_and_success_is_what_counts_as_correct
  environment verifiers: id folder config datasets success
tests/verifiers/test_v0.py::test_tasks_are_split_by_their_prompts_where_the_environment_has_no_data_set_for_evaluation
  environment verifiers: tasks held_out
tests/verifiers/test_v0.py::test_loading_that_takes_too_long_is_named
  environment verifiers: open_deadline_s
tests/worlds/test_textarena.py::test_parameters_and_players_reach_textarena
  environment textarena: game parameters players
tests/worlds/test_textarena.py::test_a_game_that_is_cut_off_has_no_winner_and_all_games_of_a_task_begin_alike
  environment textarena: max_turns seed
tests/worlds/test_textarena.py::test_a_game_that_is_not_there_or_takes_too_long_is_named
  environment textarena: step_deadline_s
libs/env_kit/tests/test_stepping.py::test_the_action_is_put_into_the_template_and_one_that_is_not_found_is_empty_and_counted
  environment textarena: action pattern template
libs/env_kit/tests/test_stepping.py::test_the_system_message_comes_first_and_an_episode_is_cut_off_at_max_turns
  environment textarena: system
libs/env_kit/tests/test_stepping.py::test_a_score_of_success_is_correct
  environment textarena: success
libs/env_kit/tests/test_stepping.py::test_tasks_are_seeds_that_differ_by_split_index_and_option
  environment textarena: tasks held_out
tests/worlds/test_reasoning_gym.py::test_a_mixture_has_its_parts_by_weight_and_levels_that_a_prior_reads
  environment reasoning_gym: mixture parameters levels tasks
tests/worlds/test_reasoning_gym.py::test_no_question_of_a_small_data_set_is_in_both_splits
  environment reasoning_gym: dataset held_out
tests/worlds/test_reasoning_gym.py::test_another_seed_makes_other_tasks_and_the_instruction_is_what_was_given
  environment reasoning_gym: seed instruction answer
tests/worlds/test_reasoning_gym.py::test_a_scorer_that_never_ends_is_ended_and_the_next_answer_is_scored
  environment reasoning_gym: scoring_deadline_s
tests/worlds/test_reasoning_gym.py::test_a_task_that_takes_too_long_to_make_is_named
  environment reasoning_gym: making_deadline_s
plugins/reward_ensemble/tests/test_ensemble.py::test_each_way_to_combine
  reward ensemble: combine trim members.weight
plugins/reward_ensemble/tests/test_ensemble.py::test_a_member_that_fails_is_a_missing_rating_and_no_zero
  reward ensemble: members.use members.deadline_s
plugins/reward_ensemble/tests/test_ensemble.py::test_a_veto
  reward ensemble: members.veto
plugins/reward_ensemble/tests/test_ensemble.py::test_too_few_ratings_fail_the_group_with_names_and_causes
  reward ensemble: least
plugins/reward_ensemble/tests/test_alpha.py::test_the_published_example
  reward ensemble: metric
plugins/reward_ensemble/tests/test_alpha.py::test_more_categories_than_configured_end_the_overall_alpha_and_not_the_rolling_one
  reward ensemble: categories window
plugins/reward_ensemble/tests/test_ensemble.py::test_a_group_that_the_members_do_not_agree_on_is_gated
  reward ensemble: gate_alpha
plugins/reward_ensemble/tests/test_ensemble.py::test_one_that_is_weighted_down_counts_less
  reward ensemble: on_departure downweight
plugins/reward_ensemble/tests/test_outlier_raters.py::test_a_second_one_is_found_among_the_others
  reward ensemble: tolerance false_alarm horizon
tests/unit/builtin/test_rewards.py::test_exact_can_mind_white_space_and_ignore_case
  reward exact: strip ignore_case
tests/unit/builtin/test_rewards.py::test_format_is_the_share_of_patterns_found
  reward format: patterns
tests/unit/builtin/test_rewards.py::test_length_falls_from_nothing_to_minus_one_between_its_bounds
  reward length: free_tokens limit_tokens
tests/unit/builtin/test_rewards.py::test_numeric_tolerance_is_relative_above_one_and_absolute_below
  reward numeric: tolerance
plugins/reward_ensemble/tests/test_judge.py::test_the_model_is_shown_the_question_and_the_reply_and_nothing_is_filled_in_twice
  reward judge: model prompt system temperature max_tokens high
plugins/reward_ensemble/tests/test_judge.py::test_scores_are_scaled_and_the_last_one_counts
  reward judge: score low
plugins/reward_ensemble/tests/test_judge.py::test_a_refusal_is_not_tried_again_and_never_shows_the_key
  reward judge: key_env
plugins/reward_ensemble/tests/test_judge.py::test_a_slow_server_and_one_that_is_gone
  reward judge: timeout_s
plugins/reward_ensemble/tests/test_judge.py::test_what_is_not_there_in_time_is_missing_and_the_rest_is_kept
  reward judge: give_up_s
plugins/reward_ensemble/tests/test_judge.py::test_a_try_that_fails_is_made_again
  reward judge: retries
plugins/reward_ensemble/tests/test_judge.py::test_waits_double
  reward judge: backoff_s
plugins/reward_ensemble/tests/test_judge.py::test_no_more_requests_at_once_than_configured
  reward judge: concurrency
plugins/reward_ensemble/tests/test_judge.py::test_the_cache_forgets_what_was_used_longest_ago
  reward judge: cache
plugins/reward_ensemble/tests/test_judge.py::test_a_spent_budget_is_a_missing_rating_that_says_so_also_after_a_resume
  reward judge: max_requests max_total_tokens
plugins/sinks/tests/test_csv.py::test_the_file_is_in_the_run_directory
  sink csv: file
plugins/sinks/tests/test_tensorboard.py::test_an_absolute_directory_is_taken
  sink tensorboard: directory
plugins/sinks/tests/test_tensorboard.py::test_what_is_flushed_is_seen_while_the_run_goes_on
  sink tensorboard: flush_s
plugins/sinks/tests/test_mlflow.py::test_a_run_has_its_metrics_parameters_tags_end_and_files
  sink mlflow: experiment tags config artifacts name
plugins/sinks/tests/test_mlflow.py::test_where_runs_are_kept_must_be_said
  sink mlflow: tracking_uri
plugins/sinks/tests/test_mlflow.py::test_a_server_that_is_not_there_and_a_uri_that_cannot_be_are_refused_before_the_first_step
  sink mlflow: start_deadline_s
plugins/sinks/tests/test_mlflow.py::test_a_store_that_stays_away_is_named_at_the_end_with_what_it_lacks
  sink mlflow: finish_deadline_s
plugins/sinks/tests/test_trackio.py::test_a_run_has_its_metrics_and_settings
  sink trackio: project name group
plugins/sinks/tests/test_trackio.py::test_after_a_resume_each_step_is_there_once_with_the_values_that_count
  sink trackio: config
plugins/sinks/tests/test_wandb.py::test_disabled_writes_nothing
  sink wandb: mode
plugins/sinks/tests/test_wandb.py::test_an_offline_run_is_written_with_all_that_was_requested
  sink wandb: project group tags config
plugins/sinks/tests/test_wandb.py::test_a_server_that_does_not_answer_is_an_error_within_the_deadline_and_the_key_is_printed_nowhere
  sink wandb: start_deadline_s
plugins/distillation/tests/test_teacher.py::test_options_that_contradict_each_other_say_which
  teacher distillation: model url served_model tokenizer
plugins/distillation/tests/test_teacher.py::test_every_token_that_the_loss_counts_gets_the_teachers_distribution_of_that_very_token
  teacher distillation: top_k
plugins/distillation/tests/test_teacher.py::test_what_a_rollout_brought_stays_and_other_environments_are_left_alone
  teacher distillation: environments
plugins/distillation/tests/test_self_teacher.py::test_each_token_has_what_the_policy_says_of_it_after_the_shown_reply_and_stays_as_it_was_sampled
  teacher self: shows top_k
plugins/distillation/tests/test_self_teacher.py::test_a_rollout_is_shown_the_next_one_that_succeeded_and_never_itself
  teacher self: success
plugins/distillation/tests/test_self_teacher.py::test_feedback_and_the_answer_stand_where_they_are_and_in_their_order
  teacher self: template solution feedback
plugins/distillation/tests/test_self_teacher.py::test_weights_that_may_be_behind_are_kept_while_they_are_near_enough
  teacher self: versions_behind
plugins/distillation/tests/test_self_teacher.py::test_the_engine_is_the_one_that_is_named_on_the_devices_that_are_named
  teacher self: engine.use engine.devices engine.threads
plugins/distillation/tests/test_self_teacher.py::test_what_does_not_come_within_the_deadline_ends_the_step
  teacher self: deadline_s
tests/unit/storage/test_checkpoint.py::test_the_last_few_stay
  run: checkpoint.keep
tests/e2e/test_resume.py::test_a_resume_on_other_rows_is_refused_and_says_which_they_are
  run: checkpoint.other_tasks
tests/unit/hub/test_hub.py::test_a_hub_too_small_for_a_step_says_so_instead_of_waiting
  run: hub.size_mb
tests/unit/rollouts/test_evaluation.py::test_each_problem_is_run_with_seeds_of_its_own_and_the_evaluations_own_sampling
  run: evaluation.samples evaluation.temperature evaluation.top_p evaluation.max_tokens
tests/unit/launch/test_plan.py::test_further_engines_differ_in_what_their_tables_say_and_only_the_first_shares_memory
  run: engine.replica
tests/e2e/test_toy_run.py::test_a_deterministic_run_is_the_same_twice_and_across_a_resume
  run: deterministic
tests/e2e/test_toy_run.py::test_two_environments_share_a_run_by_weight
  run: environment.weight
tests/e2e/test_faults.py::test_a_run_that_may_restart_goes_on_by_itself_to_the_same_bits
  run: restarts
tests/e2e/test_health.py::test_pause_saves_the_step_and_a_resume_goes_on_with_what_health_knew
  run: health.action
tests/unit/rollouts/test_runner.py::test_a_hosted_reward_that_hangs_once_fails_that_group_alone
  run: reward.deadline_s reward.runs_in
tests/unit/processes/test_child.py::test_no_process_is_given_up_before_its_usual_call_is_known_or_while_it_may_be_silent
  run: watch.say_s watch.least_s watch.times
plugins/engine_hf/tests/test_named_adapters.py::test_the_bytes_of_adapters_are_bounded_and_said
  engine hf: adapters_gb
plugins/tinker_client/tests/test_sent.py::test_changing_an_option_changes_what_the_server_is_sent
  trainer tinker: loss average clip_low clip_high rank train_attention train_mlp train_head
plugins/tinker_client/tests/test_sent.py::test_changing_an_option_changes_what_the_server_is_sent
  trainer tinker: learning_rate betas eps weight_decay max_grad_norm
plugins/tinker_client/tests/test_sent.py::test_the_divisor_of_a_constant_average_scales_what_is_sent
  trainer tinker: loss_length
plugins/tinker_client/tests/test_sent.py::test_a_model_must_be_named_if_the_server_offers_several
  trainer tinker: base_model
plugins/tinker_client/tests/test_sent.py::test_a_model_must_be_named_if_the_server_offers_several
  engine tinker: base_model
plugins/tinker_client/tests/test_sent.py::test_the_dtype_of_the_server_bounds_the_alignment
  trainer tinker: dtype
plugins/tinker_client/tests/test_sent.py::test_each_continuation_has_its_own_seed_and_all_stop_ids
  engine tinker: concurrency
plugins/tinker_client/tests/test_sent.py::test_versions_are_published_as_often_and_kept_as_long_as_the_options_say
  bridge tinker: every ttl_hours
plugins/tinker_client/tests/test_sent.py::test_a_publication_has_a_deadline
  bridge tinker: deadline_s
plugins/trainer_es/tests/test_trainer.py::test_changing_an_option_changes_the_weights
  trainer es: population sigma learning_rate fitness parameters
plugins/optimizer_gepa/tests/test_prompted.py::test_it_stands_in_front_of_the_users_message_or_in_a_system_message_of_its_own
  environment prompted: prompt place separator
plugins/optimizer_gepa/tests/test_prompted.py::environment
  environment prompted: environment.use
plugins/optimizer_gepa/tests/test_prompted.py::test_a_model_is_shown_prompt_replies_and_rewards_and_its_last_instruction_is_taken
  trainer gepa: url model key_variable
plugins/optimizer_gepa/tests/test_trainer.py::test_a_child_is_made_from_the_worst_and_best_rollouts_of_its_parent_by_whoever_is_named
  trainer gepa: proposer examples deadline_s
tests/e2e/test_roles.py::test_the_trainer_waits_for_workers_aloud_and_not_for_ever
  run: api.wait_s
plugins/sinks/tests/test_wandb.py::test_an_offline_run_is_written_with_all_that_was_requested
  sink wandb: entity
plugins/sinks/tests/test_wandb.py::test_a_resumed_run_goes_on_under_the_same_id
  sink wandb: name
tests/skyrl/test_entrypoint.py::test_skyrls_own_main_passes_on_before_it_parses_and_a_wrong_option_is_named
  adapter skyrl: run
tests/unit/rollouts/test_evaluation.py::test_pass_at_k_is_the_mean_over_problems_by_every_grader_and_failures_are_wrong
  run: evaluation.pass_at
"""


def seen() -> dict[str, str]:
    found = {}
    for test, component, options in re.findall(r"(\S+)\n  ([\w *]+): (.+)\n", SEEN_IN):
        names = [f"curriculum {one}" for one in CURRICULA] if component == "curriculum *" else [component]
        found |= {f"{name}.{option}": test for name in names for option in options.split()}
    return found


@pytest.mark.parametrize("test", sorted(set(seen().values())))
def test_the_test_that_an_entry_names_is_there_and_uses_its_options(test):
    file, _, name = test.partition("::")
    [found] = [one for one in ast.walk(ast.parse((ROOT / file).read_text())) if getattr(one, "name", None) == name]
    words = set(re.findall(r"\w+", ast.unparse(found)))
    missing = [option for option, by in seen().items() if by == test and option.rpartition(".")[2] not in words]
    assert not missing


# -- only read

READ = {
    "engine vllm.start_timeout_s": "needs a vLLM server that does not come up",
    "environment dataset.revision": "only the hub has revisions",
    "environment gsm8k.revision": "only the hub has revisions",
    "sink wandb.finish_deadline_s": "needs a W&B server that falls silent at the very end",
    "sink wandb.system_metrics": "W&B's own figures of this machine, which it takes at times of its own",
}


BY_ANOTHER = {"transform length_penalty.form": "cost"}  # it says which of the others may be set, and they are read


class Reads(ast.NodeVisitor):
    """Attributes that are read, but in what only validates options."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any("validator" in ast.unparse(decorator) for decorator in node.decorator_list):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found.add(node.attr)
        self.generic_visit(node)


LIBRARIES = sorted(path.name for path in REPOSITORY.glob("libs/*/atropos_*"))  # they read the run file too


@cache
def read_in(package: str) -> frozenset[str]:
    reads, spec = Reads(), find_spec(package)
    for file in Path(spec.origin).parent.rglob("*.py"):
        reads.visit(ast.parse(file.read_text()))
    return frozenset(reads.found)


@pytest.mark.parametrize("option", sorted(every_option()))
def test_some_code_reads_the_option(option):
    name, model = option.rpartition(".")[2], every_option()[option]
    declares = next(one for one in reversed(model.__mro__) if name in vars(one).get("__annotations__", {}))
    package = declares.__module__.partition(".")[0]
    packages = [package, *LIBRARIES] if package == "atropos_core" else [package]
    packages += ["atropos_env_dataset"] if option.startswith("run.warmup.") else []  # it reads the rows
    assert any(BY_ANOTHER.get(option, name) in read_in(one) for one in packages)


def test_there_is_an_entry_for_every_option():
    known = {*CHANGED, *OF_A_RUN, *REFUSED, *HEALTH, *seen(), *READ}
    assert not (new := sorted(set(every_option()) - known)), f"say how the effect of a new option is seen: {new}"
    assert not (gone := sorted(known - set(every_option()))), f"these are no options any more: {gone}"
