"""What serves a policy over HTTP to code that brings a client of its own, such as an environment of another framework.

A plugin offers it (hook `atropos_policy_servers`), and `Plugins.policy_server` finds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from atropos_core.errors import AtroposError
from atropos_core.interfaces import Policy
from atropos_core.types import Episode


class PolicySession(Protocol):
    """The calls of one episode, or of one of its agents."""

    url: str  # speaks the APIs of OpenAI and Anthropic to whoever has `key`; ends in /v1
    key: str

    @property
    def failure(self) -> AtroposError | None:
        """The first that the policy raised."""

    def end(self) -> Episode | None:
        """Later calls are refused. What was sampled, with the ids and logprobs that it was sampled with, and a score of 0;
        None where nothing was. May be called once."""


class PolicyServer(Protocol):
    """Lets programs of this machine sample, until `close`."""

    async def session(self, policy: Policy, *, seed: int, name: str) -> PolicySession:
        """`name` is for people: the task's."""

    async def close(self) -> None:
        """Calls that wait are ended. May be called twice."""


class ServePolicies(Protocol):
    """Start a PolicyServer that only this machine can reach, for policies of the model in this directory. `today`: the date that its
    chat template gets, as in RunContext."""

    async def __call__(self, model: Path, today: str = "") -> PolicyServer: ...
