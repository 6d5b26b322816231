"""Sampling with an engine that does not offer everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.state.checkpoints import Checkpoints
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.samplers import Samplers
from atropos_tinker_api.work.operations import Limits
from atropos_tinker_api.work.sampling import SamplingWork


class Unscored:
    """An engine that samples, but scores only at temperature 1, as vLLM does."""

    async def sample_with(self, name: Any, prompt: Any, n: int, sampling: Any, seeds: Any, deadline_s: float) -> Any:
        made = np.array([5], np.int32)
        return [Completion(made, np.zeros(1, np.float32), np.zeros(1, np.int32), "length", sampling.temperature)] * n

    async def top_logprobs_with(self, name: Any, sequences: Any, k: int, temperature: float) -> Any:
        raise NotImplementedError(f"given tokens are scored only at temperature 1: {temperature:g} was requested")


async def test_what_an_engine_does_not_score_is_refused_with_its_reason(tiny: str, tmp_path: Path) -> None:
    samplers = Samplers(tmp_path / "samplers", Checkpoints(tmp_path / "models"), 1)
    (tmp_path / "samplers").mkdir()
    sampler = samplers.create("session", 0, tiny, None)
    engine: Any = Unscored()
    work = SamplingWork(engine, samplers, ChatTokenizer(Path(tiny)), Limits(64, 64), 1)
    given = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]},
        "sampling_params": {"max_tokens": 2, "temperature": 0.5},
    }
    for seq, (more, expected) in enumerate(((0, Kind.DONE_PROTOBUF), (2, Kind.FAILED))):
        body = given | {"topk_sample_logprobs": more}
        id, _ = work.submit(sampler, seq, json.dumps(body).encode(), Fields(body))
        found = await work.result(id, 30.0)
        assert found is not None and found[0] == expected
    assert json.loads(found[1]) == {
        "error": "given tokens are scored only at temperature 1: 0.5 was requested",
        "category": "user",
    }
    await work.close()
