"""What can be known of a run's model before anything is started: from its files and the options alone, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core.errors import ConfigError, FitError, TokenizerMismatch
from atropos_core.interfaces import Environment
from atropos_core.launch.memory_plan import workloads
from atropos_core.rollouts.chat_template import ChatTemplate
from atropos_core.rollouts.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from atropos_core.launch.assemble import Plan


def check_model(plan: Plan, directory: Path) -> None:
    """Raises ConfigError, FitError or TokenizerMismatch for what would end this run, or each of its rollouts, once the model was
    loaded. What only loading it can tell stays for then."""
    tokenizer = ChatTokenizer(plan.model.directory)
    _check_shape(plan, tokenizer)
    for resolved, workload in workloads(plan, directory):
        resolved.offer.provider.check(resolved.options, workload)
    _check_template(plan, directory, tokenizer)


def _check_shape(plan: Plan, tokenizer: ChatTokenizer) -> None:
    config = _shape(plan.model.directory)
    vocabulary, longest = config.get("vocab_size"), config.get("max_position_embeddings")
    if isinstance(vocabulary, int) and tokenizer.vocabulary > vocabulary:
        raise TokenizerMismatch(
            f"the tokenizer in {plan.model.directory} has {tokenizer.vocabulary} ids, and the model only {vocabulary} embeddings "
            "(vocab_size in its config.json).",
            remedy="Put the model's own tokenizer there, or resize the model's embeddings: "
            "model.resize_token_embeddings(len(tokenizer)).",
        )
    samplings = (("sampling", plan.config.sampling.max_tokens), ("evaluation", plan.config.evaluation.max_tokens or 0))
    for section, max_tokens in samplings:
        if isinstance(longest, int) and max_tokens >= longest:
            raise FitError(
                f"{section}.max_tokens = {max_tokens} leaves no room for a prompt: the model in {plan.model.directory} has "
                f"{longest} positions (max_position_embeddings in its config.json).",
                remedy=f"--set {section}.max_tokens={longest // 2}, or a model with a longer context.",
            )


def _shape(directory: Path) -> dict[str, Any]:
    """Of config.json what concerns the decoder; empty where that is not there, or says nothing."""
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return dict(config.get("text_config", config))
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _check_template(plan: Plan, directory: Path, tokenizer: ChatTokenizer) -> None:
    """Environments that render prompts of their own may do without one."""
    try:
        ChatTemplate(tokenizer.template, plan.model.directory)
    except ConfigError:
        from atropos_core.launch.assemble import environments

        if any(_is_usual(type(one)) for one in environments(plan, directory).values()):
            raise


def _is_usual(kind: type[Environment]) -> bool:
    return kind.rollout is Environment.rollout and kind.rollout_group is Environment.rollout_group
