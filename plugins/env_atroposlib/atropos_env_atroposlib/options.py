"""What a run file may say of an environment that was written for atroposlib."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from atropos_core.plugins.provider import Options


def _absolute(reference: str) -> str:
    """Of `path.py` or `path.py:Class`."""
    path, colon, name = reference.rpartition(":") if not reference.endswith(".py") else (reference, "", "")
    return f"{Path(path).expanduser().absolute()}{colon}{name}" if path else reference


class AtroposlibOptions(Options):
    file: Annotated[str, AfterValidator(_absolute)] = Field(
        description="where the environment is: path.py, or path.py:Class where the file has several"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of the environment's own configuration, over what its config_init says",
    )
    datasets: dict[str, str] = Field(
        default_factory=dict,
        description="data sets of the hub that are files here: their name, or * for all others, and a folder or a .jsonl, .json, .csv or "
        ".parquet file",
    )
    policy_urls: list[str] = Field(
        default_factory=list,
        description="URLs that the policy answers where the file opens an OpenAI client of its own, beside those of its configured servers "
        "on this machine",
    )
    items: int = Field(
        1_000_000,
        ge=1,
        description="training tasks that are counted: an endless stream of items, numbered as they come",
    )
    tries: int = Field(8, ge=1, description="items that are taken in turn where the environment gives no group for one")
    evaluates: bool = Field(
        True, description="whether the environment's own evaluate() runs, as one held-out task, where a run evaluates"
    )
    open_deadline_s: float = Field(600.0, gt=0, description="seconds for its setup(), which loads its data")
