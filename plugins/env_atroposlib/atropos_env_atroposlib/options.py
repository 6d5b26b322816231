"""Options of an environment that was written for atroposlib."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from atropos_core.plugins.options import Options


def _absolute(reference: str) -> str:
    """The reference (`path.py` or `path.py:Class`) with an absolute path."""
    path, colon, name = reference.rpartition(":") if not reference.endswith(".py") else (reference, "", "")
    return f"{Path(path).expanduser().absolute()}{colon}{name}" if path else reference


class AtroposlibOptions(Options):
    file: Annotated[str, AfterValidator(_absolute)] = Field(
        description="file of the environment: path.py, or path.py:Class if the file has several"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of the environment's own configuration; they override its config_init",
    )
    datasets: dict[str, str] = Field(
        default_factory=dict,
        description="data sets of the hub that are local files here: their name, or * for all others, and a folder or a .jsonl, .json, "
        ".csv or .parquet file",
    )
    policy_urls: list[str] = Field(
        default_factory=list,
        description="further URLs at which the file's own OpenAI clients reach the policy, next to those of its configured servers "
        "on this machine",
    )
    items: int = Field(
        1_000_000,
        ge=1,
        description="number of training tasks: an endless stream of items, numbered in the order in which they come",
    )
    tries: int = Field(8, ge=1, description="items to try in turn until the environment gives a group")
    evaluates: bool = Field(
        True, description="run the environment's own evaluate(), as one held-out task, when the run evaluates"
    )
    open_deadline_s: float = Field(600.0, gt=0, description="seconds for its setup(), which loads its data")
