"""`engine.speculation = "ngram"` on a real vLLM: what is sampled has the distribution, logprobs and versions that it has without."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import DataError
from atropos_core.types import Completion, Sampling, tokens
from tests.vllm.ends import connected, five_updates
from tests.vllm.hosted import Hosted, count, difference, hosted, reference, start, until_running
from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference
from tests.vllm.models import EOS, POSITIONS, VOCABULARY, make_adapter, make_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

OPTIONS: dict[str, Any] = {"speculation": "ngram", "prompt_lookup_min": 1}
RANDOM = np.random.default_rng(4)
PROMPTS = [tokens(np.tile(RANDOM.integers(3, VOCABULARY, 4 + i), 3)) for i in range(4)]  # they repeat themselves
PROMPT = PROMPTS[0]
LONG_S = 120.0
CLOSE = 1e-4
OFTEN = 0.5  # a temperature at which this model repeats itself, so that many proposals are accepted


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Hosted]]:
    """One that speculates, and one that does not."""
    folder = tmp_path_factory.mktemp("run")
    made = await asyncio.gather(
        start(models["qwen2"], folder / "speculating", max_num_seqs=64, **OPTIONS),
        start(models["qwen2"], folder / "plain", max_num_seqs=64),
    )
    yield list(made)
    await asyncio.gather(*(one.engine.close() for one in made))


@pytest.fixture(scope="module")
def served(servers: list[Hosted]) -> Hosted:
    return servers[0]


async def accepted(served: Hosted) -> int:
    return await count(served, "spec_decode_num_accepted_tokens")


async def test_greedy_replies_are_those_without_speculation(servers: list[Hosted]) -> None:
    before = await accepted(servers[0])
    made = [
        await asyncio.gather(*(one.engine.sample(prompt, 1, Sampling(100, 0.0), [1], LONG_S) for prompt in PROMPTS))
        for one in servers
    ]
    for [one], [other] in zip(*made, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert await accepted(servers[0]) - before > 100


@pytest.mark.parametrize("temperature", [1.0, OFTEN, 0.0])
async def test_logprobs_of_what_it_samples_are_those_of_transformers(served: Hosted, temperature: float) -> None:
    before = await accepted(served)
    calls = [served.engine.sample(prompt, 3, Sampling(60, temperature), [1, 2, 3], LONG_S) for prompt in PROMPTS]
    others = served.engine.sample(PROMPT[:3], 4, Sampling(50, 1.3, top_p=0.8), range(4), LONG_S)
    *made, _ = await asyncio.gather(*calls, others)  # in a batch with rows that are sampled otherwise
    gaps = [difference(served.model, prompt, found) for prompt, found in zip(PROMPTS, made, strict=True)]
    assert max(gaps) <= CLOSE
    assert await accepted(served) > before


def probabilities(directory: Path, prompt: Any, reply: Any, temperature: float) -> Any:
    """f64[T, V] at each token of the reply, by transformers in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, local_files_only=True).eval()
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))[None]).logits[0]
    return torch.softmax(logits[len(prompt) - 1 : -1] / temperature, -1).numpy()


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.7}], ids=str)
async def test_what_a_cut_keeps_is_what_the_definition_keeps(served: Hosted, cut: dict[str, Any]) -> None:
    """As without speculation: of transformers' probabilities, in the order of `types.Sampling`."""
    before, sampling = await accepted(served), Sampling(60, OFTEN, **cut)
    replies = [await served.engine.sample(prompt, 2, sampling, [1, 2], LONG_S) for prompt in PROMPTS]
    assert await accepted(served) - before > 10
    for prompt, made in zip(PROMPTS, replies, strict=True):
        for one in made:
            check_kept(one, probabilities(served.model, prompt, one.tokens, OFTEN), sampling)


def check_kept(one: Completion, whole: Any, sampling: Sampling) -> None:
    assert one.kept is not None and len(one.kept.sizes) == len(one.tokens)
    parts = np.split(one.kept.token_ids, np.cumsum(one.kept.sizes)[:-1])
    for p, kept, token, logprob in zip(whole, parts, one.tokens, one.logprobs, strict=True):
        order = np.argsort(-p, kind="stable")[: sampling.most_kept]
        mass = np.cumsum(p[order]) / p[order].sum()
        expected = order[: int(np.searchsorted(mass, sampling.top_p)) + 1]
        assert len(set(expected.tolist()) ^ set(kept.tolist())) <= 1, "only a token at the boundary"
        assert token in kept and float(np.log(p[token] / p[kept].sum())) == pytest.approx(float(logprob), abs=CLOSE)


DRAWS = 4000
KEPT = 3  # tokens at each position, so that there are 27 replies of three tokens


def proposal(sequence: list[int], most: int = 4) -> list[int]:
    """Return vLLM's proposal: find the longest end of the sequence that also occurs earlier, and take what follows its first occurrence."""
    for length in range(min(most, len(sequence) - 1), 0, -1):
        for at in range(len(sequence) - length):
            if sequence[at : at + length] == sequence[-length:]:
                return sequence[at + length : at + length + 4]
    return []


class Oracle:
    """Probabilities of replies by transformers in float64, of the KEPT likeliest tokens at each position."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()

    def following(self, sequences: list[list[int]]) -> list[dict[int, float]]:
        with torch.inference_mode():
            logits = self.model(torch.tensor(sequences)).logits[:, -1]
        best = logits.topk(KEPT)
        shares = best.values.softmax(-1)
        return [dict(zip(ids.tolist(), p.tolist(), strict=True)) for ids, p in zip(best.indices, shares, strict=True)]

    def replies(self, prompt: list[int]) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            at = list(found)
            nexts = self.following([[*prompt, *reply] for reply in at])
            found = {
                (*reply, token): found[reply] * p
                for reply, next_ in zip(at, nexts, strict=True)
                for token, p in next_.items()
            }
        return found

    def accepted(self, prompt: list[int]) -> float:
        """How probable it is that the first token that is proposed is accepted."""
        first = self.following([prompt])[0]
        seconds = self.following([[*prompt, token] for token in first])
        proposed = [proposal([*prompt, token]) for token in first]
        return sum(
            p * next_.get(drafts[0], 0.0)
            for p, next_, drafts in zip(first.values(), seconds, proposed, strict=True)
            if drafts
        )


async def test_replies_are_as_frequent_as_the_model_says(served: Hosted) -> None:
    """Pearson's chi-square of 4000 replies of three tokens, after a prompt for which proposals are accepted about half of the time."""
    oracle = Oracle(served.model)
    draw = np.random.default_rng(8)
    candidates = [np.repeat(draw.permutation(np.arange(3, VOCABULARY))[:60], 2).tolist() for _ in range(40)]
    prompt = min(candidates, key=lambda one: abs(oracle.accepted(one) - 0.5))
    share = oracle.accepted(prompt)
    assert 0.25 < share < 0.75
    expected = {reply: DRAWS * p for reply, p in oracle.replies(prompt).items()}
    before, proposed = await accepted(served), await count(served, "spec_decode_num_drafts")
    calls = [
        served.engine.sample(tokens(prompt), 50, Sampling(3, 1.0, top_k=KEPT), range(at, at + 50), LONG_S)
        for at in range(0, DRAWS, 50)
    ]
    made = list(itertools.chain(*await asyncio.gather(*calls)))
    assert (
        await accepted(served) - before > 0.2 * (await count(served, "spec_decode_num_drafts") - proposed) > 0.1 * DRAWS
    )
    found = Counter(tuple(one.tokens.tolist()) for one in made if len(one.tokens) == 3)
    assert sum(found.values()) == DRAWS and found.keys() <= expected.keys()
    cells = [(found[reply], mean) for reply, mean in expected.items() if mean >= 5]
    rest = [(found[reply], mean) for reply, mean in expected.items() if mean < 5]
    if rest:
        cells.append((sum(n for n, _ in rest), sum(mean for _, mean in rest)))
    chi_square = sum((n - mean) ** 2 / mean for n, mean in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty (1931): the cube root of a chi-square over its degrees of freedom is close to normal
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    print(
        f"{share:.2f} accepted, chi-square {chi_square:.1f} with {freedom} degrees of freedom: {deviation:.2f} deviations"
    )
    assert freedom >= 10 and deviation < 3.1  # one in a thousand; the seeds are fixed


async def test_the_same_seed_draws_the_same_tokens_whoever_samples_beside_it(served: Hosted) -> None:
    alone = await served.engine.sample(PROMPT, 2, Sampling(60, OFTEN), [11, 2**62 + 5], LONG_S)
    crowd = await asyncio.gather(
        *(served.engine.sample(PROMPTS[k % 4][: 3 + k], 3, Sampling(50, 0.8), range(3), LONG_S) for k in range(8)),
        served.engine.sample(PROMPT, 2, Sampling(60, OFTEN), [11, 2**62 + 5], LONG_S),
    )
    for one, again in zip(alone, crowd[-1], strict=True):
        np.testing.assert_array_equal(one.tokens, again.tokens)
    assert alone[0].tokens.tolist() != alone[1].tokens.tolist()


async def test_a_reply_ends_within_the_tokens_of_one_step(served: Hosted) -> None:
    """At its first stop token, which is part of it, or at max_tokens, also in the middle of several accepted tokens."""
    [whole] = await served.engine.sample(PROMPT, 1, Sampling(60, 0.0), [5], LONG_S)
    for length in range(1, 25):
        [cut] = await served.engine.sample(PROMPT, 1, Sampling(length, 0.0), [5], LONG_S)
        assert (cut.tokens.tolist(), cut.finish) == (whole.tokens[:length].tolist(), "length")
    for stop in sorted(set(whole.tokens.tolist())):
        [cut] = await served.engine.sample(PROMPT, 1, Sampling(60, 0.0, stop_ids=(stop,)), [5], LONG_S)
        first = int((whole.tokens == stop).argmax())
        assert (cut.tokens.tolist(), cut.finish) == (whole.tokens[: first + 1].tolist(), "stop")
        np.testing.assert_allclose(cut.logprobs, whole.logprobs[: first + 1], atol=1e-5)
    ended = await served.engine.sample(PROMPT, 32, Sampling(POSITIONS - len(PROMPT), 1.5), range(32), LONG_S)
    assert {one.finish for one in ended} >= {"stop"}
    for one in ended:
        assert (one.tokens == EOS).sum() == (one.finish == "stop")
        assert one.tokens[-1] == EOS if one.finish == "stop" else len(one.tokens) == POSITIONS - len(PROMPT)


async def test_each_token_has_the_version_and_logprob_of_the_weights_that_sampled_it(
    served: Hosted, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", "qwen2", seed=5)
    for again in range(8):
        before = await accepted(served)
        waiting = asyncio.ensure_future(served.engine.sample(PROMPT, 8, Sampling(400, 0.3), range(8), LONG_S))
        await until_running(served, waiting)
        await served.engine.pause()
        late = asyncio.ensure_future(served.engine.sample(PROMPT, 1, Sampling(3), [1], LONG_S))
        await asyncio.sleep(0.3)
        assert not late.done(), "nothing is computed while paused"
        await served.engine.load_weights(other)
        await served.engine.resume(again + 1)
        made = await waiting
        assert set((await late)[0].policy_version.tolist()) == {again + 1}
        mixed = [one for one in made if len(set(one.policy_version.tolist())) == 2]
        for one in made:
            assert (np.diff(one.policy_version) >= 0).all()
            whole = [np.concatenate([PROMPT, one.tokens])]
            old, new = (reference(model, whole, 0.3)[0][len(PROMPT) :] for model in (served.model, other))
            expected = np.where(one.policy_version == again, old, new)
            np.testing.assert_allclose(one.logprobs, expected, atol=CLOSE)
        assert await accepted(served) > before
        await served.engine.pause()
        await served.engine.load_weights(served.model)
        await served.engine.resume(again + 1)
        if mixed:
            break
    assert mixed, "a publish comes in the middle of replies"


async def test_given_tokens_are_scored_as_transformers_scores_them(served: Hosted) -> None:
    sequences = [*PROMPTS, tokens([4]), tokens(np.random.default_rng(1).integers(3, VOCABULARY, size=40))]
    beside = asyncio.ensure_future(served.engine.sample(PROMPT, 4, Sampling(300, OFTEN), range(4), LONG_S))
    await until_running(served, beside)
    found = await served.engine.logprobs(sequences)
    for ours, theirs in zip(found, reference(served.model, sequences), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=CLOSE)
    assert difference(served.model, PROMPT, await beside) <= CLOSE


async def test_a_request_with_min_p_is_refused(served: Hosted) -> None:
    with pytest.raises(DataError, match=r"min_p = 0.1, but vLLM does not cut by min_p while it speculates"):
        await served.engine.sample(PROMPT, 1, Sampling(4, min_p=0.1), [1], LONG_S)


async def test_it_counts_what_was_proposed_and_accepted_since_the_last_time(servers: list[Hosted]) -> None:
    served, plain = servers
    names = {"drafts": "drafts", "proposed": "draft_tokens", "accepted": "accepted_tokens"}
    await served.engine.step_metrics()
    before = {name: await count(served, f"spec_decode_num_{of}") for name, of in names.items()}
    await served.engine.sample(PROMPT, 4, Sampling(100, OFTEN), range(4), LONG_S)
    async with asyncio.timeout(60):  # the server counts after it has answered
        metrics = await served.engine.step_metrics()
        while not metrics["drafted_tokens"]:
            metrics = await served.engine.step_metrics()
    again = await served.engine.step_metrics()
    now = {name: await count(served, f"spec_decode_num_{of}") - before[name] for name, of in names.items()}
    assert metrics["drafted_tokens"] + again["drafted_tokens"] == now["proposed"] > 0
    if not again["drafted_tokens"]:
        assert metrics["draft_acceptance"] == pytest.approx(now["accepted"] / now["proposed"])
        assert metrics["acceptance_length"] == pytest.approx(1 + now["accepted"] / now["drafts"])
        assert again == {"drafted_tokens": 0.0}
    assert await plain.engine.step_metrics() == {}


async def test_it_sleeps_between_updates(models: dict[str, Path], tmp_path: Path) -> None:
    async with hosted(models["qwen2"], tmp_path, enable_sleep_mode=True, **OPTIONS) as served:
        before = await served.engine.sample(PROMPT, 4, Sampling(60, OFTEN), range(4), LONG_S)
        await served.engine.release_cache()
        again = await served.engine.sample(PROMPT, 4, Sampling(60, OFTEN), range(4), LONG_S)
        for one, other in zip(before, again, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
        assert await accepted(served) > 10


@pytest.mark.parametrize("bridge", ["ipc", "lora"])
async def test_engine_and_trainer_agree_while_weights_are_published(
    bridge: str, models: dict[str, Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"engine": {"enforce_eager": True, **OPTIONS}}
    if bridge == "lora":
        changes["trainer"] = {"lora": {"rank": 8, "learning_rate": 1e-2}, "old_logprobs": "recompute"}
    async with connected(models["qwen2"], bridge, tmp_path, changes) as ends:
        load = await publish_under_load(ends, tmp_path / "saved", publishes=6, concurrent=8)
        assert len(load.answers) == load.requests
        assert bridge == "ipc" or load.mixed == 0
        worst, compared = worst_difference(load, tmp_path / "saved", transformers_scorer)
        print(
            f"{bridge}: {compared} tokens under 6 publishes {worst:.1e} nats off, {load.mixed} replies of two versions"
        )
        assert compared == load.tokens and worst <= CLOSE
        seen = await five_updates(ends)
        assert np.max(seen.difference) <= CLOSE and seen.probe_shift > 0.5
        assert (await ends.parts.engine_metrics())["engine/drafted_tokens"] > 0


async def test_named_adapters_are_sampled_and_scored_as_peft_does(tmp_path: Path) -> None:
    from tests.vllm.test_named_adapters import ROOM, check

    model = make_model(tmp_path / "model", "qwen3")
    adapters: dict[str | None, Path] = {
        "all": make_adapter(tmp_path / "all", model, seed=1),
        "head": make_adapter(tmp_path / "head", model, seed=2, targets=["q_proj", "lm_head"]),
    }
    async with hosted(model, tmp_path / "run", **ROOM, max_loras=3, max_lora_rank=8, **OPTIONS) as served:
        for name, directory in adapters.items():
            assert name is not None
            await served.engine.add_adapter(directory, name)
        assert await check(served.engine, model, adapters | {None: model}) <= CLOSE
        assert await count(served, "spec_decode_num_drafts") > 10
