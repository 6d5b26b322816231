"""Rows in the model's own cache, for models with windows, sinks, convolutions, states and experts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from atropos_core.errors import DataError
from atropos_core.types import Sampling, tokens
from atropos_engine_hf import cohort
from atropos_engine_hf.cohort import CohortDecoder
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.decode_path import LIMIT, before_start
from atropos_engine_hf.probe import SMALL, worst
from atropos_torch_models.small_model import small_config, small_model
from tests.waiting import until

EOS = 2
HYBRID = {"num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "lfm2": {**HYBRID, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba": {},
    "mamba2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "mistral": {},
    "minimax": {},
    "llama4_text": {},
}
RANDOM = np.random.default_rng(0)
PROMPTS = [tokens(RANDOM.integers(3, 640, length)) for length in (5, 40, 1, 70, 17)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Any) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind)
            model = small_model(AutoConfig.for_model(kind, **FAMILIES[kind]))
            model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
            model.save_pretrained(directory)
            write_tokenizer(directory)
            made[kind] = directory
        return made[kind]

    return make


def plain_logprobs(model: Any, prompt: Any, sampled: Any) -> Any:
    whole = torch.from_numpy(np.concatenate([prompt, sampled]).astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=whole, use_cache=False).logits[0].double(), -1)
    at = torch.arange(len(prompt) - 1, whole.shape[1] - 1)
    return table[at, whole[0, at + 1]].numpy()


def in_waves(engine: Any, new: int) -> Any:
    """Start calls, and more of them once the first have sampled some tokens."""

    async def wait(steps: int) -> None:
        for _ in range(5 * steps):
            await asyncio.sleep(0)

    async def sample() -> list[Any]:
        first = [
            asyncio.ensure_future(engine.sample(p, 3, Sampling(new + 7 * i), range(3), 60))
            for i, p in enumerate(PROMPTS[:2])
        ]
        await wait(6)
        second = [asyncio.ensure_future(engine.sample(p, 2, Sampling(new), range(2), 60)) for p in PROMPTS[2:4]]
        await wait(9)
        third = [asyncio.ensure_future(engine.sample(PROMPTS[4], 1, Sampling(new), [5], 60))]
        return list(await asyncio.gather(*first, *second, *third))

    return sample()


@pytest.mark.parametrize("kind", FAMILIES)
async def test_logprobs_are_those_of_plain_passes_whenever_rows_enter_and_end(
    open_engine: Any, small: Callable[[str], Path], kind: str
) -> None:
    engine = await open_engine(small(kind))
    assert before_start(HFOptions(), small(kind)).name.startswith("cohort")
    once, again = [await in_waves(engine, 30) for _ in range(2)]
    for prompt, calls in zip(PROMPTS, once, strict=True):
        assert len({completion.tokens.tobytes() for completion in calls}) == len(calls)
        for completion in calls:
            np.testing.assert_allclose(
                completion.logprobs, plain_logprobs(engine.model, prompt, completion.tokens), atol=1e-3
            )
    for one, other in zip(sum(once, []), sum(again, []), strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes() and one.logprobs.tobytes() == other.logprobs.tobytes()
    scored = await engine.logprobs([np.concatenate([PROMPTS[0], once[0][0].tokens])])
    np.testing.assert_allclose(scored[0][len(PROMPTS[0]) :], once[0][0].logprobs, atol=1e-3)


def seeing_and_reading(kind: str) -> Any:
    """Return a random model that also sees, and its configuration's id of an image token."""
    text = small_config(AutoConfig.for_model(f"{kind}_text")).to_dict()
    sight = AutoConfig.for_model("gemma4_vision" if kind == "gemma4" else kind)
    sight = getattr(sight, "vision_config", sight).to_dict() | {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2,
        "out_hidden_size": 64, "image_size": 28, "patch_size": 14,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    special = {"image_token_id": 600, "image_token_index": 600, "video_token_id": 601}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=sight, **special)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4"])
async def test_the_language_part_of_a_model_that_sees_samples_what_the_whole_gives(
    open_engine: Any, write_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    whole = seeing_and_reading(kind)
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    engine = await open_engine(tmp_path)
    for prompt in PROMPTS[:3]:
        (completion,) = await engine.sample(prompt, 1, Sampling(20), [3], 60)
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(whole, prompt, completion.tokens), atol=1e-4)
    with pytest.raises(
        DataError, match=r"a prompt has 2 tokens that stand for images \(id 600\), and engine 'hf' samples from text"
    ):
        await engine.sample(tokens([5, 600, 600, 7]), 1, Sampling(4), [0], 60)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma3_text", "minimax"])
async def test_a_publish_in_mid_flight_continues_under_the_new_weights(
    open_engine: Any, small: Callable[[str], Path], kind: str
) -> None:
    engine = await open_engine(small(kind))
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    calls = [asyncio.ensure_future(engine.sample(prompt, 2, Sampling(40), range(2), 60)) for prompt in PROMPTS[:3]]
    columns = engine._policy.batch._columns
    await until(
        lambda: len(engine._policy.batch.rows) == 6 and (columns["length"] - columns["start"]).max() >= 15, "15 tokens"
    )
    await engine.pause()
    assert not engine._policy.batch._decoder.cohorts
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(0.95)
    await engine.resume(4)
    found = [(p, c) for p, made in zip(PROMPTS, await asyncio.gather(*calls), strict=False) for c in made]
    new = [plain_logprobs(engine.model, prompt, completion.tokens) for prompt, completion in found]
    engine.model.load_state_dict(before)
    old = [plain_logprobs(engine.model, prompt, completion.tokens) for prompt, completion in found]
    assert sum(set(completion.policy_version.tolist()) == {0, 4} for _, completion in found) >= 4
    for (_, completion), under_old, under_new in zip(found, old, new, strict=True):
        expected = np.where(completion.policy_version == 0, under_old, under_new)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
        assert np.abs(under_old - under_new).max() > 0.05  # the weights had moved: the test could have failed


async def test_padding_that_no_row_needs_any_more_is_dropped(open_engine: Any, small: Callable[[str], Path]) -> None:
    engine = await open_engine(small("gemma3_text"))
    long = asyncio.ensure_future(engine.sample(PROMPTS[3], 1, Sampling(12), [0], 60))
    while not engine._policy.batch.rows:
        await asyncio.sleep(0)
    short = asyncio.ensure_future(engine.sample(PROMPTS[0], 1, Sampling(60), [1], 60))
    await long
    [rows] = engine._policy.batch._decoder.cohorts
    assert rows.columns == engine._policy.batch._columns["length"][0] - 1 < 40
    [completion] = await short
    np.testing.assert_allclose(
        completion.logprobs, plain_logprobs(engine.model, PROMPTS[0], completion.tokens), atol=1e-3
    )


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    plain = DynamicSlidingWindowLayer.__init__
    patch.setattr(
        DynamicSlidingWindowLayer,
        "__init__",
        lambda self, sliding_window, **rest: plain(self, sliding_window - 1, **rest),
    )


def fork_shares_state(patch: pytest.MonkeyPatch) -> None:
    def shared(self: Any, rows: torch.Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state[rows[:1]].expand(len(rows), *state.shape[1:])

    patch.setattr(LinearAttentionLayer, "reorder_cache", shared)


def mask_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        CohortDecoder, "_mask", lambda self, columns, lengths: torch.ones(len(lengths), columns, dtype=torch.int64)
    )


def compacted_wrongly(patch: pytest.MonkeyPatch) -> None:
    plain = cohort.select
    patch.setattr(cohort, "select", lambda cache, rows: plain(cache, rows.flip(0)))


def joined_on_the_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cohort, "_padded", lambda stored, columns: pad(stored, (0, 0, 0, columns - stored.shape[2])))


def positions_by_column(patch: pytest.MonkeyPatch) -> None:
    plain = CohortDecoder.step

    def step(self: Any, rows: Any, tokens: Any, lengths: Any) -> Any:
        return plain(self, rows, tokens, np.full_like(lengths, rows.columns))

    patch.setattr(CohortDecoder, "step", step)


FAULTS = {
    window_off_by_one: "mistral",
    fork_shares_state: "qwen3_5_text",
    mask_dropped: "gemma3_text",
    compacted_wrongly: "lfm2",
    joined_on_the_right: "gpt_oss",
    positions_by_column: "granitemoehybrid",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_by_the_probe(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(AutoConfig.for_model(FAULTS[fault], **FAMILIES[FAULTS[fault]]))
    assert worst(CohortDecoder(model), SMALL) < LIMIT
    fault(monkeypatch)
    try:
        assert worst(CohortDecoder(model), SMALL) > 10 * LIMIT
    except RuntimeError as error:
        assert "expanded tensor" in str(error) or "single memory location" in str(error)
