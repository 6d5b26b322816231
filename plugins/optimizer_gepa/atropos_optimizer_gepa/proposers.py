"""Who writes the next prompt: `async (prompt, examples, rng) -> str`. An example is the task's text, the reply, and its reward."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from atropos_core.errors import RemoteError
from atropos_core.plugins.references import load_reference
from atropos_optimizer_gepa.config import GepaOptions

Example = tuple[str, str, float]
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
    """Raises ConfigError, PluginError for a reference that is none."""
    own = {"reflect": lambda *given: reflect(options, *given), "first_words": first_words}.get(options.proposer)
    return own or load_reference(options.proposer, "proposer")


async def first_words(prompt: str, examples: Sequence[Example], rng: random.Random) -> str:
    """For a policy that no model can instruct: the first word of a task that went well is added to the prompt, or the prompt made
    one of the two."""
    most = max(reward for *_, reward in examples)
    words = sorted({task.split()[0] for task, _, reward in examples if reward == most and task.split()})
    word = rng.choice(words) if words else ""
    return rng.choice([word, f"{prompt} {word}".strip()])


async def reflect(options: GepaOptions, prompt: str, examples: Sequence[Example], rng: random.Random) -> str:
    """What a model says that was shown them. Raises RemoteError."""
    import httpx

    text = ASKED.format(prompt=prompt, examples="\n\n".join(SHOWN.format(*one) for one in examples))
    key = os.environ.get(options.key_variable)
    body = {"model": options.model, "messages": [{"role": "user", "content": text}], "seed": rng.randrange(1 << 31)}
    url = f"{str(options.url).rstrip('/')}/chat/completions"
    try:
        async with httpx.AsyncClient(timeout=options.deadline_s) as client:
            answer = await client.post(url, json=body, headers={"Authorization": f"Bearer {key}"} if key else {})
        said: Any = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        found = re.findall(r"<instruction>(.*?)</instruction>", said, re.DOTALL)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise RemoteError(
            f"the model that reflects, at {url}, gave no answer: {type(error).__name__}: {error}",
            remedy="Look whether it runs and whether trainer.url is its own; then `atropos resume`.",
        ) from error
    return found[-1].strip() if found else prompt
