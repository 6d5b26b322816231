"""The same requests to atroposlib's own `run-api` and to ours: status and shape of every answer, and the named exceptions.

An exception is a place where the old behaviour was a defect; README.md of the plugin lists the same ones for its users.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.atroposlib.processes import OurServer, TheirServer

pytestmark = pytest.mark.slow
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Step:
    """One request. `differs`: why our answer is another, and what it is."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    differs: str = ""
    status: int = 0
    values: bool = True  # whether the values must be the same as well


def group(sequences: int, env_id: int | None = None, tag: int = 0, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "tokens": [[1, 2, 3 + n] for n in range(sequences)],
        "masks": [[-100, 2, 3 + n] for n in range(sequences)],
        "scores": [float(n) for n in range(sequences)],
        "generation_params": {"temperature": 1.0, "tag": tag},
    }
    return {**made, **({} if env_id is None else {"env_id": env_id}), **more}


REGISTER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 100, "checkpoint_dir": "here",
    "save_checkpoint_interval": 5, "starting_step": 3, "num_steps": 50,
}  # fmt: skip
ENVIRONMENT = {"max_token_length": 64, "desired_name": "maths", "weight": 1.0, "group_size": 4}
FULL = group(
    4, 0, 7, advantages=[[0.0, 0.5, -0.25]] * 4, ref_logprobs=[[0.0, -0.5, -1.0]] * 4,
    inference_logprobs=[[1.0, -0.5, -1.5]] * 4, messages=[[{"role": "user", "content": "x", "reward": 1}]] * 4,
    overrides=[{"temperature": 0.5}, {}, {"set_advantage_to_zero": False}, {"custom": [1]}], group_overrides={"sft": False},
    images=["aGk=", None], distill_token_ids=[[[], [1, 2], [3]]] * 4, distill_logprobs=[[[], [-0.5, -1.0], [-2.0]]] * 4,
)  # fmt: skip

SCRIPT = [
    Step("root", "GET", "/"),
    Step("nothing there", "GET", "/nowhere"),
    Step("wrong method", "GET", "/register"),
    Step("status before anything", "GET", "/status"),
    Step("info before anything", "GET", "/info"),
    Step("wandb before anything", "GET", "/wandb_info"),
    Step("example before anything", "GET", "/latest_example"),
    Step("batch before a trainer", "GET", "/batch"),
    Step("environment before a trainer", "POST", "/register-env", ENVIRONMENT),
    Step("disconnect of nobody", "POST", "/disconnect-env", {"env_id": 0}, values=False),
    Step("half a registration", "POST", "/register", {"batch_size": 4}, values=False),
    Step("registration with text for numbers", "POST", "/register", {**REGISTER, "batch_size": "4"}, values=False),
    Step("trainer again", "POST", "/register", {**REGISTER, "batch_size": 64}, values=False),
    Step("info", "GET", "/info"),
    Step("wandb", "GET", "/wandb_info"),
    Step("environment before a batch was requested", "POST", "/register-env", ENVIRONMENT),
    Step("no batch yet", "GET", "/batch"),
    Step("environment", "POST", "/register-env", ENVIRONMENT),
    Step("environment of the same name", "POST", "/register-env", {**ENVIRONMENT, "min_batch_allocation": None}),
    Step("environment without a name", "POST", "/register-env", {**ENVIRONMENT, "desired_name": None}, values=False),
    Step("status of an environment", "GET", "/status-env", {"env_id": 0}),
    Step("status of an environment, by query", "GET", "/status-env?env_id=0", headers={}, status=200,
         differs="proxies drop the body of a GET: the query is taken as well"),
    Step("status of an unknown one", "GET", "/status-env", {"env_id": 99}, status=404,
         differs="it was a 500"),
    Step("group", "POST", "/scored_data", group(4, 0, 1)),
    Step("status of an environment with one group", "GET", "/status-env", {"env_id": 0}),
    Step("status of the other with one group", "GET", "/status-env", {"env_id": 1}),
    Step("status with one group", "GET", "/status"),
    Step("example", "GET", "/latest_example"),
    Step("batch", "GET", "/batch"),
    Step("status after a batch", "GET", "/status"),
    Step("group with everything", "POST", "/scored_data", FULL),
    Step("batch with everything", "GET", "/batch"),
    Step("numbers as text, truth as number", "POST", "/scored_data",
         {"tokens": [["1", 2.0]] * 4, "masks": [[-100, "2"]] * 4, "scores": ["0.5", True, 1, 2.0]}),
    Step("batch of what was coerced", "GET", "/batch"),
    Step("first piece", "POST", "/scored_data", group(3, 0, 2)),
    Step("second piece", "POST", "/scored_data", group(1, 0, 3)),
    Step("batch of pieces", "GET", "/batch", status=200,
         differs="pieces that complete a group are one group: its advantages are reckoned over all of them"),
    Step("list", "POST", "/scored_data_list", [group(4, 0, 4), group(4, 0, 5)]),
    Step("list with a piece", "POST", "/scored_data_list", [group(4, 0, 6), group(2, 0, 7)]),
    Step("empty list", "POST", "/scored_data_list", []),
    Step("list with a bad one", "POST", "/scored_data_list", [group(4, 0, 8), {"tokens": 3}], values=False),
    Step("oldest first", "GET", "/batch", status=200, values=False),
    Step("status while batches wait", "GET", "/status", status=200,
         differs="the step counts batches that were served, not those that could be; what can be served still waits"),
    Step("next", "GET", "/batch", values=False),
    Step("next", "GET", "/batch", values=False),
    Step("larger than its environment's size", "POST", "/scored_data", group(6, 0, 9), status=200,
         differs="it is a group of its own, where it was buffered for ever"),
    Step("an anonymous group", "POST", "/scored_data", group(4, None, 10)),
    Step("no JSON", "POST", "/scored_data", b"{nonsense", values=False),
    Step("nothing", "POST", "/scored_data", b"", values=False),
    Step("a list where a group belongs", "POST", "/scored_data", [], values=False),
    Step("text where a group belongs", "POST", "/scored_data", "x", values=False),
    Step("messages without content", "POST", "/scored_data", group(1, messages=[[{"role": "user"}]]), values=False),
    Step("advantages of one dimension", "POST", "/scored_data", group(1, advantages=[1.0]), values=False),
    Step("advantages of another length", "POST", "/scored_data", group(4, None, 12, advantages=[[0.0, 0.5]] * 4)),
    Step("a score that is no number", "POST", "/scored_data",
         json.dumps(group(1)).replace("[0.0]", "[NaN]").encode(), status=422,
         differs="it was taken, and every later answer with it was a 500"),
    Step("masks of another length", "POST", "/scored_data", group(1, masks=[[1]]), status=422,
         differs="it was taken, and broke the trainer"),
    Step("a group of nothing", "POST", "/scored_data", {"tokens": [], "masks": [], "scores": []}, status=422,
         differs="it was taken, and counted as a group of no sequences"),
    Step("a negative environment", "POST", "/scored_data", group(4, -1), status=422,
         differs="it was taken for the last environment"),
    Step("gzip", "POST", "/scored_data", gzip.compress(json.dumps(group(4, 0, 11)).encode()),
         {**JSON, "content-encoding": "gzip"}),
    Step("not gzip", "POST", "/scored_data", b"no gzip at all", {**JSON, "content-encoding": "gzip"}, values=False,
         status=400, differs="the answer is JSON, as all other errors are"),
    Step("half of gzip", "POST", "/scored_data", gzip.compress(json.dumps(FULL).encode())[:80],
         {**JSON, "content-encoding": "gzip"}, status=400, differs="it was a 500"),
    Step("another encoding", "POST", "/scored_data", b"(\xb5/\xfd", {**JSON, "content-encoding": "zstd"}, values=False,
         status=400, differs="the answer says which encodings there are"),
    Step("disconnect", "POST", "/disconnect-env", {"env_id": 1}),
    Step("disconnect of an unknown one", "POST", "/disconnect-env", {"env_id": 99}, values=False),
    Step("all disconnected", "POST", "/disconnect-env", {"env_id": 0}),
    Step("status of one of them", "GET", "/status-env", {"env_id": 0}, status=200, differs="it was a 500"),
    Step("reset", "GET", "/reset_data"),
    Step("status after a reset", "GET", "/status"),
    Step("batch right after a reset", "GET", "/batch", status=200, differs="it was a 500"),
    Step("info after a reset", "GET", "/info", values=False),
    Step("group before the trainer", "POST", "/scored_data", group(4, None, 12)),
    Step("trainer after a group", "POST", "/register", REGISTER, values=False),
    Step("info of that trainer", "GET", "/info", status=200, differs="a group before /register made the server forget it"),
]  # fmt: skip


def ask(url: str, step: Step) -> httpx.Response:
    body = step.body
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    return httpx.request(step.method, url + step.path, content=content, headers=step.headers, timeout=30)


def shape(value: Any) -> Any:
    """Keys and types: what a client depends on."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def test_every_answer_is_the_same_but_for_the_named_exceptions(
    our_server: Callable[..., OurServer], their_server: TheirServer
) -> None:
    ours, theirs = our_server(), their_server
    wrong = []
    for step in SCRIPT:
        mine, old = ask(ours.url, step), ask(theirs.url, step)
        if step.differs:
            same = mine.status_code == old.status_code and mine.content == old.content
            if mine.status_code != step.status or same:
                wrong.append(
                    f"{step.name}: {mine.status_code} {mine.text[:200]} where {step.differs!r}; old: {old.text[:200]}"
                )
            continue
        if mine.status_code != old.status_code or mine.headers["content-type"] != old.headers["content-type"]:
            wrong.append(f"{step.name}: {mine.status_code} {mine.text[:300]}; old: {old.status_code} {old.text[:300]}")
        elif mine.headers["content-type"] != "application/json":
            assert mine.text == old.text
        elif step.values and mine.json() != old.json():
            wrong.append(f"{step.name}: {mine.text[:900]}; old: {old.text[:900]}")
        elif mine.status_code == 200 and shape(mine.json()) != shape(old.json()):
            wrong.append(f"{step.name}: {shape(mine.json())}; old: {shape(old.json())}")
        elif mine.status_code == 422:
            (first, *_) = mine.json()["detail"]
            assert {"type", "loc", "msg"} <= first.keys(), step.name
    assert not wrong, "\n".join(wrong)


def test_batches_are_served_oldest_first_where_they_were_served_newest_first(
    our_server: Callable[..., OurServer], their_server: TheirServer
) -> None:
    served = []
    for server in (our_server(), their_server):
        httpx.post(f"{server.url}/register", json=REGISTER)
        for tag in range(4):
            httpx.post(f"{server.url}/scored_data", json=group(4, None, tag))
        batches = [httpx.get(f"{server.url}/batch").json()["batch"] for _ in range(4)]
        served.append([batch[0]["generation_params"]["tag"] for batch in batches])
    assert served == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_groups_whose_sizes_are_no_powers_of_two_form_batches(
    our_server: Callable[..., OurServer], their_server: TheirServer
) -> None:
    served = []
    for server in (our_server(), their_server):
        httpx.post(f"{server.url}/register", json={**REGISTER, "batch_size": 8})
        for tag in range(20):
            httpx.post(f"{server.url}/scored_data", json=group(3, None, tag))
        served.append(httpx.get(f"{server.url}/batch").json()["batch"])
    ours, theirs = served
    assert theirs is None
    assert [len(one["tokens"]) for one in ours] == [3, 3], "the largest sum of whole groups that is not above 8"


@pytest.mark.parametrize("accepts", ["gzip", "identity"])
def test_long_answers_are_compressed_where_the_client_wants_that(
    accepts: str, our_server: Callable[..., OurServer]
) -> None:
    server = our_server()
    httpx.post(f"{server.url}/register", json=REGISTER)
    httpx.get(f"{server.url}/batch")  # environments may register once a batch was requested
    httpx.post(f"{server.url}/register-env", json=ENVIRONMENT)
    httpx.post(f"{server.url}/scored_data", json={**FULL, "images": ["aGk=" * 300]})
    httpx.post(f"{server.url}/disconnect-env", json={"env_id": 0})
    answer = httpx.get(f"{server.url}/batch", headers={"accept-encoding": accepts})
    assert answer.headers.get("content-encoding") == (None if accepts == "identity" else "gzip")
    assert answer.json()["batch"][0]["images"] == ["aGk=" * 300]
