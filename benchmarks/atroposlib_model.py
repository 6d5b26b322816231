"""What the sweep over atroposlib's files samples from: replies by script, or the tiny policy, half of whose replies are by script.

Most files score what a small policy says alike, and leave such groups out. A scripted reply stands in for the good fortune of a
policy that is able: it is written for the file (`benchmarks.atroposlib_cases`), and its logprobs are what the policy gives its tokens,
so that what is trained is what was sampled, at the policy's own logprobs.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from atropos_core.conversation import Policy
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Floats, Message, Sampling, Tokens
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.engine import HFEngine
from atropos_engine_hf.scoring import score
from benchmarks.atroposlib_cases import case_of

POSITIONS = 16384  # tiny has 1,024, which some files' instructions alone are longer than; its positions are rotary
TEMPLATE = (  # tiny's own leaves out what system and tools say, which replies here depend on
    "{%- for message in messages -%}{%- if message.role == 'assistant' -%}<|assistant|>{{ message.content }}<|end|>"
    "{%- else -%}<|user|>{{ message.content }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def long_model(tiny: Path, folder: Path) -> Path:
    """A copy of tiny that reads longer prompts, and every role."""
    shutil.copytree(tiny, folder)
    for name, changes in (
        ("config.json", {"max_position_embeddings": POSITIONS}),
        ("tokenizer_config.json", {"model_max_length": POSITIONS, "chat_template": TEMPLATE}),
    ):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


class Script:
    """Replies to a file's prompts. Of several to one prompt, some are right."""

    def __init__(self, file: str, tokenizer: ChatTokenizer) -> None:
        self._case = case_of(file)
        self._tokenizer = tokenizer
        self._random = random.Random(0)
        self._calls = 0

    def of(self, prompt: Tokens, n: int) -> list[Tokens]:
        text = self._tokenizer.decode(prompt, keep_special=True)
        first = self._random.random() < 0.5
        said = [self._case.reply(text, (at % 2 == 0) == first, self._calls + at) for at in range(n)]
        self._calls += n
        return [np.asarray(self._tokenizer.encode(one + self._tokenizer.eos), np.int32) for one in said]


class Scripted(Policy):
    """Says what the script says."""

    def __init__(self, file: str, tokenizer: ChatTokenizer) -> None:
        self.sampling = Sampling(max_tokens=4096)
        self._tokenizer = tokenizer
        self._script = Script(file, tokenizer)

    async def render(self, messages: Sequence[Message], **more: Any) -> Tokens:
        return self._tokenizer.render(messages)

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        return self._tokenizer.parse(tokens, prompt)

    async def sample(self, prompt: Tokens, *, n: int = 1, seed: int, **more: Any) -> list[Completion]:
        return [
            Completion(ids, np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32), "stop", 1.0)
            for ids in self._script.of(prompt, n)
        ]


class HalfScriptedEngine(HFEngine):
    """The engine of a run: of every two replies to a prompt, one is the script's, the other the policy's own."""

    transports = frozenset({"posix_shm"})
    runs_in = "process"

    class Options(HFOptions):
        file: str = Field(description="the environment's file, from environments/ on")
        sampled: str = Field(
            description="a file into which the ids of every reply are written, a line of JSON for each"
        )

    def __init__(self, options: Options, context: RunContext) -> None:
        super().__init__(options, context)
        self._script = Script(options.file, ChatTokenizer(context.model))
        self._sampled = Path(options.sampled)
        self._turn = 0

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self._turn += n
        scripted = [(self._turn + at) % 2 == 0 for at in range(n)]
        texts = [ids for ids, by_script in zip(self._script.of(prompt, n), scripted, strict=True) if by_script]
        own = [seed for seed, by_script in zip(seeds, scripted, strict=False) if not by_script]
        sampled = iter(await super().sample(prompt, len(own), sampling, own, deadline_s))
        written = iter(await self._read(prompt, texts, sampling.temperature))
        made = [next(written if by_script else sampled) for by_script in scripted]
        with self._sampled.open("a") as file:
            file.writelines(f"{json.dumps(one.tokens.tolist())}\n" for one in made)
        return made

    async def _read(self, prompt: Tokens, texts: Sequence[Tokens], temperature: float) -> list[Completion]:
        """With the logprobs that the policy gives them at this temperature, all under one version."""
        versions: list[int] = []

        def scored(some: Sequence[Tokens]) -> list[Floats]:
            versions.append(self.version)
            return score(self.model, some, temperature)

        rows = await self._scored([np.concatenate([prompt, ids]) for ids in texts], scored) if texts else []
        return [
            Completion(ids, row[len(prompt) :], np.full(len(ids), versions[0], np.int32), "stop", temperature or 1.0)
            for ids, row in zip(texts, rows, strict=True)
        ]
