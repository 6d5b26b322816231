"""Several turns: a number is guessed, and the environment says which way it lies. Scored beside the others of its group."""

import os
import re

import datasets
import verifiers as vf


class Guessing(vf.MultiTurnEnv):
    rewards_steps = False

    async def setup_state(self, state):
        state["guesses"] = []

    async def env_response(self, messages, state, **kwargs):
        found = re.findall(r"\d+", messages[-1]["content"] or "")
        guess = int(found[-1][-1]) if found else -1
        state["guesses"].append(guess)
        if state["answer"] == "raise":
            raise OSError("the dice are gone")
        if state["answer"] == "fail":
            raise vf.ToolError("the dice are broken")
        target = int(state["answer"])
        if self.rewards_steps:
            state["trajectory"][-1]["reward"] = 1 - abs(guess - target) / 8
        if guess == target:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if guess < target else "lower"}]


def closeness(state) -> float:
    return max((1 - abs(guess - int(state["answer"])) / 10 for guess in state["guesses"]), default=0.0)


def rank(states) -> list[float]:
    """Of the group: whether nobody needed fewer turns."""
    fewest = min(len(state["trajectory"]) for state in states)
    return [float(len(state["trajectory"]) == fewest) for state in states]


def load_environment(turns: int = 3, answers: list | None = None, seeded: bool = True, steps: bool = False):
    rows = [
        {"question": f"What is {a} plus {b}?" + ("" if seeded else f" {os.getpid()}"), "answer": str((a + b) % 10)}
        for a in range(2, 8)
        for b in range(2, 9)
    ]
    for row, answer in zip(rows, answers or [], strict=False):
        row["answer"] = answer
    made = Guessing(
        dataset=datasets.Dataset.from_list(rows),
        max_turns=turns,
        rubric=vf.Rubric(funcs=[closeness, rank], weights=[1.0, 0.25]),
    )
    made.rewards_steps = steps
    return made
