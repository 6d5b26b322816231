"""The experts that a row's tokens were computed by, against the router logits of transformers' own pass over the whole sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from atropos_core.errors import FitError
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Completion, Sampling, tokens
from atropos_engine_hf import plugin
from atropos_engine_hf.cohort import CohortDecoder
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.decoder import SlotDecoder
from atropos_torch_models.small_model import small_model

EOS = 2
ANNOUNCED = {"router_replay": True}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"decoder_sparse_step": 1},
    "gpt_oss": {},  # windows, so only a cohort is exact
    "deepseek_v3": {"num_hidden_layers": 3},  # its first layers are dense
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
}
RANDOM = np.random.default_rng(0)
PROMPTS = [tokens(RANDOM.integers(3, 640, length)) for length in (5, 40, 1, 33, 17)]
SHORT = tokens(RANDOM.integers(3, 64, 30))  # of the vocabulary of make_model


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Any) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(kind: str, **changes: Any) -> Path:
        if (name := f"{kind}{changes}") not in made:
            directory = made[name] = tmp_path_factory.mktemp(kind)
            model = small_model(AutoConfig.for_model(kind, **{**KINDS[kind], **changes}))
            model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
            model.save_pretrained(directory)
            write_tokenizer(directory)
        return made[name]

    return make


def routed(model: Any, prompt: Any, completion: Completion) -> Any:
    """Return [T, L, k] from the model's own pass over the whole sequence, the way its routers choose: by each one's forward."""
    found: list[Any] = []
    gates = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    hooks = [gate.register_forward_hook(lambda one, given, made: found.append(made[2])) for gate in gates]
    ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert found and all(one.shape == (ids.shape[1], found[0].shape[1]) for one in found)
    return torch.stack(found, 1).numpy()


def check(model: Any, prompt: Any, completion: Completion) -> None:
    """All positions but the last are known, and are those of the whole pass."""
    experts = completion.experts
    assert experts is not None and len(experts.known) == len(prompt) + len(completion.tokens)
    assert experts.known[:-1].all() and not experts.known[-1], "the last token was not computed"
    assert experts.numbers.dtype == np.uint8
    expected = routed(model, prompt, completion)[:-1]
    assert len({row.tobytes() for row in expected}) > 1, "tokens are routed differently"
    np.testing.assert_array_equal(np.sort(experts.numbers), np.sort(expected))


@pytest.mark.parametrize(
    ("kind", "decode"),
    [("qwen3_moe", "slots"), ("qwen3_moe", "cohort"), ("gpt_oss", "auto"), ("deepseek_v3", "auto"), ("granitemoehybrid", "auto")],
)  # fmt: skip
async def test_experts_are_those_of_a_plain_pass_whenever_rows_enter_and_end(
    open_engine: Any, mixture: Callable[..., Path], kind: str, decode: str
) -> None:
    engine = await open_engine(mixture(kind), decode=decode, announced=ANNOUNCED)
    decoder = engine._policy.batch._decoder
    assert isinstance(
        decoder, SlotDecoder if kind in ("qwen3_moe", "deepseek_v3") and decode != "cohort" else CohortDecoder
    )

    async def sample(prompt: Any, after: int, n: int, most: int) -> list[Completion]:
        for _ in range(after):
            await asyncio.sleep(0)
        found: list[Completion] = await engine.sample(prompt, n, Sampling(most), range(n), 60)
        return found

    calls = [
        (PROMPTS[0], 0, 3, 20),
        (PROMPTS[1], 0, 2, 9),
        (PROMPTS[2], 30, 3, 15),
        (PROMPTS[3], 60, 1, 24),
        (PROMPTS[4], 60, 1, 1),
    ]
    made = await asyncio.gather(*(sample(*call) for call in calls))
    for (prompt, _, n, most), completions in zip(calls, made, strict=True):
        assert len({one.tokens.tobytes() for one in completions}) == n, "forked rows go apart"
        for one in completions:
            assert len(one.tokens) == most or one.finish == "stop"
            check(engine.model, prompt, one)


@pytest.mark.parametrize("decode", ["slots", "cohort"])
async def test_prompts_of_one_length_that_are_read_separately_keep_their_own(
    mixture: Callable[..., Path], open_engine: Any, decode: str
) -> None:
    engine = await open_engine(mixture("qwen3_moe"), decode=decode, announced=ANNOUNCED)
    if decode == "cohort":
        engine._policy.batch._decoder._equal_lengths = True
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1][::-1].copy(), PROMPTS[4]]
    made = await asyncio.gather(*(engine.sample(prompt, 2, Sampling(6), [3, 4], 60) for prompt in prompts))
    for prompt, completions in zip(prompts, made, strict=True):
        for one in completions:
            check(engine.model, prompt, one)


@pytest.mark.parametrize("decode", ["slots", "cohort"])
async def test_a_row_that_is_read_again_after_a_publication_keeps_what_its_tokens_were_sampled_with(
    mixture: Callable[..., Path], open_engine: Any, decode: str
) -> None:
    engine = await open_engine(mixture("qwen3_moe"), decode=decode, announced=ANNOUNCED)
    call = asyncio.ensure_future(engine.sample(PROMPTS[0], 3, Sampling(40), range(3), 60))
    while not any(
        int(length) >= len(PROMPTS[0]) + 8
        for length in engine._policy.batch._columns["length"][: len(engine._policy.batch.rows)]
    ):
        await asyncio.sleep(0)
    await engine.pause()
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std())
    after = {name: value.clone() for name, value in engine.model.state_dict().items()}
    await engine.resume(1)
    changed = 0
    for one in await call:
        expected = []
        for state in (before, after):
            engine.model.load_state_dict(state)
            expected.append(np.sort(routed(engine.model, PROMPTS[0], one)))
        split = len(PROMPTS[0]) + int((one.policy_version == 0).sum())
        found = np.sort(one.experts.numbers)
        if split == len(one.tokens) + len(PROMPTS[0]):
            continue  # ended before the publication
        # The last token of the old policy was computed only by the new one.
        np.testing.assert_array_equal(found[: split - 1], expected[0][: split - 1])
        changed += int((found[: split - 1] != expected[1][: split - 1]).any())
        np.testing.assert_array_equal(found[split - 1], expected[1][split - 1][None][0])
    assert changed


async def test_scoring_between_two_passes_leaves_no_trace(mixture: Callable[..., Path], open_engine: Any) -> None:
    engine = await open_engine(mixture("qwen3_moe"), announced=ANNOUNCED)
    call = asyncio.ensure_future(engine.sample(PROMPTS[1], 2, Sampling(20), range(2), 60))
    while not call.done():
        await engine.logprobs([PROMPTS[0], PROMPTS[3]])
    for one in call.result():
        check(engine.model, PROMPTS[1], one)


async def test_more_than_256_experts_take_two_bytes(make_model: Any, open_engine: Any, tmp_path: Path) -> None:
    engine = await open_engine(make_model(tmp_path / "many", "qwen3_moe", num_experts=300), announced=ANNOUNCED)
    [one] = await engine.sample(SHORT, 1, Sampling(20), [1], 60)
    assert one.experts.numbers.dtype == np.uint16 and one.experts.numbers.max() > 256
    np.testing.assert_array_equal(np.sort(one.experts.numbers), np.sort(routed(engine.model, SHORT, one)[:-1]))


async def test_nothing_is_hooked_or_recorded_unless_the_trainer_asks(
    mixture: Callable[..., Path], open_engine: Any
) -> None:
    for announced in ({}, {"router_replay": False}):
        engine = await open_engine(mixture("qwen3_moe"), announced=announced)
        assert not any(module._forward_hooks for module in engine.model.modules())
        [one] = await engine.sample(PROMPTS[0], 1, Sampling(4), [1], 60)
        assert one.experts is None


async def test_a_model_without_routers_is_refused_when_it_is_opened(open_engine: Any, tiny: Path) -> None:
    with pytest.raises(FitError, match=r"'qwen3' models have no routers(.|\n)*trainer.router_replay=false"):
        await open_engine(tiny, announced=ANNOUNCED)


def test_a_model_without_experts_is_refused_before_it_is_loaded(
    tiny: Path, mixture: Callable[..., Path], make_model: Any, tmp_path: Path
) -> None:
    context = RunContext(tmp_path, tiny, announced=ANNOUNCED, devices=("cpu",))
    with pytest.raises(FitError, match=r"has no experts(.|\n)*--set trainer.router_replay=false"):
        plugin.check(HFOptions(), Workload(context, 8, 8, 64, 64))
    plugin.check(HFOptions(), Workload(replace(context, announced={}), 8, 8, 64, 64))
    for model in (make_model(tmp_path / "moe", "qwen3_moe"), *(mixture(kind) for kind in KINDS)):
        plugin.check(HFOptions(), Workload(replace(context, model=model), 8, 8, 64, 64))
