"""Register the environment `agent`, the sandboxes `local`, `process`, `bubblewrap`, `docker` and `external`, the command
`serve-agent`, and the server of policies."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from pathlib import Path

    from atropos_agent_api.config import AgentOptions
    from atropos_agent_api.sandboxes.config import BubblewrapOptions, DockerOptions, ExternalOptions
    from atropos_core.interfaces import Environment, Sandbox
    from atropos_core.plugins.options import NoOptions
    from atropos_core.plugins.services import PolicyServer, ServePolicies


def build_agent(options: AgentOptions, context: RunContext) -> Environment:
    from atropos_agent_api.environment.build import build

    return build(options, context)


def build_local(options: BubblewrapOptions, context: RunContext) -> Sandbox:
    from atropos_agent_api.sandboxes.local import LocalSandbox

    return LocalSandbox(options.visible)


def build_process(options: NoOptions, context: RunContext) -> Sandbox:
    from atropos_agent_api.sandboxes.process import ProcessSandbox

    return ProcessSandbox()


def build_bubblewrap(options: BubblewrapOptions, context: RunContext) -> Sandbox:
    from atropos_agent_api.sandboxes.bubblewrap import BubblewrapSandbox

    return BubblewrapSandbox(options.visible)


def build_docker(options: DockerOptions, context: RunContext) -> Sandbox:
    from atropos_agent_api.sandboxes.docker import DockerSandbox

    return DockerSandbox(options.image, options.python)


def build_external(options: ExternalOptions, context: RunContext) -> Sandbox:
    from atropos_agent_api.sandboxes.external import ExternalSandbox

    return ExternalSandbox(options, context.directory / "agents" / f"{context.label or 'external'}.token")


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer, which listing plugins does not import
    from atropos_agent_api import serve_agent

    serve_agent.add(app)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    return [
        Provider(
            "agent",
            "any program that calls a model, unmodified",
            "atropos_agent_api.config:AgentOptions",
            build_agent,
        )
    ]


@hookimpl
def atropos_policy_servers() -> Iterable[ServePolicies]:
    return [_serve_policies]


async def _serve_policies(model: Path, today: str = "") -> PolicyServer:
    import asyncio  # here: listing plugins does not need it, and it takes 17 ms

    module = await asyncio.to_thread(importlib.import_module, "atropos_agent_api.server.policies")  # a second or more
    server: PolicyServer = await module.serve_policies(model, today)
    return server


@hookimpl
def atropos_sandboxes() -> Iterable[Provider[Sandbox]]:
    yield Provider(
        name="local",
        summary="bubblewrap if this machine permits it, else process, with a warning",
        config="atropos_agent_api.sandboxes.config:BubblewrapOptions",
        build=build_local,
    )
    yield Provider(
        name="process",
        summary="limits, and separate directories for each program; it has its user's rights",
        config=None,
        build=build_process,
    )
    yield Provider(
        name="bubblewrap",
        summary="Linux namespaces: a program sees only the system's files and its own, and no network but the API",
        config="atropos_agent_api.sandboxes.config:BubblewrapOptions",
        build=build_bubblewrap,
    )
    yield Provider(
        name="docker",
        summary="a container of your image for each program, run by a docker daemon on this machine",
        config="atropos_agent_api.sandboxes.config:DockerOptions",
        build=build_docker,
    )
    yield Provider(
        name="external",
        summary="starts nothing: programs that you start ask for episodes over HTTP, and report their ends",
        config="atropos_agent_api.sandboxes.config:ExternalOptions",
        build=build_external,
    )
