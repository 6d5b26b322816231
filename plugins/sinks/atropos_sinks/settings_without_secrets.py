"""The settings of a run as trackers show them: its run file, without secrets."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRET = re.compile(r"(^|_)(key|keys|token|secret|password|credentials)$")


def run_settings(directory: Path) -> dict[str, Any]:
    """Return the resolved run file of a run directory without secrets; empty if it has none."""
    saved = directory / "config.toml"
    return without_secrets(tomllib.loads(saved.read_text(encoding="utf-8"))) if saved.is_file() else {}


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without strings that are named like keys, tokens or passwords."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if not (SECRET.search(name) and isinstance(value, str))
    }
