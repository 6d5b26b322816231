"""Sizes of the trainer that cost only time and memory: the tokens of a micro-batch, and layers that are computed again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atropos_core.models.model_size import read
from atropos_core.plugins.model_provider import SizeChoice, Workload, halves
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.layouts import layout_of
from atropos_trainer_grpo.memory import parts_of, rows_of

SEQUENCES = 4  # the least that a micro-batch should hold: with fewer, matrices are small and a step is many passes


HALVED = 0.02  # slower: each half of a micro-batch,
TOO_SMALL = 0.1  # one that holds fewer than SEQUENCES,
AGAIN = 0.2  # and a third more compute in the update, which is more than half of a step


def sizes(options: GrpoOptions, workload: Workload, free: Collection[str]) -> Sequence[SizeChoice]:
    """Return the default micro-batch, then its halves down to SEQUENCES sequences; then the same with layers that are computed again,
    down to one sequence. What is larger than a batch takes no more memory than the batch."""
    model = read(workload.context.model)
    if model is None:
        return ()
    sequence = min(workload.prompt_tokens + workload.max_tokens, model.longest)
    layout = layout_of(workload.context.model, options)
    batch = rows_of(
        options.model_copy(update={"tokens_per_microbatch": 1 << 40}), workload, model, layout=layout
    ).packed
    whole = -(-batch // parts_of(workload))
    few = min(SEQUENCES * sequence, whole)
    microbatches = [options.tokens_per_microbatch]
    if "tokens_per_microbatch" in free:
        smaller = [tokens for tokens in halves(microbatches[0], 1) if sequence < tokens < whole]
        microbatches += [*smaller, *([sequence] if sequence < microbatches[0] else [])]
    checkpointing = [options.gradient_checkpointing]
    if "gradient_checkpointing" in free and not options.gradient_checkpointing:
        checkpointing = [False, True]
    found = []
    for again in checkpointing:
        slower = AGAIN if again else 0.0
        for number, tokens in enumerate(microbatches):
            if number and tokens < few and again != checkpointing[-1]:
                break
            values = {"tokens_per_microbatch": tokens, "gradient_checkpointing": again}
            found.append(SizeChoice(slower, {name: value for name, value in values.items() if name in free}))
            slower += HALVED if tokens >= few else TOO_SMALL
    return found
