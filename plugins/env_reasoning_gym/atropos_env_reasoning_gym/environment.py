"""The environment `reasoning_gym`: questions of its data sets, one reply each, scored by their own scorers."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from atropos_core.console.waits import waiting
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded, RemoteError
from atropos_core.interfaces import Environment
from atropos_core.seeds import derive
from atropos_core.types import Message, Score, Split, Task
from atropos_env_kit.function_worker import Worker
from atropos_env_reasoning_gym.config import Form, ReasoningGymOptions

IMPORT_DEADLINE_S = 300.0  # to import reasoning-gym on a busy machine; it takes 3 s otherwise
SPARE = 4  # give up after this many questions per wanted task, if one split still has too few
RIGHT = 0.999  # a reply with at least this score is correct
SHAPES: dict[Form, str] = {"tag": "<answer>{}</answer>", "marked": "#### {}", "whole": "{}"}


class ReasoningGym(Environment):
    """Scores a reply from 0 to 1 as its question's data set does."""

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options
        self._tasks: dict[Split, list[Task]] = {}
        self._worker = Worker("atropos_env_reasoning_gym.generators:call", environment={"PYTHONHASHSEED": "0"})

    def source(self) -> str:
        return f"{', '.join(self._options.weights)} of reasoning-gym, generated locally"

    def tasks(self, split: Split) -> Sequence[Task]:
        if not self._tasks:
            raise DataError("reasoning_gym has no tasks before it is opened", remedy="Await open() first.")
        return self._tasks[split]

    async def open(self) -> None:
        if self._tasks:
            return
        options = self._options
        known = await self._worker.call("names", deadline_s=IMPORT_DEADLINE_S)
        for name in options.weights:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(known)}."
                raise ConfigError(f"reasoning-gym has no data set {name!r}.", remedy=hint)
        levels: list[int | None] = [*options.levels] or [None]
        parts = [(name, level) for name in options.weights for level in levels]
        weights = [options.weights[name] for name, _ in parts]
        train, test = parts_of(options.tasks, weights), parts_of(options.held_out, weights)
        made: dict[Split, list[Task]] = {"train": [], "test": []}
        for (name, level), *sizes in zip(parts, train, test, strict=True):
            with waiting(f"tasks of {name}"):
                for split, tasks in (await self._make(name, level, *sizes)).items():
                    made[split] += tasks
        for split, tasks in made.items():
            random.Random(derive(options.seed, split)).shuffle(tasks)
        self._tasks = made

    async def _make(self, name: str, level: int | None, train: int, test: int) -> dict[Split, list[Task]]:
        """Make `train` and `test` tasks. A hash of the question decides its split, so no question is in both."""
        size = SPARE * (train + test) + 64
        seed = derive(self._options.seed, name, "" if level is None else level) % 2**31
        parameters = self._options.parameters.get(name, {})
        source = json.dumps({"name": name, "parameters": parameters, "level": level, "seed": seed, "size": size})
        wanted: dict[Split, int] = {"train": train, "test": test}
        made: dict[Split, list[Task]] = {"train": [], "test": []}
        index = 0
        while any(len(made[split]) < wanted[split] for split in made):
            chunk = await self._chunk(name, source, index, size) if index < size else []
            if not chunk:
                raise DataError(
                    f"reasoning-gym's {name} has too few different questions: of {index} that were made, "
                    f"{len(made['train'])} are for training ({train} wanted) and {len(made['test'])} held out ({test} wanted).",
                    remedy=f"Ask for fewer tasks, or widen [environment.NAME.parameters.{name}].",
                )
            for question, answer in chunk:
                digest = int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "big")
                split: Split = "test" if digest % (train + test) < test else "train"
                if len(made[split]) < wanted[split]:
                    data = {"source": source, "index": index, "dataset": name, "level": level or 0}
                    made[split].append(self._task(question, answer, data))
                index += 1
        return made

    async def _chunk(self, name: str, source: str, first: int, size: int) -> Any:
        try:
            return await self._worker.call(
                "make", source, first, size - first, deadline_s=self._options.making_deadline_s
            )
        except RemoteError as error:
            said = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"reasoning-gym cannot make tasks of {name} with these options: {said}",
                remedy=f"Check [environment.NAME.parameters.{name}] and levels.",
            ) from error
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"a task of reasoning-gym's {name} took more than {self._options.making_deadline_s:g} s to make",
                remedy="Make them easier, or raise making_deadline_s.",
            ) from error

    def _task(self, question: str, answer: str | None, data: dict[str, Any]) -> Task:
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        level = f"/{data['level']}" if self._options.levels else ""
        oracle = SHAPES[self._options.answer].format(answer) if answer else None
        name = f"{data['dataset']}{level}/{data['index']}"
        return Task(name, (*system, {"role": "user", "content": question}), oracle, data)

    async def score(self, task: Task, reply: Message) -> Score:
        answer = answer_of(str(reply.get("content") or ""), self._options.answer)
        late, raised = False, ""
        try:
            value, raised = await self._worker.call(
                "score", task.data["source"], task.data["index"], answer, deadline_s=self._options.scoring_deadline_s
            )
        except DeadlineExceeded:
            value, late = 0.0, True
        metrics = {"reasoning_gym/late": float(late), "reasoning_gym/unreadable": float(bool(raised))}
        return Score(value, correct=value >= RIGHT, metrics=metrics)

    async def close(self) -> None:
        await self._worker.close()


def answer_of(text: str, form: Form) -> str | None:
    """The answer in a reply; None if it has none."""
    if form == "whole":
        return text.strip() or None
    if form == "marked":
        _, mark, after = text.rpartition("####")
        lines = after.strip().splitlines()
        return lines[0].strip() if mark and lines else None
    before, end, _ = text.rpartition("</answer>")
    _, begin, inside = before.rpartition("<answer>")
    return inside.strip() if begin and end else None


def parts_of(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` into parts by weight; each part is at least one."""
    shares = [total * weight / sum(weights) for weight in weights]
    ends = [round(sum(shares[: at + 1])) for at in range(len(shares))]
    return [max(1, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
