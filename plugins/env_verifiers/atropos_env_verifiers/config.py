"""What a run file may say of an environment that was written for verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from atropos_core.plugins.provider import Options


class VerifiersOptions(Options):
    id: str = Field(
        description="of the environment, as verifiers knows it: name or owner/name of a package that is installed, or "
        "whose module lies in `folder`"
    )
    folder: Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())] | None = Field(
        None, description="where the environment's module is; unset: it is installed"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="with load_environment, its arguments; with a Taskset, fields of the configuration of its Env",
    )
    datasets: dict[str, str] = Field(
        default_factory=dict,
        description="data sets of the hub that are files here: their name, or * for all others, and a folder or a .jsonl, .json, .csv or "
        ".parquet file",
    )
    tasks: int = Field(100_000, ge=1, description="tasks that are read of each of its data sets, the first ones")
    held_out: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="the part of the tasks, from 0 to 1, that is held out, by their prompts, where the environment has no data "
        "set for evaluation",
    )
    success: float = Field(1.0, description="the score of an episode from which on it counts as correct")
    open_deadline_s: float = Field(600.0, gt=0, description="seconds for loading the environment, and for its tasks")
