"""A function of Python as the program of an episode: `python function.py pkg.mod NAME`, or /path/file.py NAME.

It is called with the task, a dict with `id`, `prompt` and `messages`, in the episode's work directory. Clients find URL and
key in the environment variables that they know. A coroutine is awaited; whatever it returns is ignored. Run as a file, with
nothing imported but what the function needs: a sandbox need not show Atropos.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def load(where: str, name: str) -> Callable[[dict[str, Any]], Any]:
    """Raises what importing it raises."""
    if where.endswith(".py"):
        sys.path.insert(0, os.path.dirname(where))  # as for a file that Python is started with
        spec = importlib.util.spec_from_file_location(os.path.basename(where).removesuffix(".py"), where)
        assert spec is not None and spec.loader is not None  # a .py file always has both
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found: Callable[[dict[str, Any]], Any] = getattr(module, name)
    return found


def run(function: Callable[[dict[str, Any]], Any]) -> None:
    """With the task of this episode."""
    with open(os.environ["ATROPOS_TASK_FILE"], encoding="utf-8") as file:
        made = function(json.load(file))
    if inspect.iscoroutine(made):
        import asyncio

        asyncio.run(made)


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose names are none of the function's business
    run(load(*sys.argv[1:3]))
