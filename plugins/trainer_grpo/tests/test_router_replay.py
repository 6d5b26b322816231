"""Router replay against transformers' own forward pass of one sequence at a time, with routers written from the model's formula."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from atropos_core.errors import DataError, FitError
from atropos_core.types import EXPERTS, Column
from atropos_torch_models.routers import routers_of
from atropos_torch_models.small_model import small_model
from atropos_trainer_grpo.router_replay import attach_replay, difference

LAYERS, CHOSEN, COUNT = 2, 2, 4  # of the model qwen3_moe of conftest.py


def recorded(batch, layers=LAYERS, count=COUNT, unknown=0.0):
    """The batch with random experts. Tokens after the same beginning have the same, as an engine's would."""
    values = np.zeros((len(batch.tokens), layers, CHOSEN), np.uint8)
    present = np.ones(len(batch.tokens), np.bool_)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        for at in range(start, end):
            random = np.random.default_rng(zlib.crc32(batch.tokens[start : at + 1].tobytes()))
            values[at] = [random.permutation(count)[:CHOSEN] for _ in range(layers)]
            present[at] = random.random() >= unknown
        present[end - 1] = False
    return replace(batch, columns={**batch.columns, EXPERTS: Column("token", values, present)})


def logprobs_of(model, batch):
    """[T] of each sequence, with a gradient, from a plain forward pass in which each router takes the batch's experts."""
    column, made = batch.columns[EXPERTS], []
    routers = routers_of(model)
    plain = [router.forward for router in routers]
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        known = torch.from_numpy(column.present[start:end])[:, None]
        for layer, router in enumerate(routers):
            given = torch.from_numpy(column.values[start:end, layer]).long()

            def route(hidden, router=router, given=given, known=known):
                logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
                probabilities = logits.float().exp() / logits.float().exp().sum(-1, keepdim=True)
                chosen = torch.where(known, given, probabilities.argsort(-1, descending=True)[:, :CHOSEN])
                weights = probabilities.gather(1, chosen)
                return logits, (weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights), chosen

            router.forward = route
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        logits = model(tokens[None]).logits[0, :-1].float()
        made.append(torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0])
    for router, forward in zip(routers, plain, strict=True):
        router.forward = forward
    return made


def expected(directory, batch):
    """The gradient of sum of advantage times logprob over trained tokens, and the logprobs [N]."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    rows = logprobs_of(model, batch)
    found = np.zeros(len(batch.tokens), np.float32)
    total = torch.zeros(())
    for start, end, row in zip(batch.offsets[:-1], batch.offsets[1:], rows, strict=True):
        found[start + 1 : end] = row.detach().numpy()
        advantages = torch.from_numpy(batch.advantages[start + 1 : end] * batch.trained[start + 1 : end])
        total = total - (row * advantages).sum()
    total.backward()
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("unknown", [0.0, 0.4])
@pytest.mark.parametrize(
    "options", [{}, {"layout": "rows"}, {"share_prompts": False}, {"gradient_checkpointing": True}, {"tokens_per_microbatch": 60}],
    ids=["packed", "rows", "apart", "checkpointing", "microbatches"],
)  # fmt: skip
async def test_logprobs_and_gradient_are_those_of_the_recorded_experts(
    open_trainer, make_batch, model_of, gate, options, unknown
):
    batch = recorded(make_batch(), unknown=unknown)
    values, slopes = expected(model_of("qwen3_moe"), batch)
    trainer = await open_trainer(
        model_of("qwen3_moe"), router_replay=True, loss="reinforce", average="token", old_logprobs="recompute",
        max_grad_norm=1e9, learning_rate=0.0, **options,
    )  # fmt: skip
    seen = {}

    def keep(name):
        return lambda parameter: seen.__setitem__(name, parameter.grad.clone())

    for name, parameter in trainer.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(keep(name))
    await trainer.step(batch, gate)
    own = (await trainer.token_values())["trainer_logprobs"]
    scored = batch.sampled.copy()
    scored[batch.offsets[:-1]] = False
    assert np.abs(own - values)[scored].max() < 2e-5
    count = (batch.trained & scored).sum()
    for name, slope in slopes.items():
        if name in seen and slope is not None:
            assert (seen[name] * count - slope).norm() <= 1e-4 * slope.norm() + 1e-6, name
    assert any("gate.weight" in name and slope.norm() > 0 for name, slope in seen.items()), "routers have a gradient"


async def test_without_replay_the_trainer_computes_other_logprobs(open_trainer, make_batch, model_of, gate):
    """A trainer that ignores the recorded experts is far from what the test above asks for."""
    batch = recorded(make_batch())
    values, _ = expected(model_of("qwen3_moe"), batch)
    trainer = await open_trainer(model_of("qwen3_moe"), learning_rate=0.0, old_logprobs="recompute")
    metrics = await trainer.step(batch, gate)
    own = (await trainer.token_values())["trainer_logprobs"]
    assert np.nanmax(np.abs(own - values)[batch.sampled]) > 0.1
    assert "router/replayed_share" not in metrics


async def test_metrics_count_what_was_recorded_and_what_the_trainer_would_choose_too(
    open_trainer, make_batch, model_of, gate
):
    model = AutoModelForCausalLM.from_pretrained(model_of("qwen3_moe")).eval()
    batch = make_batch()
    values = np.zeros((len(batch.tokens), LAYERS, CHOSEN), np.uint8)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        with torch.no_grad():
            tokens = torch.from_numpy(batch.tokens[start:end]).long()
            logits = model(tokens[None], output_router_logits=True).router_logits
        values[start:end] = torch.stack(logits, 1).topk(CHOSEN).indices
    present = np.ones(len(batch.tokens), np.bool_)
    present[batch.offsets[1:] - 1] = False
    present[batch.offsets[3] : batch.offsets[4] - 1] = False
    lacking = batch.lengths[3] - 1
    own = replace(batch, columns={EXPERTS: Column("token", values, present)})
    trainer = await open_trainer(model_of("qwen3_moe"), router_replay=True, learning_rate=0.0)
    metrics = await trainer.step(own, gate)
    assert metrics["router/agreement"] == 1.0
    assert metrics["router/replayed_share"] == pytest.approx(1 - lacking / (batch.lengths - 1).sum())
    others = await trainer.step(recorded(batch), gate)
    assert others["router/replayed_share"] == 1.0
    assert 0.3 < others["router/agreement"] < 0.7, "two of four experts, at random"


async def test_a_batch_without_experts_or_with_those_of_another_model_is_refused(
    open_trainer, make_batch, model_of, gate
):
    trainer = await open_trainer(model_of("qwen3_moe"), router_replay=True)
    with pytest.raises(DataError, match="none of 12 sequences has any recorded"):
        await trainer.step(make_batch(), gate)
    with pytest.raises(DataError, match="experts of 3 layers, and the trainer's model has 2 routers in 2 layers"):
        await trainer.step(recorded(make_batch(), layers=3), gate)
    with pytest.raises(DataError, match="a recorded expert 7, and the trainer's model has 4 experts"):
        await trainer.step(recorded(make_batch(), count=8), gate)
    metrics = await trainer.step(recorded(make_batch()), gate)
    assert metrics["router/replayed_share"] == 1.0
    await trainer.supervised_step(make_batch(), 1e-3)  # a warm start has no engine's choice


async def test_a_model_without_routers_is_refused(open_trainer):
    with pytest.raises(FitError, match="it has no routers that say which experts they choose"):
        await open_trainer(router_replay=True)


def test_layers_without_experts_are_skipped_where_an_engine_counts_them(make_batch):
    config = CONFIG_MAPPING["deepseek_v3"](num_hidden_layers=4, first_k_dense_replace=2)
    model = small_model(config)
    layers = model.config.num_hidden_layers
    routers = len(routers_of(model))
    assert 0 < routers < layers
    batch = recorded(make_batch(), layers=layers)
    replay = attach_replay(model)
    places = len(batch.tokens)
    found = replay.of(batch, np.arange(places), np.arange(places), places, "cpu")
    column = batch.columns[EXPERTS]
    assert torch.equal(found.known, torch.from_numpy(column.present))
    assert torch.equal(
        found.numbers[found.known].long(), torch.from_numpy(column.values[column.present, layers - routers :]).long()
    )


# Routers that choose by softmax, by sigmoid, with a bias, and among groups of experts first
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "mixtral", "gpt_oss", "minimax_m2", "granitemoe", "afmoe", "deepseek_v2", "deepseek_v3", "qwen3_5_moe_text"]
)  # fmt: skip
def test_routers_that_can_be_replayed(kind):
    more = (
        {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
        if kind == "deepseek_v2"
        else {}
    )
    assert difference(small_model(CONFIG_MAPPING[kind](**more))) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("phimoe", "a PhimoeTopKRouter does not choose experts by topk, and cannot be replayed"),
        ("zaya", "its routers do not weigh other experts than those that they choose"),
        ("jetmoe", "it has no routers that say which experts they choose"),
        ("llama", "it has no routers that say which experts they choose"),
    ],
)
def test_why_others_cannot(kind, why):
    assert difference(small_model(CONFIG_MAPPING[kind]())) == why
