"""A curriculum `ledger`, as an installed plugin: `shuffled`, which also writes down how each draw was settled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conftest import plant

PLUGIN = """
from atropos_core import hookimpl
from atropos_core.plugins.options import NoOptions
from atropos_core.plugins.provider import Provider


def build(options, context):
    from tests.unit.schedules import Ledger

    return Ledger(context.seed)


@hookimpl
def atropos_curricula():
    return [Provider("ledger", "shuffled, and writes down how each draw was settled", NoOptions, build)]
"""


def plant_ledger(folder: Path) -> str:
    """Returns what PYTHONPATH must have in front."""
    plant(folder, "ledger", PLUGIN)
    return f"{folder}:{Path(__file__).parents[2]}"


def settled(run: Path, step: int) -> list[list[Any]]:
    """[draw, task number, outcome] of every draw that was settled, as the checkpoint of that step has it."""
    manifest = json.loads((run / f"checkpoints/step-{step:06d}/manifest.json").read_text())
    found: list[list[Any]] = manifest["state"]["parts"]["curriculum"]["settled"]
    return found


def check_epochs(entries: list[list[Any]], tasks: int) -> None:
    """Every draw is settled once, and every whole epoch has each task once."""
    assert sorted(draw for draw, _, _ in entries) == list(range(len(entries)))
    for epoch in range(len(entries) // tasks):
        inside = [index for draw, index, _ in entries if draw // tasks == epoch]
        assert Counter(inside) == Counter(range(tasks))
