"""The routers' metrics against counts over transformers' own recorded logits."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM


def routed(model, batch):
    """Return busiest share and entropy, over every token of every sequence."""
    counts, entropies = np.zeros((2, 4)), np.zeros(2)
    for number in range(batch.sequences):
        tokens = torch.from_numpy(batch.tokens[batch.offsets[number] : batch.offsets[number + 1]]).long()
        with torch.no_grad():
            logits = torch.stack(model(tokens[None], output_router_logits=True).router_logits)  # [L, T, E]
        for layer, chosen in enumerate(logits.topk(2, dim=-1).indices):
            counts[layer] += np.bincount(chosen.flatten(), minlength=4)
        logs = logits.log_softmax(-1)
        entropies += -(logs.exp() * logs).sum((1, 2)).numpy()
    return (counts.max(1) / counts.sum(1)).mean(), (entropies / len(batch.tokens)).mean()


@pytest.mark.parametrize("checkpointing", [False, True])
async def test_metrics_of_each_step_are_those_of_transformers_own_router_logits(
    open_trainer, make_batch, model_of, gate, checkpointing
):
    model = AutoModelForCausalLM.from_pretrained(model_of("qwen3_moe"))
    trainer = await open_trainer(model_of("qwen3_moe"), share_prompts=False, gradient_checkpointing=checkpointing)
    found = []
    for seed in (0, 1):
        batch, state = make_batch(seed), copy.deepcopy(trainer.model.state_dict())
        await trainer.logprobs([batch.tokens[:20]])  # passes without a gradient do not count
        metrics = await trainer.step(batch, gate)
        model.load_state_dict(state)
        found.append((metrics["router/busiest_share"], metrics["router/entropy"]))
        assert found[-1] == pytest.approx(routed(model, batch), abs=1e-5)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


async def test_a_model_without_routers_has_no_such_metrics(open_trainer, make_batch, gate):
    assert not [name for name in await (await open_trainer()).step(make_batch(), gate) if name.startswith("router/")]
