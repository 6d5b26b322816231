"""Servers that say which experts computed each token: what they are started with, what they answer, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from atropos_core.errors import AtroposError, ConfigError, FitError, ProcessDied, RemoteError
from atropos_core.plugins.model_provider import Workload
from atropos_core.types import Sampling
from atropos_engine_vllm import command, generate, plugin
from atropos_engine_vllm.api import Api
from atropos_engine_vllm.attach import check_attached
from atropos_engine_vllm.router_replay import FLAG, check_replay

ANNOUNCED = {"router_replay": True}
NUMBERS = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)  # of a prompt of 3 tokens and a reply of 3


@pytest.fixture
def mixture(context: Any, model: Path) -> Any:
    """A context with a mixture of experts, of a trainer that asks."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    return context(announced=ANNOUNCED, devices=("cuda:0",), label="engine")


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a backend for CPUs, as a build of Triton with one does."""
    (metadata := tmp_path / "installed" / "triton_cpu-1.dist-info").mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-cpu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[triton.backends]\ncpu = triton.backends.cpu\n")
    monkeypatch.syspath_prepend(str(metadata.parent))


def encoded(numbers: Any) -> str:
    file = io.BytesIO()
    np.save(file, numbers)
    return base64.b64encode(file.getvalue()).decode()


def answer(sent: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": "stop",
        "token_ids": [4, 5, 2],
        "logprobs": {"content": [{"logprob": -0.5}] * 3},
        "weight_versions": [{"version": "1", "start": 0, "end": 3}],
        "routed_experts": sent,
    }
    return {"choices": [choice]}


def read(sent: Any) -> Any:
    return generate.completion(answer(sent), Sampling(8), None, routed_after=3).experts


def test_a_server_records_experts_only_if_the_trainer_asks(
    options: Any, context: Any, mixture: Any, tmp_path: Path
) -> None:
    assert FLAG in command.flags(options(), mixture, "bfloat16")
    assert command.environment(options(), mixture, tmp_path, "key")["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    for announced in ({}, {"router_replay": False}):
        where = context(announced=announced)
        assert FLAG not in command.flags(options(), where, "float32")
        assert "VLLM_USE_V2_MODEL_RUNNER" not in command.environment(options(), where, tmp_path, "key")
    with pytest.raises(ValidationError, match="--enable-return-routed-experts is set by the engine"):
        options(extra_args=[FLAG])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_an_answer_has_the_experts_of_prompt_and_reply_but_the_last_token(dtype: Any) -> None:
    found = read(encoded(NUMBERS.astype(dtype)))
    assert found.known.tolist() == [True] * 5 + [False]
    assert found.numbers.dtype == dtype and found.numbers.tolist() == NUMBERS.tolist()
    assert generate.completion(answer(None), Sampling(8), None).experts is None


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (None, r"(?s)does not say it: it runs without --enable-return-routed-experts.*trainer.router_replay=false"),
        ("?", "not an array in base64"),
        (base64.b64encode(b"hello").decode(), "not an array in base64"),
        (encoded(NUMBERS)[:40], "not an array in base64"),
        (encoded(np.array([{"a": 1}], object)), "not an array in base64"),
        (encoded(NUMBERS[:4]), r"shape \[4, 3, 2\] for a prompt and reply of 6 tokens, of which it computed 5"),
        (encoded(NUMBERS[:, 0]), r"shape \[5, 2\]"),
        (encoded(NUMBERS.astype(np.int32)), "of type int32"),
    ],
    ids=["none", "text", "bytes", "cut", "objects", "short", "flat", "wide"],
)
def test_an_answer_without_them_or_with_others_is_refused(sent: Any, says: str) -> None:
    with pytest.raises(RemoteError, match=says):
        read(sent)


def test_a_model_without_experts_is_refused(options: Any, context: Any, mixture: Any, model: Path) -> None:
    check_replay(options(), mixture)
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64}))
    for given in (options(), options(url="http://127.0.0.1:1")):
        with pytest.raises(
            FitError, match=r"'vllm' is to record .*has no experts(.|\n)*--set trainer.router_replay=false"
        ):
            check_replay(given, mixture)
    check_replay(options(), context())


def test_experts_without_a_prefix_cache_are_refused_before_a_server_starts(options: Any, mixture: Any) -> None:
    work = Workload(mixture, 8, 8, 64, 64)
    (mixture.model / "model.bin").touch()
    plugin.check(options(), work)
    with pytest.raises(ConfigError, match=r"engine.prefix_caching is false(.|\n)*--set engine.prefix_caching=true, or"):
        plugin.check(options(prefix_caching=False), work)


def test_on_a_cpu_a_triton_with_a_backend_for_cpus_is_needed(
    options: Any, mixture: Any, request: pytest.FixtureRequest
) -> None:
    where = replace(mixture, devices=("cpu",))
    with pytest.raises(FitError, match=r"backend for CPUs, and none is installed here(.|\n)*--engine hf"):
        check_replay(options(), where)
    check_replay(options(url="http://127.0.0.1:1"), where)
    request.getfixturevalue("triton")
    check_replay(options(), where)


async def lost(what: str) -> AtroposError:
    return ProcessDied(what)


@pytest.mark.parametrize(("recorded", "refused"), [(False, True), (True, False), (None, True)])
async def test_an_attached_server_that_does_not_record_them_is_refused_before_it_samples(
    answering: Any, mixture: Any, recorded: Any, refused: bool
) -> None:
    routes = ("/pause", "/resume", "/update_weight_version", "/collective_rpc", "/server_info", generate.PATH)
    info: dict[str, Any] = {
        "parallel_config": {"worker_extension_cls": command.EXTENSION},
        "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
        "device_config": {"device": "cuda"},
    }
    if recorded is not None:
        info["aux_output_config"] = {"enable_return_routed_experts": recorded}
    url = await answering(
        {
            "/version": {"version": "0.32.0"},
            "/openapi.json": {"paths": {route: {} for route in routes}},
            "/server_info": {"vllm_config": info},
            "/v1/models": {"data": [{"id": "theirs", "root": "/nowhere"}]},
        }
    )
    api = Api(url, None, lost)
    try:
        if not refused:
            assert (await check_attached(api, mixture, {})).served == "theirs"
            return
        with pytest.raises(FitError, match="does not record them") as error:
            await check_attached(api, mixture, {})
        assert FLAG in error.value.remedy and "VLLM_USE_V2_MODEL_RUNNER=1" in error.value.remedy
        await check_attached(api, replace(mixture, announced={}), {})
    finally:
        await api.close()
