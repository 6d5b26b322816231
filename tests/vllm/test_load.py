"""Two hundred publishes while 32 requests are in flight at every moment."""

from __future__ import annotations

import pytest

from tests.vllm.ends import connected
from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference

pytestmark = pytest.mark.timeout(400)

PUBLISHES, CONCURRENT = 200, 32
TRAINER = {"learning_rate": 1e-3, "old_logprobs": "recompute"}


async def test_publishing_in_place_loses_nothing_and_every_token_is_of_the_version_that_it_names(models, tmp_path):
    async with connected(models["qwen3"], "ipc", tmp_path / "run", {"trainer": TRAINER}) as ends:
        load = await publish_under_load(ends, tmp_path / "saved", publishes=PUBLISHES, concurrent=CONCURRENT)
    assert len(load.answers) == load.requests >= PUBLISHES
    assert load.mixed > PUBLISHES / 10, "requests were in flight over a publish"
    assert set(load.bytes_copied) == {0}
    worst, compared = worst_difference(load, tmp_path / "saved", transformers_scorer)
    assert compared == sum(len(answer.completion.tokens) for answer in load.answers)
    assert worst <= 1e-4, worst
