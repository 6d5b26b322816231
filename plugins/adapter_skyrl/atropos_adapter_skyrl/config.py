"""The adapter's options: `--option KEY=VALUE` for `atropos adapter skyrl`, or `atropos.KEY=VALUE` among SkyRL's own options."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.options import Options


class SkyRLOptions(Options):
    source: Literal["here", "api", "rings"] = Field(
        "here",
        description="who runs rollouts: this process with SkyRL's engines; workers at a trajectory API; workers that send through "
        "shared memory. With the latter two SkyRL starts no engine",
    )
    run: AbsolutePath | None = Field(None, description="the run file with environments, rewards and model")
    url: str | None = Field(None, description="api: where `atropos serve` listens")
    token_file: AbsolutePath | None = Field(None, description="of that server and of the engines")
    rings: AbsolutePath | None = Field(
        None, description="rings: a folder that only this user may access, where workers find the socket"
    )
    engines: tuple[str, ...] = Field((), description="api, rings: URLs of `atropos engine`, which are sent the weights")
    tasks: int | None = Field(
        None, ge=1, description="how many tasks of each environment and split SkyRL sees at most. Unset: all"
    )
    deadline_s: float = Field(600.0, gt=0, description="of one rollout here; of one group elsewhere, once it is begun")
    attempts: int = Field(
        3, ge=1, description="how often a rollout, or a group's reward, may fail or be late before generate() raises"
    )
    max_staleness: int = Field(0, ge=0, description="api, rings: policy versions that a token may be behind")
    turn_rewards: bool = Field(
        False,
        description="give SkyRL rewards token by token: turn rewards at the last tokens of their turns, the outcome reward on the last "
        "token. For its estimators that read them (gae, reinforce++). false: the whole reward on the last token",
    )
    stash_mb: float = Field(256.0, gt=0, description="rings: of rows whose group is not complete")

    @model_validator(mode="after")
    def _agrees(self) -> SkyRLOptions:
        if self.source == "api" and self.url is None:
            raise ValueError("source=api needs url, the address of `atropos serve`, such as http://127.0.0.1:8000")
        if self.source == "rings" and self.rings is None:
            raise ValueError("source=rings needs rings, a folder in which workers of this machine find the socket")
        where = f"with source={self.source}"
        self.refuse_idle(self.source == "api", f"{where}: it is for source=api", "url")
        self.refuse_idle(self.source == "rings", f"{where}: it is for source=rings", "rings", "stash_mb")
        self.refuse_idle(
            self.source != "here",
            f"{where}, where SkyRL's own engines sample: it is for source=api and source=rings",
            "token_file", "engines", "max_staleness",
        )  # fmt: skip
        return self
