"""Speculation by n-grams: what a server is started with, what is refused before, and what is counted. tests/vllm has it on real servers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from atropos_core.errors import AtroposError, ConfigError, DataError, FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.model_provider import Workload
from atropos_core.types import Sampling
from atropos_engine_vllm import command, plugin
from atropos_engine_vllm.api import Api
from atropos_engine_vllm.attach import check_attached
from atropos_engine_vllm.speculation import DraftCounts, check_numba, check_request, check_speculation
from atropos_engine_vllm.speculation_worker import cut, repeat_for_tokens

NGRAM = {"speculation": "ngram"}
PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="policy"}} {0}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="policy"}} {1}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="policy"}} {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="policy",position="0"}} 900.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="policy"}} 1.7e+09
"""


def test_a_server_speculates_only_if_the_option_says_so(options: Any, context: Any, tmp_path: Path) -> None:
    where = context(devices=("cuda:0",))
    plain = command.flags(options(), where, "bfloat16")
    made = command.flags(
        options(speculation="ngram", speculative_tokens=6, prompt_lookup_min=1, prompt_lookup_max=3), where, "bfloat16"
    )
    at = made.index("--speculative-config")
    assert made[:at] + made[at + 2 :] == plain
    assert json.loads(made[at + 1]) == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    off, on = (command.environment(options(**given), where, tmp_path, "key") for given in ({}, NGRAM))
    assert on == off | {"VLLM_USE_V2_MODEL_RUNNER": "0"} != off
    assert [plugin.measures(options(**given)) for given in ({}, NGRAM)] == [False, True]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"speculation": "suffix"}, "Input should be 'ngram'"),
        ({"speculative_tokens": 5}, 'speculative_tokens has no effect without speculation = "ngram": remove it'),
        ({"prompt_lookup_max": 5}, "prompt_lookup_max has no effect without speculation"),
        ({**NGRAM, "prompt_lookup_min": 5}, "prompt_lookup_min = 5 is more than prompt_lookup_max = 4"),
        ({**NGRAM, "speculative_tokens": 129}, "less than or equal to 128"),
        ({**NGRAM, "url": "http://h:1"}, "speculation apply only to a server that the engine starts"),
        ({"extra_args": ["--speculative-config={}"]}, "--speculative-config is set by the engine"),
        ({"extra_args": ["-sc", "{}"]}, "-sc is set by the engine"),
        ({"extra_args": ["--spec-method", "ngram"]}, "--spec-method is set by the engine"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        options(**given)


def refused(options: Any, context: Any, given: dict[str, Any] | None = None, **workload: Any) -> str:
    """Return the error of the plugin's check of these options, which holds without speculation."""
    work = Workload(context, 8, 8, 64, 64, **workload)
    check_speculation(options(**given or {}), context, work.min_p)
    with pytest.raises(AtroposError) as error:
        check_speculation(options(**NGRAM, **given or {}), context, work.min_p)
    assert isinstance(error.value, ConfigError | FitError)
    return str(error.value)


def test_what_vllm_cannot_do_beside_is_refused_by_name_before_the_start(
    options: Any, context: Any, model: Path
) -> None:
    where = context(devices=("cpu",), label="engine.replica.second")
    said = refused(options, where, min_p=0.05)
    assert 'engine.replica.second.speculation = "ngram" does not work with min_p = 0.05' in said and "top_p" in said
    said = refused(options, replace(where, announced={"router_replay": True}))
    assert "trainer.router_replay = true: vLLM records experts in its second model runner" in said
    assert "--set trainer.router_replay=false" in said
    assert "eager is the default on a CPU" in refused(options, where, {"enforce_eager": False})
    check_speculation(options(**NGRAM, enforce_eager=False), context(devices=("cuda:0",)))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "falcon_h1"}))
    assert "does not work with 'falcon_h1' models: their layers keep a state" in refused(options, where)


def test_a_run_that_cuts_by_min_p_is_refused_by_the_plan(options: Any, context: Any) -> None:
    where = replace(context(devices=("cpu",), label="engine"), model=load_plugins().resolve_model("tiny").directory)
    work = Workload(where, 8, 8, 64, 64, min_p=0.1)
    plugin.check(options(), work)
    with pytest.raises(ConfigError, match="does not work with min_p = 0.1 of sampling or evaluation"):
        plugin.check(options(**NGRAM), work)


def test_a_missing_numba_is_named() -> None:
    check_numba(True)
    with pytest.raises(FitError, match=r'engine.speculation = "ngram" needs the package numba') as error:
        check_numba(False)
    assert "pip install numba" in str(error.value)


def test_metrics_are_of_what_was_proposed_since_the_last_call() -> None:
    counts = DraftCounts()
    assert counts.since_last(PAGE.format(10, 40.0, 25.0)) == {
        "drafted_tokens": 40.0,
        "draft_acceptance": 25 / 40,
        "acceptance_length": 3.5,
    }
    assert counts.since_last(PAGE.format(10, 40.0, 25.0)) == {"drafted_tokens": 0.0}
    found = counts.since_last(PAGE.format(14, 56.0, 29.0))
    assert found == {"drafted_tokens": 16.0, "draft_acceptance": 0.25, "acceptance_length": 2.0}
    large = DraftCounts().since_last(PAGE.format("1.2e+06", "4.8e+06", "2.4e+06"))
    assert large == {"drafted_tokens": 4.8e6, "draft_acceptance": 0.5, "acceptance_length": 3.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_token_gets_the_value_of_its_request(dtype: Any) -> None:
    values = torch.tensor([0, 3, 7, 5], dtype=dtype)
    if dtype.is_floating_point:
        values /= 10
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    expected = []
    for request, end in enumerate(ends.tolist()):
        expected += [1 if values[request] == 0 else values[request].item()] * (end - len(expected))
    found = repeat_for_tokens(values, ends, 6, 0, 1)
    assert found.dtype == dtype and found.tolist() == expected
    assert repeat_for_tokens(values, ends, 6).tolist()[:2] == [0, 0]
    assert repeat_for_tokens(values, torch.zeros(4, dtype=torch.int32), 0).tolist() == []


def test_no_rows_are_not_cut() -> None:
    def own(logits: Any, top_k: Any, top_p: Any) -> Any:
        return logits - top_k.max()

    assert cut(own, torch.ones(2, 3), torch.tensor([1, 2]), None).tolist() == [[-1.0] * 3] * 2
    assert cut(own, torch.ones(0, 3), torch.tensor([], dtype=torch.int64), None).shape == (0, 3)


def served(method: str | None) -> dict[str, Any]:
    """A server's answers about itself."""
    config = {
        "parallel_config": {"worker_extension_cls": command.EXTENSION},
        "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "enforce_eager": True},
        "device_config": {"device": "cuda"},
        "scheduler_config": {"enable_chunked_prefill": True},
        "lora_config": None,
        "speculative_config": None if method is None else {"method": method, "num_speculative_tokens": 3},
    }
    paths = ("/pause", "/resume", "/update_weight_version", "/collective_rpc", "/server_info", "/inference/v1/generate")
    return {
        "/version": {"version": "0.32.0"},
        "/openapi.json": {"paths": {path: {} for path in paths}},
        "/server_info": {"vllm_config": config},
        "/v1/models": {"data": [{"id": "policy", "root": "/nowhere"}]},
    }


@pytest.mark.parametrize("method", [None, "ngram", "eagle3", "draft_model", "suffix"])
async def test_a_running_server_may_speculate_but_not_with_weights_that_go_stale(
    answering: Any, context: Any, method: str | None
) -> None:
    async def lost(what: str) -> AtroposError:
        return AtroposError(what)

    api = Api(await answering(served(method)), None, lost)
    try:
        if method in (None, "ngram"):
            assert (await check_attached(api, context(devices=("cuda:0",)), {})).speculates == (method == "ngram")
        else:
            with pytest.raises(FitError, match=f"speculates by '{method}'. Only 'ngram' is verified here"):
                await check_attached(api, context(devices=("cuda:0",)), {})
    finally:
        await api.close()


def test_a_request_with_min_p_is_refused() -> None:
    check_request(Sampling(4, 1.0, top_p=0.5, top_k=3))
    with pytest.raises(DataError, match=r"min_p = 0.2, but vLLM does not cut by min_p while it speculates"):
        check_request(Sampling(4, min_p=0.2))
