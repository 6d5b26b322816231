"""Answers of the server, and requests that get none."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import (
    AtroposError,
    DataError,
    DeadlineExceeded,
    FitError,
    ProcessDied,
    RemoteError,
    TrainingDiverged,
    WeightsMismatch,
)
from atropos_core.types import MOST_KEPT, MOST_TIES, Sampling, tokens
from atropos_engine_vllm import command, generate
from atropos_engine_vllm.api import Api, Refused
from atropos_engine_vllm.attach import check_attached
from atropos_engine_vllm.engine import VLLMEngine


async def lost(what: str) -> AtroposError:
    return ProcessDied(what)


def answer(**different: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": "stop",
        "token_ids": [4, 5, 2],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}, {"logprob": 0.0}]},
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}],
    }
    return {"choices": [choice | different]}


def test_a_completion_has_the_version_of_each_token() -> None:
    made = generate.completion(answer(), Sampling(8, 0.7), None)
    assert made.policy_version.tolist() == [1, 2, 2] and made.tokens.tolist() == [4, 5, 2]
    assert (made.finish, made.temperature, made.truncated) == ("stop", 0.7, False)
    assert generate.completion(answer(), Sampling(8), 9).policy_version.tolist() == [9, 9, 9], "an adapter's"


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [{"version": "1", "start": 0, "end": 2}],
        [{"version": "1", "start": 1, "end": 3}],
        [{"version": "1", "start": 0, "end": 4}],
        [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 3}],
    ],
)
def test_spans_that_leave_a_token_out_are_no_answer(spans: Any) -> None:
    with pytest.raises(RemoteError, match="do not cover its 3 tokens"):
        generate.completion(answer(weight_versions=spans), Sampling(8), None)


def test_an_answer_that_is_none_is_named() -> None:
    with pytest.raises(RemoteError, match="'default', which no run has published"):
        generate.completion(answer(weight_versions=[{"version": "default", "start": 0, "end": 3}]), Sampling(8), None)
    with pytest.raises(RemoteError, match="'abort'"):
        generate.completion(answer(finish_reason="abort"), Sampling(8), None)
    with pytest.raises(RemoteError, match="3 tokens with 1 logprobs"):
        generate.completion(answer(logprobs={"content": [{"logprob": 0.0}]}), Sampling(8), None)
    content = [{"logprob": -0.5}, {"logprob": -9999.0}, {"logprob": 0.0}]
    with pytest.raises(TrainingDiverged, match=r"policy version 2(.|\n)*An update broke its weights"):
        generate.completion(answer(logprobs={"content": content}), Sampling(8), None)


def test_a_request_says_all_that_decides_what_is_sampled() -> None:
    made = generate.request(tokens([4, 5]), Sampling(8, 0.5, 0.9, 3), 2**63 + 5, [2, 7], "v3", 9000)
    assert made["token_ids"] == [4, 5] and made["cache_salt"] == "v3"
    sampling = made["sampling_params"]
    assert (sampling["seed"], sampling["stop_token_ids"], sampling["ignore_eos"]) == (5, [2, 7], True)
    assert (sampling["max_tokens"], sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (8, 0.5, 0.9, 3)
    assert (sampling["min_p"], sampling["logprobs"]) == (0.0, 3 + MOST_TIES)


@pytest.mark.parametrize(
    ("sampling", "top_k", "logprobs"),
    [
        (Sampling(8), 0, 0),
        (Sampling(8, 0.0, 0.9), 0, 0),
        (Sampling(8, top_p=0.9), MOST_KEPT, MOST_KEPT + MOST_TIES),
        (Sampling(8, min_p=0.1, top_k=20), 20, 20 + MOST_TIES),
    ],
)
def test_a_request_asks_for_all_tokens_that_are_kept(sampling: Sampling, top_k: int, logprobs: int) -> None:
    made = generate.request(tokens([4]), sampling, 0, [], "v0", 9000)["sampling_params"]
    assert (made["top_k"], made["logprobs"], made["min_p"]) == (top_k, logprobs, sampling.min_p)


def kept_answer(*positions: dict[int, float]) -> dict[str, Any]:
    """An answer whose positions have these tokens, with their probabilities; the first is the sampled one."""
    content = [
        {
            "logprob": float(np.log(next(iter(one.values())))),
            "top_logprobs": [
                {"token_id": token, "logprob": float(np.log(p)) if p else -9999.0, "rank": 1}
                for token, p in one.items()
            ],
        }
        for one in positions
    ]
    spans = [{"version": "1", "start": 0, "end": len(positions)}]
    ids = [next(iter(one)) for one in positions]
    return answer(token_ids=ids, logprobs={"content": content}, weight_versions=spans)


def test_kept_tokens_are_those_with_a_probability() -> None:
    made = generate.completion(kept_answer({7: 0.25, 3: 0.75, 9: 0.0}, {2: 1.0, 1: 0.0}), Sampling(8, top_p=0.9), None)
    assert made.truncated and made.kept is not None
    assert made.kept.sizes.tolist() == [2, 1] and made.kept.token_ids.tolist() == [3, 7, 2]


def test_an_answer_that_leaves_out_a_kept_token_is_refused() -> None:
    with pytest.raises(RemoteError, match="vLLM named 2 tokens at position 1 of a reply, and these are not all"):
        generate.completion(kept_answer({2: 1.0}, {7: 0.25, 3: 0.7}), Sampling(8, top_k=2), None)


def test_scores_are_of_the_tokens_that_were_given() -> None:
    prompt = [None, {"5": {"logprob": -2.0}, "9": {"logprob": -0.1}}]
    np.testing.assert_array_equal(generate.scores({"prompt_logprobs": prompt}, tokens([4, 5])), np.float32([0, -2]))


async def test_every_way_to_fail_has_its_error(answering: Any) -> None:
    url = await answering(
        {
            "/late": 30.0,
            "/wrong": (400, {"error": {"message": "too long"}}),
            "/broken": (500, {"error": {"message": "Worker failed with error 'no such tensor'"}}),
            "/dead": (500, {"error": {"message": "EngineCore encountered an issue. See above."}}),
            "/text": "fine",
        }
    )
    api = Api(url, None, lost)
    try:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"/late gave no answer within 0\.1 s"):
            await api.post("/late", deadline_s=0.1)
        assert time.monotonic() - began < 30
        with pytest.raises(DataError, match="/wrong: too long"):
            await api.post("/wrong")
        with pytest.raises(Refused, match="no such tensor"):
            await api.post("/broken")
        with pytest.raises(ProcessDied, match="EngineCore encountered"):
            await api.post("/dead")
        assert await api.get("/text") == "fine"
    finally:
        await api.close()
    dying = Api(url, None, lost, is_dying=lambda: True)  # one of its processes is gone: its answers follow from that
    try:
        with pytest.raises(ProcessDied, match="no such tensor"):
            await dying.post("/broken")
        with pytest.raises(DataError, match="too long"):
            await dying.post("/wrong")
    finally:
        await dying.close()
    nobody = Api("http://127.0.0.1:9", None, lost)
    try:
        assert not await nobody.answers()
        with pytest.raises(ProcessDied, match="Connect"):
            await nobody.get("/health")
    finally:
        await nobody.close()


ROUTES = ("/pause", "/resume", "/update_weight_version", "/collective_rpc", "/server_info", generate.PATH)
INFO = {"parallel_config": {"worker_extension_cls": command.EXTENSION}}
BARE = {"vllm_config": {"parallel_config": {"worker_extension_cls": ""}}}


@pytest.mark.parametrize(
    ("different", "why"),
    [
        ({"/version": {"version": "0.31.0"}}, r"(?s)works with vLLM .* is 0\.31\.0.*Start a server of vLLM"),
        ({"/version": "hello"}, "is not a vLLM server"),
        ({"/version": (401, {"error": "Unauthorized"})}, r"(?s)needs another key.*VLLM_API_KEY"),
        ({"/openapi.json": {"paths": {"/pause": {}}}}, r"(?s)does not offer /resume.*VLLM_SERVER_DEV_MODE=1.*--enable-scale-out"),
        ({"/server_info": {"vllm_config": INFO | {"model_config": {"logprobs_mode": "raw_logprobs"}}}}, "raw_logprobs, which do not"),
        ({"/server_info": BARE}, "was started without .* which loads the weights of a run"),
    ],
)  # fmt: skip
async def test_a_server_that_cannot_serve_a_run_is_refused_with_a_reason(
    answering: Any, context: Any, different: dict[str, Any], why: str
) -> None:
    answers = {"/version": {"version": "0.32.0"}, "/openapi.json": {"paths": {route: {} for route in ROUTES}}}
    api = Api(await answering(answers | different), None, lost)
    try:
        with pytest.raises(FitError, match=why):
            await check_attached(api, context(), {})
    finally:
        await api.close()


class Requests(dict[str, Any]):
    """A fake API with answers by path. It records the requested paths."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(answers)
        self.paths: list[str] = []

    def get(self, path: str, default: Any = None) -> Any:
        self.paths.append(path)
        return super().get(path, default)


SERVES: dict[str, Any] = {
    "/version": {"version": "0.32.0"},
    "/openapi.json": {"paths": {route: {} for route in ROUTES}},
    "/server_info": {
        "vllm_config": INFO
        | {
            "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": False},
        }
    },
    "/v1/models": {"data": [{"id": "theirs", "root": "/nowhere"}]},
    "/pause": {},
    "/resume": {},
}
REFUSES = (500, {"error": "no such weights"})


@pytest.mark.parametrize("resume", [{}, REFUSES], ids=["goes on", "refuses that too"])
async def test_a_server_that_does_not_load_the_model_is_let_go_on_and_says_why(
    answering: Any, options: Any, context: Any, resume: Any
) -> None:
    answers = Requests(SERVES | {"/collective_rpc": REFUSES, "/resume": resume})
    engine = VLLMEngine(options(url=await answering(answers)), context())
    with pytest.raises(WeightsMismatch, match="vLLM cannot load the weights in .* no such weights"):
        await engine.open()
    assert answers.paths[-3:] == ["/pause", "/collective_rpc", "/resume"]


async def test_an_attachment_that_is_given_up_while_it_loads_lets_the_server_go_on(
    answering: Any, options: Any, context: Any
) -> None:
    answers = Requests(SERVES | {"/collective_rpc": 60.0})
    engine = VLLMEngine(options(url=await answering(answers)), context())
    opening = asyncio.create_task(engine.open())
    async with asyncio.timeout(30):
        while "/collective_rpc" not in answers.paths:
            await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert answers.paths[-1] == "/resume"


async def test_a_server_that_was_refused_is_neither_paused_nor_resumed(
    answering: Any, options: Any, context: Any
) -> None:
    answers = Requests(SERVES | {"/server_info": BARE})
    engine = VLLMEngine(options(url=await answering(answers)), context())
    with pytest.raises(FitError):
        await engine.open()
    assert not {"/pause", "/resume"} & set(answers.paths)
