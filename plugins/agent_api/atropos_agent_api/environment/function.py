"""A function of Python as the program of an episode: `python -m atropos_agent_api.environment.function pkg.mod:name`.

It is called with the task, a dict with `id`, `prompt` and `messages`, in the episode's work directory. Clients find URL and
key in the environment variables that they know. A coroutine is awaited; whatever it returns is ignored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any


def run(function: Any) -> None:
    """With the task of this episode."""
    task = json.loads(Path(os.environ["ATROPOS_TASK_FILE"]).read_text())
    made = function(task)
    if inspect.iscoroutine(made):
        asyncio.run(made)


def main() -> None:
    from atropos_core.plugins.references import load_reference

    run(load_reference(sys.argv[1]))


if __name__ == "__main__":
    main()
