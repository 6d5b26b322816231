"""Reward functions that files register and combine. None comes along but the combination."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atropos_core.errors import ConfigError


class RewardFunction(ABC):
    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: Any) -> None:
        self.weight = weight
        self.config = kwargs
        self.wandb_logger: Any = None
        self._name = name

    @property
    def name(self) -> str:
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]: ...

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self.weight * float(one) for one in self.compute(completions, **kwargs)]

    def set_wandb_logger(self, logger: Any) -> None:
        self.wandb_logger = logger

    @staticmethod
    def get_content(completion: Any) -> str:
        """Of text, a message, a choice, or the first of the assistant's messages."""
        if isinstance(completion, str):
            return completion
        if isinstance(completion, Mapping):
            message = completion.get("message", completion)
            return str(message.get("content", "")) if message.get("role") == "assistant" else ""
        if isinstance(completion, Sequence):
            return next((found for one in completion if (found := RewardFunction.get_content(one))), "")
        return ""


class _OfFunction(RewardFunction):
    def __init__(self, function: Callable[..., list[float]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._function = function

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return self._function(completions, **{**self.config, **kwargs})


class RewardRegistry:
    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        def add(made: Any) -> Any:
            self._known[name or made.__name__.lower().removesuffix("reward")] = made
            return made

        return add if cls is None else add(cls)

    def register_function(self, name: str, function: Any) -> None:
        self._known[name] = function

    def get(self, name: str) -> Any:
        found = self._known.get(name, self._known.get(name.removesuffix("_reward")))
        if found is None:
            raise ConfigError(
                f"the environment wants a reward function {name!r}, which its file does not register.",
                remedy=f"Registered are: {', '.join(sorted(self._known)) or 'none'}. atroposlib's own do not come along.",
            )
        return found

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> RewardFunction:
        given: dict[str, Any] = {"type": name_or_config} if isinstance(name_or_config, str) else dict(name_or_config)
        made = self.get(given.pop("type"))
        options = {**kwargs, **given, **given.pop("params", {})}
        options.pop("params", None)
        result: RewardFunction = made(**options) if isinstance(made, type) else _OfFunction(made, **options)
        return result

    def list_registered(self) -> list[str]:
        return list(self._known)


registry = RewardRegistry()


@registry.register
class CombinedReward(RewardFunction):
    """The weighted sum of several: as it is ("none"), over the sum of weights ("sum"), or from 0 to 1 ("minmax")."""

    def __init__(self, rewards: Sequence[Any], normalization: str = "none", weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.normalization = normalization
        self.reward_functions = [registry.create(one) for one in rewards]

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        totals = [sum(row) for row in zip(*(one(completions, **kwargs) for one in self.reward_functions), strict=True)]
        if self.normalization == "sum":
            weights = sum(one.weight for one in self.reward_functions)
            return [total / weights for total in totals] if weights > 0 else totals
        low, high = min(totals, default=0.0), max(totals, default=0.0)
        if self.normalization == "minmax" and high > low:
            return [(total - low) / (high - low) for total in totals]
        return totals
