"""The tables of docs/coming-from, and where the source of those projects lies."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = ("atroposlib", "roll", "skyrl", "trl", "verifiers")
PACKAGES = {
    "trl": ("trl",),
    "skyrl": ("skyrl", "skyrl_gym"),
    "atroposlib": ("atroposlib",),
    "verifiers": ("verifiers",),
    "roll": ("roll", "gem"),
}
ELSEWHERE = {  # names of the data, of transformers' TrainingArguments, and of atroposlib's environments' commands
    "trl": {"prompt", "max_steps", "save_steps", "save_total_limit", "eval_steps", "report_to", "per_device_train_batch_size",
            "lr_scheduler_type", "adam_beta1", "adam_beta2", "warmup_steps", "gradient_accumulation_steps", "peft_config"},
    "atroposlib": {"run-api", "view-run"},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    theirs: tuple[str, ...]
    ours: tuple[str, ...]


def rows(page: str) -> list[Row]:
    """The table under "Names", its names without quotes or values."""
    text = (REPOSITORY / f"docs/coming-from/{page}.md").read_text()
    _, _, names = text.partition("## Names\n")
    table = [line for line in names.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    found = []
    for line in table:
        theirs, ours, _ = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:4])
        found.append(Row(tuple(theirs), tuple(name.partition(" = ")[0] for name in ours)))
    return found


def sources(page: str) -> list[Path]:
    """Folders of that project's packages, where an environment of this checkout has them, or THEIR_SOURCE names where they lie."""
    roots = [
        *REPOSITORY.glob(".venv-*/lib/python*/site-packages"),
        *map(Path, filter(None, os.environ.get("THEIR_SOURCE", "").split(":"))),
    ]
    return [root / name for root in roots for name in PACKAGES[page] if (root / name).is_dir()]
