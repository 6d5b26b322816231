"""Values for what neither the user nor the model's preset sets. They follow from the model's size and kind (docs/defaults.md has the
table and the published runs behind it), and from the trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from atropos_core.config.resolve import placed
from atropos_core.errors import AtroposError
from atropos_core.models.model_size import context_tokens
from atropos_core.plugins.model_provider import TrainerProvider

if TYPE_CHECKING:
    from atropos_core.config.run_file import RunConfig
    from atropos_core.plugins.registry import Registry

RULE = "rule"  # the origin of these values
BILLION = 1024  # hidden size from which a model has about a billion parameters
SEVEN_BILLION = 3584
SMALL_ON_A_CPU = 256  # with a smaller hidden size, a CPU samples thousands of tokens a second
THINKING = "<think>"


def follow_model(config: RunConfig, directory: Path, registry: Registry) -> dict[str, Any]:
    """Return values in the form of a run file; none if config.json does not give the hidden size."""
    width = hidden_size(directory)
    if width is None:
        return {}
    values: dict[str, Any] = {
        "sampling": {"max_tokens": reply_tokens(width, thinks(directory), context_tokens(directory))}
    }
    if width >= SMALL_ON_A_CPU and placed(config.trainer).devices == ("cpu",):
        values |= {"training": {"groups_per_step": 4}, "evaluation": {"problems": 64}}
    if trainer := _of_trainer(config, width, registry):
        values["trainer"] = trainer
    return values


def follow_trainer(config: RunConfig, registry: Registry) -> dict[str, Any]:
    """Return the engine and the bridge that the trainer works with, in the form of a run file."""
    try:
        provider = registry.find("trainer", config.trainer.use).provider
    except AtroposError:
        return {}  # planning the run says what is wrong
    found = provider.goes_with if isinstance(provider, TrainerProvider) else {}
    return {kind: {"use": name} for kind, name in found.items()}


def reply_tokens(width: int, thinks: bool, context: int) -> int:
    """Return the longest reply: longer for larger models, whose replies are longer, and for those that think first; at most half of
    the model's context (0: unknown)."""
    usual = 2048 if thinks else 256 if width < BILLION else 512 if width < SEVEN_BILLION else 1024
    return min(usual, context // 2) if context > 1 else usual


def hidden_size(directory: Path) -> int | None:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return max(int(config.get("text_config", config)["hidden_size"]), 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def thinks(directory: Path) -> bool:
    """Return True if the chat template has a <think> block."""
    files = (directory / "chat_template.jinja", directory / "tokenizer_config.json")
    return any(THINKING in file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def _of_trainer(config: RunConfig, width: int, registry: Registry) -> Mapping[str, Any]:
    try:
        provider = registry.find("trainer", config.trainer.use).provider
        if isinstance(provider, TrainerProvider):
            return provider.suits(provider.options.model_validate(config.trainer.options), width, config.training.steps)
    except (AtroposError, ValidationError):
        pass  # planning the run says what is wrong
    return {}
