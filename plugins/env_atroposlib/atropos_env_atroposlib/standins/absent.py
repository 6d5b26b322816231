"""Packages that environment files import but can do without: `wandb`, if it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class Table:
    """Rows and columns, like `wandb.Table`."""

    def __init__(self, columns: Any = None, data: Any = None, **ignored: Any) -> None:
        self.columns = list(columns or ())
        self.data = list(data or ())

    def add_data(self, *row: Any) -> None:
        self.data.append(list(row))


def without_wandb() -> None:
    """Install a `wandb` that records nothing if there is none: what environments log becomes metrics of the run."""
    if importlib.util.find_spec("wandb") is not None:
        return
    module = ModuleType("wandb", "a stand-in of atropos_env_atroposlib")

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    vars(module).update(Table=Table, Histogram=list, Image=nothing, Html=str, run=None, init=nothing, log=nothing)
    vars(module).update(finish=nothing, config={}, summary={})
    sys.modules["wandb"] = module
