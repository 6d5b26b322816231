"""Which environments of other worlds import, run and train here: python -m benchmarks.worlds [SOURCE ...]

Writes the rows of a source into benchmarks/results/worlds.json, from which `python -m tools.make_catalogue` makes docs/catalogue.md:

    name              the environment, as the source calls it
    imports, runs     whether it could be made; whether a task of it was run and its own answer scored as right, or, where it is
                      stepped, whether an episode began and took a step
    trains            whether groups of it were trained within five steps of the tiny policy; null: not tried
    note              why not, or what is to be known

Rows of a source replace those that it had; those of other sources stay. What is learnt in more than five steps: `benchmarks.soak_worlds`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atropos_core.errors import AtroposError
from atropos_env_kit.function_worker import Worker
from benchmarks.machine import RESULTS, described

MAKING_S = 20.0  # for a task, and for scoring one answer


def write_rows(
    source: str, of_version: str, rows: Sequence[dict[str, Any]], path: Path = RESULTS / "worlds.json"
) -> None:
    """With what they were measured on, in the order of their names."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    found[source] = {**described(), "version": of_version, "rows": sorted(rows, key=lambda row: str(row["name"]))}
    path.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


async def reasoning_gym() -> list[dict[str, Any]]:
    worker = Worker("atropos_env_reasoning_gym.generators:call", environment={"PYTHONHASHSEED": "0"})
    rows = []
    for name in await worker.call("names", deadline_s=300):
        source = json.dumps({"name": name, "parameters": {}, "level": None, "seed": 0, "size": 100})
        row: dict[str, Any] = {"name": name, "imports": False, "runs": False, "trains": None, "note": ""}
        rows.append(row)
        try:
            [(_, answer), *_] = await worker.call("make", source, 0, 1, deadline_s=MAKING_S)
            row["imports"] = True
            value, raised = await worker.call("score", source, 0, answer, deadline_s=MAKING_S)
            row["runs"] = value > 0.999
            if not row["runs"]:
                row["note"] = raised or (
                    "its tasks have no answer" if answer is None else f"its own answer scores {value:g}"
                )
        except AtroposError as error:
            row["note"] = without_folder(str(error).splitlines()[0])
        print(row, flush=True)
    await worker.close()
    return rows


async def stepped(function: str, parameters: Mapping[str, Any], action: str, only: Sequence[str] = ()) -> Any:
    """Of a source whose environments are stepped in a process: each begun, and given an action that it may not know."""
    worker = Worker(function, environment={"PYTHONHASHSEED": "0"})
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(only or await worker.call("names", deadline_s=300)):
        source = json.dumps({"name": name, "parameters": parameters})
        row: dict[str, Any] = {"name": name, "imports": False, "runs": False, "trains": None, "note": ""}
        rows.append(row)
        try:
            shown = await worker.call("step", source, number, 1, [], "", deadline_s=MAKING_S)
            row["imports"] = True
            await worker.call("step", source, number, 1, [action], shown["text"], deadline_s=MAKING_S)
            row["runs"] = True
        except AtroposError as error:
            row["note"] = said(error)
        print(row, flush=True)
    await worker.close()
    return rows


def said(error: AtroposError) -> str:
    """Its first line with a word in it: what nltk raises begins with a frame."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" *")]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return without_folder(first.rpartition(" raised ")[2])[:160]


def without_folder(text: str) -> str:
    """A file of a package as it is in the package, wherever that is installed here."""
    return re.sub(r"/\S*?/site-packages/", "", text)


def train_some(rows: Sequence[dict[str, Any]], options: Mapping[str, dict[str, Any]], **training: Any) -> None:
    """Write into `rows` which of these environments were trained; `options`: of each, by its name there."""
    from tests.worlds.training import train, trained_groups

    tables = {f"e{number}": table for number, table in enumerate(options.values())}
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), tables, **training)
        learnt = trained_groups(Path(folder) / "run")
    for name, count in zip(options, (learnt[table] for table in tables), strict=True):
        [row] = [row for row in rows if row["name"] == name]
        row["trains"] = count > 0
        row["note"] = f"{count} groups in five steps"


def measure_reasoning_gym() -> None:
    from tests.worlds.test_reasoning_gym import TRAINED, options_of

    rows = asyncio.run(reasoning_gym())
    train_some(rows, {name: {"use": "reasoning_gym", **options_of(name)} for name in TRAINED})
    for row in rows:
        if parameters := TRAINED.get(row["name"]):
            row["note"] += f", with {json.dumps(parameters)}"
    write_rows("reasoning-gym", version("reasoning-gym"), rows)


def measure_gem() -> None:
    from tests.worlds.test_gem import SHORT, TRAINED, options_of

    rows = asyncio.run(stepped("atropos_env_gem.episodes:call", {}, "\\boxed{1}"))
    train_some(rows, {name: {"use": "gem", **options_of(name)} for name in TRAINED}, **SHORT)
    write_rows("gem", version("gem-llm"), rows)


def measure_textarena() -> None:
    from tests.worlds.test_textarena import SHORT, TRAINED, options_of

    found: dict[str, dict[str, Any]] = {}
    for players in (2, 1, 3, 4, 5):
        left = [name for name, row in found.items() if "AssertionError" in row["note"]]  # of so many it cannot be made
        if found and not left:
            break
        for row in asyncio.run(stepped("atropos_env_textarena.episodes:call", {"players": players}, "[1]", left)):
            if row["runs"] and players != 2:
                row["note"] = f"with `players = {players}`"
            if row["runs"] or row["name"] not in found:
                found[row["name"]] = row
    rows = list(found.values())
    train_some(rows, {name: {"use": "textarena", **options_of(name)} for name in TRAINED}, **SHORT)
    write_rows("textarena", version("textarena"), rows)


def measure_verifiers() -> None:
    """Of the version that is installed: the three shapes of tests/verifiers, each trained."""
    of_version = version("verifiers")
    contract = importlib.import_module(f"tests.verifiers.test_{'v0' if of_version.startswith('0.1.') else 'v1'}")
    names = {"sums": "one turn", "guessing": "several turns", "tooling": "tools"}
    rows: list[dict[str, Any]] = [
        {"name": name, "imports": True, "runs": True, "trains": None, "note": ""} for name in names.values()
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = {
            said: {"use": "verifiers", **contract.options_of(name, Path(folder))} for name, said in names.items()
        }
        train_some(rows, options, **contract.SHORT)
    write_rows(f"verifiers {contract.CONTRACT}", of_version, rows)


def measure_openenv() -> None:
    """The servers of tests/worlds, each begun and given an action; the one whose rewards differ is trained."""
    from tests.worlds.test_openenv import NUMBER, Server, made, rollout

    kinds: Mapping[str, tuple[str, dict[str, Any], str]] = {
        "echo, the template of `openenv init`": ("echo", {"field": "message", "shown": "echoed_message"}, "hello"),
        "a number that is guessed by hints": ("number", {}, "1"),
        "tools (MCP)": ("tools", {"tools": True, "shown": None}, "none"),
    }
    rows: list[dict[str, Any]] = []
    for name, (kind, options, action) in kinds.items():
        row: dict[str, Any] = {"name": name, "imports": False, "runs": False, "trains": None, "note": ""}
        rows.append(row)
        server = Server(kind, 8)

        async def look(
            url: str = server.url, row: dict[str, Any] = row, options: Any = options, said: str = action
        ) -> None:
            environment = made(url, max_turns=1, **options)
            try:
                await environment.open()
                row["imports"] = True
                await rollout(environment, said)
                row["runs"] = True
            except AtroposError as error:
                row["note"] = without_folder(str(error).splitlines()[0])
            finally:
                await environment.close()

        try:
            asyncio.run(look())
            if kind == "number":
                table = {"use": "openenv", "url": server.url, "tasks": 60, "held_out": 20, **NUMBER}
                train_some(rows, {name: table}, max_tokens=12, groups_per_step=6)
        finally:
            server.kill()
        print(row, flush=True)
    write_rows("openenv", version("openenv"), rows)


SOURCES: Mapping[str, Callable[[], None]] = {
    "reasoning-gym": measure_reasoning_gym,
    "gem": measure_gem,
    "textarena": measure_textarena,
    "openenv": measure_openenv,
    "verifiers": measure_verifiers,
}

if __name__ == "__main__":
    for source in sys.argv[1:] or SOURCES:
        SOURCES[source]()
