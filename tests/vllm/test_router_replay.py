"""A real vLLM says which experts computed each token, of prompts from its prefix cache and under new weights, too.

On a CPU it does so only with a Triton that has a backend for CPUs, which vLLM's build for CPUs does not bring. Triton's own interpreter
stands in for one: TRITON_PYTHON names a Python in whose environment Triton is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from atropos_core.types import Completion, Sampling, tokens
from tests.vllm.hosted import Hosted, count, difference, start
from tests.vllm.models import make_model
from tests.vllm.triton import interpreter

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.skipif("TRITON_PYTHON" not in os.environ, reason="needs Triton's interpreter: `make test-vllm`"),
]
ANNOUNCED = {"router_replay": True}
RANDOM = np.random.default_rng(0)
PROMPTS = [
    tokens(RANDOM.integers(3, 160, length)) for length in (90, 37)
]  # longer than a block, so that a part is cached


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a server that finds a Triton with a backend for CPUs: its interpreter."""
    return interpreter(os.environ["TRITON_PYTHON"], tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape, the first layer of which is dense."""
    folder = tmp_path_factory.mktemp("mixtures")
    return [make_model(folder / str(seed), "qwen3_moe", seed=seed, mlp_only_layers=[0]) for seed in (0, 1)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    triton: dict[str, str], mixtures: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Hosted]:
    made = await start(
        mixtures[0],
        tmp_path_factory.mktemp("run"),
        announced=ANNOUNCED,
        environment=triton,
        extra_args=["--block-size", "32"],
    )
    yield made
    await made.engine.close()


def routed(directory: Path, prompt: Any, completion: Completion) -> tuple[Any, Any]:
    """Return [T, k] of transformers' own router in the last layer, and by how much its last choice is ahead of the next."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        [logits] = model(input_ids=ids, output_router_logits=True).router_logits
    best = logits.topk(3, dim=-1)
    return best.indices[:, :2].numpy(), (best.values[:, 1] - best.values[:, 2]).numpy()


def check(directory: Path, prompt: Any, completion: Completion, positions: slice = slice(None)) -> None:
    experts = completion.experts
    assert experts is not None and experts.known[:-1].all() and not experts.known[-1]
    assert len(experts.known) == len(prompt) + len(completion.tokens)
    assert experts.numbers.dtype == np.uint8 and experts.numbers.shape[1:] == (2, 2), "each hidden layer has an entry"
    expected, ahead = routed(directory, prompt, completion)
    same = (np.sort(experts.numbers[:, 1]) == np.sort(expected[:-1])).all(-1)
    assert same[positions].all() or ahead[:-1][positions][~same[positions]].max() < 1e-4
    assert len({row.tobytes() for row in expected}) > 5, "tokens are routed differently"


async def sample(served: Hosted, seed: int, new: int = 12) -> list[list[Completion]]:
    return list(
        await asyncio.gather(
            *(served.engine.sample(prompt, 2, Sampling(new), [seed, seed + 1], 240) for prompt in PROMPTS)
        )
    )


async def test_experts_are_those_of_transformers_whether_a_prompt_is_computed_or_cached(
    served: Hosted, mixtures: list[Path]
) -> None:
    first, hits = await sample(served, 1), await count(served, "prefix_cache_hits")
    again = await sample(served, 1)
    assert await count(served, "prefix_cache_hits") > hits
    for prompt, computed, cached in zip(PROMPTS, first, again, strict=True):
        assert difference(mixtures[0], prompt, computed) <= 1e-4
        for one, other in zip(computed, cached, strict=True):
            check(mixtures[0], prompt, one)
            check(mixtures[0], prompt, other)
            np.testing.assert_array_equal(one.tokens, other.tokens)


async def test_new_weights_give_new_experts_and_a_request_in_flight_keeps_its_old_ones(
    served: Hosted, mixtures: list[Path]
) -> None:
    long = asyncio.ensure_future(served.engine.sample(PROMPTS[1], 1, Sampling(200), [9], 240))
    await served.engine.sample(PROMPTS[1], 1, Sampling(4), [3], 240)  # until the other has some tokens too
    await served.engine.pause()
    await served.engine.load_weights(mixtures[1])
    await served.engine.resume(1)
    for prompt, completions in zip(PROMPTS, await sample(served, 5), strict=True):
        for one in completions:
            check(mixtures[1], prompt, one)
            assert set(one.policy_version.tolist()) == {1}
    [one] = await long
    old = len(PROMPTS[1]) + int((one.policy_version == 0).sum())
    assert len(PROMPTS[1]) < old < len(PROMPTS[1]) + len(one.tokens), "weights changed between its tokens"
    check(mixtures[0], PROMPTS[1], one, slice(old - 1))
    with pytest.raises(AssertionError):
        check(mixtures[1], PROMPTS[1], one, slice(old - 1))
    check(mixtures[1], PROMPTS[1], one, slice(old - 1, old))  # computed by the new weights only
