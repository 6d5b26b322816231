"""A conversation of two calls of a tool and an answer. It writes what it sampled into the file that SAMPLED names."""

import json
import os

from atropos_core.conversation import Conversation
from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def called(a, b):
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


SHOWN = (
    {"role": "system", "content": "Call the tool add for every sum."},
    *(
        {"role": role, "content": text}
        for a, b in ((12, 30), (5, 41))
        for role, text in (("user", f"{a} + {b}"), ("assistant", called(a, b)))
    ),
)


def keep(row):
    with open(os.environ["SAMPLED"], "a") as file:
        file.write(json.dumps(row) + "\n")


class Watched:
    """A policy that keeps what it samples."""

    def __init__(self, policy):
        self.policy, self.sampling, self.kept = policy, policy.sampling, []

    async def render(self, messages, **options):
        return await self.policy.render(messages, **options)

    async def parse(self, tokens, **options):
        return await self.policy.parse(tokens, **options)

    async def sample(self, prompt, **options):
        made = await self.policy.sample(prompt, **options)
        self.kept += [[prompt.tolist(), one.tokens.tolist(), one.logprobs.tolist()] for one in made]
        return made


class Adding(Environment):
    """Scores by the tool's results and the length of the answer, so that replies differ."""

    def tasks(self, split):
        return [Task(f"{split}-{n}", (*SHOWN, {"role": "user", "content": f"14 + {n}"})) for n in range(3, 7)]

    async def rollout(self, task, policy, *, seed):
        watched = Watched(policy)
        talk = Conversation(watched, seed=seed, tools=[ADD])
        reply = await talk.reply(*task.messages)
        results = []
        for question in ("20 + 7", "Is that even?"):
            new = [{"role": "user", "content": question}]
            for call in reply.get("tool_calls", ()):
                results.append(sum(n for n in call["function"]["arguments"].values() if isinstance(n, int)))
                new.insert(0, {"role": "tool", "content": str(results[-1])})
            reply = await talk.reply(*new)
        keep({"said": list(task.messages), "heard": list(talk.messages), "sampled": watched.kept})
        score = sum(results) / 100 + sum(len(tokens) + sum(logprobs) for _, tokens, logprobs in watched.kept) / 1000
        return talk.episode(Score(score, metrics={"tools/calls": float(len(results))}))
