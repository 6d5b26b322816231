"""The layout that is chosen for a model is exact, and a way that leaks is found and refused with its number."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from atropos_core.errors import FitError
from atropos_core.models.model_size import read
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_torch_models.small_model import small_model
from atropos_trainer_grpo.architecture import PLAIN
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.layout_probe import compared, layout_in_process, measured
from atropos_trainer_grpo.layouts import LIMIT, PACKED, Layout, chosen
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.memory import layer_bytes, rows_of
from atropos_trainer_grpo.model import language_model, open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.plugin import check
from atropos_trainer_grpo.saving import save
from atropos_trainer_grpo.update import Update

_HEADS = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
}
_SHAPE = {
    "vocab_size": 640,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **_HEADS,
}
_DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2,
}  # fmt: skip
_MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}
FAMILIES = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "head_dim": 16},
    "mamba2": {**_MAMBA, "num_hidden_layers": 2},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    },
    "gemma2": {"sliding_window": 16, "head_dim": 16},
    "gemma3_text": {"sliding_window": 16, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {"sliding_window": 16, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "deepseek_v3": _DEEPSEEK,
}  # fmt: skip


def config_of(kind: str):
    if kind == "mamba2":
        return AutoConfig.for_model(kind, vocab_size=640, hidden_size=64, **FAMILIES[kind])
    return AutoConfig.for_model(kind, **{**_SHAPE, **FAMILIES[kind]})


def model_directory(kind: str, directory: Path) -> Path:
    """Write a model of this kind, with weights in which a leak shows."""
    small_model(config_of(kind)).save_pretrained(directory)
    return directory


KEEPS_STATE = ("lfm2", "qwen3_5_text", "mamba2", "nemotron_h")


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """`family(kind)`: a directory with a small model of this kind, and a tokenizer."""
    made = {}

    def make(kind):
        if kind not in made:
            directory = model_directory(kind, tmp_path_factory.mktemp(kind))
            words = {"<pad>": 0, "<begin>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, 640)}
            tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
            tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
            fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            fast.save_pretrained(directory)
            made[kind] = directory
        return made[kind]

    return make


def longer(batch, seed=0):
    """The batch with sequences of up to 90 tokens: longer than the windows and chunks of a small model."""
    random = np.random.default_rng(seed)
    rows = [
        np.concatenate([row, random.integers(3, 640, random.integers(10, 60))])
        for row in np.split(batch.tokens, batch.offsets[1:-1])
    ]
    lengths = [len(row) for row in rows]
    count = sum(lengths)
    sampled = random.random(count) < 0.7
    sampled[np.cumsum([0, *lengths[:-1]])] = False
    return replace(
        batch,
        tokens=np.concatenate(rows).astype(np.int32),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        sampled=sampled,
        trained=sampled.copy(),
        logprobs=np.where(sampled, -3.0, 0).astype(np.float32),
        policy_version=np.zeros(count, np.int32),
        advantages=(np.repeat(random.normal(size=len(rows)), lengths) * sampled).astype(np.float32),
    )


def of_single(directory, batch):
    """The loss of REINFORCE and its gradient by transformers' own forward, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total = torch.zeros(())
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))
        logs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1], -1)
        own = logs.gather(1, ids[1:, None])[:, 0]
        trained = torch.from_numpy(batch.trained[begin + 1 : end])
        advantages = torch.from_numpy(batch.advantages[begin + 1 : end])
        total = total - (own * advantages)[trained].sum() / batch.sequences
    total.backward()
    return float(total), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"tokens_per_microbatch": 200, "logprob_chunk": 64}], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_gradient_of_the_chosen_layout_is_that_of_single_sequences(family, make_batch, kind, options):
    batch = longer(make_batch(groups=2, size=3))
    options = GrpoOptions(loss="reinforce", **options)
    layout = layout_in_process(family(kind), options)
    model = open_model(family(kind), dtype="auto", device="cpu", with_weights=True, layout=layout)
    update = Update(model, Optimizer(model.named_parameters(), options), options, LOSSES["reinforce"], batch, "cpu", 0)
    [every] = update.minibatches()
    update.backward(every)
    _, expected = of_single(family(kind), batch)
    whole = torch.cat([one.flatten() for one in expected.values() if one is not None]).norm()
    for name, parameter in model.named_parameters():
        mine, theirs = (torch.zeros(()) if one is None else one.to_dense() for one in (parameter.grad, expected[name]))
        assert float((mine - theirs).norm() / whole) < 1e-5, name


@pytest.mark.parametrize("kind", KEEPS_STATE)
def test_a_model_whose_layers_keep_state_is_trained_in_rows_and_the_line_says_so(family, kind):
    layout = layout_in_process(family(kind), GrpoOptions())
    assert layout.name == "rows"
    assert "would keep state across packed sequences; prompts are not shared" in layout.line


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_model_of_full_attention_stays_packed(model_of, kind):
    assert layout_in_process(model_of(kind), GrpoOptions()) == PACKED
    found = measured(model_of(kind))
    assert chosen(found, model_of(kind), GrpoOptions()) == PACKED
    assert max(found["packed"], found["rows"], found["packed, own logits"], found["rows, own logits"]) < 1e-5


@pytest.mark.parametrize("kind", ["granite", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_windows_sinks_and_changed_logits_stay_packed(family, kind):
    assert layout_in_process(family(kind), GrpoOptions()) == PACKED


def test_packing_forced_on_a_recurrent_model_leaks_and_is_refused_with_the_number(family):
    found = measured(family("lfm2"))
    assert found["packed"] > 0.1 > LIMIT > found["rows"]
    with pytest.raises(
        FitError, match=f"short convolutions.*differ from single sequences by {found['packed']:.2g}"
    ) as refused:
        layout_in_process(family("lfm2"), GrpoOptions(layout="packed"))
    assert 'trainer.layout = "packed"' in str(refused.value) and 'layout = "auto"' in refused.value.remedy


def test_logits_of_an_unknown_form_are_the_models_own(family):
    """As if the softcap, or the scale, were ignored after the head."""
    for kind in ("gemma2", "granite"):
        model = small_model(config_of(kind))
        model.logit_form = PLAIN
        found = compared(model)
        assert min(found["packed"], found["rows"]) > 10 * LIMIT
        assert max(found["packed, own logits"], found["rows, own logits"]) < LIMIT / 10
        assert chosen({**measured(family(kind)), **found}, family(kind), GrpoOptions()) == Layout(own_logits=True)


def test_a_layer_that_looks_at_padding_is_found_and_no_layout_is_exact(tmp_path, model_of):
    """As a model would whose padding has to be masked: each token sees the mean of its whole row."""
    model = small_model(AutoConfig.from_pretrained(model_of()))
    model.model.layers[0].register_forward_hook(lambda module, given, made: made + made.mean(dim=1, keepdim=True))
    found = {**measured(model_of()), **compared(model)}
    assert min(found["rows"], found["rows, own logits"], found["packed"]) > 0.01
    with pytest.raises(
        FitError, match=f"no exact way to train.*'qwen3'.*rows with padding differ .* by {found['rows']:.2g}"
    ):
        chosen(found, tmp_path, GrpoOptions())


def test_attention_over_packed_sequences_is_refused_for_rows(family):
    with pytest.raises(FitError, match='trainer.attention = "padded" is about packed sequences') as refused:
        layout_in_process(family("lfm2"), GrpoOptions(attention="padded"))
    assert "auto" in refused.value.remedy


def test_the_check_before_a_run_measures_a_model_that_is_not_plain(family, tmp_path):
    work = Workload(RunContext(tmp_path, family("lfm2")), 1, 2, 300, 2)
    check(GrpoOptions(), work)  # replies may be longer than anything measured
    with pytest.raises(FitError, match="not exact"):
        check(GrpoOptions(layout="packed"), work)


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 2}}], ids=str)
async def test_steps_of_a_recurrent_model_are_those_of_small_micro_batches(
    family, make_batch, open_trainer, gate, more
):
    moved = []
    for tokens in (100_000, 100):
        trainer = await open_trainer(family("lfm2"), tokens_per_microbatch=tokens, **more)
        for seed in range(2):
            metrics = await trainer.step(longer(make_batch(seed)), gate)
            assert metrics["grad_norm"] > 0
        moved.append([one.detach() for one in trainer.model.parameters() if one.requires_grad])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["lfm2", "gemma2"])
async def test_a_model_in_16_bits_scores_within_its_rounding(family, make_batch, open_trainer, kind):
    sequences = np.split((batch := longer(make_batch())).tokens, batch.offsets[1:-1])
    exact, rounded = [
        await (await open_trainer(family(kind), dtype=dtype)).logprobs(sequences) for dtype in ("float32", "bfloat16")
    ]
    apart = np.abs(np.concatenate(exact) - np.concatenate(rounded))
    assert 0 < apart.mean() < 0.2


async def test_a_saved_recurrent_model_is_restored_and_loaded_by_transformers(
    family, make_batch, open_trainer, gate, tmp_path
):
    trainer = await open_trainer(family("lfm2"))
    await trainer.step(longer(make_batch()), gate)
    await trainer.save(tmp_path)
    other = await open_trainer(family("lfm2"), seed=3)
    await other.restore(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for mine, theirs, its in zip(
        trainer.model.parameters(), other.model.parameters(), loaded.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs) and torch.equal(mine, its)


MEDIA = {"image_token_id": 90, "image_token_index": 90, "video_token_id": 91, "audio_token_id": 92}


def with_images(kind, directory):
    """Write a small model that also sees images."""
    text = {**_SHAPE, "num_hidden_layers": 2, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "gemma3":
        config = AutoConfig.for_model(
            kind, text_config={**text, "sliding_window": 16}, vision_config={**vision, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4, **MEDIA,
        )  # fmt: skip
    elif kind == "gemma4":
        layers = {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "final_logit_softcapping": 30.0,
        }
        per_layer = {
            "vocab_size_per_layer_input": _SHAPE["vocab_size"],
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0,
        }
        of_vision = {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14}
        config = AutoConfig.for_model(
            kind, text_config={**text, **layers, **per_layer}, vision_config={**vision, **of_vision}, **MEDIA
        )
    else:
        heads = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        config = AutoConfig.for_model(
            kind, text_config={**text, **heads, "layer_types": ["linear_attention", "full_attention"]},
            vision_config={**vision, "depth": 1, "num_heads": 2, "out_hidden_size": 64}, **MEDIA,
        )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3_5"])
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}], ids=str)
async def test_a_model_that_sees_images_trains_its_language_and_is_saved_whole(
    family, make_batch, open_trainer, gate, tmp_path, kind, more
):
    directory = with_images(kind, tmp_path / "origin")
    for path in family("lfm2").glob("tokenizer*"):
        (directory / path.name).write_bytes(path.read_bytes())
    trainer = await open_trainer(directory, **more)
    assert (await trainer.step(longer(make_batch()), gate))["grad_norm"] > 0
    (tmp_path / "saved").mkdir()
    await trainer.save(tmp_path / "saved")
    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(one).named_parameters())
        for one in (directory, tmp_path / "saved")
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    language = {name for name in before if ".language_model." in name or name.startswith("lm_head")}
    assert moved and moved <= language and len(moved) > len(language) / 2
    other = await open_trainer(directory, seed=3, **more)
    await other.restore(tmp_path / "saved")
    for one, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, theirs)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3_5"])
def test_buffers_of_a_skeleton_that_sees_images_are_those_of_the_model(tmp_path, kind):
    directory = with_images(kind, tmp_path)
    whole, skeleton = (
        open_model(directory, dtype="auto", device="cpu", with_weights=with_weights, layout=Layout("rows"))
        for with_weights in (True, False)
    )
    theirs = dict(whole.named_buffers())
    assert theirs.keys() == dict(skeleton.named_buffers()).keys()
    assert all(torch.equal(buffer, theirs[name]) for name, buffer in skeleton.named_buffers())


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3_5"])
async def test_a_sampled_token_that_stands_for_an_image_is_read_as_the_whole_model_reads_it(
    family, open_trainer, tmp_path, kind
):
    directory = with_images(kind, tmp_path)
    for path in family("lfm2").glob("tokenizer*"):
        (directory / path.name).write_bytes(path.read_bytes())
    trainer = await open_trainer(directory)
    whole = AutoModelForImageTextToText.from_pretrained(directory).eval()
    rows = [np.array([5, 6, 7, media, 8, 9, media, 10, 11], np.int32) for media in (90, 91, 92, 12)]
    for row, found in zip(rows, await trainer.logprobs(rows), strict=True):
        ids = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(whole(input_ids=ids[None]).logits[0].float(), -1)
        expected = logprobs[torch.arange(len(row) - 1), ids[1:]].numpy()
        np.testing.assert_allclose(found[1:], expected, atol=1e-5)


def test_a_model_that_transformers_has_no_causal_class_for_is_refused_by_name(tmp_path):
    AutoConfig.for_model("qwen2_5_vl").save_pretrained(tmp_path)
    with pytest.raises(FitError, match="no causal language model of type 'qwen2_5_vl'"):
        layout_in_process(tmp_path, GrpoOptions())


def test_the_plan_of_rows_counts_no_shared_prompt_and_the_scores_of_eager_attention(family):
    """Rows of whole sequences: a row of logits for each reply's token, and no prompt twice in one row."""
    model = read(family("lfm2"))
    work = Workload(RunContext(family("lfm2"), family("lfm2")), 2, 4, 100, 8, prompt_tokens=50)
    options = GrpoOptions(tokens_per_microbatch=500)
    rows = rows_of(options, work, model, layout=Layout("rows"))
    assert (rows.packed, rows.keys, rows.scored, rows.mask, rows.several) == (450, 450, 300, 0, True)
    eager = rows_of(options, work, model, layout=Layout("rows", eager_heads=4))
    assert layer_bytes(model, eager, 4, False) - layer_bytes(model, rows, 4, False) == 4 * 3 * 150**2 * 8
    packed = rows_of(options.model_copy(update={"tokens_per_microbatch": 10**6}), work, model)
    whole = rows_of(options.model_copy(update={"tokens_per_microbatch": 10**6}), work, model, layout=Layout("rows"))
    assert whole.packed == packed.packed + 6 * 50, "3 more prompts in each of two groups"


def test_noise_of_a_router_is_switched_off(tmp_path):
    """It would make another policy of the model while layers are computed again."""
    config = AutoConfig.for_model(
        "mixtral", num_local_experts=4, router_jitter_noise=0.5, output_router_logits=True, sliding_window=None,
        **{name: value for name, value in config_of("granite").to_dict().items() if name in ("vocab_size", "hidden_size")},
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    )  # fmt: skip
    small_model(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["router_jitter_noise"] == 0.5
    model = open_model(tmp_path, dtype="auto", device="cpu", with_weights=True, layout=Layout("rows"))
    assert language_model(model).config.router_jitter_noise == 0
    (tmp_path / "saved").mkdir()
    save(model, {}, tmp_path, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["router_jitter_noise"] == 0.5
