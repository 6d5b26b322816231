"""atroposlib's own environment files, unmodified, each in its process: which import, open, give a group, evaluate, and train.

    ATROPOSLIB_SOURCE=path/of/a/checkout python -m benchmarks.atroposlib_environments [--only WORD,...] [--jobs 2] [--train [N]]

Files run in a copy of the checkout. No data set is fetched: every name of the hub is a table of `benchmarks.atroposlib_cases`, which says
of each file what it is given. Nothing can be reached but this machine: the sweep starts itself again within bubblewrap, in a network
that has nothing else; where that cannot be had, proxies lead nowhere, and the record says so.

    imports, opens    imported and configured; made and set up
    group, ids        how many sequences one of its first items gave, and how many of these were found again by ids or text, so that what
                      would be trained has the ids and logprobs that were sampled; `scores`: of the group
    evaluates         how many replies its own evaluate() sampled; tried of those in eval_environments, most of which do nothing else
    trained           with `--train`: five steps of the tiny policy, half of whose replies are by script (`benchmarks.atroposlib_model`)
    why               what became of it otherwise

`intern_bootcamp_env.py` imports a package that has no release: for its row, a checkout of InternLM/InternBootcamp is on PYTHONPATH.

Writes benchmarks/results/atroposlib_environments.json, of which `python -m tools.make_catalogue` makes a part of docs/catalogue.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from atropos_agent_api.sandboxes.bubblewrap import find_bwrap
from atropos_core.errors import AtroposError, DataError, FitError
from atropos_core.guards.deadlines import within
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import checked_episode
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Episode
from atropos_env_atroposlib.environment import AtroposlibEnvironment
from atropos_env_atroposlib.options import AtroposlibOptions
from atropos_records.rollout_records import RolloutRecords
from benchmarks.atroposlib_cases import ROW, case_of
from benchmarks.atroposlib_model import Scripted, long_model
from benchmarks.machine import RESULTS, described
from tests.warm.requests import install_with_template, start_template

BASES = r"^class \w+\([^)]*\b(BaseEnv|TeacherDistillationEnv|AtroposBaseEnv|BaseLanguageEnv)\b"
GROUP, TRIES, DEADLINE_S, TRAINING_S = 8, 6, 60.0, 300.0
USUAL = "datasets openai wandb math_verify bs4"  # what most files import beside atroposlib
SPLITS = ("train", "test", "validation", "dev", "eval")
EVALUATIONS = "eval_environments/"
WITHIN, ALONE = "ATROPOSLIB_SWEEP_WITHIN", ("--dev-bind", "/", "/", "--unshare-net", "--die-with-parent")
STEPS = 5
HERE = described()
NETWORK = "its own" if os.environ.get(WITHIN) else "proxies to nowhere"
KEYS = {  # of services that cannot be reached: files refuse to begin without one
    f"{name}_API_KEY": "none" for name in ("OPENAI", "ANTHROPIC", "NOUS", "GOOGLE", "GEMINI", "TAVILY", "OPENROUTER")
}


@dataclass(frozen=True)
class Given:
    """What every file of one sweep is run with."""

    source: Path  # a copy of the checkout
    model: Path


def environment_files(source: Path) -> list[Path]:
    files = sorted((source / "environments").rglob("*.py"))
    return [file for file in files if re.search(BASES, file.read_text(errors="replace"), re.MULTILINE)]


def name_of(file: Path, source: Path) -> str:
    return str(file.relative_to(source / "environments"))


def options_of(file: Path, source: Path, folder: Path) -> dict[str, Any]:
    """Of the environment `atroposlib`, with the rows that its case says and every column that the file names somewhere."""
    name = name_of(file, source)
    case = case_of(name)
    named = re.findall(r"""(?:\[|get\()["'](\w+)["']""", file.read_text(errors="replace"))
    row = {**dict.fromkeys(named, "4"), **ROW, **case.columns}
    count = 8 if name.startswith(EVALUATIONS) else 128
    folder.mkdir()
    for split in (*SPLITS, *case.splits):
        lines = [
            json.dumps({**row, **(case.other if at % 2 else {}), "id": str(at), "uid": str(at)}) + "\n"
            for at in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    usual = {"custom_thinking_prompt": "Think first.", "data_dir_to_save_evals": str(folder / "saved")}
    config = {**(usual if name.startswith(EVALUATIONS) else {}), **case.config}
    return {"datasets": {"*": str(folder)}, "config": config}


def prepare(source: Path) -> None:
    """The files that the cases put beside the checkout's."""
    for file in environment_files(source):
        for name, content in case_of(name_of(file, source)).files.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, list) and path.suffix == ".jsonl":
                content = "".join(json.dumps(one) + "\n" for one in content)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.write_text(content if isinstance(content, str) else json.dumps(content))


async def looked_at(file: Path, given: Given) -> dict[str, Any]:
    name = name_of(file, given.source)
    row: dict[str, Any] = {"file": name, "imports": False, "opens": False, "group": 0, "ids": 0}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = AtroposlibOptions(
            file=str(file),
            tries=TRIES,
            open_deadline_s=DEADLINE_S,
            **options_of(file, given.source, Path(folder) / "data"),
        )
        environment = AtroposlibEnvironment(options, RunContext(Path(folder), given.model, label="environment.it"))
        policy = Scripted(name, ChatTokenizer(given.model))
        try:
            await environment.open()
            row |= {"imports": True, "opens": True}
            if name.startswith(EVALUATIONS):
                row["evaluates"] = await evaluated(environment, policy)
            row |= await group_of(environment, policy)
        except Exception as error:  # noqa: BLE001 - what became of it is the result
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            row["imports"] |= not re.search(r" imports '|could not be imported|config_init\(\)", said)
            row["why"] = said.replace(str(given.source), "").replace(folder, "").replace(str(Path.home()), "~")[:300]
        finally:
            await environment.close()
            log = Path(folder) / "logs/environment-it.log"
            if os.environ.get("ATROPOSLIB_LOGS") and log.is_file():
                shutil.copy(log, Path(os.environ["ATROPOSLIB_LOGS"]) / f"{name.replace('/', '.')}.log")
    row["seconds"] = round(time.monotonic() - began, 1)
    print(row, flush=True)
    return row


async def group_of(environment: AtroposlibEnvironment, policy: Scripted) -> dict[str, Any]:
    task = environment.tasks("train")[0]
    rollouts = environment.rollout_group(task, policy, GROUP, seeds=range(GROUP))
    given = await within(rollouts, DEADLINE_S, "rollout_group()")
    episodes = [
        checked_episode(one) for one in given if isinstance(one, Episode)
    ]  # raises for what must not be trained
    made = [one for one in episodes if isinstance(one, Episode)]
    if not made:
        raise DataError(f"it gave no group: {given[0] if given else 'an empty one'!s:.300}")
    return {
        "group": len(made),
        "ids": sum(one.rollouts[0].logprobs is not None for one in made),
        "scores": sorted({round(one.score, 3) for one in made})[:4],
    }


async def evaluated(environment: AtroposlibEnvironment, policy: Scripted) -> int:
    """How many replies were sampled for it."""
    task = environment.tasks("test")[0]
    [one] = await within(environment.rollout_group(task, policy, 1, seeds=[0]), DEADLINE_S, "evaluate()")
    if not isinstance(one, Episode):
        raise DataError(f"evaluate() gave {one!r:.200}")
    checked_episode(one)  # raises for what a run would refuse
    return len(one.rollouts)


async def trained(name: str, given: Given) -> dict[str, Any]:
    """Five steps: whether they ended, the largest distance of a logprob from the trainer's own, and whether each id that was trained
    is one that was sampled."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = given.source / "environments" / name
        options = {
            "use": f"atroposlib:{file}",
            "tries": 16,
            "evaluates": False,
            **options_of(file, given.source, folder / "data"),
        }
        run = {
            "model": str(given.model),
            "plot": "never",
            "environment": {"it": options},
            "training": {"steps": STEPS, "groups_per_step": 2, "group_size": 4, "min_group": 1},
            "sampling": {"max_tokens": 24},
            "evaluation": {"problems": 0},
            "engine": {
                "use": "benchmarks.atroposlib_model:HalfScriptedEngine", "devices": ["cpu"], "file": name,
                "sampled": str(folder / "sampled.jsonl"),
            },
            "trainer": {"devices": ["cpu"]},
        }  # fmt: skip
        (folder / "run.toml").write_text(tomli_w.dumps(run))
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "atropos_core", "run", str(folder / "run.toml"), "--dir", str(folder / "run"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = await within(child.communicate(), TRAINING_S, "the run")
        except AtroposError as error:
            child.kill()
            await child.wait()
            return {"steps": 0, "why": str(error)}
        if child.returncode:
            lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
            return {"steps": 0, "why": " ".join(lines[-4:])[-300:].replace(str(given.source), "").replace(text, "")}
        return judged(folder / "run", folder / "sampled.jsonl")


def judged(run: Path, sampled: Path) -> dict[str, Any]:
    """By the run's own records, and by what the engine wrote down of each reply as it gave it."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    said = {tuple(json.loads(line)) for line in sampled.read_text().splitlines()}
    apart = [row[ALIGNMENT] for row in steps if row.get(ALIGNMENT) is not None]
    counted: Counter[str] = Counter()
    records = RolloutRecords(run)
    for step in map(records.step, records.steps()):
        for episode in step.episodes:
            for tokens in step.sequences(episode) if episode.outcome == "trained" else ():
                for begin, end in runs_of(np.asarray(tokens.trained)):
                    ids = tuple(int(one) for one in tokens.ids[begin:end])
                    counted["replies"] += 1
                    counted["other"] += not any(one[: len(ids)] == ids for one in said)
    return {
        "steps": sum(row["step"] > 0 for row in steps),
        "replies": counted["replies"],
        "other_ids": counted["other"],
        "alignment": max(apart, default=None),
    }


ALIGNMENT = "alignment/max_abs_logprob_diff"


def runs_of(flags: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def is_trained(row: dict[str, Any]) -> bool:
    """Five steps, alignment under 1e-4, and no id that was not sampled."""
    found = row.get("trained", {})
    return found.get("steps") == STEPS and found["replies"] > 0 and not found["other_ids"] and found["alignment"] < 1e-4


async def swept(given: Given, only: Sequence[str], jobs: int, train: int) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(jobs)
    left = train

    async def one(file: Path) -> dict[str, Any]:
        nonlocal left
        async with gate:
            row = await looked_at(file, given)
            write([row])
            if left and row["ids"]:
                left -= 1
                row["trained"] = await trained(row["file"], given)
                print(row["file"], row["trained"], flush=True)
                left += not is_trained(row)
                write([row])
            return row

    files = [file for file in environment_files(given.source) if any(word in str(file) for word in only)]
    return await asyncio.gather(*(one(file) for file in files))


def counts_of(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {
        "files": len(rows),
        "import": sum(row["imports"] for row in rows),
        "open": sum(row["opens"] for row in rows),
        "give a group": sum(row["group"] > 0 for row in rows),
        "all of it found again": sum(0 < row["group"] == row["ids"] for row in rows),
        "evaluate alone": sum(row.get("evaluates", 0) > 0 and not row["group"] for row in rows),
        "trained": sum(is_trained(row) for row in rows),
    }


def write(rows: Sequence[dict[str, Any]], path: Path = RESULTS / "atroposlib_environments.json") -> None:
    """In place of those that it had of the same files; what was trained stays where nothing was tried now."""
    had = {row["file"]: row for row in json.loads(path.read_text())["rows"]} if path.is_file() else {}
    made = {
        row["file"]: {**({"trained": old} if (old := had.get(row["file"], {}).get("trained")) else {}), **row}
        for row in rows
    }
    every = [row for _, row in sorted({**had, **made}.items())]
    path.write_text(
        json.dumps({**HERE, "network": NETWORK, "counts": counts_of(every), "rows": every}, indent=1) + "\n"
    )


def alone() -> None:
    """Start again in a network of its own. Nothing where this process is within it, or it cannot be had."""
    if os.environ.get(WITHIN):
        return
    try:
        program = find_bwrap()
    except FitError:
        return
    os.environ[WITHIN] = "yes"
    os.execv(program, [program, *ALONE, sys.executable, "-m", "benchmarks.atroposlib_environments", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, with commas between: files whose path has one of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--train",
        type=int,
        nargs="?",
        const=1000,
        default=0,
        help="how many of those that give a group that was sampled",
    )
    given = parser.parse_args()
    if not (source := os.environ.get("ATROPOSLIB_SOURCE")):
        raise DataError("ATROPOSLIB_SOURCE names no checkout of atroposlib: there are no files to look at.")
    alone()
    root = Path.cwd()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        **KEYS,
    }
    os.environ["PYTHONPATH"] = f"{root}:{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "atropos"
        shutil.copytree(Path(source) / "environments", copy / "environments")
        prepare(copy)
        tiny = load_plugins().resolve_model("tiny").directory
        os.environ |= {
            "WARM_ALSO": USUAL,
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }
        install_with_template()
        start_template()
        os.environ |= {"NLTK_DATA": str(copy / "nltk_data"), "WIKISQL_CACHE_DIR": str(copy / "wikisql")}
        os.chdir(copy)  # files are read from there, by their names from the root
        made = Given(copy, long_model(tiny, Path(folder) / "model"))
        for name in {name for file in environment_files(copy) for name in case_of(name_of(file, copy)).models}:
            shutil.copytree(made.model, copy / name)  # transformers takes a folder of that name for it
        rows = asyncio.run(swept(made, given.only.split(","), given.jobs, given.train))
        os.chdir(root)
    counts = counts_of(rows)
    print(counts)


if __name__ == "__main__":
    main()
