"""Writes the table of docs/models.md from benchmarks/results/models.json. Run from the project root: python tools/make_models_page.py"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path("docs/models.md")
BEGINS = "<!-- from here on: tools/make_models_page.py -->\n"
RESULTS = Path("benchmarks/results/models.json")
LIMIT = 1e-3


NATS = 1e-4  # between engine and trainer, in a run
BRIDGES = ("checkpoint", "delta", "lora")


def table(families: Mapping[str, Any], vllm: Mapping[str, Any], bridges: Mapping[str, Any]) -> str:
    rows = [
        "| model type | trainer | off by | engine `hf` | off by | `checkpoint` | `delta` | LoRA | resume | router replay "
        "| engine `vllm` | off by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    refused = []
    for name, found in sorted(families.items()):
        ways = {way: off for way, off in found["trainer"].items() if way.partition(",")[0] in ("packed", "rows")}
        trainer, engine = first(ways), first(found["engine"]["off"])
        if trainer is None or engine is None:
            refused.append(name)
        rows.append(
            f"| `{name}` | {cells(trainer, ways)} | {cells(engine, found['engine']['off'])} "
            f"| {' | '.join(of_bridge(bridges[name][bridge]) for bridge in BRIDGES)} | {of_resume(bridges[name])} "
            f"| {of_replay(found['trainer'].get('router replay'))} | {of_vllm(vllm[name])} |"
        )
    failed = [f"| `{name}` | {text(found['failed'])} |" for name, found in sorted(vllm.items()) if "failed" in found]
    return "\n".join(
        [
            *rows,
            "",
            f"Refused with engine `hf`, since no way is exact: {', '.join(f'`{name}`' for name in refused)}.",
            "",
            "The errors of vLLM for the small copies that it does not run. transformers saves these copies, and some lack settings that",
            "a released checkpoint has, so a family of this list may still run:",
            "",
            "| model type | error |",
            "|---|---|",
            *failed,
            "",
        ]
    )


def of_bridge(found: Mapping[str, Any]) -> str:
    """The difference after two updates, in nats."""
    if "apart" not in found:
        return next(iter(found))  # refused, failed
    return f"{found['apart']:.0e}" if found["apart"] <= NATS else f"**{found['apart']:.2g}**"


def of_resume(found: Mapping[str, Any]) -> str:
    resumed = [one["resumed"] for one in found.values() if "resumed" in one]
    return ("same bits" if all(resumed) else "**other bits**") if resumed else ""


def of_replay(found: float | str | None) -> str:
    """Empty for a model without experts."""
    if isinstance(found, float):
        return "yes" if found <= LIMIT else f"**{found:.2g}**"
    return "" if found is None or found.startswith("it has no routers") else "no"


def of_vllm(found: Mapping[str, Any]) -> str:
    """The two cells of the engine `vllm`."""
    if "failed" in found:
        return "fails | "
    off = max(found["started"], found["reloaded"])
    return f"exact | {off:.0e}" if off <= LIMIT else f"**refused** | {off:.2g}"


def text(error: str) -> str:
    """The error in one cell of a table."""
    return error.partition(" [type=")[0].replace("|", "\\|").strip()[:200].rstrip(": ")


def first(ways: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest exact way, in the order in which they were tried."""
    for way, off in ways.items():
        if isinstance(off, float) and off <= LIMIT:
            return way.partition(",")[0], off
    return None


def cells(chosen: tuple[str, float] | None, ways: Mapping[str, Any]) -> str:
    if chosen is not None:
        return f"{chosen[0]} | {chosen[1]:.0e}"
    numbers = [off for off in ways.values() if isinstance(off, float)]
    return f"**none** | {min(numbers):.2g}" if numbers else "**none** | fails"


def page(before: str) -> str:
    found = json.loads(RESULTS.read_text())
    vllm = found["vllm"]
    head = (
        f"transformers {found['transformers']}, torch {found['machine']['torch']}, float32 on a CPU. Engine `vllm`: vLLM {vllm['vllm']}, "
        f"transformers {vllm['transformers']}.\n\n"
    )
    return (
        before.partition(BEGINS)[0]
        + BEGINS
        + "\n"
        + head
        + table(found["families"], vllm["families"], found["bridges"])
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
