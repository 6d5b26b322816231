"""Files that open OpenAI's own clients, which are the real package's: the policy answers some, judges elsewhere the others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import RemoteError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.env_atroposlib.tests.hosted import N, group_of, within_environment


class Judge:
    """Elsewhere: gives one mark to whatever it is asked for."""

    def __init__(self, mark: str) -> None:
        self.requests: list[dict[str, Any]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": mark}}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                made = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "j",
                    "choices": [choice],
                    "usage": usage,
                }
                body = json.dumps(made).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *ignored: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    made = Judge("0.75")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_client_of_its_own_is_answered_by_the_policy_and_what_judges_say_is_not_trained(
    tmp_path: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(environment: Any, policy: Any) -> None:
        sampled: dict[str, Any] = {}
        sample = policy.sample

        async def seen(prompt: Any, **more: Any) -> Any:
            made = await sample(prompt, **more)
            sampled[environment._tokenizer.decode(prompt)] = made
            return made

        policy.sample = seen
        groups = await asyncio.gather(group_of(environment, policy, 0), group_of(environment, policy, 1))
        assert len(sampled) == 4, "two prompts for the policy, and two for the judge that is the policy as well"
        for group in groups:
            assert [one.score for one in group] == [0.75] * N
            shown = environment._tokenizer.decode(group[0].rollouts[0].tokens)
            said = next(made for prompt, made in sampled.items() if "say" in prompt and shown.startswith(prompt))
            known = {tuple(one.tokens.tolist()): one.logprobs for one in said}
            for episode in group:
                [rollout] = episode.rollouts
                assert rollout.logprobs is not None
                ids = tuple(rollout.tokens[rollout.trained].tolist())
                assert (rollout.logprobs[rollout.trained] == known[ids]).all()

    within_environment(tmp_path, use, "own_client.py:Clients", config={"judge_url": judge.url})
    assert len(judge.requests) == 2, "the judge elsewhere had its own requests, and no other"
    said = capsys.readouterr().err
    assert "own_client.py:Clients opened an OpenAI client for http://localhost:9001/v1: the policy answers it" in said
    assert "http://policy.invalid/v1" in said
    assert judge.url not in said


def test_a_url_that_is_named_is_the_policys(tmp_path: Path, judge: Judge) -> None:
    async def use(environment: Any, policy: Any) -> None:
        with pytest.raises(RemoteError, match="could not convert string to float"):  # the policy's reply is not a mark
            await group_of(environment, policy)

    within_environment(
        tmp_path, use, "own_client.py:Clients", config={"judge_url": judge.url}, policy_urls=[judge.url], tries=1
    )
    assert not judge.requests


def test_a_default_client_goes_where_the_users_variables_say(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    monkeypatch.setenv("OPENAI_BASE_URL", judge.url)

    async def use(environment: Any, policy: Any) -> None:
        assert len(await group_of(environment, policy)) == N

    within_environment(tmp_path, use, "own_client.py:Clients", config={"judge_url": judge.url}, tries=1)
    assert [one["prompt"] for one in judge.requests if "prompt" in one] == ["judge 1:"]


@pytest.mark.parametrize(
    ("name", "error"),
    [("Blocking", "blocks was used in a coroutine: use AsyncOpenAI"), ("Streaming", "not streamed")],
)
def test_what_the_policy_cannot_answer_is_one_error(tmp_path: Path, judge: Judge, name: str, error: str) -> None:
    async def use(environment: Any, policy: Any) -> None:
        with pytest.raises(RemoteError, match=error):
            await group_of(environment, policy)

    within_environment(tmp_path, use, f"own_client.py:{name}", config={"judge_url": judge.url}, tries=1)


def test_a_managed_server_in_the_shape_of_openais_client_answers_in_its_classes(tmp_path: Path) -> None:
    async def use(environment: Any, policy: Any) -> list[Any]:
        return await group_of(environment, policy)

    group = within_environment(tmp_path, use, "adapted.py", tries=1)
    assert len(group) == N
    text = ChatTokenizer(TOY_MODEL).decode
    for one in group:
        [rollout] = one.rollouts
        assert one.score == len(text(rollout.tokens[rollout.trained])), "its own reply's"
