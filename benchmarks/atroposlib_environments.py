"""atroposlib's own environment files, unmodified, each in its process: which import, open, and give a group for a scripted model.

    ATROPOSLIB_SOURCE=path/of/a/checkout python -m benchmarks.atroposlib_environments [--only WORD] [--jobs 2] [--train]

Files run in a copy of the checkout. No data set is fetched: every name of the hub is one small table with the columns that such
tables usually have and those that the file names, and proxies lead nowhere. `opens`: imported, made, and set up. `group`: one of the
first items, as many as `tries` says, gave a group, of so many sequences, for a model that answers in two usual ways, one of them right.
`ids`: how many of them were found again by ids or text, so that what would be trained has the ids and logprobs that were sampled.
`--train` trains the policy `tiny` for five steps on each that gave a group. Writes benchmarks/results/atroposlib_environments.json
and a table beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Policy
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import checked
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Episode, Message, Sampling, Tokens
from atropos_env_atroposlib.environment import AtroposlibEnvironment
from atropos_env_atroposlib.options import AtroposlibOptions
from benchmarks.machine import RESULTS, described

BASES = r"^class \w+\([^)]*\b(BaseEnv|TeacherDistillationEnv|AtroposBaseEnv|BaseLanguageEnv)\b"
GROUP, TRIES, DEADLINE_S = 8, 6, 90.0
REPLIES = (  # of a model that answers in the ways in which such files look for answers: right, then wrong
    "<think>two and two</think> <answer>4</answer> \\boxed{4} The answer is A. #### 4",
    "<think>who knows what this may be</think> <answer>7</answer> \\boxed{7} The answer is B. #### 7",
)
ROW = {
    **dict.fromkeys(
        ("question", "problem", "prompt", "instruction", "query", "input", "text", "content"), "What is 2 + 2?"
    ),
    **dict.fromkeys(("solution", "output", "response", "completion", "chosen"), "It is \\boxed{4}. #### 4"),
    "answer": "2 + 2 is 4. #### 4",
    "final_answer": "4",
    "ground_truth": "4",
    "choices": ["4", "7", "8", "9"],
    "options": ["4", "7", "8", "9"],
    "messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}],
    "conversations": [{"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}],
    "subject": "maths",
    "id": "0",
}
SPLITS = ("train", "test", "validation", "dev", "eval")


class Scripted(Policy):
    """Answers in turn."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.sampling = Sampling(max_tokens=64)
        self._tokenizer = tokenizer
        self._calls = 0

    async def render(self, messages: Sequence[Message], **more: Any) -> Tokens:
        return self._tokenizer.render(messages)

    async def parse(self, tokens: Tokens) -> Message:
        return self._tokenizer.parse(tokens)

    async def sample(self, prompt: Tokens, *, n: int = 1, seed: int, **more: Any) -> list[Completion]:
        self._calls += n
        texts = [REPLIES[(self._calls + at) % len(REPLIES)] for at in range(n)]
        rows = [self._tokenizer.encode(text + self._tokenizer.eos) for text in texts]
        return [
            Completion(ids, np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32), "stop", 1.0)
            for ids in rows
        ]


def environment_files(source: Path) -> list[Path]:
    files = sorted((source / "environments").rglob("*.py"))
    return [file for file in files if re.search(BASES, file.read_text(errors="replace"), re.MULTILINE)]


def datasets(folder: Path, file: Path) -> dict[str, str]:
    """With every column that the file names somewhere."""
    folder.mkdir()
    named = re.findall(r"""(?:\[|get\()["'](\w+)["']""", file.read_text(errors="replace"))
    row = {**dict.fromkeys(named, "4"), **ROW}
    for split in SPLITS:
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({**row, "id": str(at)}) + "\n" for at in range(16)))
    return {"*": str(folder)}


async def looked_at(file: Path, source: Path, model: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"file": str(file.relative_to(source / "environments")), "opens": False, "group": 0, "ids": 0}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        data = datasets(Path(folder) / "data", file)
        options = AtroposlibOptions(file=str(file), datasets=data, tries=TRIES, open_deadline_s=DEADLINE_S)
        environment = AtroposlibEnvironment(options, RunContext(Path(folder), model, label="environment.it"))
        try:
            await environment.open()
            row["opens"] = True
            task = environment.tasks("train")[0]
            policy = Scripted(ChatTokenizer(model))
            given = await within(
                environment.rollout_group(task, policy, GROUP, seeds=range(GROUP)), DEADLINE_S, "rollout_group()"
            )
            episodes = [
                checked(one) for one in given if isinstance(one, Episode)
            ]  # raises for what must not be trained
            row["group"] = len(episodes)
            row["ids"] = sum(one.rollouts[0].logprobs is not None for one in episodes if isinstance(one, Episode))
            row["scores"] = sorted({round(one.score, 3) for one in episodes if isinstance(one, Episode)})[:4]
        except Exception as error:  # noqa: BLE001 - what became of it is the result
            row["why"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".replace(
                str(source), ""
            )[:200]
        finally:
            await environment.close()
        row["seconds"] = round(time.monotonic() - began, 1)
    print(row, flush=True)
    return row


def trained(row: dict[str, Any], source: Path) -> dict[str, Any]:
    """Five steps of `tiny`: whether they ended, with the largest alignment of them."""
    with tempfile.TemporaryDirectory() as folder:
        name = "it"
        data = datasets(Path(folder) / "data", source / "environments" / row["file"])
        run_file = Path(folder) / "run.toml"
        run_file.write_text(
            f'model = "tiny"\n[environment.{name}]\nuse = "atroposlib:{source / "environments" / row["file"]}"\n'
            f"datasets = {{ {', '.join(f'{json.dumps(key)} = {json.dumps(value)}' for key, value in data.items())} }}\n"
            "tries = 32\nevaluates = false\n[training]\nsteps = 5\ngroups_per_step = 2\ngroup_size = 4\nmin_group = 1\n"
            "[evaluation]\nproblems = 0\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "atropos_core.cli.main", "run", str(run_file), "--dir", f"{folder}/run"],
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        path = Path(folder) / "run" / "metrics.jsonl"
        steps = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        keys = [key for key in (steps[-1] if steps else {}) if "alignment" in key]
        made = {"steps": len([s for s in steps if s.get("step", 0) > 0]), "alignment": {k: steps[-1][k] for k in keys}}
        return made | ({} if done.returncode == 0 else {"why": done.stdout[-300:] + done.stderr[-300:]})


async def swept(source: Path, only: str, jobs: int) -> list[dict[str, Any]]:
    model = load_plugins().resolve_model("tiny").directory
    gate = asyncio.Semaphore(jobs)

    async def one(file: Path) -> dict[str, Any]:
        async with gate:
            return await looked_at(file, source, model)

    return await asyncio.gather(*(one(file) for file in environment_files(source) if only in str(file)))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| file | opens | group | ids | why not |", "|---|---|---|---|---|"]
    for row in rows:
        why = str(row.get("why", "")).replace("|", "\\|")
        lines.append(
            f"| {row['file']} | {'yes' if row['opens'] else ''} | {row['group'] or ''} | {row['ids'] or ''} | {why} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--train", action="store_true")
    given = parser.parse_args()
    if not (source := os.environ.get("ATROPOSLIB_SOURCE")):
        raise DataError("ATROPOSLIB_SOURCE names no checkout of atroposlib: there are no files to look at.")
    os.environ |= {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "atropos"
        shutil.copytree(Path(source) / "environments", copy / "environments")
        os.chdir(copy)  # files are read from there, by their names from the root
        rows = asyncio.run(swept(copy, given.only, given.jobs))
        if given.train:
            for row in rows:
                if row["group"]:
                    row["trained"] = trained(row, copy)
                    print(row["file"], row["trained"], flush=True)
    counts = {
        "files": len(rows),
        "open": sum(row["opens"] for row in rows),
        "give a group": sum(row["group"] > 0 for row in rows),
        "all of it found again": sum(0 < row["group"] == row["ids"] for row in rows),
        "trained five steps": sum(row.get("trained", {}).get("steps", 0) >= 5 for row in rows),
    }
    print(counts)
    if not given.only:
        (RESULTS / "atroposlib_environments.json").write_text(
            json.dumps({"machine": described(), "counts": counts, "rows": rows}, indent=1) + "\n"
        )
        (RESULTS / "atroposlib_environments.md").write_text(table(rows))


if __name__ == "__main__":
    main()
