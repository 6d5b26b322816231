"""The engine on a real vLLM: what it samples, how it pauses, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import AtroposError, ConfigError, DataError, DeadlineExceeded
from atropos_core.rollouts.tokenizer import fingerprint
from atropos_core.types import Sampling, tokens
from tests.vllm.hosted import Hosted, difference, reference, running, start, until_running
from tests.vllm.models import EOS, POSITIONS, VOCABULARY, make_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = tokens([5, 9, 33, 7, 120, 64])
LONG_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosted]:
    made = await start(models["qwen2"], tmp_path_factory.mktemp("run"), max_num_seqs=64)
    yield made
    await made.engine.close()


async def test_it_says_what_it_opened(served: Hosted) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(served.model)
    assert served.info.architecture == type(model).__name__
    assert served.info.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (served.info.vocabulary, served.info.dtype, served.info.device) == (VOCABULARY, "float32", "cpu")
    assert served.info.tokenizer == fingerprint(served.model)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_of_what_it_samples_are_those_of_transformers(served: Hosted, temperature: float) -> None:
    greedy = served.engine.sample(PROMPT, 2, Sampling(40, temperature), [1, 2], LONG_S)
    others = served.engine.sample(PROMPT[:3], 4, Sampling(30, 1.3, top_p=0.8), range(4), LONG_S)
    made, _ = await asyncio.gather(greedy, others)  # beside rows that are sampled otherwise
    assert difference(served.model, PROMPT, made) <= 1e-4
    if temperature == 0.0:
        best = reference(served.model, [np.concatenate([PROMPT, made[0].tokens])])[0][len(PROMPT) :]
        np.testing.assert_array_equal(made[0].tokens, made[1].tokens)
        assert (best > np.log(1 / VOCABULARY)).all()


def probabilities(directory: Path, prompt: Any, reply: Any, temperature: float) -> Any:
    """[T, V] at each token of the reply, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))[None]).logits[0].double()
    return torch.softmax(logits[len(prompt) - 1 : -1] / temperature, -1).numpy()


@pytest.mark.parametrize(
    "cut", [{"top_k": 1}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.5}, {"min_p": 0.3}, {"min_p": 0.1, "top_k": 50, "top_p": 0.7}],
    ids=str,
)  # fmt: skip
async def test_what_a_cut_keeps_is_what_the_definition_keeps(served: Hosted, cut: dict[str, Any]) -> None:
    """Of transformers' probabilities, in the order of `types.Sampling`. A token at the very boundary may go either way."""
    [one] = await served.engine.sample(PROMPT, 1, Sampling(20, 0.8, **cut), [1], LONG_S)
    assert one.truncated and one.kept is not None and len(one.kept.sizes) == len(one.tokens)
    whole = probabilities(served.model, PROMPT, one.tokens, 0.8)
    sampling = Sampling(1, **cut)
    parts = np.split(one.kept.token_ids, np.cumsum(one.kept.sizes)[:-1])
    for p, kept, token, logprob in zip(whole, parts, one.tokens, one.logprobs, strict=True):
        order = np.argsort(-p, kind="stable")
        order = order[p[order] >= sampling.min_p * p[order[0]]][: sampling.most_kept]
        mass = np.cumsum(p[order]) / p[order].sum()
        expected = order[: int(np.searchsorted(mass, sampling.top_p)) + 1]
        differs = set(expected.tolist()) ^ set(kept.tolist())
        assert len(differs) <= 1, "only a token at the boundary"
        assert token in kept and float(np.log(p[token] / p[kept].sum())) == pytest.approx(float(logprob), abs=1e-4)


async def test_the_same_seed_draws_the_same_tokens_whoever_samples_beside_it(served: Hosted) -> None:
    alone = await served.engine.sample(PROMPT, 2, Sampling(30), [11, 2**62 + 5], LONG_S)
    crowd = await asyncio.gather(
        *(served.engine.sample(PROMPT[:k], 3, Sampling(25, 1.2), range(3), LONG_S) for k in range(1, 6)),
        served.engine.sample(PROMPT, 2, Sampling(30), [11, 2**62 + 5], LONG_S),
    )
    for one, again in zip(alone, crowd[-1], strict=True):
        np.testing.assert_array_equal(one.tokens, again.tokens)
    assert alone[0].tokens.tolist() != alone[1].tokens.tolist()


async def test_a_stop_token_ends_a_reply_and_is_part_of_it(served: Hosted) -> None:
    made = await served.engine.sample(PROMPT, 64, Sampling(300, 1.5), range(64), LONG_S)
    stopped = [one for one in made if one.finish == "stop"]
    assert stopped
    for one in made:
        assert (one.tokens == EOS).sum() == (one.finish == "stop")
        assert one.tokens[-1] == EOS if one.finish == "stop" else len(one.tokens) == 300


async def test_a_stop_id_of_the_call_ends_a_reply_and_is_part_of_it(served: Hosted) -> None:
    [whole] = await served.engine.sample(PROMPT, 1, Sampling(20), [5], LONG_S)
    stop = int(whole.tokens[len(whole.tokens) // 2])
    [cut] = await served.engine.sample(PROMPT, 1, Sampling(20, stop_ids=(stop,)), [5], LONG_S)
    first = int((whole.tokens == stop).argmax())
    assert (cut.tokens.tolist(), cut.finish) == (whole.tokens[: first + 1].tolist(), "stop")


async def test_hundreds_of_requests_at_once_are_all_answered(served: Hosted) -> None:
    made = await asyncio.gather(
        *(served.engine.sample(PROMPT, 4, Sampling(4), range(i, i + 4), LONG_S) for i in range(100))
    )
    assert sum(len(completions) for completions in made) == 400


async def test_what_spans_a_pause_says_both_versions(served: Hosted) -> None:
    await served.engine.resume(7)
    for _ in range(8):
        waiting = asyncio.ensure_future(served.engine.sample(PROMPT, 4, Sampling(400, 0.5), range(4), LONG_S))
        await until_running(served, waiting)
        await served.engine.pause()
        await served.engine.pause()
        late = asyncio.ensure_future(served.engine.sample(PROMPT, 1, Sampling(3), [1], LONG_S))
        await asyncio.sleep(0.3)
        assert not late.done(), "nothing is computed while paused"
        await served.engine.resume(8)
        made = await waiting
        assert set((await late)[0].policy_version.tolist()) == {8}
        if any(set(one.policy_version.tolist()) == {7, 8} for one in made):
            break
        await served.engine.resume(7)
    for one in made:
        assert (np.diff(one.policy_version) >= 0).all()
        assert set(one.policy_version.tolist()) <= {7, 8}
    assert any(set(one.policy_version.tolist()) == {7, 8} for one in made)
    assert difference(served.model, PROMPT, made) <= 1e-4
    await served.engine.resume(0)


async def test_given_tokens_are_scored_as_transformers_scores_them(served: Hosted) -> None:
    sequences = [tokens(np.random.default_rng(i).integers(3, VOCABULARY, size=3 + 7 * i)) for i in range(6)]
    sequences += [tokens([4]), sequences[2]]
    found = await served.engine.logprobs(sequences)
    for ours, theirs in zip(found, reference(served.model, sequences), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


async def test_it_tells_the_likeliest_tokens_as_transformers_does(served: Hosted) -> None:
    sequences = [tokens(np.random.default_rng(i).integers(3, VOCABULARY, size=3 + 7 * i)) for i in range(4)] + [
        tokens([4])
    ]
    model = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32)
    for sequence, top in zip(sequences, await served.engine.top_logprobs(sequences, 5), strict=True):
        assert np.diff(top.offsets).tolist() == [0] + [5] * (len(sequence) - 1)
        with torch.no_grad():
            logs = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0].log_softmax(-1)
        best = logs[:-1].topk(5)
        np.testing.assert_array_equal(top.token_ids.reshape(-1, 5), best.indices)
        np.testing.assert_allclose(top.logprobs.reshape(-1, 5), best.values, atol=1e-4)


async def test_a_deadline_ends_the_request_here_and_in_the_server(served: Hosted) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"0 of 2 continuations within 0\.2 s|no answer within 0\.2 s"):
        await served.engine.sample(PROMPT, 2, Sampling(POSITIONS - 10, 0.1), [1, 2], 0.2)
    assert time.monotonic() - began < 30
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/metrics") as response:
        assert response.status == 401, "to strangers it says nothing"
    async with asyncio.timeout(60):
        while await running(served):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "why"),
    [
        (tokens([]), Sampling(4), "no tokens"),
        (tokens([3, VOCABULARY]), Sampling(4), "another tokenizer"),
        (PROMPT, Sampling(POSITIONS), f"Set max_tokens to at most {POSITIONS - len(PROMPT)}"),
        (PROMPT, Sampling(4, -1.0), "temperature is -1.0"),
    ],
)
async def test_a_bad_request_is_a_clear_error(served: Hosted, prompt: Any, sampling: Sampling, why: str) -> None:
    with pytest.raises(DataError, match=why):
        await served.engine.sample(prompt, 1, sampling, [1], LONG_S)


async def test_new_weights_from_a_directory_are_those_that_it_samples_from(served: Hosted, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "qwen2", seed=5)  # tied: the output layer must follow the embedding
    with pytest.raises(AtroposError, match="only while it is paused"):
        await served.engine.load_weights(other)
    waiting = asyncio.ensure_future(served.engine.sample(PROMPT, 8, Sampling(400, 0.3), range(8), LONG_S))
    await until_running(served, waiting)
    await served.engine.pause()
    with pytest.raises(ConfigError, match="cannot read a model"):
        await served.engine.load_weights(tmp_path)
    await served.engine.load_weights(other)
    await served.engine.resume(1)
    made = await served.engine.sample(PROMPT, 4, Sampling(30), range(4), LONG_S)
    assert difference(other, PROMPT, made) <= 1e-4 < 0.5 < difference(served.model, PROMPT, made)
    for one in await waiting:
        whole = [np.concatenate([PROMPT, one.tokens])]
        old, new = (reference(model, whole, 0.3)[0][len(PROMPT) :] for model in (served.model, other))
        np.testing.assert_allclose(one.logprobs, np.where(one.policy_version == 0, old, new), atol=1e-4)
    await served.engine.pause()
    await served.engine.load_weights(served.model)
    await served.engine.resume(0)
    made = await served.engine.sample(PROMPT, 2, Sampling(30), range(2), LONG_S)
    assert difference(served.model, PROMPT, made) <= 1e-4
