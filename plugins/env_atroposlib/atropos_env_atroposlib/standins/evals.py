"""Evaluations that are not environments: kept so that their files can be imported."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from typing import Any

from atropos_core.errors import ConfigError
from atropos_env_atroposlib.standins.servers import ServerManager


def pass_at_k(m: int, c: int, k: int) -> float:
    """The chance that one of `k` out of `m` samples is right, `c` of which are (Chen et al. 2021, equation 1)."""
    return 1.0 - math.comb(m - c, k) / math.comb(m, k) if m - c >= k else 1.0


def evaluate_log(metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    logging.getLogger("atroposlib").warning("evaluation: %s", metrics)


class EvalBase(ABC):
    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: Any) -> None:
        self.pass_at_n, self.pass_at_n_samples = pass_at_n, pass_at_n_samples
        vars(self).update(kwargs)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Any]: ...

    @abstractmethod
    async def run_item(self, server: ServerManager, data_item: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]: ...


async def eval_runner(eval_env: EvalBase) -> Any:
    raise ConfigError(f"{type(eval_env).__name__} is an evaluation, not an environment.")
