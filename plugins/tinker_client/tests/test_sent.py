"""What the server is sent, option by option; a stand-in writes it down."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import CheckpointError, ConfigError, DeadlineExceeded, RemoteError
from atropos_core.interfaces import Engine
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Sampling, tokens
from atropos_tinker_client.bridge import TinkerBridge
from atropos_tinker_client.config import TinkerBridgeOptions, TinkerEngineOptions, TinkerTrainerOptions
from atropos_tinker_client.engine import TinkerEngine
from atropos_tinker_client.engine_extension import EngineExtension
from atropos_tinker_client.trainer import TinkerTrainer
from atropos_tinker_client.trainer_extension import TrainerExtension
from plugins.tinker_client.tests.sdk import Record
from plugins.tinker_client.tests.test_losses import make_batch

KEY = "tml-a-secret-of-the-user"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    made = Record()
    monkeypatch.setitem(sys.modules, "tinker", made)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    return made


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return RunContext(tmp_path, load_plugins().resolve_model("tiny", download=False).directory, seed=7, max_staleness=3)


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


async def trained(context: RunContext, **options: Any) -> TinkerTrainer:
    trainer = TinkerTrainer(TinkerTrainerOptions(**options), context)
    await trainer.open()
    await trainer.step(make_batch()[0], nothing)
    return trainer


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": "dapo"}, {"loss": "cispo"}, {"loss": "gspo"}, {"loss": "reinforce"}, {"average": "token"}, {"clip_low": 0.1},
        {"clip_high": 0.4}, {"rank": 4}, {"train_attention": False}, {"train_mlp": False}, {"train_head": False},
        {"learning_rate": 1e-3}, {"betas": (0.8, 0.95)}, {"eps": 1e-6}, {"weight_decay": 0.1}, {"max_grad_norm": 0.0},
    ],
    ids=str,
)  # fmt: skip
async def test_changing_an_option_changes_what_the_server_is_sent(
    record: Record, context: RunContext, changed: dict[str, Any]
) -> None:
    await trained(context)
    first, record.sent = record.sent, []
    await trained(context)
    again, record.sent = record.sent, []
    await trained(context, **changed)
    assert first == again != record.sent


async def test_the_divisor_of_a_constant_average_scales_what_is_sent(record: Record, context: RunContext) -> None:
    sent = []
    for length in (10, 20):
        record.sent = []
        await trained(context, loss="dr_grpo", loss_length=length)
        sent.append([one["advantages"] for one in record.sent[1][1][2]])
    for first, second in zip(*sent, strict=True):
        np.testing.assert_allclose(first, 2 * np.array(second), rtol=1e-6)


async def test_parameters_change_only_inside_writing_and_gspo_looks_before(record: Record, context: RunContext) -> None:
    at: list[int] = []

    @asynccontextmanager
    async def writing() -> AsyncIterator[None]:
        at.append(len(record.sent))
        yield
        at.append(len(record.sent))

    trainer = TinkerTrainer(TinkerTrainerOptions(loss="gspo"), context)
    await trainer.open()
    metrics = await trainer.step(make_batch()[0], writing)
    assert [call for call, _ in record.sent] == ["create", "forward", "forward_backward", "optim_step"] and at == [3, 4]
    assert metrics["alignment/max_abs_logprob_diff"] > 0.1 and np.isfinite(metrics["loss"])
    values = await trainer.token_values()
    assert np.isfinite(values["trainer_logprobs"]).sum() == make_batch()[0].sampled.sum()


async def test_a_model_must_be_named_if_the_server_offers_several(record: Record, context: RunContext) -> None:
    record.models = ("org/small", "org/large")
    for role, made in (
        ("trainer", TinkerTrainer(TinkerTrainerOptions(), context)),
        ("engine", TinkerEngine(TinkerEngineOptions(), context)),
    ):
        with pytest.raises(ConfigError, match=f"{role}.base_model names none of them: org/small, org/large"):
            await made.open()
    with pytest.raises(ConfigError, match="has no model 'org/other'"):
        await TinkerTrainer(TinkerTrainerOptions(base_model="org/other"), context).open()
    await trained(context, base_model="org/large")
    await TinkerEngine(TinkerEngineOptions(base_model="org/small"), context).open()
    named = [given["base_model"] for call, given in record.sent if call in ("create", "sampler")]
    assert named == ["org/large", "org/small"]


async def test_the_dtype_of_the_server_bounds_the_alignment(record: Record, context: RunContext) -> None:
    for dtype in ("float32", "bfloat16"):
        info = await TinkerTrainer(TinkerTrainerOptions(dtype=dtype), context).open()  # type: ignore[arg-type]
        assert info.dtype == dtype and info.parameters is None


async def test_a_server_that_fails_is_an_error_without_the_key(record: Record, context: RunContext) -> None:
    trainer = await trained(context)

    async def fail(adam: Any) -> Any:
        raise record.TinkerError(f"401: the key {KEY} is not known")  # type: ignore[attr-defined]

    trainer.client.optim_step = fail
    with pytest.raises(RemoteError, match=r"has failed an optimizer step: TinkerError: 401: the key \[key\]") as failed:
        await trainer.step(make_batch()[0], nothing)
    assert KEY not in repr(failed.value) and failed.value.__cause__ is None


async def test_a_checkpoint_names_the_state_at_the_server(record: Record, context: RunContext, tmp_path: Path) -> None:
    trainer = await trained(context)
    with pytest.raises(CheckpointError, match="names no state that the Tinker server has saved"):
        await trainer.restore(tmp_path)
    await trainer.save(tmp_path)
    text = (tmp_path / "tinker.json").read_text()
    assert KEY not in text
    await trainer.restore(tmp_path)
    call, path = record.sent[-1]
    assert call == "restore" and path in text


async def test_each_continuation_has_its_own_seed_and_all_stop_ids(record: Record, context: RunContext) -> None:
    engine = TinkerEngine(TinkerEngineOptions(concurrency=2), context)
    await engine.open()
    made = await engine.sample(tokens([5, 9]), 5, Sampling(8, stop_ids=(40,)), range(3, 8), 10)
    sent = [given for call, given in record.sent if call == "sample"]
    assert [one["seed"] for one in sent] == [3, 4, 5, 6, 7] and record.most_at_once == 2
    assert all(40 in one["stop"] and len(one["stop"]) > 1 and one["top_k"] == -1 for one in sent)
    assert all(one.tokens.tolist() == [5, 2] and one.finish == "stop" for one in made)
    await engine.pause()
    with pytest.raises(DeadlineExceeded, match="has sampled 0 of 1"):
        await engine.sample(tokens([5]), 1, Sampling(8), [0], 0.05)
    await engine.close()
    await engine.close()


class Here:
    """An endpoint in this process."""

    host = ""

    def __init__(self, extension: Any, *, delay_s: float = 0) -> None:
        self._extension, self._delay_s = extension, delay_s

    async def load_extension(self, reference: str) -> None: ...

    async def call(self, method: str, *arguments: Any, descriptors: Any = (), deadline_s: float = 60.0) -> Any:
        async with asyncio.timeout(deadline_s):
            await asyncio.sleep(self._delay_s)
            return await getattr(self._extension, method)(*arguments), []


async def bridged(context: RunContext, *, delay_s: float = 0, **options: Any) -> tuple[TinkerBridge, TinkerEngine]:
    trainer = TinkerTrainer(TinkerTrainerOptions(), context)
    engine = TinkerEngine(TinkerEngineOptions(), context)
    await trainer.open()
    await engine.open()
    engine.endpoint = Here(EngineExtension(engine))
    engines: list[Engine] = [engine]
    bridge = TinkerBridge(TinkerBridgeOptions(**options), context)
    await bridge.connect(Here(TrainerExtension(trainer), delay_s=delay_s), engines)
    return bridge, engine


async def test_versions_are_published_as_often_and_kept_as_long_as_the_options_say(
    record: Record, context: RunContext
) -> None:
    bridge, engine = await bridged(context, every=2, ttl_hours=3)
    seen = []
    for version in range(1, 6):
        async with bridge.writing(version):
            pass
        seen.append(engine.version)
    assert seen == [1, 2, 2, 4, 4]
    assert [given for call, given in record.sent if call == "publish"] == [3 * 3600] * 4
    paths = [given["model_path"] for call, given in record.sent if call == "sampler" and "model_path" in given]
    assert len(set(paths)) == 4 and all("/sampler_weights/atropos-v" in path for path in paths)
    (made,) = await engine.sample(tokens([5]), 1, Sampling(8), [0], 10)
    assert made.policy_version.tolist() == [4, 4]


async def test_a_publication_has_a_deadline(record: Record, context: RunContext) -> None:
    with pytest.raises(TimeoutError):
        await bridged(context, delay_s=30, deadline_s=0.05)
