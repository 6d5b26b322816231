"""The run as the stand-ins see it: its tokenizer, and the policy through the supervisor. One of each in this process.

Every sample belongs to the group that is being collected. A context variable holds that group, and tasks that the environment
starts inherit it. A prompt that continues an earlier sample of the same group keeps that sample's ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from atropos_core.errors import ConfigError
from atropos_core.rollouts.dropped_messages import DroppedMessages
from atropos_core.types import Completion

ENDED = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Reply:
    """One sampled continuation, as the stand-ins return it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str  # without special tokens
    marked: str  # with them
    finish: str


@dataclass
class Collecting:
    """One group, or an evaluation, that is being collected."""

    number: int
    histories: list[tuple[str, list[int]]] = field(default_factory=list)  # text and ids of each prompt with its reply


@dataclass
class Link:
    tokenizer: Any
    sample: Callable[..., Awaitable[list[Completion]]]  # (number, prompt ids, n, settings)
    running: dict[int, Collecting] = field(default_factory=dict)
    messages: DroppedMessages = field(default_factory=lambda: DroppedMessages("the model's chat template"))

    def collecting(self) -> Collecting:
        """The group that is being collected. Raises ConfigError if there is none."""
        found = COLLECTING.get()
        if found is not None and found.number in self.running:
            return found
        if len(self.running) == 1:  # a thread or task that started earlier
            return next(iter(self.running.values()))
        raise ConfigError(
            "the environment sampled while no group was being collected, or from a task that belongs to none of several.",
            remedy="Sample inside collect_trajectories(), collect_trajectory() or evaluate().",
        )

    def ids(self, text: str, *, special: bool, history: tuple[str, list[int]] | None = None) -> list[int]:
        """The ids of a prompt. What was sampled of it earlier in this group is not encoded again."""
        found = history or self.history(text)
        if found is not None:
            return [*found[1], *self.tokenizer.encode(text[len(found[0]) :], add_special_tokens=False)]
        bos = self.tokenizer.bos_token
        special = special and not (bos and text.startswith(bos))
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def history(self, text: str) -> tuple[str, list[int]] | None:
        """The longest history that the text begins with."""
        known = [one for one in self.collecting().histories if text.startswith(one[0])]
        return max(known, key=lambda one: len(one[0]), default=None)

    async def replies(
        self, prompt: Sequence[int], text: str, n: int, settings: dict[str, Any], stops: Sequence[str] = ()
    ) -> list[Reply]:
        """`n` replies. Each is cut after the first token that completes one of `stops`."""
        group = self.collecting()
        ids = [int(token) for token in prompt]
        done = []
        for found in await self.sample(group.number, ids, n, settings, list(stops)):
            tokens = found.tokens.tolist()
            marked = self.tokenizer.decode(tokens, skip_special_tokens=False)
            shown = self.tokenizer.decode(tokens, skip_special_tokens=True)
            for stop in stops:
                shown = shown.split(stop)[0] if stop else shown
            ended = any(stop and stop in marked for stop in stops)
            done.append(
                Reply(ids, tokens, found.logprobs.tolist(), shown, marked, "stop" if ended else ENDED[found.finish])
            )
            group.histories.append((text + marked, [*ids, *tokens]))
        return done


COLLECTING: ContextVar[Collecting | None] = ContextVar("collecting", default=None)
_LINKS: list[Link] = []


def join(link: Link) -> None:
    _LINKS[:] = [link]


def link() -> Link:
    """This process's link. Raises ConfigError before the environment is opened."""
    if not _LINKS:
        raise ConfigError("the environment has no policy, because it was not started by a run.")
    return _LINKS[0]
