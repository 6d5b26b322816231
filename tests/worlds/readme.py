"""The table of a plugin's README, run as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.worlds.training import train


def run_table(folder: Path, plugin: str, /, **changed: object) -> None:
    """Train on the first table in TOML of the page, with `changed` in the place of what only its reader has."""
    [text, *_] = re.findall(
        r"```toml\n(.*?)```", (REPOSITORY / "plugins" / plugin / "README.md").read_text(), re.DOTALL
    )
    environments = tomllib.loads(text)["environment"]
    train(
        folder, {name: {**table, **changed} for name, table in environments.items()}, max_tokens=12, groups_per_step=3
    )
