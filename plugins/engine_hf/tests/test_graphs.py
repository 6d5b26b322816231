"""Recorded decode steps sample what other steps sample, and a step makes the host wait for the device once.

A tape stands for CUDA graphs, and a device that counts for the GPU: tests/counted_device.py. tests/gpu has a check for a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atropos_core.errors import FitError
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Completion, Sampling, tokens
from atropos_engine_hf import plugin
from atropos_engine_hf.batch import RunningBatch, SequenceState
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.decoder import SlotDecoder
from atropos_engine_hf.graphs import StepGraphs, rounded_columns, rounded_rows
from atropos_engine_hf.loading import load_model
from plugins.engine_hf.tests.test_adapter import make_adapter
from tests.counted_device import Tape, counting, put

PROMPTS = [tokens(row) for row in ([5, 9, 33], [7], range(3, 60), [3, 60, 8, 8, 12])]
CUT = [Sampling(24, top_p=0.8), Sampling(20, temperature=0.7, top_k=5), Sampling(12), Sampling(16, min_p=0.05)]
SETTINGS = {
    "temperature 1": [Sampling(14)],
    "several temperatures": [Sampling(14, temperature=0.7), Sampling(12, temperature=1.3), Sampling(9)],
    "greedy": [Sampling(14, temperature=0.0), Sampling(10)],
    "cut": CUT,
}
BEFORE = 250  # tokens that a row has sampled already, so that it soon needs another block of uniforms


@pytest.fixture(scope="module")
def long_model(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Path = make_model(tmp_path_factory.mktemp("long"), max_position_embeddings=512)
    return model


def sampled(
    model: Path, settings: Sequence[Sampling], *, on_device: bool = False, tape: Tape | None = None
) -> tuple[dict[int, Completion], list[dict[str, int]]]:
    """Return the completions of a batch by row, and what the host waited for in each step."""
    loaded = load_model(model, "float32", "cpu")
    if on_device:
        put(loaded)
    found: dict[int, Completion] = {}
    waits = []
    with counting() if on_device else nullcontext() as counted:
        decoder = SlotDecoder(loaded)
        batch = RunningBatch(decoder, [], 256, 1e9, 4096, None if tape is None else StepGraphs(decoder, tape))
        rows = [row(at, settings[at % len(settings)]) for at in range(7)]
        found |= {one.owner: made for one, made in batch.admit(rows[:4], 0)}
        while batch.rows:
            if counted is not None:
                counted.waits.clear()
            found |= {one.owner: made for one, made in batch.step(0)}
            if counted is not None:
                waits.append(dict(counted.waits))
            if rows[4:]:
                found |= {one.owner: made for one, made in batch.admit(rows[4:], 0)}  # longer rows join later
                del rows[4:]
    return found, waits


def row(at: int, sampling: Sampling) -> SequenceState:
    """Return a row that was in a batch before."""
    prompt, before = PROMPTS[at % 4], tokens(np.random.default_rng(at).integers(3, 64, BEFORE + at))
    made = SequenceState(
        at,
        0,
        prompt,
        at,
        replace(sampling, max_tokens=len(before) + sampling.max_tokens),
        np.concatenate([prompt, before]),
    )
    made.logprobs, made.versions = np.zeros(len(before), np.float32), np.zeros(len(before), np.int32)
    made.kept = [None] * len(before)
    return made


def check_equal(found: dict[Any, Completion], expected: dict[Any, Completion]) -> None:
    assert found.keys() == expected.keys()
    for row, one in found.items():
        other = expected[row]
        assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.kept is None) == (other.kept is None)
        if one.kept is not None and other.kept is not None:
            assert one.kept.sizes.tolist() == other.kept.sizes.tolist()
            assert one.kept.token_ids.tolist() == other.kept.token_ids.tolist()


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_decode_step_waits_for_the_device_once(long_model: Path, name: str, recorded: bool) -> None:
    expected, _ = sampled(long_model, SETTINGS[name])
    tape = Tape() if recorded else None
    found, waits = sampled(long_model, SETTINGS[name], on_device=True, tape=tape)
    check_equal(found, expected)
    assert len(waits) >= 13 and all(one == {"copy to the host": 1} for one in waits), "also when rows come and go"
    assert tape is None or tape.replayed > len(waits) / 2


def test_the_device_counts_what_a_step_could_wait_for() -> None:
    with counting() as counted:
        there = torch.from_numpy(np.arange(5.0)).to("meta", non_blocking=True)
        assert not counted.waits
        torch.from_numpy(np.arange(5.0)).to("meta")
        assert float(there.sum()) == 10 and there[there > 2].cpu().tolist() == [3, 4]
        there.copy_(torch.zeros(5), non_blocking=True)
        there.copy_(torch.zeros(5))
    assert counted.waits == {
        "copy to the device": 1,
        "aten._local_scalar_dense.default": 1,
        "aten.index.Tensor by a mask": 1,
        "copy to the host": 1,
        "copy between host and device": 1,
    }


async def calls(engine: Any, seed: int = 0) -> list[Completion]:
    """Sample with several prompts, some of which come while others run."""
    first = [
        asyncio.ensure_future(engine.sample(prompt, 3, CUT[at], range(seed, seed + 3), 60))
        for at, prompt in enumerate(PROMPTS)
    ]
    while not engine._policy.batch.rows:
        await asyncio.sleep(0)
    later = [engine.sample(PROMPTS[2], 20, Sampling(40), range(seed, seed + 20), 60)]
    return [one for call in await asyncio.gather(*first, *later) for one in call]


def numbered(found: Sequence[Completion]) -> dict[int, Completion]:
    return dict(enumerate(found))


@pytest.fixture
async def both(open_engine: Any, tiny: Path) -> tuple[Any, Any, Tape]:
    """An engine, one that records its steps, and the tape."""
    tape = Tape()
    return await open_engine(tiny), await open_engine(tiny, capture=tape), tape


async def test_an_engine_that_records_its_steps_samples_the_same(both: tuple[Any, Any, Tape]) -> None:
    plain, recording, tape = both
    check_equal(numbered(await calls(recording)), numbered(await calls(plain)))
    assert tape.recorded < 12 and tape.replayed > 20
    check_equal(numbered(await calls(recording, 7)), numbered(await calls(plain, 7)))


async def test_weights_that_change_in_place_are_those_of_the_next_replay(both: tuple[Any, Any, Tape]) -> None:
    plain, recording, tape = both
    await asyncio.gather(calls(plain), calls(recording))
    recorded, replayed = tape.recorded, tape.replayed
    for engine in (plain, recording):
        await engine.pause()
        for parameter in engine.model.parameters():
            parameter.data.mul_(1.1)
        await engine.resume(1)
    check_equal(numbered(await calls(recording)), numbered(await calls(plain)))
    assert tape.recorded - recorded < tape.replayed - replayed
    assert tape.recorded <= recorded + 2, "graphs are kept"


async def test_graphs_are_recorded_again_when_weights_have_other_addresses(both: tuple[Any, Any, Tape]) -> None:
    plain, recording, _ = both
    await asyncio.gather(calls(plain), calls(recording))
    for engine in (plain, recording):
        await engine.pause()
        for parameter in engine.model.parameters():
            parameter.data = parameter.data * 1.1
        engine.weights_moved()
        await engine.resume(1)
    check_equal(numbered(await calls(recording)), numbered(await calls(plain)))


async def test_graphs_are_recorded_again_after_the_cache_was_given_back(
    both: tuple[Any, Any, Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, recording, _ = both
    expected = await calls(plain)
    await calls(recording)
    monkeypatch.setattr("atropos_engine_hf.limits.KEPT", 0)
    await recording.release_cache()
    graphs = recording._policy.batch._graphs
    assert not graphs._graphs and not graphs._weights and not graphs._state.numel(), "an update has their memory"
    check_equal(numbered(await calls(recording)), numbered(expected))


async def test_recorded_steps_use_the_adapter_of_their_batch(
    both: tuple[Any, Any, Tape], tiny: Path, tmp_path: Path
) -> None:
    plain, recording, _ = both
    one, other = (make_adapter(tiny, tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    found = []
    for engine in (plain, recording):
        made = await calls(engine)  # without an adapter, before there is one
        await engine.add_adapter(one, "one")
        for name, path in (("one", None), (None, None), ("two", other), ("one", None)):
            if path is not None:
                await engine.add_adapter(path, name)
            made += await engine.sample_with(name, PROMPTS[0], 4, Sampling(30), range(4), 60)
        await engine.remove_adapter("one")
        made += await engine.sample_with("two", PROMPTS[0], 4, Sampling(30), range(4), 60)
        await engine.load_adapter(one, 1)
        made += await calls(engine)
        await engine.load_adapter(other, 2)
        found.append(made + await calls(engine))
    check_equal(numbered(found[1]), numbered(found[0]))


async def test_experts_of_recorded_steps_are_recorded_too(open_engine: Any, make_model: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path / "mixture", "qwen3_moe")
    tape = Tape()
    engines = [await open_engine(model, announced={"router_replay": True}, capture=capture) for capture in (None, tape)]
    expected, found = [await calls(engine) for engine in engines]
    check_equal(numbered(found), numbered(expected))
    for one, other in zip(found, expected, strict=True):
        assert one.experts is not None and other.experts is not None
        assert one.experts.numbers.tolist() == other.experts.numbers.tolist()
    assert tape.replayed > 20


async def test_a_model_that_cannot_be_recorded_is_refused_when_it_is_opened(
    open_engine: Any, make_model: Any, tmp_path: Path
) -> None:
    by_length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}  # looks at the largest position
    model = make_model(tmp_path / "dynamic", "llama", rope_parameters=by_length)
    with pytest.raises(
        FitError, match="cannot record a decode step of this 'llama' model(.|\n)*engine.cuda_graphs = false"
    ):
        await open_engine(model, capture=Tape())


async def test_a_model_without_slots_is_refused(open_engine: Any, tiny: Path) -> None:
    with pytest.raises(FitError, match="'qwen3' model is decoded as a cohort(.|\n)*engine.cuda_graphs = false"):
        await open_engine(tiny, decode="cohort", capture=Tape())
    work = Workload(RunContext(tiny, tiny, devices=("cuda:0",)), 1, 1, 40, 5, prompt_tokens=20)
    with pytest.raises(FitError, match="'qwen3' model is decoded as a cohort"):
        plugin.check(HFOptions(cuda_graphs=True, decode="cohort"), work)
    plugin.check(HFOptions(cuda_graphs=True), work)


def test_the_plan_counts_what_graphs_keep(tiny: Path) -> None:
    def planned(device: str, **options: Any) -> dict[str, int]:
        work = Workload(RunContext(tiny, tiny, devices=(device,)), 1, 1, 40, 5, prompt_tokens=20)
        return {one.what: one.size_bytes for one in plugin.holds(HFOptions(**options), work)}

    assert "CUDA graphs" not in planned("cuda:0") and "CUDA graphs" not in planned("cpu", cuda_graphs=True)
    with_graphs = planned("cuda:0", cuda_graphs=True)
    assert with_graphs["CUDA graphs"] > 5 * 64 * 8 * 4, "probabilities of five rows, as they are computed"
    assert with_graphs | {"CUDA graphs": 0} == planned("cuda:0") | {"CUDA graphs": 0}


def test_few_shapes_serve_all_sizes() -> None:
    for rounded, most, shapes in ((rounded_rows, 512, 14), (rounded_columns, 8192, 20)):
        made = [rounded(count, most) for count in range(1, most + 1)]
        assert all(count <= one <= most for count, one in enumerate(made, 1)) and made == sorted(made)
        assert len(set(made)) == shapes
        assert rounded(10, 12) <= 12
    assert sorted({rounded_rows(count, 64) for count in range(1, 65)}) == [1, 2, 4, 8, 16, 32, 48, 64]
