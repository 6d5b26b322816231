"""Remove secrets from a configuration before it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SECRET = re.compile(r"(^|_)(key|keys|token|secret|password|credentials)$")


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without strings that are named like keys, tokens or passwords."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if not (SECRET.search(name) and isinstance(value, str))
    }
