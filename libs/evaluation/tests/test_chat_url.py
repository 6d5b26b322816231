"""`atropos eval --model-url`: any environment, with a model behind somebody's OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_core.cli import run_app
from atropos_evaluation import chat_model
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow
TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"
KEY = "sk-very-secret"

Answers = Callable[[dict[str, Any]], tuple[int, dict[str, Any], dict[str, str]]]


class Elsewhere(ThreadingHTTPServer):
    """Somebody's server: answers by `answers`, and keeps what it was sent."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Elsewhere

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.keys.add(self.headers["authorization"])
        self.server.at_once += 1
        self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        status, answer, headers = self.server.answers(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.server.at_once -= 1
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Answers], Elsewhere]]:
    started: list[Elsewhere] = []

    def start(answers: Answers) -> Elsewhere:
        started.append(server := Elsewhere(answers))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def says(text: str, *calls: dict[str, Any], **usage: int) -> tuple[int, dict[str, Any], dict[str, str]]:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = list(calls)
    finish = "tool_calls" if calls else "stop"
    return 200, {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}, {}


def is_first(body: dict[str, Any]) -> bool:
    """The short call that an evaluation begins with."""
    return len(body["messages"]) == 1 and body["messages"][0]["content"] == "Hi"


def evaluated(server: Elsewhere, out: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    arguments = ["eval", "--model-url", server.url, "--model-name", "theirs", "--out", str(out), *flags]
    assert run_app(arguments) == 0
    return json.loads(out.with_suffix(".json").read_text()), [
        json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()
    ]


def test_tools_turns_and_figures_are_those_of_a_model_here(elsewhere, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)

    def answers(body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        if is_first(body):
            return says("Hi", completion_tokens=1)
        if body["messages"][-1]["role"] == "tool":
            return says(body["messages"][-1]["content"], completion_tokens=3)
        function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"expression": "6 * 7"}'}
        return says("", {"id": "abc", "type": "function", "function": function}, completion_tokens=4)

    server = elsewhere(answers)
    figures, rows = evaluated(
        server, tmp_path / "out", "--env", "calculator", "--problems", "5", "--key-variable", "THEIR_KEY", "--concurrency", "2",
    )  # fmt: skip
    assert server.keys == {f"Bearer {KEY}"} and server.most_at_once <= 2
    assert len(server.bodies) == 1 + 5 * 2
    for body in server.bodies[1:]:
        assert (body["model"], body["temperature"], body["tools"][0]["type"]) == ("theirs", 0.0, "function")
    second = next(body for body in server.bodies if body["messages"][-1]["role"] == "tool")
    [call] = second["messages"][-2]["tool_calls"]
    assert (call["id"], call["function"]["arguments"]) == ("abc", '{"expression": "6 * 7"}'), "text, as it was said"
    assert second["messages"][-1]["tool_call_id"] == "abc"
    assert figures["tokens"] == 5 * 7 and figures["model"] == "theirs" and figures["engine"]["url"] == server.url
    assert figures["metrics"]["eval/failed"] == 0
    for row in rows:
        [sample] = row["samples"]
        said = [message for message in sample["messages"] if message["role"] == "assistant"]
        assert said[0]["tool_calls"][0]["function"]["arguments"] == {"expression": "6 * 7"}, "an object, as here"
        assert said[-1]["content"].strip() == "42"
    printed = capsys.readouterr()
    assert "token ids and logprobs" in printed.out and KEY not in printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "is_read"), [("[6, 7]", False), ('{"expression": 6 *', False), ("", True), ("{}", True)]
)
def test_a_call_that_cannot_be_read_is_text_beside_those_that_can(elsewhere, tmp_path, arguments, is_read) -> None:
    good = {"id": "a", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "6 * 7"}'}}
    other = {"id": "b", "type": "function", "function": {"name": "calculate", "arguments": arguments}}

    def answers(body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        done = is_first(body) or body["messages"][-1]["role"] == "tool"
        return says("42") if done else says("Look:", good, other)

    _, [row] = evaluated(elsewhere(answers), tmp_path / "out", "--env", "calculator", "--problems", "1")
    first = next(one for one in row["samples"][0]["messages"] if one["role"] == "assistant")
    read = [call["function"]["arguments"] for call in first["tool_calls"]]
    assert read == [{"expression": "6 * 7"}, *([{}] if is_read else [])]
    said = f'<tool_call>{{"name": "calculate", "arguments": {arguments}}}</tool_call>'
    assert first["content"] == ("Look:" if is_read else f"Look:\n{said}")


def test_what_may_pass_is_called_again_and_the_rest_is_named_at_once(elsewhere, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    (tmp_path / "sums.py").write_text(SUMS)
    env = ("--env", f"{tmp_path}/sums.py:Sums", "--problems", "2")
    failures = iter([(429, {"error": "slow down"}, {"retry-after": "0.1"}), (503, {"error": "busy"}, {})])

    def at_first_not(body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        if "max_tokens" in body:
            return 400, {"error": "Unsupported parameter: use 'max_completion_tokens' instead."}, {}
        return next(failures, None) or says("2")

    server = elsewhere(at_first_not)
    figures, _ = evaluated(server, tmp_path / "out", *env)
    assert (figures["metrics"]["eval/accuracy"], figures["engine"]["retries"]) == (1.0, 2)
    assert figures["tokens"] is None, "the server does not say"
    assert "max_completion_tokens" in server.bodies[-1] and "max_tokens" not in server.bodies[-1]

    for status, answer, wanted in (
        (401, {"error": f"wrong key {KEY}"}, 'failed: status 401: {"error": "wrong key [the key]"}'),
        (404, {"error": "no model named theirs"}, "no model named theirs"),
        (200, ["a page"], "The URL ends in /v1 with most servers."),
    ):
        server = elsewhere(lambda body, status=status, answer=answer: (status, answer, {}))
        capsys.readouterr()
        flags = ("--model-url", server.url, "--model-name", "theirs", "--key-variable", "THEIR_KEY")
        assert run_app(["eval", *env, *flags]) == 1
        printed = " ".join(capsys.readouterr().err.split())
        assert wanted in printed and "What to do" in printed and KEY not in printed
        assert len(server.bodies) == 1


SESSIONS = """
import atropos_core as atropos


class Sessions(atropos.Environment):
    def tasks(self, split):
        return [atropos.Task(f"{split}-{number}", ({"role": "user", "content": f"{number}?"},), "7") for number in range(8)]

    async def open(self):
        if self.at_once is None:  # it is not open yet
            self.at_once, self.sessions = 2, ["first", "second"]

    async def score(self, task, reply):
        session = self.sessions.pop()
        self.sessions.append(session)
        return float(reply["content"] == "7")
"""


def test_an_environment_that_learns_as_it_opens_how_many_rollouts_it_can_run_is_opened(elsewhere, tmp_path) -> None:
    """As `openenv` does, of its server."""
    (tmp_path / "mine.py").write_text(SESSIONS)
    server = elsewhere(lambda body: says("7", completion_tokens=1))
    figures, _ = evaluated(server, tmp_path / "out", "--env", f"{tmp_path}/mine.py:Sessions", "--problems", "8")
    assert figures["metrics"]["eval/reward"] == 1.0 and figures["metrics"]["eval/failed"] == 0
    assert server.most_at_once <= 2


def test_a_server_that_is_not_there_is_waited_for_by_name(monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    monkeypatch.setattr(chat_model, "OPEN_DEADLINE_S", 3.0)
    assert run_app(["eval", "--env", "gsm8k", "--model-url", url, "--model-name", "theirs"]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert f"waiting for {url} to answer" in printed
    assert f"{url} answered no call within 3 s; the last reason: ConnectError" in printed


SUMS = """
from atropos_core import Environment, Score, Task

class Sums(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"1 + 1, {n}"},), answer="2") for n in range(4)]

    async def score(self, task, reply):
        return Score(float(reply["content"] == "2"), correct=reply["content"] == "2")
"""


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--model-url", "http://h/v1"), "--model-name NAME"),
        (("--model-url", "h:80/v1", "--model-name", "m"), "is not a URL"),
        (("--model-url", "http://me:secret@h/v1", "--model-name", "m"), "Give a key by --key-variable"),
        (("--model-url", "http://h/v1", "--model-name", "m", "--key-variable", "NO_SUCH"), "export NO_SUCH=..."),
        (("--model-url", "http://h/v1", "--model-name", "m", "--model", "tiny"), "--model has no effect with --model-url"),
        (("--model-url", "http://h/v1", "--model-name", "m", "--set", "engine.threads=1"), "--set engine.threads has no effect"),
        (("--model-url", "http://h/v1", "--model-name", "m", "--set", "evaluation.top_k=5", "--temperature", "1"), "has none"),
        (("--model-name", "m"), "--model-name has no effect without --model-url"),
        (("--concurrency", "3"), "--concurrency has no effect without --model-url"),
        (("--env", "agent", "--set", "environment.agent.tasks_from=gsm8k", "--model-url", "http://h/v1", "--model-name", "m",
          "--set", 'environment.agent.command=["x"]'), "--set environment.agent.baseline.url=http://h/v1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(flags, wanted, capsys) -> None:
    env = () if "--env" in flags else ("--env", "gsm8k")
    assert run_app(["eval", *env, *flags]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert wanted in printed and "secret" not in printed


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """`transformers serve`, which loads a model by its directory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = "from transformers.cli.transformers import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "serve", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        until = time.monotonic() + 180
        while True:
            assert process.poll() is None and time.monotonic() < until
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def test_behind_transformers_own_server_the_tiny_policy_says_what_it_says_here(served, tmp_path) -> None:
    asked = ("eval", "--env", "gsm8k", "--problems", "6", "--set", "evaluation.max_tokens=64")
    assert run_app([*asked, "--out", str(tmp_path / "here")]) == 0
    assert run_app([*asked, "--out", str(tmp_path / "there"), "--model-url", served, "--model-name", str(TINY)]) == 0
    here, there = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("here", "there")
    )
    assert [row["task"] for row in here] == [row["task"] for row in there]
    for one, other in zip(here, there, strict=True):
        assert one["samples"][0]["tokens"] == other["samples"][0]["tokens"]
        local, remote = (row["samples"][0]["messages"][-1]["content"] for row in (one, other))
        # this server leaves a model's own control tokens in the text
        assert local == re.sub(r"^.*<\|assistant\|>|<\|\w+\|>$", "", remote, flags=re.S)
