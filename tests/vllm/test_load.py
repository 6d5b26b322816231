"""Many publishes while 32 requests are in flight at every moment. `make soak` has 200, and adapter swaps as well."""

from __future__ import annotations

import numpy as np
import pytest

from atropos_core.types import Sampling
from tests.vllm.ends import connected, five_updates
from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference

pytestmark = pytest.mark.timeout(400)

PUBLISHES, CONCURRENT = 40, 32
TRAINER = {"learning_rate": 1e-3, "old_logprobs": "recompute"}


async def test_publishing_in_place_loses_nothing_and_every_token_is_of_the_version_that_it_names(models, tmp_path):
    async with connected(models["qwen3"], "ipc", tmp_path / "run", {"trainer": TRAINER}) as ends:
        load = await publish_under_load(ends, tmp_path / "saved", publishes=PUBLISHES, concurrent=CONCURRENT)
    assert len(load.answers) == load.requests >= PUBLISHES
    assert load.mixed > PUBLISHES / 10, "requests were in flight over a publish"
    assert set(load.bytes_copied) == {0}
    worst, compared = worst_difference(load, tmp_path / "saved", transformers_scorer)
    assert compared == load.tokens
    assert worst <= 1e-4, worst
    print(
        f"{PUBLISHES} publishes, p95 {load.p95_s():.3f} s; {compared} tokens, {load.mixed} of {len(load.answers)} mixed"
    )


async def test_sixteen_bit_weights_agree_within_their_rounding_while_the_policy_moves(models, tmp_path):
    half = {"engine": {"dtype": "bfloat16"}, "trainer": {"dtype": "bfloat16"}}
    async with connected(models["qwen3"], "ipc", tmp_path / "run", half) as ends:
        found = await five_updates(ends)
        metrics = await ends.update(Sampling(max_tokens=24))
    assert ends.info.dtype == "bfloat16"
    assert set(found.bytes_copied) == {0}
    assert np.max(found.difference) <= 0.15, "a run stops at 0.5"
    assert found.probe_shift > 0.5
    assert 0 < metrics["alignment/mean_abs_logprob_diff"] < metrics["alignment/max_abs_logprob_diff"] <= 0.15
