"""One turn: a sum from a file, scored by two weighted functions; and a metric that scores nothing."""

import json
import re
from pathlib import Path

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumsConfig(vf.TasksetConfig):
    source: str
    most: int = 1000


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, task, trace) -> float:
        return float(self.said(trace) == task.answer)

    @vf.reward(weight=0.5)
    async def near(self, task, trace) -> float:
        said = self.said(trace)
        return 0.0 if said is None else 1 / (1 + abs(said - task.answer))

    @vf.metric
    async def characters(self, trace) -> float:
        return float(len(reply_of(trace)))

    def said(self, trace):
        found = re.findall(r"-?\d{1,12}", reply_of(trace))
        return int(found[-1]) if found else None


def reply_of(trace) -> str:
    said = [message.content or "" for message in trace.messages if message.role == "assistant"]
    return said[-1] if said else ""


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        lines = Path(self.config.source).read_text().splitlines()
        for row in map(json.loads, lines[: self.config.most]):
            yield SumTask(SumData(prompt=row["question"], answer=int(row["answer"])), self.config.task)


__all__ = ["Sums"]
