"""The judge against a real HTTP server: good answers, bad ones, late ones, none."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import DataError
from atropos_core.plugins.provider import RunContext
from atropos_reward_ensemble.config import EnsembleOptions, JudgeOptions
from atropos_reward_ensemble.judge import Judge
from atropos_reward_ensemble.missing import MissingRatings
from atropos_reward_ensemble.plugin import build_ensemble
from atropos_testing import reward_contract
from atropos_testing.samples import make_episode, make_task

KEY = "sk-secret-4711"


class Server(ThreadingHTTPServer):
    """Answers with `script(request number, what the judge is shown)`: a text, or (status, headers, body); after `delay_s`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.busy = self.busiest = 0
        self.delay_s = 0.0
        self.tokens: int | None = 10
        self.lock = threading.Lock()
        self.script: Callable[[int, str], Any] = lambda number, shown: f"Fine. Score: {len(shown) % 11}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that has gone is not an error here."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.seen.append(question)
            server.headers.append(self.headers.get("authorization"))
            number = len(server.seen)
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        time.sleep(server.delay_s)
        with server.lock:
            server.busy -= 1
        answer = server.script(number, question["messages"][-1]["content"])
        if isinstance(answer, str):
            usage = {} if server.tokens is None else {"usage": {"total_tokens": server.tokens}}
            body = {"choices": [{"message": {"role": "assistant", "content": answer}}], **usage}
            answer = (200, {}, json.dumps(body))
        status, headers, text = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
async def judge(server: Server) -> AsyncIterator[Callable[..., Judge]]:
    made: list[Judge] = []

    def make(**options: Any) -> Judge:
        given = {"url": server.url, "model": "m", "backoff_s": 0.01, **options}
        made.append(Judge(JudgeOptions.model_validate(given)))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def question(*replies: str) -> tuple[Any, list[Any]]:
    task = make_task("42")
    return task, [make_episode(task, reply) for reply in replies]


def test_contract(server):
    reward_contract("judge", options={"url": server.url, "model": "m"})()


async def test_scores_are_scaled_and_the_last_one_counts(judge, server):
    server.script = lambda number, shown: "Score: 10? No.\nScore: 2.5" if "first" in shown else "**score = 10**"
    given = await judge()(*question("the first", "the second"))
    assert given.tolist() == [0.25, 1.0]
    assert (await judge(low=-10)(*question("the first")))[0] == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("said", "score"),
    [("Score: 8", 0.9), ("Score：８", 0.9), ("score = −5", 0.25), ("Score: 1e-1", 0.505), ("Score: 5e", 0.75)],
)
def test_a_score_is_read_in_digits_and_signs_of_any_script(judge, said, score):
    assert judge(low=-10).read(said) == pytest.approx(score)


async def test_the_model_is_shown_the_question_and_the_reply_and_nothing_is_filled_in_twice(judge, server):
    await judge(prompt="Q {question} R {reply} A {answer} {low}-{high}", system="Be strict.")(*question("say {answer}"))
    [request] = server.seen
    assert request["messages"] == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "Q Question 0: what is six times seven? R say {answer} A 42 0-10"},
    ]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.0, 256)


async def test_equal_replies_are_sent_once_and_remembered(judge, server):
    one = judge()
    first = await one(*question("a", "b", "a"))
    again = await one(*question("b", "a", "a"))
    assert len(server.seen) == 2
    assert first.tolist() == [first[0], first[1], first[0]]
    assert again.tolist() == [first[1], first[0], first[0]]
    assert one.metrics() == {"missing": 0, "cached": 4 / 6, "requests": 2, "tokens": 20, "retries": 0}


async def test_the_cache_forgets_what_was_used_longest_ago(judge, server):
    one = judge(cache=2)
    for reply in ("a", "b", "a", "c", "a", "b"):
        await one(*question(reply))
    assert len(server.seen) == 4  # a, b, c, and b again
    none = judge(cache=0)
    await none(*question("a"))
    await none(*question("a"))
    assert len(server.seen) == 6


@pytest.mark.parametrize(
    "trouble",
    [
        (500, {}, "oops"),
        (429, {"retry-after": "0.02"}, "slow down"),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, ""),
        (200, {}, "no json"),
        (200, {}, "{}"),
        (200, {}, '{"choices": []}'),
        (200, {}, '{"choices": [{"message": null}]}'),
        (200, {}, "[1]"),
        "no number at all",
        "Score: 11",
        "Score: -1",
        "",
    ],
)
async def test_a_try_that_fails_is_made_again(judge, server, trouble):
    server.script = lambda number, shown: trouble if number < 3 else "Score: 5"
    one = judge()
    assert (await one(*question("r"))).tolist() == [0.5]
    assert one.metrics()["retries"] == 2


async def test_the_last_try_leaves_a_missing_rating_with_its_cause_and_keeps_the_others(judge, server):
    server.script = lambda number, shown: "Score: 5" if "good" in shown else "I would rather not say"
    one = judge(retries=2)
    with pytest.raises(MissingRatings) as caught:
        await one(*question("good", "bad", "good"))
    assert np.array_equal(caught.value.ratings, [0.5, np.nan, 0.5], equal_nan=True)
    assert "1 of 3 episodes have no rating" in str(caught.value)
    assert "'I would rather not say' (the last of 3 tries)" in str(caught.value)
    assert len(server.seen) == 4
    assert one.metrics()["missing"] == pytest.approx(1 / 3)


async def test_a_refusal_is_not_tried_again_and_never_shows_the_key(judge, server, monkeypatch, capfd):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.script = lambda number, shown: (401, {}, f"wrong key {KEY}")
    one = judge(key_env="JUDGE_KEY")
    with pytest.raises(DataError, match=r"status 401: wrong key \[the key\]"):
        await one(*question("r"))
    assert server.headers == [f"Bearer {KEY}"]
    visible = f"{vars(JudgeOptions(url=server.url, model='m', key_env='JUDGE_KEY'))} {one.state()} {capfd.readouterr()}"
    assert KEY not in visible


async def test_a_slow_server_and_one_that_is_gone(judge, server):
    server.delay_s = 10.0
    started = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0\.1 s \(the last of 2 tries\)"):
        await judge(timeout_s=0.1, retries=1)(*question("r"))
    assert time.monotonic() - started < 9
    with pytest.raises(DataError, match="ConnectError: "):
        await judge(url="http://127.0.0.1:9/v1", retries=1)(*question("r"))


async def test_what_is_not_there_in_time_is_missing_and_the_rest_is_kept(judge, server):
    server.script = lambda number, shown: time.sleep(9.0) or "Score: 5" if "slow" in shown else "Score: 5"
    with pytest.raises(MissingRatings, match=r"all tries together, gave no answer within 4 s") as caught:
        await judge(give_up_s=4.0)(*question("good", "slow", "fine"))
    assert np.isnan(caught.value.ratings).tolist() == [False, True, False]


async def test_waits_double(judge, server):
    server.script = lambda number, shown: (500, {}, "")
    started = time.monotonic()
    with pytest.raises(DataError):
        await judge(backoff_s=0.1, retries=2)(*question("r"))
    assert 0.3 <= time.monotonic() - started < 60


async def test_no_more_requests_at_once_than_configured(judge, server):
    server.delay_s = 0.05
    await judge(concurrency=3)(*question(*map(str, range(12))))
    assert server.busiest == 3


async def test_a_spent_budget_is_a_missing_rating_that_says_so_also_after_a_resume(judge, server):
    one = judge(max_requests=2, concurrency=1)
    with pytest.raises(MissingRatings, match=r"budget is spent: max_requests = 2") as caught:
        await one(*question("a", "b", "c"))
    assert np.isnan(caught.value.ratings).tolist() == [False, False, True]
    assert len(server.seen) == 2
    again = judge(max_requests=2)
    again.load(json.loads(json.dumps(one.state())))
    with pytest.raises(MissingRatings, match="budget is spent"):
        await again(*question("d"))
    assert len(server.seen) == 2
    tokens = judge(max_total_tokens=25, concurrency=1)
    with pytest.raises(MissingRatings, match=r"30 tokens of max_total_tokens = 25"):
        await tokens(*question(*"efgh"))
    server.tokens = None
    with pytest.raises(MissingRatings, match=r"does not say usage\.total_tokens"):
        await judge(max_total_tokens=25)(*question("x"))


async def test_an_ensemble_of_judges_uses_the_ratings_that_there_are(server, tmp_path):
    """One judge has no answer to `bad`: the other two rate it."""
    server.script = lambda number, shown: "none" if "bad" in shown and "pedant" in shown else "Score: 5"
    judged = {"use": "judge", "url": server.url, "model": "m", "retries": 0}
    members = {"a": judged, "b": {**judged, "model": "n"}, "pedant": {**judged, "prompt": "pedant {reply}"}}
    ensemble: Any = build_ensemble(EnsembleOptions(members=members), RunContext(directory=tmp_path, model=TOY_MODEL))
    assert (await ensemble(*question("good", "bad"))).tolist() == [0.5, 0.5]
    metrics = ensemble.metrics()
    assert metrics["pedant/missing"] == 0.5
    assert metrics["a/requests"] == 2
    state = json.loads(json.dumps(ensemble.state()))
    assert state["inner"]["pedant"] == {"requests": 2, "tokens": 20}
    await ensemble.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "url must be http://HOST"),
        ({"url": "http://me:secret@host/v1"}, "a key goes in key_env"),
        ({"low": 3, "high": 3}, "low = 3 is not below high = 3"),
        ({"prompt": "{question}"}, "no {reply} in it"),
        ({"prompt": "{reply} {gold}"}, "prompt has {gold} in it"),
        ({"score": "("}, "score is not a regular expression"),
        ({"score": r"\d+"}, "score has 0 groups"),
        ({"key_env": "NO_SUCH_KEY_ANYWHERE"}, "NO_SUCH_KEY_ANYWHERE, which is not set"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_starts(options, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        JudgeOptions.model_validate({"url": "http://host/v1", "model": "m", **options})
