"""One turn: a sum from a file, scored by two weighted functions; and a metric that scores nothing."""

import re

import datasets
import verifiers as vf


def last_number(text: str) -> int | None:
    found = re.findall(r"-?\d{1,12}", text)
    return int(found[-1]) if found else None


def correct(completion, answer) -> float:
    return float(last_number(completion[-1]["content"] or "") == int(answer))


def near(parser, completion, answer) -> float:
    """From 0 to 1, so that the replies of a group differ."""
    said = last_number(parser.parse_answer(completion) or "")
    return 0.0 if said is None else 1 / (1 + abs(said - int(answer)))


def characters(completion) -> float:
    return float(len(completion[-1]["content"] or ""))


def raises(completion) -> float:
    raise OSError("this metric is broken")


def load_environment(source: str = "example/sums", near_weight: float = 0.5, evaluates: bool = True, system: str = ""):
    split = datasets.load_dataset(source)
    rubric = vf.Rubric(funcs=[correct, near, characters, raises], weights=[1.0, near_weight, 0.0, 0.0])
    return vf.SingleTurnEnv(
        dataset=split["train"],
        eval_dataset=split["test"] if evaluates else None,
        system_prompt=system or None,
        rubric=rubric,
    )
