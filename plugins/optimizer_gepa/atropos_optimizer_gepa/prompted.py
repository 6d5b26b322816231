"""The environment that uses a prompt, and the bridge that publishes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from atropos_core.builtin.local import LocalBridge
from atropos_core.conversation import Policy
from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import Endpoint, Engine, Environment
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Episode, Failed, Message, Score, Split, Task
from atropos_optimizer_gepa.config import PromptedOptions

# That an environment may have (interfaces.py).
OPTIONAL = ("state", "load", "take_snapshot", "snapshot", "metrics", "own_findings")

PROMPT_FILE = "prompt.txt"  # in a policy's directory, next to the model that it is for
published: dict[Path, str] = {}  # by run directory: what its trainer has published


class Posed(NamedTuple):
    """A task without a prompt."""

    name: str
    text: str


posed: dict[Path, dict[bytes, Posed]] = {}  # by run directory: of which task a sequence of tokens is


class Prompted(Environment):
    """Poses another environment's tasks with the published prompt, or with the one in the model's directory."""

    def __init__(self, options: PromptedOptions, inside: Environment, context: RunContext) -> None:
        self._options = options
        self._inside = inside
        self._directory = context.directory
        self._label = context.label.rpartition(".")[2] or "prompted"
        saved = context.model / PROMPT_FILE
        try:
            published[context.directory] = saved.read_text(encoding="utf-8") if saved.exists() else options.prompt
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the prompt in {saved} cannot be read: {error}") from error
        self.at_once, self.repeats, self.waits_for = inside.at_once, inside.repeats, inside.waits_for

    @property
    def prompt(self) -> str:
        return published[self._directory]

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._inside.tasks(split)

    async def score(self, task: Task, reply: Message) -> float | Score:
        return await self._inside.score(task, reply)

    def source(self) -> str:
        return self._inside.source()

    async def open(self) -> None:
        await self._inside.open()

    async def close(self) -> None:
        await self._inside.close()

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await self._inside.rollout(self.posed(task), policy, seed=seed)
        self._remember(task, episode)
        return episode

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        made = await self._inside.rollout_group(self.posed(task), policy, n, seeds=seeds)
        for one in made:
            if isinstance(one, Episode):
                self._remember(task, one)
        return made

    def _remember(self, task: Task, episode: Episode) -> None:
        """Remember the task for the trainer, which gets only tokens."""
        text = "\n\n".join(str(message.get("content") or "") for message in task.messages)
        for rollout in episode.rollouts:
            posed.setdefault(self._directory, {})[rollout.tokens.tobytes()] = Posed(f"{self._label} {task.id}", text)

    def posed(self, task: Task) -> Task:
        if not (prompt := self.prompt):
            return task
        if self._options.place == "system":
            return replace(task, messages=({"role": "system", "content": prompt}, *task.messages))
        at = next((i for i, one in enumerate(task.messages) if one["role"] == "user"), None)
        if at is None or not isinstance(said := task.messages[at].get("content"), str):
            raise DataError(f"task {task.id!r} has no message of the user with text to put a prompt in front of.")
        changed: Message = {**task.messages[at], "content": f"{prompt}{self._options.separator}{said}"}
        return replace(task, messages=(*task.messages[:at], changed, *task.messages[at + 1 :]))


def prompted(options: PromptedOptions, inside: Environment, context: RunContext) -> Prompted:
    """Wrap an environment, and pass on what else it has that a run or a check looks for: state, metrics, its own findings."""
    passed_on = {name: _forward(name) for name in OPTIONAL if hasattr(inside, name)}
    made: Prompted = type("Prompted", (Prompted,), passed_on)(options, inside, context)
    return made


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *given: getattr(self._inside, name)(*given)


class PromptBridge(LocalBridge):
    """Pauses the engines while the trainer publishes, so that what they sample has one prompt and its version. It moves no weights."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        if self._directory not in published:
            raise ConfigError(
                "bridge 'prompt' publishes a prompt, and no environment of this process has one.",
                remedy="--env prompted:NAME, as prompted:gsm8k, run by the trainer's own process.",
            )
        self._engines = engines
