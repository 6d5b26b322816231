"""Options of an environment that was written for verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from atropos_core.plugins.options import Options


class VerifiersOptions(Options):
    id: str = Field(
        description="id of the environment in verifiers: name or owner/name of an installed package, or of a package "
        "whose module is in `folder`"
    )
    folder: Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())] | None = Field(
        None, description="folder of the environment's module; unset: it is installed"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="with load_environment, its arguments; with a Taskset, fields of the configuration of its Env",
    )
    datasets: dict[str, str] = Field(
        default_factory=dict,
        description="data sets of the hub that are local files here: their name, or * for all others, and a folder or a .jsonl, .json, "
        ".csv or .parquet file",
    )
    tasks: int = Field(
        100_000, ge=1, description="how many tasks to read from each of its data sets, from the first on"
    )
    held_out: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of the tasks, from 0 to 1, to hold out by a hash of their prompts; only if the environment has no "
        "data set for evaluation",
    )
    success: float = Field(1.0, description="an episode with at least this score is correct")
    open_deadline_s: float = Field(600.0, gt=0, description="seconds to load the environment and its tasks")
