"""docs/catalogue.md, from results of benchmarks that it names: python -m tools.make_catalogue"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from tools.metadata import REPOSITORY

PAGE = REPOSITORY / "docs/catalogue.md"
RESULTS = REPOSITORY / "benchmarks/results/worlds.json"
FILES = REPOSITORY / "benchmarks/results/atroposlib_environments.json"
LEARNED = REPOSITORY / "benchmarks/results/soak_worlds.json"
STEPS, COMMIT = 5, "296a0bc5"
NOTES = {  # faults of the files, by reading them
    "community/lean_proof_env/lean_proof_env.py": "a fault of the file: each of its sequences is the prompt without the reply, "
    "under masks of 1, where atroposlib's are the token itself or -100",
    "community/wikipedia_research/wikipedia_article_creator.py": "a fault of the file: for each step before the article, what it "
    "trains is the message with the tools' results, which was not sampled, instead of the reply",
    "game_environments/gymnasium/blackjack/blackjack_env_thinking.py": "a fault of the file: if a move does not end the game, what "
    "it trains is the environment's message, which was not sampled, instead of the reply",
}
HEAD = """# Environments of other worlds

*Made by `tools/make_catalogue.py` from `worlds.json`, `soak_worlds.json` and `atroposlib_environments.json` in `benchmarks/results`, which
`benchmarks.worlds`, `benchmarks.soak_worlds` and `benchmarks.atroposlib_environments` write. A test holds them together.*

**Imports**: it could be made. **Runs**: a task of it was run, and its own answer was scored as right; of environments that are stepped, an
episode began and took a step. **Trains**: groups of it were trained within five steps of the tiny policy; a dash: not tried.
"""

EXPLAINED = """Unmodified, by import, and without a network; every data set of the hub is a small table with its columns
(`benchmarks/atroposlib_cases.py`). **Group**: how many sequences one of its first items gave for a scripted model. **Evaluates**: how many
replies its own `evaluate()` sampled; tried of those in `eval_environments`, most of which do nothing else. **Trains**: five steps of the
tiny policy, half of whose replies are by script, with every trained id one that was sampled; the largest distance of a logprob from the
trainer's own. A dash: not tried.
"""


def page(sources: Mapping[str, Mapping[str, Any]]) -> str:
    parts = [HEAD]
    for source, found in sources.items():
        rows = found["rows"]
        counts = [sum(bool(row[name]) for row in rows) for name in ("imports", "runs", "trains")]
        tried = sum(row["trains"] is not None for row in rows)
        parts.append(
            f"## {source} {found['version']}\n\n{counts[0]} of {len(rows)} import, {counts[1]} run, {counts[2]} of {tried} that were "
            f"tried train.\n\n| name | imports | runs | trains | |\n|---|---|---|---|---|\n"
            + "".join(
                f"| {row['name']} | {_said(row['imports'])} | {_said(row['runs'])} | {_said(row['trains'])} | {_cell(row['note'])} |\n"
                for row in rows
            )
        )
    return "\n".join(parts)


def learned_page(found: Mapping[str, Any]) -> str:
    """One environment of each kind, over a run."""
    lines = "".join(
        f"| {source} | {len(rows)} | {_percent(row['before'] for row in rows)} | {_percent(row['after'] for row in rows)} | "
        f"{100 * each['gain']:+.0f} | {100 * each['least_gain']:+.0f} | {_cell(each.get('note', ''))} |\n"
        for source, each in found.items()
        if (rows := each["rows"])
    )
    return f"""
## What is learned

Held-out accuracy of the tiny policy before and after a run of 30 steps, in percent, mean over the random seeds, with what the seed that
gained least gained. Which environments these are: `benchmarks/soak_worlds.py`.

| kind | seeds | before | after | gain | least | |
|---|---|---|---|---|---|---|
{lines}"""


def _percent(shares: Iterable[float]) -> str:
    return f"{100 * statistics.mean(shares):.0f}"


def files_page(found: Mapping[str, Any]) -> str:
    """The part of atroposlib's own files."""
    counts, rows = found["counts"], found["rows"]
    lines = "".join(
        f"| {row['file']} | {_said(row['imports'])} | {_said(row['opens'])} | {row['group'] or _said(False)} | "
        f"{row.get('evaluates') or '–'} | {_trained(row)} | {_cell(NOTES.get(row['file'], row.get('why', '')))} |\n"
        for row in rows
    )
    return f"""
## atroposlib's files at {COMMIT}

{EXPLAINED}
Of {counts["files"]} files {counts["import"]} import, {counts["open"]} open, {counts["give a group"]} give a group,
{counts["evaluate alone"]} evaluate and do nothing else, {counts["trained"]} train.

| file | imports | opens | group | evaluates | trains | why not |
|---|---|---|---|---|---|---|
{lines}"""


def _trained(row: Mapping[str, Any]) -> str:
    found = row.get("trained")
    if found is None:
        return "–"
    if found["steps"] < STEPS or found["other_ids"]:
        return "no" if row["file"] in NOTES else f"no: {_cell(found.get('why', 'other ids'))}"
    return f"{found['alignment']:.0e}" if found["replies"] else "no group had unequal scores"


def whole() -> str:
    learned = learned_page(json.loads(LEARNED.read_text()))
    return page(json.loads(RESULTS.read_text())) + learned + files_page(json.loads(FILES.read_text()))


def _said(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(whole())
