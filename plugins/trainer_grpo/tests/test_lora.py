"""LoRA: only the adapter is trained, by the gradient of peft's own forward pass, and a checkpoint is a peft directory."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from atropos_core.cli import run_app
from atropos_core.errors import CheckpointError, ConfigError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_torch_models.small_model import small_model
from atropos_trainer_grpo import lora
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.model import open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.packed_rows import pack
from atropos_trainer_grpo.plugin import build, notes
from atropos_trainer_grpo.update import Update
from plugins.trainer_grpo.tests.resumed import assert_same_bits, trained_on

LORA = {"rank": 4, "alpha": 8.0, "learning_rate": 1e-2}
SHAPE = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EVERY_LAYER = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def disturb(model, seed=5):
    """Adapters that do something: B is zero at first, and A has no gradient then."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in lora.tensors(model).items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)


def base_of(model):
    return {name: value.clone() for name, value in model.named_parameters() if "lora_" not in name}


def adapted_modules(model):
    return {
        name.partition(".lora_A")[0].removeprefix("base_model.model.")
        for name in lora.tensors(model)
        if "lora_A" in name
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_only_the_adapter_changes_and_it_is_in_fp32(open_trainer, make_batch, model_of, gate, dtype):
    trainer = await open_trainer(model_of(dtype=dtype), lora=LORA, dtype=str(dtype).removeprefix("torch."))
    before, adapter = base_of(trainer.model), {k: v.clone() for k, v in lora.tensors(trainer.model).items()}
    for seed in range(2):  # the first moves only B
        await trainer.step(make_batch(seed), gate)
    assert {tensor.dtype for tensor in lora.tensors(trainer.model).values()} == {torch.float32}
    for name, tensor in lora.tensors(trainer.model).items():
        assert not torch.equal(tensor, adapter[name]), name
    after = base_of(trainer.model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == dtype
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name


async def test_experts_are_adapted_and_peft_loads_and_merges_what_is_saved(
    open_trainer, make_batch, model_of, gate, tmp_path
):
    trainer = await open_trainer(model_of("qwen3_moe"), lora=LORA)
    layers = {f"model.layers.{number}" for number in (0, 1)}
    attention = {f"{layer}.self_attn.{name}_proj" for layer in layers for name in "qkvo"}
    experts = {f"{layer}.mlp.experts{inner}" for layer in layers for inner in ("", ".base_layer")}  # down, gate and up
    assert adapted_modules(trainer.model) == attention | experts
    before, adapter = base_of(trainer.model), {k: v.clone() for k, v in lora.tensors(trainer.model).items()}
    for seed in range(2):
        await trainer.step(make_batch(seed), gate)
    assert not any(torch.equal(tensor, adapter[name]) for name, tensor in lora.tensors(trainer.model).items())
    assert all(torch.equal(value, before[name]) for name, value in base_of(trainer.model).items())
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    sequence = np.arange(2, 20, dtype=np.int32)
    ours = (await trainer.logprobs([sequence]))[0][1:]
    tokens = torch.from_numpy(sequence).long()[None]
    with torch.no_grad():
        lora.merge(tmp_path / "saved", tmp_path / "merged")
        for theirs in (
            AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved"),
            AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        ):
            logs = theirs(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            np.testing.assert_allclose(logs.numpy(), ours, atol=1e-5)


async def test_experts_and_layers_are_chosen_by_name(open_trainer, model_of):
    chosen = await open_trainer(model_of("qwen3_moe"), lora={**LORA, "targets": ["q_proj", "down_proj"], "layers": [1]})
    assert adapted_modules(chosen.model) == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts"}
    with pytest.raises(ConfigError, match=r"names 'gate_proj'.* Choose from: down_proj, gate_up_proj, k_proj"):
        await open_trainer(model_of("qwen3_moe"), lora={**LORA, "targets": ["gate_proj"]})
    with pytest.raises(ConfigError, match=r"no dropout for adapters of experts.*\n.*k_proj"):
        await open_trainer(model_of("qwen3_moe"), lora={**LORA, "dropout": 0.1})
    await open_trainer(model_of("qwen3_moe"), lora={**LORA, "dropout": 0.1, "targets": ["k_proj"]})


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("gpt2", ("attn.c_attn", "mlp.c_fc")),  # whose matrices are transposed
        ("falcon", ("self_attention.query_key_value", "mlp.dense_h_to_4h")),  # of a subclass
        (
            "gemma3n_text",
            ("model.altup_projections.0", "self_attn.q_proj"),
        ),  # whose last name is a number, as a layer's is
    ],
)
def test_all_linear_adapts_linear_layers_of_every_kind(kind, layers, tmp_path):
    model = small_model(CONFIG_MAPPING[kind]())
    head = model.get_output_embeddings()
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    ids = torch.arange(3, 40)[None]
    before = model(input_ids=ids).logits
    adapted = lora.attach(model, LoraOptions(**LORA), tmp_path)
    assert adapted_modules(adapted) == linear
    assert all(any(name.endswith(layer) for name in linear) for layer in layers)
    disturb(adapted)
    apart = adapted(input_ids=ids).logits
    assert not torch.allclose(apart, before, atol=1e-2)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, apart, rtol=1e-4, atol=1e-4)


def test_what_peft_cannot_adapt_is_named_with_what_can_be(tmp_path):
    with pytest.raises(ConfigError, match="peft cannot adapt 'out_proj' of FalconH1ForCausalLM") as refused:
        lora.attach(small_model(CONFIG_MAPPING["falcon_h1"]()), LoraOptions(**LORA), tmp_path)
    names = json.loads(refused.value.remedy.partition("'")[2].partition("'")[0])
    assert "out_proj" not in names and {"q_proj", "in_proj"} <= set(names)
    lora.attach(small_model(CONFIG_MAPPING["falcon_h1"]()), LoraOptions(**LORA, targets=names), tmp_path)


def test_linear_layers_that_peft_takes_for_experts_are_named_with_what_can_be_adapted():
    shape = {**SHAPE, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
    config = AutoConfig.for_model("glm4_moe", **shape, topk_group=1, first_k_dense_replace=1, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="takes the names down_proj, gate_proj, up_proj for those") as refused:
        lora.attach(model, LoraOptions(**LORA), Path("base"))
    _, _, wanted = refused.value.remedy.partition("targets='")
    targets = json.loads(wanted.partition("'")[0])
    assert set(targets) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}
    adapted = {
        name.rpartition(".")[2]
        for name in adapted_modules(lora.attach(model, LoraOptions(targets=targets), Path("base")))
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "base_layer"}


async def test_an_adapter_computes_in_the_dtype_of_its_base_and_keeps_no_copy_of_what_goes_in(open_trainer):
    trainer = await open_trainer(lora=LORA, dtype="bfloat16")
    disturb(trainer.model)
    kept: list[torch.Tensor] = []
    tokens = torch.arange(2, 22)[None]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        packing = pack(tokens[0].int().numpy(), np.array([20]), "cpu")
        hidden = trainer.model.get_base_model().base_model(input_ids=tokens, packing=packing, use_cache=False)[0]
    assert hidden.dtype == torch.bfloat16
    wide = [one for one in kept if one.dtype == torch.float32 and one.shape[-1] == 48]
    assert not wide, "the MLP has no norm: only an adapter's copy would be in fp32"
    hidden.float().sum().backward()
    assert {one.grad.dtype for name, one in trainer.model.named_parameters() if "lora_" in name} == {torch.float32}


async def test_an_untrained_adapter_leaves_the_policy_as_it_was_and_the_model_info_speaks_of_the_base(open_trainer):
    whole, adapted = await open_trainer(), await open_trainer(lora=LORA)
    sequence = np.arange(2, 20, dtype=np.int32)
    np.testing.assert_array_equal(*[(await trainer.logprobs([sequence]))[0] for trainer in (whole, adapted)])
    assert await whole.open() == await adapted.open()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_gradients_are_those_of_pefts_own_forward(make_batch, model_of, kind, checkpointing):
    options = GrpoOptions(loss="dapo", lora=LoraOptions(**LORA))
    ours = lora.attach(
        open_model(model_of(kind), dtype="auto", device="cpu", with_weights=True).double(), options.lora, model_of(kind)
    )
    theirs = lora.attach(AutoModelForCausalLM.from_pretrained(model_of(kind)).double(), options.lora, model_of(kind))
    for model in (ours, theirs):
        model.get_base_model().config._experts_implementation = "eager"  # torch's grouped products know no float64
    disturb(ours)
    with torch.no_grad():
        for name, tensor in lora.tensors(theirs).items():
            tensor.copy_(lora.tensors(ours)[name])
    if checkpointing:
        ours.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        ours.train()
    batch = make_batch()
    batch = replace(batch, logprobs=batch.logprobs.astype(np.float64), advantages=batch.advantages.astype(np.float64))
    update = Update(ours, Optimizer(ours.named_parameters(), options), options, LOSSES["dapo"], batch, "cpu", 0)
    (chosen,) = update.minibatches()
    update.backward(chosen)

    total = 0.0
    for i in range(batch.sequences):
        at = slice(batch.offsets[i], batch.offsets[i + 1])
        tokens = torch.from_numpy(batch.tokens[at]).long()
        logs = theirs(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        trained = torch.from_numpy(batch.trained[at][1:])
        ratio = (logs - torch.from_numpy(batch.logprobs[at][1:])).exp()
        advantages = torch.from_numpy(batch.advantages[at][1:])
        total = total - (torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) * trained).sum()
    loss = total / int(batch.trained.sum())
    loss.backward()
    assert update.tally.losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    expected = {name: value.grad for name, value in theirs.named_parameters() if value.grad is not None}
    found = {name: value.grad for name, value in ours.named_parameters() if value.grad is not None}
    assert found.keys() == expected.keys() == {name for name, _ in ours.named_parameters() if "lora_" in name}
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-7, name
        torch.testing.assert_close(found[name], gradient, atol=1e-8, rtol=1e-5)


async def test_targets_and_layers_choose_what_is_adapted(open_trainer):
    trainer = await open_trainer(lora={**LORA})
    assert adapted_modules(trainer.model) == {
        f"model.layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
        for layer in (0, 1)
        for name in EVERY_LAYER
    }
    trainer = await open_trainer(lora={**LORA, "targets": ["q_proj", "down_proj"], "layers": [1]})
    assert adapted_modules(trainer.model) == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}
    trainable = [name for name, value in trainer.model.named_parameters() if value.requires_grad]
    assert len(trainable) == 4
    assert all(".layers.1." in name for name in trainable)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"targets": ["q_proj", "c_attn"]},
            r"'c_attn'.*Choose from: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        ({"targets": ["lm_head"]}, "the head is not one"),
        ({"targets": ["embed_tokens"]}, "no such linear layer"),
        ({"layers": [0, 2]}, r"layers names 2, but Qwen3ForCausalLM has layers 0 to 1"),
    ],
)
async def test_what_matches_nothing_is_refused_and_what_there_is_is_listed(open_trainer, options, match):
    with pytest.raises(ConfigError, match=match):
        await open_trainer(lora={**LORA, **options})


def test_empty_lists_are_refused():
    for key in ("targets", "layers"):
        with pytest.raises(ValueError, match="would train nothing"):
            LoraOptions(**{key: []})


async def test_the_learning_rate_is_ten_times_that_of_full_training_unless_it_is_set(open_trainer, make_batch, gate):
    for options, rate in (({}, 3e-2), ({"learning_rate": 5e-4}, 5e-4)):
        trainer = await open_trainer(learning_rate=3e-3, lora=options)
        assert (await trainer.step(make_batch(), gate))["learning_rate"] == pytest.approx(rate)


async def test_a_bridge_that_carries_adapters_makes_the_trainer_train_one(open_trainer):
    trainer = await open_trainer(transport="adapter")
    assert trainer.model.peft_config["default"].r == LoraOptions().rank
    assert (await open_trainer(transport="copy")).model.__class__.__name__ == "Qwen3ForCausalLM"


async def test_dropout_acts_where_gradients_are_computed_and_nowhere_else(open_trainer, make_batch, gate):
    sequence = np.arange(2, 20, dtype=np.int32)
    for checkpointing in (False, True):
        plain, dropped = [
            await open_trainer(lora={**LORA, "dropout": p}, gradient_checkpointing=checkpointing) for p in (0.0, 0.5)
        ]
        for trainer in (plain, dropped):
            disturb(trainer.model)
        [expected], [found] = await plain.logprobs([sequence]), await dropped.logprobs([sequence])
        np.testing.assert_array_equal(expected, found)
        batch = make_batch()
        scored = await plain.logprobs(list(np.split(batch.tokens, batch.offsets[1:-1])))
        batch = replace(batch, logprobs=np.where(batch.sampled, np.concatenate(scored), 0).astype(np.float32))
        seen = {trainer: await trainer.step(batch, gate) for trainer in (plain, dropped)}
        for metrics in seen.values():
            assert metrics["alignment/max_abs_logprob_diff"] < 1e-5
            assert metrics["alignment/fresh_tokens"] == batch.sampled.sum()
        assert abs(seen[plain]["ratio/mean"] - 1) < 1e-5
        assert abs(seen[dropped]["ratio/mean"] - 1) > 1e-4  # of the network that dropout makes
        assert not any(layer.training for layer in dropped._dropouts)
        assert dropped._dropouts


@pytest.mark.parametrize("kind", ["tis", "mis", "sequence_mis"])
async def test_a_correction_weighs_the_sampled_policy_and_not_the_one_that_dropout_makes(
    open_trainer, make_batch, gate, kind
):
    options = {"old_logprobs": "recompute", "correction": {"kind": kind}}
    trainer = await open_trainer(lora={**LORA, "dropout": 0.5}, **options)
    disturb(trainer.model)
    batch = make_batch()
    scored = await trainer.logprobs(list(np.split(batch.tokens, batch.offsets[1:-1])))
    batch = replace(batch, logprobs=np.where(batch.sampled, np.concatenate(scored), 0).astype(np.float32))
    metrics = await trainer.step(batch, gate)
    assert metrics["alignment/max_abs_logprob_diff"] < 1e-5, "on-policy"
    assert metrics["correction/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["correction/fraction"] == 0
    assert abs(metrics["ratio/mean"] - 1) > 1e-4, "dropout was on where the gradient was computed"


async def test_a_new_process_resumes_to_identical_bits(open_trainer, make_batch, model_of, gate, tmp_path):
    options = {"lora": {**LORA, "dropout": 0.1}, "minibatches": 2, "warmup_steps": 5, "weight_decay": 0.01}
    trainer = await open_trainer(transport="adapter", **options)
    for seed in range(3):
        await trainer.step(make_batch(seed, version=seed + 1), gate)
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    later = [make_batch(seed, version=seed + 1) for seed in range(3, 6)]
    for batch in later:
        await trainer.step(batch, gate)
    resumed = await trained_on(model_of(), tmp_path / "saved", later, options, transport="adapter")
    assert_same_bits(trainer.model, resumed)
    await trainer.restore(tmp_path / "saved")  # and back, in the same process
    for batch in later:
        await trainer.step(batch, gate)
    assert_same_bits(trainer.model, resumed)


async def test_what_is_saved_loads_with_transformers_and_with_peft_and_holds_no_base(
    open_trainer, make_batch, model_of, gate, tmp_path
):
    trainer = await open_trainer(lora=LORA)
    for seed in range(2):
        await trainer.step(make_batch(seed), gate)
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "trainer_state.pt", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    settings = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model_of().resolve())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("w5 w9").input_ids[-2:] == [5, 9]
    tokens = np.arange(2, 12, dtype=np.int32)
    mine = (await trainer.logprobs([tokens]))[0][1:]
    start = (await (await open_trainer()).logprobs([tokens]))[0][1:]
    assert np.abs(mine - start).max() > 0.01
    for load in (AutoModelForCausalLM, AutoPeftModelForCausalLM):
        model = load.from_pretrained(tmp_path / "saved").eval()
        logs = torch.log_softmax(model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0, :-1], -1)
        expected = logs.gather(1, torch.from_numpy(tokens[1:]).long()[:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    await trainer.step(make_batch(1), gate)  # saving has left the trainer as it was


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_a_merged_model_has_the_precision_of_the_base_s_weights(open_trainer, model_of, tmp_path, dtype):
    """Also if config.json names another: that of a GGUF file's directory names bfloat16, and its weights are float32."""
    shutil.copytree(model_of(dtype=dtype), base := tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    trainer = await open_trainer(base, lora=LORA, dtype="float32")
    disturb(trainer.model)
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    lora.merge(tmp_path / "saved", tmp_path / "merged")
    assert {one.dtype for one in load_file(tmp_path / "merged/model.safetensors").values()} == {dtype}
    ids = torch.arange(2, 12)[None]
    merged, adapted = (
        kind.from_pretrained(tmp_path / name, dtype=torch.float32).eval()(input_ids=ids).logits
        for kind, name in ((AutoModelForCausalLM, "merged"), (AutoPeftModelForCausalLM, "saved"))
    )
    torch.testing.assert_close(merged, adapted, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0)


async def test_a_checkpoint_of_another_adapter_or_of_a_whole_model_is_refused_before_anything_changes(
    open_trainer, gate, make_batch, tmp_path
):
    trainer = await open_trainer(lora=LORA)
    others = {
        "missing": {"lora": {**LORA, "targets": ["q_proj"]}},
        r"\(8, 32\)": {"lora": {**LORA, "rank": 8}},
        "cannot be read": {},
    }
    before = {name: value.clone() for name, value in lora.tensors(trainer.model).items()}
    for number, (match, options) in enumerate(others.items()):
        other = await open_trainer(**options)
        await other.step(make_batch(), gate)
        (saved := tmp_path / str(number)).mkdir()
        await other.save(saved)
        with pytest.raises(CheckpointError, match=match):
            await trainer.restore(saved)
    assert all(torch.equal(value, before[name]) for name, value in lora.tensors(trainer.model).items())


async def test_a_model_directory_that_is_an_adapter_is_refused(open_trainer, tmp_path):
    trainer = await open_trainer(lora=LORA)
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    with pytest.raises(FitError, match="holds an adapter"):
        await open_trainer(tmp_path / "saved")


def test_without_peft_a_trainer_of_adapters_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    monkeypatch.setitem(sys.modules, "peft", None)
    here = Path()
    build(GrpoOptions(), RunContext(here, here, transport="checkpoint"))
    with pytest.raises(FitError, match="'peft' is not installed") as refused:
        build(GrpoOptions(), RunContext(here, here, transport="adapter"))
    assert refused.value.remedy == "pip install 'atropos-plugin-trainer-grpo[lora]'"


async def test_an_adapter_is_taken_up_only_by_one_of_the_same_parts_and_scale(open_trainer, tmp_path):
    whole = await open_trainer(lora=LORA)
    await whole.save(tmp_path)
    other = await open_trainer(
        lora={**LORA, "alpha": 2 * LORA["alpha"]} if "alpha" in LORA else {**LORA, "alpha": 99.0}
    )
    with pytest.raises(CheckpointError, match="was trained with alpha"):
        await other.restore(tmp_path)
    fewer = await open_trainer(lora={**LORA, "layers": [0]})
    with pytest.raises(CheckpointError, match="more parameters that this run's adapter does not have"):
        await fewer.restore(tmp_path)


DEFAULT = "1e-05, 10 times the default for full training, since LoRA trains an adapter"
NOTES = {
    "full training": ({}, "copy", None),
    "an adapter": ({"lora": {}}, "copy", DEFAULT),
    "by the bridge": ({}, "adapter", DEFAULT),
    "of a rate that was set": (
        {"lora": {}, "learning_rate": 2e-4}, "adapter", "0.002, 10 times trainer.learning_rate, since LoRA trains an adapter",
    ),
    "its own rate": ({"lora": {"learning_rate": 3e-5}}, "adapter", None),
}  # fmt: skip


@pytest.mark.parametrize(("options", "transport", "expected"), NOTES.values(), ids=NOTES)
def test_the_learning_rate_of_an_adapter_is_said_if_it_follows_from_another_option(options, transport, expected):
    said = notes(GrpoOptions.model_validate(options), [transport]).get("learning rate")
    assert said == (expected and f"{expected}; trainer.lora.learning_rate sets another")


def test_config_show_says_the_learning_rate_of_an_adapter(capsys):
    shown = ("config", "show", "--env", "gsm8k", "--model", "tiny", "--trainer", "grpo", "--bridge")
    assert run_app([*shown, "lora", "--engine", "hf"]) == 0
    assert "0.001, 10 times trainer.learning_rate" in " ".join(capsys.readouterr().out.split())
    assert run_app([*shown, "checkpoint", "--engine", "hf"]) == 0
    assert "10 times" not in capsys.readouterr().out
