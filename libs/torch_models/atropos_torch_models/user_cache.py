"""The folder of what is made once for each user, and may be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atropos" / kind
