"""A separate engine process for a trainer elsewhere, which sends it weights."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from atropos_core import console
from atropos_core.config.resolve import WITH_EVERY_ENGINE, resolve_component
from atropos_core.errors import FitError
from atropos_core.interfaces import Bridge
from atropos_core.launch.builder import build_for_evaluation
from atropos_core.launch.plan import Plan
from atropos_core.launch.signals import watched
from atropos_core.plugins.manager import Plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.storage.tempdirs import owned_prefix, sweep
from atropos_http_server.server import ListenOptions
from atropos_trajectory_api.engine_http.routes import SENT
from atropos_trajectory_api.engine_http.server import open_engine_server
from atropos_trajectory_api.roles.environment_worker import draining_signals


def sent_weights(plan: Plan, plugins: Plugins, *, by_bridge: bool) -> Plan:
    """The plan of an engine that receives whole models, or with `by_bridge` what `bridge.use` carries. For adapters, the
    trainer sends their size. Raises FitError."""
    [engine], config = plan.engines, plan.config
    carried = (
        resolve_component(plugins.registry, "bridge", "bridge", config.bridge).transports
        if by_bridge
        else {"checkpoint"}
    )
    transport = next((sent for sent in SENT if sent in carried & engine.transports), None)
    if transport is None:
        what = f"bridge {config.bridge.use!r} carries {', '.join(sorted(carried))}; " if by_bridge else ""
        raise FitError(
            f"no weights can be sent to this engine from elsewhere: {what}engine {engine.component.use!r} takes"
            f" {', '.join(sorted(engine.transports - WITH_EVERY_ENGINE)) or 'nothing'}.",
            remedy="Use --bridge checkpoint, --bridge delta or --bridge lora, with an engine that takes what it carries: hf or vllm.",
        )
    announcing = ("trainer",) if transport == "adapter" else ()
    single = {kind: resolve_component(plugins.registry, kind, kind, getattr(config, kind)) for kind in announcing}
    return replace(plan, transports=(transport,), single=single)


def bridge_code(plan: Plan, plugins: Plugins) -> str:
    """The code that a run's bridge loads in the engine's process, as "pkg.mod:Class"; empty if it needs none."""
    resolved = resolve_component(plugins.registry, "bridge", "bridge", plan.config.bridge)
    bridge: Bridge = resolved.build(RunContext(Path(), plan.model.directory, max_staleness=sys.maxsize))
    return bridge.extensions().get("engine", "")


async def serve_engine(plan: Plan, where: str, token_file: Path | None, extension: str = "") -> None:
    """Serve until SIGTERM or Ctrl-C, or until the engine's process ends. `plan` is from `sent_weights`, `extension` from
    `bridge_code`. Raises ConfigError, ProcessDied."""
    [takes] = plan.transports
    stop = asyncio.Event()
    sweep("engine")
    with draining_signals(stop), tempfile.TemporaryDirectory(prefix=owned_prefix("engine")) as directory:
        (Path(directory) / "logs").mkdir()
        parts = await build_for_evaluation(plan, Path(directory))
        try:
            info = await parts.engine.open()
            server = await open_engine_server(
                parts.engine,
                where,
                token_file,
                info,
                takes=takes,
                extension=extension,
                options=ListenOptions("--host", "--port"),
            )
            try:
                engine = f"{plan.config.engine.use}, {plan.model.summary}"
                console.facts([("engine", engine), ("takes", SENT[takes]), ("at", server.url)])
                await watched(_until(stop), parts.children)
            finally:
                await server.close()
        finally:
            await parts.close()


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
