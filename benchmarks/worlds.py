"""Which environments of other worlds import, run and train here: python -m benchmarks.worlds

Writes the rows of a source into benchmarks/results/worlds.json, from which `python -m tools.make_catalogue` makes docs/catalogue.md:

    name              the environment, as the source calls it
    imports, runs     whether it could be made; whether a task of it was run and its own answer scored as right
    trains            whether groups of it were trained within five steps of the tiny policy; null: not tried
    note              why not, or what is to be known

Rows of a source replace those that it had; those of other sources stay.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atropos_core.errors import AtroposError
from atropos_core.processes.function_worker import Worker
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
            row["note"] = str(error).splitlines()[0]
        print(row, flush=True)
    await worker.close()
    return rows


def main() -> None:
    from tests.worlds.test_reasoning_gym import TRAINED, options_of
    from tests.worlds.training import train, trained_groups

    rows = asyncio.run(reasoning_gym())
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), {name: {"use": "reasoning_gym", **options_of(name)} for name in TRAINED})
        learnt = trained_groups(Path(folder) / "run")
    for row in rows:
        if row["name"] in TRAINED:
            row["trains"] = learnt[row["name"]] > 0
            row["note"] = f"{learnt[row['name']]} groups in five steps"
            row["note"] += f", with {json.dumps(TRAINED[row['name']])}" if TRAINED[row["name"]] else ""
    write_rows("reasoning-gym", version("reasoning-gym"), rows)


if __name__ == "__main__":
    main()
