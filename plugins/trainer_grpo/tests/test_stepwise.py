"""The numbers of a stepwise trainer next to float64: logprobs, losses, gradients and steps, by transformers, peft and torch's AdamW."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atropos_core.stepwise import AdamSettings, AdapterSettings, StepwiseTrainer, TargetSequence
from plugins.trainer_grpo.tests.stepwise_oracle import Oracle, disturb, sequences_of, weights_of
from plugins.trainer_grpo.tests.test_layouts import family  # noqa: F401 - a fixture

SETTINGS = AdapterSettings(rank=4, alpha=8.0, seed=3)
SMOOTH = AdamSettings(  # an eps of the gradient's size: the step shows the gradient itself, and not only its sign
    learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1.0, weight_decay=0.1
)
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
OF_LOSS = {
    "cross_entropy": {}, "importance_sampling": {}, "ppo": CLIP, "cispo": CLIP, "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
}  # fmt: skip


async def near_policy(trainer, name, sequences):
    """The same, with logprobs from a policy nearby: ratios are on both sides of every bound."""
    weights = [
        TargetSequence(one.tokens, one.targets, {"weights": np.zeros(one.targets.shape, np.float32)})
        for one in sequences
    ]
    found = (await trainer.forward_backward(name, weights, "cross_entropy", {}, False)).logprobs
    random = np.random.default_rng(9)
    return [
        TargetSequence(
            one.tokens,
            one.targets,
            {**one.values, "logprobs": (lp + random.normal(0.02, 0.1, lp.shape)).astype(np.float32)},
        )
        for one, lp in zip(sequences, found, strict=True)
    ]


def assert_close(ours, theirs, atol):
    assert ours.keys() == theirs.keys() and ours
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor.double(), theirs[name], atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


async def compared(trainer, base: Path, tmp_path: Path, loss: str, targets: int = 0, settings=SETTINGS, **more):
    """Compare logprobs, loss and one step of AdamW with the oracle's. Returns the largest difference of each."""
    await trainer.create_adapter("mine", settings)
    oracle = Oracle(base, await disturb(trainer, "mine", tmp_path / "start"))
    sequences = sequences_of(loss, targets=targets, **more)
    if loss != "cross_entropy":
        sequences = await near_policy(trainer, "mine", sequences)
    before = oracle.weights()
    before = {name: one.clone() for name, one in before.items()}
    output = await trainer.forward_backward("mine", sequences, loss, OF_LOSS[loss], True)
    total = oracle.backward(sequences, loss, OF_LOSS[loss])
    for found, one in zip(output.logprobs, sequences, strict=True):
        assert found.dtype == np.float32 and found.shape == one.targets.shape
        np.testing.assert_allclose(found, oracle.logprobs(one).detach().numpy(), atol=1e-5)
    assert output.metrics == {"loss:sum": pytest.approx(total, rel=1e-5, abs=1e-4)}
    await trainer.optimizer_step("mine", SMOOTH)
    oracle.step(SMOOTH)
    moved = oracle.weights()
    assert all((moved[name] - one).abs().max() > 1e-4 for name, one in before.items()), "each tensor has a gradient"
    assert_close(await weights_of(trainer, "mine", tmp_path / "end"), moved, 1e-5)


@pytest.mark.parametrize("loss", OF_LOSS)
async def test_each_loss_has_the_logprobs_value_and_gradient_of_float64(open_stepwise, model_of, tmp_path, loss):
    await compared(await open_stepwise(), model_of(), tmp_path, loss)


@pytest.mark.parametrize("tied", [True, False])
async def test_several_targets_at_a_position_with_weights_of_any_sign(open_stepwise, model_of, tmp_path, tied):
    await compared(await open_stepwise(model_of(tied=tied)), model_of(tied=tied), tmp_path, "cross_entropy", targets=3)


@pytest.mark.parametrize("chosen", ["attention", "mlp", "head"])
async def test_each_kind_of_layer_alone_trains_only_its_layers(open_stepwise, model_of, tmp_path, chosen):
    flags = {"attention": False, "mlp": False, "head": False, chosen: True}
    settings = AdapterSettings(rank=2, alpha=2.0, seed=1, **flags)
    trainer = await open_stepwise(model_of(tied=False))
    await compared(trainer, model_of(tied=False), tmp_path, "cross_entropy", settings=settings)
    names = {
        name.split(".lora_")[0].rpartition(".")[2] for name in load_file(tmp_path / "end/adapter_model.safetensors")
    }
    assert names == {
        "attention": {"q_proj", "k_proj", "v_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}, "head": {"lm_head"},
    }[chosen]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_microbatch": 40},
        {"share_prompts": False},
        {"logprob_chunk": 7},
        {"layout": "rows"},
        {"attention": "flash"},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
async def test_how_it_is_computed_changes_no_result(open_stepwise, model_of, tmp_path, options):
    for loss, targets in (("ppo", 0), ("cross_entropy", 2)):
        folder = tmp_path / loss
        folder.mkdir()
        await compared(await open_stepwise(**options), model_of(), folder, loss, targets)


@pytest.mark.parametrize("kind", ["lfm2", "gemma2", "granite"])
async def test_models_of_other_layouts_and_other_logits(open_stepwise, family, tmp_path, kind):  # noqa: F811 - a fixture
    await compared(await open_stepwise(family(kind)), family(kind), tmp_path, "importance_sampling", vocabulary=640)


async def test_experts_are_adapted_with_the_mlp(open_stepwise, model_of, tmp_path):
    trainer = await open_stepwise(model_of("qwen3_moe"))
    await trainer.create_adapter("other", AdapterSettings(rank=2, alpha=2.0, seed=1))
    await compared(trainer, model_of("qwen3_moe"), tmp_path, "cross_entropy")
    assert any("experts" in name for name in load_file(tmp_path / "end/adapter_model.safetensors"))


async def test_it_is_a_stepwise_trainer(open_stepwise):
    assert isinstance(await open_stepwise(), StepwiseTrainer)
