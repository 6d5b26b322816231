"""Proposers write the next prompt: `async (prompt, examples, rng) -> str`. An example is the task's text, the reply, and its reward."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from atropos_core import console
from atropos_core.errors import AccessRefused, AtroposError, ConfigError, PluginError, RemoteError
from atropos_core.guards.exits import file_and_line
from atropos_core.plugins.references import load_reference
from atropos_optimizer_gepa.config import GepaOptions

Example = tuple[str, str, float]
TRIES, PAUSE_S = 5, 1.0  # doubled after each
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
    key = os.environ.get(options.key_variable)
    body = {"model": options.model, "messages": [{"role": "user", "content": text}], "seed": rng.randrange(1 << 31)}
    url = f"{str(options.url).rstrip('/')}/chat/completions"
    answer = await _posted(options, url, body, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        said = str(answer.json()["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError) as error:
        raise RemoteError(
            f"the model that reflects, at {url}, answered without choices[0].message.content: {answer.text[:300]!r}",
            remedy="trainer.url must be that of an OpenAI-compatible server, up to /v1; then `atropos resume`.",
        ) from error
    found = [one.strip() for one in re.findall(r"<instruction>(.*?)</instruction>", said, re.DOTALL) if one.strip()]
    if not found:
        console.warn(
            f"the model that reflects, at {url}, wrote nothing between <instruction> and </instruction>, and the prompt stays as it is. "
            f"It said: {said[:200]!r}"
        )
    return found[-1] if found else prompt


async def _posted(options: GepaOptions, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
    import httpx

    cause = ""
    async with httpx.AsyncClient(timeout=options.deadline_s) as client:
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                answer = await client.post(url, json=body, headers=headers)
            except httpx.HTTPError as error:
                cause = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in (401, 403):
                raise AccessRefused(
                    f"the model that reflects, at {url}, refused access with status {answer.status_code}: {answer.text[:300]}",
                    remedy=f"Put its key into the variable {options.key_variable} (trainer.key_variable); then `atropos resume`.",
                )
            if answer.status_code == 429 or answer.status_code >= 500:
                cause = f"status {answer.status_code}: {answer.text[:300]}"
                continue
            if answer.is_error:
                raise RemoteError(
                    f"the model that reflects, at {url}, answered {answer.status_code}: {answer.text[:300]}",
                    remedy="Look whether trainer.url and trainer.model are its own; then `atropos resume`.",
                )
            return answer
    raise RemoteError(
        f"the model that reflects, at {url}, did not answer in {TRIES} tries; the last one: {cause}",
        remedy="Check that it is running and that trainer.url is right. Then run `atropos resume`.",
    )
