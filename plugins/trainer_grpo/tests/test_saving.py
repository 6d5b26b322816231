"""A checkpoint resumes to the same bits, and is a model directory that anyone can load."""

import copy
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atropos_core.errors import CheckpointError
from plugins.trainer_grpo.tests.resumed import assert_same_bits, trained_on


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("qwen3_moe", torch.bfloat16)], ids=str
)
async def test_a_new_process_resumes_to_identical_bits(open_trainer, make_batch, model_of, gate, tmp_path, kind, dtype):
    options = {
        "learning_rate": 1e-3, "minibatches": 2, "warmup_steps": 5, "schedule": "cosine", "weight_decay": 0.01,
        "learning_rates": [{"pattern": "q_proj", "factor": 3.0}, {"pattern": "norm", "learning_rate": 1e-4}],
    }  # fmt: skip
    directory = model_of(kind, dtype=dtype)
    trainer = await open_trainer(directory, steps=7, **options)
    for seed in range(3):
        await trainer.step(make_batch(seed, version=seed + 1), gate)
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    later = [make_batch(seed, version=seed + 1) for seed in range(3, 6)]
    for batch in later:
        await trainer.step(batch, gate)
    resumed = await trained_on(directory, tmp_path / "saved", later, options, steps=7)
    assert_same_bits(trainer.model, resumed)

    addresses = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    await trainer.restore(tmp_path / "saved")  # and back, in the same process, in place
    for batch in later:
        await trainer.step(batch, gate)
    assert_same_bits(trainer.model, resumed)
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == addresses


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
async def test_what_is_saved_loads_as_a_model_with_its_tokenizer(
    open_trainer, make_batch, model_of, gate, tmp_path, kind, tied
):
    trainer = await open_trainer(model_of(kind, tied))
    await trainer.step(make_batch(), gate)
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for (name, mine), (other, theirs) in zip(trainer.model.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("w5 w9").input_ids[-2:] == [5, 9]
    assert tokenizer.chat_template
    tokens = np.arange(2, 12, dtype=np.int32)
    logs = torch.log_softmax(model(torch.from_numpy(tokens).long()[None]).logits[0, :-1], -1)
    expected = logs.gather(1, torch.from_numpy(tokens[1:]).long()[:, None])[:, 0].detach().numpy()
    assert (await trainer.logprobs([tokens]))[0][1:] == pytest.approx(expected, abs=1e-5)
    await trainer.step(make_batch(1), gate)  # saving has left the trainer as it was


async def test_a_checkpoint_of_another_model_or_none_is_refused_before_anything_changes(
    open_trainer, model_of, tmp_path
):
    trainer = await open_trainer()
    with pytest.raises(CheckpointError, match="cannot be read"):
        await trainer.restore(tmp_path)
    other = await open_trainer(model_of("llama"))
    (tmp_path / "saved").mkdir()
    await other.save(tmp_path / "saved")
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises(CheckpointError, match="missing"):
        await trainer.restore(tmp_path / "saved")
    assert all(torch.equal(one, old) for one, old in zip(trainer.model.parameters(), before, strict=True))


VALUES = (None, -7, "x", {"x": 1}, torch.zeros(3, 5), torch.zeros((), dtype=torch.int64))
OF_RANDOM = ((), ("torch",), ("numpy",), ("numpy", 2), ("numpy", 4), ("python", 1), ("python", 2))


def places(value, place=()):
    """Every place in a state; of many alike, the first."""
    yield place
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys if len(keys) <= 5 else list(keys)[:1]:
            yield from places(value[key], (*place, key))


def changed(state, place, *value):
    """The state with another value there, or without it."""
    if not place:
        return value[0] if value else {}
    made = copy.deepcopy(state)
    inside = made
    for key in place[:-1]:
        inside = inside[key]
    if value:
        inside[place[-1]] = value[0]
    else:
        del inside[place[-1]]
    return made


async def test_a_state_of_another_form_is_one_error_that_changes_nothing(open_trainer, make_batch, gate, tmp_path):
    trainer = await open_trainer(dtype="bfloat16")
    await trainer.step(make_batch(), gate)
    (whole := tmp_path / "whole").mkdir()
    await trainer.save(whole)
    state = torch.load(whole / "trainer_state.pt", weights_only=True)
    await trainer.step(make_batch(1, version=2), gate)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    shutil.copytree(whole, other := tmp_path / "other")
    taken_up = set()
    for place in [*places(state["optimizer"], ("optimizer",)), *(("random", *place) for place in OF_RANDOM)]:
        for value in ((), *((one,) for one in VALUES)):
            torch.save(changed(state, place, *value), other / "trainer_state.pt")
            try:
                await trainer.restore(other)
            except CheckpointError as error:
                assert (str(other) in str(error) or place == ("optimizer", "optimizer")) and error.remedy, (
                    place,
                    value,
                )
                assert all(map(torch.equal, trainer.model.parameters(), before)), (place, value)
            else:
                taken_up.add((*place[:2], len(place)))
                await trainer.step(make_batch(1, version=2), gate)
                await trainer.restore(whole)
                await trainer.step(make_batch(1, version=2), gate)
    assert taken_up == {("optimizer", "optimizer", 2), ("optimizer", "moments", 3), ("random", "python", 3)}
