"""Proposers write the next prompt: `async (prompt, examples, rng) -> str`. An example is the task's text, the reply, and its reward."""

from __future__ import annotations

import inspect
import os
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from atropos_chat_client.client import CallFailed, ChatClient
from atropos_chat_client.retries import repeat
from atropos_core import console
from atropos_core.errors import AccessRefused, AtroposError, ConfigError, PluginError, RemoteError
from atropos_core.guards.exits import file_and_line
from atropos_core.plugins.references import load_reference
from atropos_optimizer_gepa.config import GepaOptions

Example = tuple[str, str, float]
TRIES, PAUSE_S = 5, 1.0  # before the second try; doubled before each further one
Proposer = Callable[[str, Sequence[Example], random.Random], Awaitable[str]]

ASKED = """An assistant is given tasks, each with this instruction:

<instruction>
{prompt}
</instruction>

What it replied to some of them, and the reward that each reply was given:

{examples}

Say what the well rewarded replies do and the others do not, and what the tasks want. Then write a better instruction, which will stand \
in front of other tasks of this kind: put it between <instruction> and </instruction>."""
SHOWN = "<task>\n{0}\n</task>\n<reply>\n{1}\n</reply>\n<reward>{2:g}</reward>"


def proposer(options: GepaOptions) -> Proposer:
    """Return the proposer that the options name. Raises ConfigError or PluginError if the reference is not a proposer."""
    own = {"reflect": lambda *given: reflect(options, *given), "first_words": first_words}.get(options.proposer)
    if own is not None:
        return own
    theirs: Any = load_reference(options.proposer, "proposer")
    if not inspect.iscoroutinefunction(theirs):
        raise ConfigError(
            f"trainer.proposer = {options.proposer!r} is not a coroutine function.",
            remedy="Write it as `async def propose(prompt, examples, rng) -> str`.",
        )

    async def called(prompt: str, examples: Sequence[Example], rng: random.Random) -> str:
        try:
            made = await theirs(prompt, examples, rng)
        except AtroposError:
            raise
        except Exception as error:  # the plugin boundary
            where = file_and_line(error.__traceback__)
            raise PluginError(
                f"proposer {options.proposer!r} raised {type(error).__name__}: {error}{where}",
                remedy="Fix that line, then run `atropos resume`.",
            ) from error
        if not isinstance(made, str):
            raise PluginError(
                f"proposer {options.proposer!r} returned {made!r:.100}, which is not a str.",
                remedy="Return the next prompt as a str, then run `atropos resume`.",
            )
        return made

    return called


async def first_words(prompt: str, examples: Sequence[Example], rng: random.Random) -> str:
    """Add the first word of a best-rewarded task to the prompt, or replace the prompt by that word. For a policy that cannot follow
    instructions."""
    most = max(reward for *_, reward in examples)
    words = sorted({task.split()[0] for task, _, reward in examples if reward == most and task.split()})
    word = rng.choice(words) if words else ""
    return rng.choice([word, f"{prompt} {word}".strip()])


async def reflect(options: GepaOptions, prompt: str, examples: Sequence[Example], rng: random.Random) -> str:
    """Show a model the prompt and the examples, and return the prompt that it proposes, or `prompt` if its answer has no instruction.
    The request is repeated if the server is busy or briefly gone. Raises RemoteError, AccessRefused."""
    text = ASKED.format(prompt=prompt, examples="\n\n".join(SHOWN.format(*one) for one in examples))
    body = {"model": options.model, "messages": [{"role": "user", "content": text}], "seed": rng.randrange(1 << 31)}
    client = ChatClient(str(options.url), os.environ.get(options.key_variable, ""), timeout_s=options.deadline_s)
    name = f"the model that reflects, at {client.url},"
    try:
        answer = await repeat(lambda: client.post("/chat/completions", body), tries=TRIES, pause_s=PAUSE_S)
        said = client.reply_text(answer)
    except CallFailed as failed:
        raise _named(failed, name, options) from failed
    finally:
        await client.close()
    found = [one.strip() for one in re.findall(r"<instruction>(.*?)</instruction>", said, re.DOTALL) if one.strip()]
    if not found:
        console.warn(
            f"{name} wrote nothing between <instruction> and </instruction>, and the prompt stays as it is. "
            f"It said: {said[:200]!r}"
        )
    return found[-1] if found else prompt


def _named(failed: CallFailed, name: str, options: GepaOptions) -> AtroposError:
    """Return the error of a run for a call that failed."""
    if failed.status in (401, 403):
        return AccessRefused(
            f"{name} refused access with {failed}",
            remedy=f"Put its key into the variable {options.key_variable} (trainer.key_variable); then `atropos resume`.",
        )
    if failed.is_temporary:
        return RemoteError(
            f"{name} did not answer in {TRIES} tries; the last one: {failed}",
            remedy="Check that it is running and that trainer.url is right. Then run `atropos resume`.",
        )
    return RemoteError(
        f"{name} failed: {failed}",
        remedy="Check that trainer.url is the address of an OpenAI-compatible server, up to /v1, and that it serves trainer.model. "
        "Then run `atropos resume`.",
    )
