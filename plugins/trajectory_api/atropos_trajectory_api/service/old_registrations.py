"""Messages of atroposlib's clients other than groups, with bounds that exclude nonsense."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
GroupSize = Annotated[int, Field(ge=1, le=1 << 16)]  # pieces of a group wait in memory until they reach this
Name = Annotated[str, Field(max_length=512)]


class Registration(BaseModel):
    """A trainer. `batch_size` is in sequences."""

    model_config = ConfigDict(allow_inf_nan=False)

    wandb_group: Name
    wandb_project: Name
    batch_size: Positive
    max_token_len: Whole  # if 0 or less, old environments keep groups of any length
    checkpoint_dir: Annotated[str, Field(max_length=4096)]
    save_checkpoint_interval: Whole
    starting_step: Whole
    num_steps: Whole


class RegisterEnv(BaseModel):
    """An environment."""

    model_config = ConfigDict(allow_inf_nan=False)

    max_token_length: Annotated[int, Field(ge=0, le=2**53)]
    desired_name: Name
    weight: Annotated[float, Field(ge=-1e9, le=1e9)]
    group_size: GroupSize
    min_batch_allocation: Annotated[float, Field(ge=0, le=1)] | None = None


class EnvIdentifier(BaseModel):
    """The environment that asks; atroposlib numbers them from 0."""

    env_id: Whole
