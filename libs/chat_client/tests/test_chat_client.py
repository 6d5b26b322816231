"""The client against a real HTTP server, and messages in OpenAI's form."""

from __future__ import annotations

import json
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from atropos_chat_client import retries
from atropos_chat_client.client import CallFailed, ChatClient, read_key
from atropos_chat_client.messages import openai_messages
from atropos_chat_client.retries import repeat
from atropos_core.errors import ConfigError
from tests.pages.blocks import the_block

KEY = "sk-very-secret"
SAYS_HI = (200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}))


class Server(ThreadingHTTPServer):
    """Answers with the next of `answers`, the last of them again and again, after `delay_s`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], str]] = [SAYS_HI]
        self.calls: list[tuple[str, str | None, Any]] = []
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that has gone is not an error here."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        self.server.calls.append((self.path, self.headers["authorization"], body))
        time.sleep(self.server.delay_s)
        answers = self.server.answers
        status, headers, text = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(text.encode()))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
async def client() -> AsyncIterator[Callable[..., ChatClient]]:
    made: list[ChatClient] = []

    def make(*arguments: Any, **options: Any) -> ChatClient:
        made.append(ChatClient(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.mark.parametrize("ending", ["", "/", "/chat/completions"])
async def test_a_call_goes_to_the_servers_path_with_the_key(server, client, ending):
    one = client(server.url + ending, KEY)
    assert one.reply_text(await one.post("/chat/completions", {"model": "m"})) == "Hi"
    await one.get("/models")
    key = f"Bearer {KEY}"
    assert server.calls == [("/v1/chat/completions", key, {"model": "m"}), ("/v1/models", key, None)]


async def test_without_a_key_none_is_sent(server, client):
    await client(server.url).get("/models")
    assert server.calls == [("/v1/models", None, None)]


@pytest.mark.parametrize(
    ("status", "is_temporary"),
    [
        (400, False),
        (401, False),
        (404, False),
        (408, True),
        (409, True),
        (425, True),
        (429, True),
        (500, True),
        (529, True),
    ],
)
async def test_a_refusal_has_its_status_and_says_if_another_try_may_succeed(server, client, status, is_temporary):
    server.answers = [(status, {"retry-after": "3"}, f"not with {KEY}")]
    with pytest.raises(CallFailed, match=rf"^status {status}: not with \[the key\]$") as caught:
        await client(server.url, KEY).get("/models")
    assert (caught.value.status, caught.value.is_temporary, caught.value.retry_after_s) == (status, is_temporary, 3.0)


@pytest.mark.parametrize("text", ["no json", "[1]", ""])
async def test_an_answer_that_is_not_a_json_object_is_final(server, client, text):
    server.answers = [(200, {}, text)]
    with pytest.raises(CallFailed, match="the answer is not a JSON object") as caught:
        await client(server.url).get("/models")
    assert caught.value.status == 200 and not caught.value.is_temporary


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": None}]}, {"error": KEY}])
async def test_an_answer_that_is_not_a_chat_completion_is_shown_without_the_key(client, answer):
    with pytest.raises(CallFailed, match="the answer is not a chat completion: {") as caught:
        client("http://host/v1", KEY).reply_text(answer)
    assert KEY not in str(caught.value)


async def test_a_late_answer_and_a_server_that_is_gone_are_temporary(server, client):
    server.delay_s = 5.0
    with pytest.raises(CallFailed, match=r"^no answer within 0\.1 s$") as late:
        await client(server.url, timeout_s=0.1).get("/models")
    with pytest.raises(CallFailed, match="^ConnectError: ") as gone:
        await client("http://127.0.0.1:9/v1").get("/models")
    assert late.value.is_temporary and gone.value.is_temporary


async def test_a_watch_is_entered_around_each_call_and_sees_refusals_as_answers(server, client):
    seen: list[str] = []

    @asynccontextmanager
    async def watched(call: str) -> AsyncIterator[None]:
        seen.append(call)
        yield
        seen.append("answered")

    server.answers = [(503, {}, "busy")]
    with pytest.raises(CallFailed, match="busy"):
        await client(server.url, watched=watched).get("/models")
    assert seen == ["GET /models", "answered"]


async def test_a_call_is_repeated_until_it_succeeds_with_pauses_that_double(server, client):
    server.answers = [(503, {}, ""), (429, {}, ""), SAYS_HI]
    began = time.monotonic()
    one = client(server.url)
    await repeat(lambda: one.get("/models"), tries=3, pause_s=0.1)
    assert len(server.calls) == 3 and time.monotonic() - began >= 0.3


async def test_a_pause_is_as_long_as_the_server_asks_for(server, client, monkeypatch):
    monkeypatch.setattr(retries, "LONGEST_ASKED_S", 0.3)
    server.answers = [
        (429, {"retry-after": "3600"}, ""),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, ""),
        SAYS_HI,
    ]
    began = time.monotonic()
    one = client(server.url)
    await repeat(lambda: one.get("/models"), pause_s=0.01, jitter=0.5)
    assert 0.3 <= time.monotonic() - began < 10


async def test_the_last_failure_is_raised_and_a_refusal_at_once(server, client):
    one = client(server.url)
    server.answers = [(500, {}, "first"), (500, {}, "second")]
    with pytest.raises(CallFailed, match="second"):
        await repeat(lambda: one.get("/models"), tries=2, pause_s=0.01)
    server.answers = [(404, {}, "no such model"), SAYS_HI]
    with pytest.raises(CallFailed, match="no such model"):
        await repeat(lambda: one.get("/models"), tries=5, pause_s=0.01)
    assert len(server.calls) == 3


def test_a_key_is_read_from_the_environment_variable_that_an_option_names(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", KEY)
    assert read_key("THEIR_KEY", "--key-variable") == KEY
    with pytest.raises(ConfigError, match="--key-variable names the environment variable NO_SUCH, which is not set"):
        read_key("NO_SUCH", "--key-variable")


def test_calls_get_ids_that_their_answers_name_and_arguments_are_text():
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"id": "mine", "function": {"name": "list"}}]
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "none"},
    ]
    assert openai_messages(messages) == [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "mine", "type": "function", "function": {"name": "list", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "call_1_0"},
        {"role": "tool", "content": "none", "tool_call_id": "mine"},
    ]


async def test_the_example_of_the_readme(server, capsys):
    text = the_block("libs/chat_client/README.md", "from atropos_chat_client").text
    lines = textwrap.indent(text.replace("http://127.0.0.1:8000/v1", server.url), "    ")
    names: dict[str, Any] = {}
    exec(f"async def example():\n{lines}", names)
    await names["example"]()
    assert capsys.readouterr().out == "Hi\n"
    assert server.calls[0][2]["model"] == "Qwen/Qwen3-4B"
