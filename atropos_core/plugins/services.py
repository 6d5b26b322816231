"""The services that a run gets from one plugin each: servers, and the source of remote groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from atropos_core.conversation import Policy
from atropos_core.errors import AtroposError
from atropos_core.interfaces import Curriculum, Engine, ModelInfo
from atropos_core.types import Episode, Rollout


class EngineServer(Protocol):
    """Serves an engine over the network until `close`."""

    url: str  # where workers reach it

    async def close(self) -> None:
        """Stop serving; the engine keeps running. May be called twice."""


class ServeEngine(Protocol):
    """Starts an EngineServer at HOST:PORT for an engine that is open (`info`). Clients need the token of `token_file`. Raises
    ConfigError if it cannot or must not listen there."""

    async def __call__(
        self, engine: Engine, where: str, token_file: Path | None, info: ModelInfo | None = None
    ) -> EngineServer: ...


class OpenSource(Protocol):
    """Opens the groups of a run with an [api]: returns a `rollouts.source.Source` for this RunConfig and Profile.
    `context_tokens` is the model's context length, or 0 if it is unknown."""

    def __call__(
        self,
        config: Any,
        curriculum: Curriculum,
        model: ModelInfo,
        directory: Path,
        profile: Any,
        *,
        context_tokens: int,
    ) -> Any: ...  # config, profile and source have types of layers above this module


class WarmupRows(Protocol):
    """The rows of a warm start, as token sequences of the policy's tokenizer (`Rollout.sft`)."""

    @property
    def steps(self) -> int: ...

    @property
    def held_out(self) -> Sequence[Rollout]: ...

    @property
    def digest(self) -> str:
        """A hash of the rows and their order: a resumed run must find the same."""

    @property
    def summary(self) -> str:
        """For people: how many rows, from where."""

    def batch(self, step: int) -> Sequence[Rollout]:
        """Return the rows of step 1, 2, ... `steps`."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, as a share of the highest."""


class OpenWarmup(Protocol):
    """Reads the rows of a [warmup] (run_file.WarmupSection). `max_tokens` is the length of the longest row that is kept. May take
    minutes, and runs in a thread. Raises DataError that names file and row."""

    def __call__(self, section: Any, tokenizer: Any, *, max_tokens: int, seed: int) -> WarmupRows: ...


class PolicySession(Protocol):
    """The calls that one episode, or one of its agents, makes over HTTP to a policy."""

    url: str  # serves the OpenAI and Anthropic APIs to clients that have `key`; ends in /v1
    key: str
    # after `end`: of each call that is trained, in their order, its rollout and the position after its last token (0: it has none)
    turns: Sequence[tuple[int, int]]

    @property
    def failure(self) -> AtroposError | None:
        """The first error that the policy raised."""

    def end(self) -> Episode | None:
        """Refuse further calls. Return what was sampled as an episode with ids, logprobs and a score of 0, or None if nothing
        was sampled. May be called once."""


class PolicyServer(Protocol):
    """Lets programs on this machine sample from policies until `close`. For environments that bring their own client."""

    async def session(self, policy: Policy, *, seed: int, name: str) -> PolicySession:
        """Open a session. `name` is only for display: the task's."""

    async def close(self) -> None:
        """End pending calls. May be called twice."""


class ServePolicies(Protocol):
    """Starts a PolicyServer for policies of the model in this directory. Only this machine can reach it. `today` is the date
    given to its chat template (RunContext.today)."""

    async def __call__(self, model: Path, today: str = "") -> PolicyServer: ...
