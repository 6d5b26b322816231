"""Adapters of several clients on one base: none changes another, each is saved and restored exactly, and wrong calls change nothing."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atropos_core.errors import CheckpointError, ConfigError, DataError, TrainingDiverged
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedStepwiseTrainer
from atropos_core.stepwise import AdamSettings, AdapterSettings, TargetSequence
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.plugin import build
from atropos_trainer_grpo.stepwise.adapter import Adapter
from plugins.trainer_grpo.tests.stepwise_oracle import disturb, sequences_of, weights_of

ADAM = AdamSettings(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, max_grad_norm=0.5)
SMALL = AdapterSettings(rank=2, alpha=4.0, seed=1)
LARGE = AdapterSettings(rank=8, alpha=16.0, seed=2)


def assert_same_bits(one, other):
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


async def train(trainer, name, steps, first=0):
    """Yield after each call, so that calls on other adapters can come in between."""
    for step in range(first, first + steps):
        yield await trainer.forward_backward(name, sequences_of("ppo", step), "ppo", {}, True)
        yield await trainer.forward_backward(name, sequences_of("cross_entropy", step, 3), "cross_entropy", {}, True)
        yield await trainer.optimizer_step(name, ADAM)


async def run(calls):
    return [made async for made in calls]


async def trained_alone(open_stepwise, settings, folder):
    trainer = await open_stepwise()
    await trainer.create_adapter("one", settings)
    outputs = await run(train(trainer, "one", 3))
    return outputs, await weights_of(trainer, "one", folder)


async def test_interleaved_adapters_have_the_bits_that_each_has_alone(open_stepwise, tmp_path):
    trainer = await open_stepwise()
    wanted = {}
    for name, settings in (("small", SMALL), ("large", LARGE)):
        wanted[name] = await trained_alone(open_stepwise, settings, tmp_path / f"{name}-alone")
    await trainer.create_adapter("large", LARGE)
    calls, found = {"large": train(trainer, "large", 3)}, {"small": [], "large": []}
    found["large"].append(await anext(calls["large"]))
    await trainer.create_adapter("small", SMALL)  # while a gradient of the other is not yet used
    calls["small"] = train(trainer, "small", 3)
    for number in range(9):
        found["small"].append(await anext(calls["small"]))
        if number == 4:
            await trainer.create_adapter("third", SMALL)
            await trainer.forward_backward("third", sequences_of("dro"), "dro", {}, True)
        if number == 6:
            await trainer.drop_adapter("third")
        if number < 8:
            found["large"].append(await anext(calls["large"]))
    for name, (outputs, weights) in wanted.items():
        for one, other in zip(outputs, found[name], strict=True):
            if isinstance(one, dict):
                assert one == other
            else:
                assert one.metrics == other.metrics
                for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
                    np.testing.assert_array_equal(mine, theirs)
        assert_same_bits(weights, await weights_of(trainer, name, tmp_path / name))


async def test_the_first_weights_follow_from_the_seed_and_change_nothing(open_stepwise, tmp_path):
    trainer = await open_stepwise()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for name, settings in (("one", SMALL), ("same", SMALL), ("other", replace(SMALL, seed=2))):
        await trainer.create_adapter(name, settings)
    assert torch.equal(before, torch.get_rng_state())
    one, same, other = [await weights_of(trainer, name, tmp_path / name) for name in ("one", "same", "other")]
    assert_same_bits(one, same)
    assert not torch.equal(one[first := sorted(one)[0]], other[first])
    (sequence,) = sequences_of("cross_entropy", count=1)
    follows = TargetSequence(
        sequence.tokens[:-1],
        sequence.tokens[1:].astype(np.int64),
        {"weights": np.ones(len(sequence.tokens) - 1, np.float32)},
    )
    output = await trainer.forward_backward("one", [follows], "cross_entropy", {}, False)
    np.testing.assert_allclose(output.logprobs[0], (await trainer.logprobs([sequence.tokens]))[0][1:], atol=1e-6)


async def test_two_calls_add_up_to_one(open_stepwise, tmp_path):
    trainer, sequences = await open_stepwise(), sequences_of("importance_sampling", count=6)
    smooth = replace(ADAM, eps=1.0)
    for name, parts in (("whole", [sequences]), ("parts", [sequences[:2], sequences[2:]])):
        await trainer.create_adapter(name, SMALL)
        await disturb(trainer, name, tmp_path / f"{name}-start")
        for part in parts:
            await trainer.forward_backward(name, part, "importance_sampling", {}, True)
        await trainer.optimizer_step(name, smooth)
    whole, parts = [await weights_of(trainer, name, tmp_path / name) for name in ("whole", "parts")]
    start = load_file(tmp_path / "whole-start/adapter_model.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-6, rtol=0)
        assert (tensor - start[name]).abs().max() > 1e-4


async def test_a_forward_pass_and_a_cleared_gradient_leave_nothing(open_stepwise, tmp_path):
    trainer, sequences = await open_stepwise(), sequences_of("ppo")
    for name in ("plain", "looked", "cleared"):
        await trainer.create_adapter(name, SMALL)
    there = await trainer.forward_backward("looked", sequences_of("ppo", 4), "ppo", {}, False)
    assert there.metrics["loss:sum"] != 0
    await trainer.forward_backward("cleared", sequences_of("ppo", 4), "ppo", {}, True)
    await trainer.clear_gradient("cleared")
    for name in ("plain", "looked", "cleared"):
        await trainer.forward_backward(name, sequences, "ppo", {}, True)
        await trainer.optimizer_step(name, ADAM)
    plain, looked, cleared = [
        await weights_of(trainer, name, tmp_path / name) for name in ("plain", "looked", "cleared")
    ]
    assert_same_bits(plain, looked)
    assert_same_bits(plain, cleared)


async def test_a_step_without_a_call_is_one_with_a_gradient_of_zero(open_stepwise, tmp_path):
    trainer = await open_stepwise()
    zeros = [
        replace(one, values={"weights": np.zeros(len(one.tokens), np.float32)}) for one in sequences_of("cross_entropy")
    ]
    for name in ("none", "zero"):
        await trainer.create_adapter(name, SMALL)
        await run(train(trainer, name, 1))
    await trainer.forward_backward("zero", zeros, "cross_entropy", {}, True)
    before = await weights_of(trainer, "none", tmp_path / "before")
    assert [await trainer.optimizer_step(name, ADAM) for name in ("none", "zero")] == [{"grad_norm": 0.0}] * 2
    none, zero = [await weights_of(trainer, name, tmp_path / name) for name in ("none", "zero")]
    assert_same_bits(none, zero)
    assert not torch.equal(none[first := sorted(none)[0]], before[first]), "by momentum"


@pytest.mark.parametrize("moments", [True, False])
async def test_a_restored_adapter_continues_with_the_same_bits(open_stepwise, tmp_path, moments):
    trainer = await open_stepwise()
    await trainer.create_adapter("one", LARGE)
    await run(train(trainer, "one", 2))
    (tmp_path / "saved").mkdir()
    await trainer.save_adapter(tmp_path / "saved", "one", True)
    await run(train(trainer, "one", 2, first=2))
    wanted = await weights_of(trainer, "one", tmp_path / "wanted")
    fresh = await open_stepwise()
    await fresh.create_adapter("other", SMALL)
    await fresh.restore_adapter(tmp_path / "saved", "back", moments)
    await fresh.forward_backward("back", sequences_of("ppo", 7), "ppo", {}, True)
    await fresh.restore_adapter(tmp_path / "saved", "back", moments)  # also over one with a gradient
    assert_same_bits(
        load_file(tmp_path / "saved/adapter_model.safetensors"), await weights_of(fresh, "back", tmp_path / "again")
    )
    await run(train(fresh, "back", 2, first=2))
    found = await weights_of(fresh, "back", tmp_path / "found")
    if moments:
        assert_same_bits(wanted, found)
    else:
        assert not torch.equal(found[first := sorted(found)[0]], wanted[first]), "its moments began anew"


@pytest.mark.parametrize("tied", [True, False])
async def test_what_is_saved_is_a_directory_of_peft(open_stepwise, model_of, tmp_path, tied):
    trainer = await open_stepwise(model_of(tied=tied))
    await trainer.create_adapter("one", LARGE)
    await disturb(trainer, "one", tmp_path / "saved")
    sequences = sequences_of("cross_entropy")
    output = await trainer.forward_backward("one", sequences, "cross_entropy", {}, False)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_of(tied=tied)), str(tmp_path / "saved")
    )
    for found, one in zip(output.logprobs, sequences, strict=True):
        with torch.no_grad():
            logs = theirs(torch.from_numpy(one.tokens).long()[None]).logits[0].log_softmax(-1)
        np.testing.assert_allclose(
            found, logs.gather(1, torch.from_numpy(one.targets)[:, None])[:, 0].numpy(), atol=1e-5
        )
    settings = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model_of(tied=tied).resolve())
    assert sorted(settings["target_modules"]) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "lm_head",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]


SEQUENCES = sequences_of("ppo", count=2)
GOOD = SEQUENCES[1]
LENGTH = len(GOOD.tokens)


def with_values(**values):
    return replace(GOOD, values={**GOOD.values, **values})


WRONG = {
    "no sequence": ([], "ppo", {}, r"without sequences"),
    "no tokens": (replace(GOOD, tokens=GOOD.tokens[:0], targets=GOOD.targets[:0]), "ppo", {}, r"sequence 1 of 2 .* at least one"),
    "tokens in rows": (replace(GOOD, tokens=GOOD.tokens[None]), "ppo", {}, r"tokens of shape \[1, "),
    "fractions": (replace(GOOD, tokens=GOOD.tokens.astype(np.float32)), "ppo", {}, r"tokens that are not an array of whole numbers"),
    "a huge id": (replace(GOOD, targets=np.full(LENGTH, 2**62)), "ppo", {}, r"has the id 4611686018427387904 in its targets"),
    "a negative id": (replace(GOOD, tokens=np.full(LENGTH, -1, np.int32)), "ppo", {}, r"has the id -1 in its tokens"),
    "outside the vocabulary": (replace(GOOD, targets=np.full(LENGTH, 37)), "ppo", {}, r"ids are 0 to 36"),
    "longer than the context": (
        TargetSequence(np.full(129, 2, np.int32), np.full(129, 2), {name: np.zeros(129, np.float32) for name in GOOD.values}),
        "ppo", {}, r"129 tokens, and the model's context holds 128",
    ),
    "shorter targets": (replace(GOOD, targets=GOOD.targets[1:]), "ppo", {}, r"has targets of shape"),
    "several targets": (replace(GOOD, targets=GOOD.targets[:, None]), "ppo", {}, r"the loss 'ppo' takes one"),
    "shorter values": (with_values(advantages=GOOD.values["advantages"][1:]), "ppo", {}, r"has advantages of shape"),
    "not a number": (with_values(advantages=np.full(LENGTH, np.nan, np.float32)), "ppo", {}, r"advantages that are not all finite"),
    "text": (with_values(advantages=np.full(LENGTH, "x")), "ppo", {}, r"advantages that are not an array of numbers"),
    "a missing value": (replace(GOOD, values={"logprobs": GOOD.values["logprobs"]}), "ppo", {}, r"has no advantages"),
    "an unknown value": (with_values(mask=np.ones(LENGTH, np.float32)), "ppo", {}, r"has 'mask', which the loss 'ppo' does not use"),
    "a value of some sequences": (with_values(clip_low_threshold=np.ones(LENGTH, np.float32)), "ppo", {}, r"other values than sequence 0"),
    "a mask of nothing": (with_values(sequence_ratio_mask=np.zeros(LENGTH, np.float32)), "gspo", {}, r"a mean over no token"),
    "an unknown loss": (GOOD, "stable_reinforce", {}, r"no loss is called 'stable_reinforce'"),
    "an unknown setting": (GOOD, "ppo", {"beta": 0.1}, r"has no setting 'beta'"),
    "an infinite setting": (GOOD, "ppo", {"clip_low_threshold": float("inf")}, r"must be a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_call_that_does_not_fit_is_one_error_and_changes_nothing(open_stepwise, tmp_path, wrong):
    sequence, loss, settings, message = WRONG[wrong]
    first = GOOD
    if wrong == "a mask of nothing":
        first = with_values(sequence_ratio_mask=np.ones(LENGTH, np.float32))
    trainer = await open_stepwise()
    for name in ("plain", "tried"):
        await trainer.create_adapter(name, SMALL)
        await trainer.forward_backward(name, [GOOD], "ppo", {}, True)
    with pytest.raises(DataError, match=message):
        await trainer.forward_backward("tried", sequence and [first, sequence], loss, settings, True)
    await same_afterwards(trainer, tmp_path)


async def same_afterwards(trainer, tmp_path):
    for name in ("plain", "tried"):
        await trainer.optimizer_step(name, ADAM)
    plain, tried = [await weights_of(trainer, name, tmp_path / name) for name in ("plain", "tried")]
    assert_same_bits(plain, tried)


async def test_a_loss_that_is_not_finite_changes_nothing(open_stepwise, tmp_path):
    trainer = await open_stepwise(tokens_per_microbatch=30)
    for name in ("plain", "tried"):
        await trainer.create_adapter(name, SMALL)
        await trainer.forward_backward(name, [GOOD], "ppo", {}, True)
    huge = with_values(logprobs=np.full(LENGTH, -1e38, np.float32), advantages=np.full(LENGTH, -1e30, np.float32))
    with pytest.raises(TrainingDiverged, match="the loss of this call is"):
        await trainer.forward_backward("tried", [GOOD, huge], "importance_sampling", {}, True)
    await same_afterwards(trainer, tmp_path)


@pytest.mark.parametrize("huge", [[float("inf"), 0.0], [float("nan"), 0.0], [3e38, 3e38]], ids=str)
def test_a_gradient_that_is_not_finite_is_not_added(huge):
    plain, tried = (Adapter("client", {"matrix": torch.nn.Parameter(torch.zeros(2))}) for _ in range(2))
    for adapter in (plain, tried):
        adapter.add([torch.tensor([3e38, 1e-3])])
        adapter.clear_gradient()
        adapter.add([torch.tensor([1e38, 1e-3])])
    with pytest.raises(TrainingDiverged, match="entries that are not finite"):
        tried.add([torch.tensor(huge)])
    for adapter in (plain, tried):
        adapter.add([torch.tensor([-1e38, 1e-3])])
        assert adapter.step(ADAM) == {"grad_norm": pytest.approx(2e-3)}
    assert torch.equal(plain.parameters["matrix"], tried.parameters["matrix"])


def test_a_gradient_whose_norm_is_not_finite_is_kept_and_moves_nothing():
    adapter = Adapter("client", {"matrix": torch.nn.Parameter(torch.ones(2))})
    adapter.add([torch.tensor([1e30, 1.0])])
    for _ in range(2):
        with pytest.raises(TrainingDiverged, match="squares of the gradient"):
            adapter.step(ADAM)
    assert torch.equal(adapter.parameters["matrix"].detach(), torch.ones(2))
    adapter.clear_gradient()
    assert adapter.step(ADAM) == {"grad_norm": 0.0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": float("nan")}, r"learning_rate of the optimizer step is nan"),
        ({"learning_rate": -1.0}, r"at least 0"),
        ({"beta1": 1.0}, r"beta1 .* below 1"),
        ({"eps": 0.0}, r"eps of the optimizer step is 0"),
        ({"max_grad_norm": float("inf")}, r"max_grad_norm"),
        ({"weight_decay": "1"}, r"weight_decay"),
    ],
    ids=str,
)
async def test_a_step_with_wrong_numbers_is_refused(open_stepwise, tmp_path, changed, message):
    trainer = await open_stepwise()
    for name in ("plain", "tried"):
        await trainer.create_adapter(name, SMALL)
        await trainer.forward_backward(name, [GOOD], "ppo", {}, True)
    with pytest.raises(DataError, match=message):
        await trainer.optimizer_step("tried", replace(ADAM, **changed))
    await same_afterwards(trainer, tmp_path)


async def test_names_and_settings_of_adapters_are_checked(open_stepwise, tmp_path):
    trainer = await open_stepwise()
    await trainer.create_adapter("one.with.dots and spaces", SMALL)
    with pytest.raises(DataError, match=r"already an adapter 'one\.with"):
        await trainer.create_adapter("one.with.dots and spaces", SMALL)
    for changed, message in (
        ({"rank": 0}, "rank"), ({"rank": 10**9}, "rank"), ({"alpha": float("nan")}, "alpha"), ({"seed": -1}, "seed"),
        ({"attention": False, "mlp": False, "head": False}, "no layer"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            await trainer.create_adapter("two", replace(SMALL, **changed))
    for call in (
        trainer.drop_adapter("two"),
        trainer.forward_backward("two", SEQUENCES, "ppo", {}, True),
        trainer.optimizer_step("two", ADAM),
        trainer.clear_gradient("two"),
        trainer.save_adapter(tmp_path, "two", True),
    ):
        with pytest.raises(DataError, match=r"adapter 'two' does not exist"):
            await call
    await trainer.drop_adapter("one.with.dots and spaces")
    with pytest.raises(DataError, match="does not exist"):
        await trainer.drop_adapter("one.with.dots and spaces")


async def test_a_damaged_adapter_is_not_restored_and_changes_nothing(open_stepwise, tmp_path):
    trainer = await open_stepwise()
    for name in ("plain", "tried"):
        await trainer.create_adapter(name, SMALL)
        await run(train(trainer, name, 1))
        await trainer.forward_backward(name, [GOOD], "ppo", {}, True)
    good = tmp_path / "good"
    good.mkdir()
    await trainer.save_adapter(good, "plain", True)
    weights, config = (
        load_file(good / "adapter_model.safetensors"),
        json.loads((good / "adapter_config.json").read_text()),
    )
    first = sorted(weights)[0]
    one_nan = weights[first].clone()
    one_nan[0, -1] = float("nan")

    def damaged(name, weights=weights, **changed):
        directory = tmp_path / name
        shutil.copytree(good, directory)
        save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps({**config, **changed}))
        return directory

    nothing = damaged("nothing")
    shutil.rmtree(nothing)
    without = damaged("without")
    (without / "adam.safetensors").unlink()
    cut = damaged("cut")
    (cut / "adapter_model.safetensors").write_bytes((good / "adapter_model.safetensors").read_bytes()[:-9])
    for directory, message in (
        (nothing, "cannot be read"),
        (without, "cannot be read"),
        (cut, "cannot be read"),
        (damaged("lacks", {name: one for name, one in weights.items() if name != first}), "lacks"),
        (damaged("nan", {**weights, first: one_nan}), "not finite"),
        (damaged("shape", {**weights, first: weights[first][:, :-1].contiguous()}), "of shape"),
        (damaged("rank", r=3), "of shape"),
        (damaged("huge", r=10**12), "the rank 1000000000000"),
        (damaged("dora", use_dora=True), "use_dora"),
        (damaged("layers", target_modules=["no_such_layer"]), "does not fit the model"),
        (damaged("kind", peft_type="IA3"), "does not describe a LoRA adapter"),
    ):
        with pytest.raises(CheckpointError, match=message):
            await trainer.restore_adapter(directory, "tried", True)
    with pytest.raises(CheckpointError):
        await trainer.restore_adapter(nothing, "new", False)
    with pytest.raises(DataError, match="adapter 'new' does not exist"):
        await trainer.drop_adapter("new")
    await same_afterwards(trainer, tmp_path)


async def test_a_trainer_of_whole_models_says_what_adapters_need(model_of, tmp_path):
    trainer = build(GrpoOptions(), RunContext(tmp_path, model_of(), transport="checkpoint", threads=1))
    await trainer.open()
    with pytest.raises(ConfigError, match=r"trains a whole model.*\n.*\[trainer\.lora\]"):
        await trainer.create_adapter("one", SMALL)
    await trainer.close()


async def test_the_trainers_own_steps_and_those_of_clients_do_not_touch_each_other(
    open_stepwise, make_batch, gate, tmp_path
):
    wanted, _ = await trained_alone(open_stepwise, SMALL, tmp_path / "alone")
    plain, mixed = await open_stepwise(), await open_stepwise()
    await plain.step(make_batch(), gate)
    await mixed.create_adapter("one", SMALL)
    found = await run(train(mixed, "one", 1))
    await mixed.step(make_batch(), gate)
    found += await run(train(mixed, "one", 2, first=1))
    np.testing.assert_array_equal(found[-2].logprobs[0], wanted[-2].logprobs[0])
    sequence = GOOD.tokens
    np.testing.assert_array_equal((await plain.logprobs([sequence]))[0], (await mixed.logprobs([sequence]))[0])


async def test_through_a_child_process_the_bits_are_the_same(open_stepwise, model_of, tmp_path):
    here = await open_stepwise()
    build = {
        "kind": "trainer",
        "name": "grpo",
        "options": {},
        "context": {
            "directory": str(tmp_path), "model": str(model_of()), "seed": 0, "deterministic": True, "transport": "adapter",
            "devices": ["cpu"], "threads": 1,
        },
    }  # fmt: skip
    child = await Child.start("trainer", build, tmp_path / "log", threads=1)
    there = HostedStepwiseTrainer(child)
    try:
        await there.open()
        for trainer in (here, there):
            await trainer.create_adapter("one", SMALL)
        for one, other in zip(await run(train(here, "one", 1)), await run(train(there, "one", 1)), strict=True):
            assert one == other if isinstance(one, dict) else one.metrics == other.metrics
        with pytest.raises(DataError, match="no loss is called"):
            await there.forward_backward("one", SEQUENCES, "nothing", {}, True)
        assert_same_bits(
            await weights_of(here, "one", tmp_path / "here"), await weights_of(there, "one", tmp_path / "there")
        )
        await there.restore_adapter(tmp_path / "here", "two", False)
        await there.drop_adapter("one")
        several = sequences_of("cross_entropy", targets=2)
        output = await there.forward_backward("two", several, "cross_entropy", {}, True)
        assert [found.shape for found in output.logprobs] == [one.targets.shape for one in several]
    finally:
        await there.close()
