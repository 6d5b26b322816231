"""From built components to a loop that can take its first step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from atropos_core import console
from atropos_core.config.run_file import ApiSection, flatten
from atropos_core.console.waits import waiting
from atropos_core.guards.deadlines import within
from atropos_core.guards.open_component import MODEL_DEADLINE_S, opened
from atropos_core.interfaces import Engine, ModelInfo, Trainer
from atropos_core.launch.banner import banner
from atropos_core.launch.fit import check_models
from atropos_core.launch.plan import Plan
from atropos_core.launch.text_checks import warn_of_long_answers, warn_of_prompts
from atropos_core.models.model_size import context_tokens
from atropos_core.plugins.services import ServeEngine
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.rollouts.source import LocalSource, Source, refuse_other_tasks
from atropos_core.storage.checkpoint import Checkpoint
from atropos_core.training.loop import Loop
from atropos_core.training.parts import Parts

LOOPBACK = ("127.0.0.1", "localhost", "::1")


async def start(plan: Plan, parts: Parts, directory: Path, checkpoint: Checkpoint | None, stop: asyncio.Event) -> Loop:
    """Open all components, connect the bridge, and load the checkpoint. Return the loop, which can take its first step."""
    tokenizer = plan.tokenizer()
    settings = dict(flatten(plan.resolved())) | plan.code()
    plan = _with_workers(plan, parts)
    config = plan.config
    if checkpoint is not None and config.api is None:  # before a model is loaded
        state = checkpoint.state.get("source", {})
        await refuse_other_tasks(parts.environments, state, allowed=config.checkpoint.other_tasks)
    model, engines, *_ = await asyncio.gather(
        _open_model("trainer", parts.trainer),
        asyncio.gather(*(_open_model(one.label, part) for one, part in zip(plan.engines, parts.engines, strict=True))),
        asyncio.gather(*(opened(f"teacher {name!r}", one, MODEL_DEADLINE_S) for name, one in parts.teachers.items())),
    )
    for info in engines:
        check_models(tokenizer, model, info)
    extensions = parts.bridge.extensions()
    if "trainer" in extensions:
        await parts.trainer.endpoint.load_extension(extensions["trainer"])
    if "engine" in extensions:
        await asyncio.gather(*(engine.endpoint.load_extension(extensions["engine"]) for engine in parts.engines))
    with waiting(f"bridge {config.bridge.use} to join trainer and engine"):
        await within(
            parts.bridge.connect(parts.trainer.endpoint, parts.engines),
            MODEL_DEADLINE_S,
            f"bridge {config.bridge.use}: connect()",
        )
    runner = RolloutRunner(
        parts.environments,
        parts.rewards,
        parts.engine,
        tokenizer,
        deadline_s=config.training.rollout_deadline_s,
        deterministic=config.deterministic,
        profile=parts.profile,
        vocabulary=model.vocabulary,
    )
    source = _source(plan, parts, runner, model, directory)
    parts.opened.append(source)
    await source.open(checkpoint.state.get("source") if checkpoint else None)
    for of in parts.rewards:
        if of.gold is not None and parts.environments and config.api is None:
            of.gold.check(of.name, parts.environments)
    for name, environment in parts.environments.items():
        warn_of_prompts(name, environment, tokenizer)
        warn_of_long_answers(name, environment, tokenizer, plan.config.sampling.max_tokens)
    loop = Loop(config, parts, source, runner, model, directory, stop, settings, context_tokens(plan.model.directory))
    if checkpoint is not None:
        with waiting(f"the checkpoint of step {checkpoint.step} to be taken up"):
            await loop.restore(checkpoint)
    if config.api is not None and plan.serve_engine is not None:
        await _serve_engines(config.api, plan.serve_engine, parts, source, model)
    for name, sink in parts.sinks.items():
        await opened(f"sink {name!r}", sink)
    console.facts(banner(plan, parts, parts.tasks, model, directory, checkpoint))
    return loop


def _with_workers(plan: Plan, parts: Parts) -> Plan:
    """Return the plan with the server of the launcher's workers instead of the one in the run file."""
    if (workers := parts.workers) is None or plan.config.api is None:
        return plan
    host = f"[{workers.host}]" if ":" in workers.host else workers.host
    found = {"url": workers.url, "token_file": workers.token_file, "engine_address": f"{host}:0"}
    api = plan.config.api.model_copy(update=found)
    return replace(plan, config=plan.config.model_copy(update={"api": api}))


async def _open_model(named: str, part: Engine | Trainer) -> ModelInfo:
    """Open an engine or a trainer. One in a child process reports its own progress and errors, and has its own deadline."""
    is_here = isinstance(part.endpoint, LocalEndpoint)
    info: ModelInfo = await (opened(named, part, MODEL_DEADLINE_S) if is_here else part.open())
    return info


def _source(plan: Plan, parts: Parts, runner: RolloutRunner, model: ModelInfo, directory: Path) -> Source:
    """Return the source of groups: rollouts here, or the workers of a trajectory API."""
    if plan.open_source is None:
        return LocalSource(plan.config, runner, parts.curriculum)
    from atropos_core.models.model_size import context_tokens

    length = context_tokens(plan.model.directory)
    source: Source = plan.open_source(
        plan.config, parts.curriculum, model, directory, parts.profile, context_tokens=length
    )
    return source


async def _serve_engines(api: ApiSection, serve: ServeEngine, parts: Parts, source: Source, model: ModelInfo) -> None:
    """Serve the engines to remote workers, once the engines hold the run's own weights."""
    server = await serve(parts.engine, api.engine_address, api.token_file, model)
    parts.opened.insert(0, server)
    await source.add_engine(server.url)
    console.say(f"workers sample from {server.url}")
    if urlsplit(server.url).hostname in LOOPBACK and urlsplit(api.url).hostname not in LOOPBACK:
        console.warn(
            "workers on other machines cannot reach that: set api.engine_address to HOST:PORT, an address of this machine "
            "(`atropos train --engine-address HOST:PORT`)."
        )
