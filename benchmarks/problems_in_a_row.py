"""Four word problems in one episode, for `python -m benchmarks.turn_learning`: their score as turn rewards, or only at the end."""

from __future__ import annotations

from collections.abc import Sequence

from atropos_core import Conversation, Environment, Episode, Score, Task
from atropos_core.builtin.numbers import last_number
from atropos_core.conversation import Policy
from atropos_core.types import Message, Split
from atropos_env_gsm8k.calculator import CALCULATE, CODES, TEST, problem, result_of

PROBLEMS = 4
REPLIES = 4  # to one problem at most


class AtTheEnd(Environment):
    """Scores the share of the problems that were answered right. Each problem has a separate token history."""

    places_turns = False

    def tasks(self, split: Split) -> Sequence[Task]:
        codes = CODES[:TEST] if split == "test" else CODES[TEST:]
        return [self._task(codes[at : at + PROBLEMS]) for at in range(0, len(codes) - PROBLEMS + 1, PROBLEMS)]

    def _task(self, codes: Sequence[int]) -> Task:
        first, _, answer = problem(codes[0])
        opening = ({"role": "user", "content": first},)
        return Task("-".join(map(str, codes)), opening, answer=f"#### {answer}", data={"codes": list(codes)})

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed, tools=[CALCULATE])
        earned: list[float] = []  # by each reply
        for code in task.data["codes"]:
            question, _, answer = problem(code)
            talk.start_over()
            reply, replies = await self._answered(talk, {"role": "user", "content": question})
            is_right = not reply.get("tool_calls") and last_number(reply["content"]) == last_number(answer)
            earned += [0.0] * (replies - 1) + [is_right / PROBLEMS]
        right = sum(earned)
        turns = earned if self.places_turns else None
        return talk.episode(Score(right, correct=right == 1, turns=turns, metrics={"problems/right": right}))

    async def _answered(self, talk: Conversation, question: Message) -> tuple[Message, int]:
        """Return the last reply to a problem, and the number of replies."""
        reply = await talk.reply(question)
        for replies in range(1, REPLIES):
            if not (calls := reply.get("tool_calls", [])):
                return reply, replies
            reply = await talk.reply(*({"role": "tool", "content": result_of(call)} for call in calls))
        return reply, REPLIES


class AtTheTurns(AtTheEnd):
    """The same score, with the part of each problem at the reply that answered it."""

    places_turns = True
