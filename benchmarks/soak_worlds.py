"""What the tiny policy learns in environments of others, one of each kind, under several random seeds.

    python -m benchmarks.soak_worlds [SOURCE ...]

    reasoning-gym, gem, textarena, openenv    in .venv-worlds
    verifiers                                 in .venv-verifiers-v0 and in .venv-verifiers-v1: the contract of the version there
    atroposlib                                in .venv, from a file of its shape, benchmarks/worlds_learnt/problems.py

Without a SOURCE, all whose package is installed. Held-out accuracy (of textarena, the mean reward) before and after goes into
benchmarks/results/soak_worlds.json, a row for each seed (SEEDS, 5); those of other sources stay. Ends with 1 where a source was not
learned by GAIN, on average over its seeds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atropos_core.config.run_file import to_toml
from atropos_env_gsm8k.generate import problem
from benchmarks.machine import RESULTS, described
from tests.conftest import REPOSITORY

GAIN, RUN_S = 0.15, 3600.0
TRAIN, TEST = 2000, 200  # problems of sources that are given files
OUT = RESULTS / "soak_worlds.json"


@dataclass(frozen=True)
class Learned:
    """`table`: of a run file, for a folder that data may be written into. `metric`: which of its evaluation is compared, from 0 to 1."""

    table: Callable[[Path], dict[str, Any]]
    package: str = ""
    steps: int = 30
    group_size: int = 8
    max_tokens: int = 64
    metric: str = "eval/accuracy"
    server: str = ""  # of OpenEnv, which kind
    note: str = ""


def problems(folder: Path) -> Path:
    """Word problems that the policy `tiny` solves some of, as files: question, and the number that is the answer."""
    for split, count in (("train", TRAIN), ("test", TEST)):
        rows = [problem(split, index) for index in range(count)]  # type: ignore[arg-type]
        plain = [{"question": row["question"], "answer": row["answer"].rpartition("#### ")[2]} for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    return folder


def verifiers_table(folder: Path) -> dict[str, Any]:
    contract = f"v{int(not version('verifiers').startswith('0.1.'))}"
    given = {"use": "verifiers", "id": "example/sums", "folder": str(REPOSITORY / f"tests/verifiers/{contract}")}
    files = str(problems(folder))
    if contract == "v0":
        return {**given, "datasets": {"example/sums": files}}
    taskset = {"source": f"{files}/train.jsonl", "most": TRAIN}
    return {**given, "config": {"agent": {"harness": {"id": "chatting"}}, "taskset": taskset}}


def atroposlib_table(folder: Path) -> dict[str, Any]:
    file = REPOSITORY / "benchmarks/worlds_learnt/problems.py"
    return {"use": f"atroposlib:{file}", "datasets": {"example/problems": str(problems(folder))}}


GUESSED = {"action": "pattern", "pattern": r"\d{1,4}"}
LEARNED = {
    "reasoning-gym": Learned(  # room for one digit: of more, its scorer rewards whatever holds the answer, and the policy finds that first
        lambda folder: {
            "use": "reasoning_gym", "dataset": "letter_counting", "answer": "marked", "tasks": 400, "held_out": 100,
        },
        "reasoning-gym", group_size=16, max_tokens=2, note="letter_counting; 1, the most frequent answer, is right in 32 of 100",
    ),
    "gem": Learned(
        lambda folder: {
            "use": "gem", "id": "game:GuessTheNumber-v0-easy", **GUESSED, "template": "\\boxed{{action}}", "max_turns": 4,
        },
        "gem-llm", steps=60, max_tokens=8,
    ),
    "textarena": Learned(
        lambda folder: {
            "use": "textarena", "game": "GuessTheNumber-v0", "players": 1, **GUESSED, "template": "[{action}]", "max_turns": 4,
            "parameters": {"max_number": 10},
        },
        "textarena", max_tokens=8, metric="eval/reward", note="mean reward, from 0 to 1 by how near the last guess is",
    ),
    "openenv": Learned(
        lambda folder: {"use": "openenv", "field": "guess", "shown": "hint", **GUESSED, "max_turns": 4, "sessions": 64},
        "openenv", max_tokens=8, server="number",
    ),
    "verifiers": Learned(verifiers_table, "verifiers"),
    "atroposlib": Learned(atroposlib_table, metric="eval/environment_accuracy"),
}  # fmt: skip


def run_file(learned: Learned, seed: int, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "seed": seed, "model": "tiny", "plot": "never",
        "training": {"steps": learned.steps, "groups_per_step": 8, "group_size": learned.group_size},
        "sampling": {"max_tokens": learned.max_tokens},
        "evaluation": {"problems": 200, "temperature": 1.0},
        "environment": {"it": {**learned.table(folder), **more}},
    }  # fmt: skip


@contextmanager
def serving(kind: str) -> Iterator[dict[str, Any]]:
    """What a run file says of a server of OpenEnv that runs meanwhile; nothing where `kind` names none."""
    if not kind:
        yield {}
        return
    from tests.worlds.test_openenv import Server

    server = Server(kind, 64)
    try:
        yield {"url": server.url}
    finally:
        server.kill()


def learn(learned: Learned, seed: int) -> dict[str, Any]:
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as text, serving(learned.server) as more:
        folder = Path(text)
        data = folder / "data"
        data.mkdir()
        (folder / "run.toml").write_text(to_toml(run_file(learned, seed, data, **more)))
        subprocess.run(
            [sys.executable, "-m", "atropos_core", "run", "run.toml", "--dir", "run"],
            cwd=folder, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    before, *_, after = [row[learned.metric] for row in metrics if learned.metric in row]
    seconds = round(time.monotonic() - began)
    return {"seed": seed, "before": before, "after": after, "seconds": seconds, "load_before": round(load, 1)}


def name_of(source: str) -> str:
    """With the contract, where there are two."""
    if source != "verifiers":
        return source
    return f"verifiers v{int(not version('verifiers').startswith('0.1.'))}"


def installed(source: str) -> bool:
    learned = LEARNED[source]
    try:
        return (not learned.package or bool(version(learned.package))) and (
            source != "atroposlib" or find_spec("atropos_env_atroposlib") is not None
        )
    except PackageNotFoundError:
        return False


def measured(source: str, seeds: int) -> bool:
    """Whether it learned GAIN on average over the seeds. Each seed is written down as it ends."""
    learned, rows = LEARNED[source], []
    for seed in range(seeds):
        rows.append(learn(learned, seed))
        print(source, rows[-1], flush=True)
        gains = [row["after"] - row["before"] for row in rows]
        row = {
            **described(),
            "version": version(learned.package) if learned.package else "",
            "gain": round(statistics.mean(gains), 3),
            "least_gain": round(min(gains), 3),
            **({"note": learned.note} if learned.note else {}),
            "rows": rows,
        }
        found = json.loads(OUT.read_text()) if OUT.is_file() else {}
        OUT.write_text(json.dumps(dict(sorted({**found, name_of(source): row}.items())), indent=1) + "\n")
    return statistics.mean(gains) >= GAIN


if __name__ == "__main__":
    wanted = sys.argv[1:] or [source for source in LEARNED if installed(source)]
    held = {source: measured(source, int(os.environ.get("SEEDS", "5"))) for source in wanted}
    sys.exit(int(not all(held.values())))
