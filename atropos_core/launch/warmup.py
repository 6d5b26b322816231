"""The rows of a warm start are read, and its steps counted, before anything is started."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from atropos_core.console.waits import waiting
from atropos_core.errors import FitError
from atropos_core.launch.plan import Plan
from atropos_core.models.model_size import context_tokens
from atropos_core.plugins.model_provider import PROMPT_TOKENS
from atropos_core.training.warm_start import WarmStart


async def with_warmup(plan: Plan, step: int = 0) -> tuple[Plan, WarmStart | None]:
    """Return the plan with the number of its supervised steps, and their rows; None if the run has none, or resumes at a `step` after
    them. Raises DataError, FitError."""
    section = plan.config.warmup
    if section is None or plan.open_warmup is None or (section.steps is not None and step >= section.steps):
        return plan, None
    context = context_tokens(plan.model.directory)
    longest = section.max_tokens or PROMPT_TOKENS + plan.config.sampling.max_tokens
    if context and section.max_tokens is not None and section.max_tokens > context:
        raise FitError(
            f"warmup.max_tokens = {section.max_tokens} is more than the model in {plan.model.directory} can read: it has {context} "
            "positions (max_position_embeddings in its config.json).",
            remedy=f"--set warmup.max_tokens={context}, or a model with a longer context.",
        )
    longest = min(longest, context or longest)
    with waiting(f"the rows of {section.data} to be read"):
        rows = await asyncio.to_thread(
            plan.open_warmup, section, plan.tokenizer(), max_tokens=longest, seed=plan.config.seed
        )
    counted = section.model_copy(update={"steps": rows.steps, "epochs": None})
    made = replace(plan, config=plan.config.model_copy(update={"warmup": counted}))
    return made, WarmStart(rows, plan.supervised_rate) if step < rows.steps else None
