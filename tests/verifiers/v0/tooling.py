"""Tools: verifiers' own ToolEnv, its functions called by the policy; a judge of another model scores as well, where one is named."""

import re

import datasets
import verifiers as vf
from openai import AsyncOpenAI


def calculate(expression: str) -> str:
    """One operation on two numbers.

    Args:
        expression: two numbers and what is between them
    """
    a, sign, b = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression).groups()
    return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign])


def right(completion, answer) -> float:
    found = re.findall(r"-?\d+", str(completion[-1]["content"]))
    return float(bool(found) and found[-1] == answer)


def used(completion) -> float:
    return float(any(message["role"] == "tool" for message in completion))


def load_environment(judge: str = ""):
    rows = [
        {"question": f"Ann has {a} coins and finds {b} more. How many coins is that?", "answer": str(a + b)}
        for a in range(100, 112)
        for b in range(20, 27)
    ]
    rubric = vf.Rubric(funcs=[right, used], weights=[1.0, 0.3])
    if judge:
        client = AsyncOpenAI(base_url=judge, api_key="none")
        judged = vf.JudgeRubric(judge_client=client, judge_model="judge")

        async def liked(prompt, completion, answer, state) -> float:
            return float("yes" in await judged.judge(prompt, completion, answer, state))

        judged.add_reward_func(liked, weight=0.1)
        rubric = vf.RubricGroup([rubric, judged])
    return vf.ToolEnv(dataset=datasets.Dataset.from_list(rows), tools=[calculate], max_turns=3, rubric=rubric)
