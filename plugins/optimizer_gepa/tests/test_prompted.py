"""The prompt's place in a task's messages, and the requests and answers of a model that reflects."""

from __future__ import annotations

import json
import random
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from pydantic import ValidationError

from atropos_core.errors import AccessRefused, ConfigError, DataError, PluginError, RemoteError
from atropos_core.interfaces import Measured, Stateful
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Task
from atropos_optimizer_gepa import proposers
from atropos_optimizer_gepa.config import GepaOptions, PromptedOptions
from atropos_optimizer_gepa.plugin import build_environment
from atropos_optimizer_gepa.prompted import PROMPT_FILE, published
from atropos_optimizer_gepa.proposers import reflect

TASK = Task("t", ({"role": "system", "content": "s"}, {"role": "user", "content": "How many?"}), answer="3")


def environment(tmp_path, model=None, **options):
    tiny = load_plugins().resolve_model("tiny").directory
    return build_environment(
        PromptedOptions(environment={"use": "gsm8k"}, **options), RunContext(tmp_path, model or tiny)
    )


def test_it_stands_in_front_of_the_users_message_or_in_a_system_message_of_its_own(tmp_path):
    posed = environment(tmp_path, prompt="Think.").posed(TASK)
    assert [one["content"] for one in posed.messages] == ["s", "Think.\n\nHow many?"]
    assert (posed.id, posed.answer) == ("t", "3")
    posed = environment(tmp_path, prompt="Think.", place="system").posed(TASK)
    assert [(one["role"], one["content"]) for one in posed.messages] == [
        ("system", "Think."), ("system", "s"), ("user", "How many?"),
    ]  # fmt: skip
    assert environment(tmp_path, prompt="A", separator=" ").posed(TASK).messages[1]["content"] == "A How many?"
    assert environment(tmp_path).posed(TASK) is TASK


def test_what_is_published_replaces_it_and_a_saved_policy_brings_its_own(tmp_path):
    made = environment(tmp_path, prompt="first")
    published[tmp_path] = "second"
    assert made.prompt == "second"
    model = tmp_path / "policy"
    model.mkdir()
    (model / PROMPT_FILE).write_text("learned")
    assert environment(tmp_path / "other", model=model, prompt="first").prompt == "learned"


STATEFUL = """
from atropos_core.interfaces import Environment
from atropos_core.types import Task

class Counted(Environment):
    seen = 0
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say {n}"},)) for n in range(4)]
    async def score(self, task, reply):
        return Score(0.0)
    def state(self):
        return {"seen": self.seen}
    def load(self, state):
        self.seen = state["seen"]
    def metrics(self):
        return {"seen": float(self.seen)}
"""


def test_what_the_environment_inside_keeps_and_measures_is_passed_on(tmp_path):
    (tmp_path / "counted.py").write_text(STATEFUL)
    options = PromptedOptions(environment=f"{tmp_path}/counted.py:Counted", prompt="x")
    made = build_environment(options, RunContext(tmp_path, load_plugins().resolve_model("tiny").directory))
    assert isinstance(made, Stateful) and isinstance(made, Measured)
    made.load({"seen": 3})
    assert (made.state(), made.metrics()) == ({"seen": 3}, {"seen": 3.0})
    plain = environment(tmp_path)
    assert not isinstance(plain, Stateful) and not isinstance(plain, Measured)


def test_a_task_without_words_of_a_user_is_refused_by_its_id(tmp_path):
    with pytest.raises(DataError, match="task 'u' has no message of the user"):
        environment(tmp_path, prompt="x").posed(Task("u", ({"role": "system", "content": "s"},)))


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, "give its address"),
        ({"url": "127.0.0.1:8000/v1"}, "start it with http"),
        ({"proposer": "first_words", "url": "http://h/v1"}, "url has no effect"),
    ],
)
def test_options_that_do_nothing_or_are_missing_are_refused(options, wrong):
    with pytest.raises(ValidationError, match=wrong):
        GepaOptions(**options)


def test_an_environment_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nonsense"):
        build_environment(PromptedOptions(environment="nonsense"), RunContext(tmp_path, tmp_path))


class Model(BaseHTTPRequestHandler):
    """An address that answers as OpenAI's, and keeps what it was asked."""

    answer: str = ""
    codes: list[int] = []  # noqa: RUF012 - of the next answers
    bodies: list[dict] = []  # noqa: RUF012
    keys: list[str | None] = []  # noqa: RUF012

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.keys.append(self.headers["Authorization"])
        body = self.answer.encode()
        self.send_response(self.codes.pop(0) if self.codes else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def address():
    server = HTTPServer(("127.0.0.1", 0), Model)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


async def reflected(said, **options):
    Model.answer = (
        json.dumps({"choices": [{"message": {"content": said}}]}) if isinstance(said, str) else json.dumps(said)
    )
    return await reflect(GepaOptions(**options), "Old.", [("2 + 2", "5", 0.0), ("1 + 1", "2", 1.0)], random.Random(0))


async def test_a_model_is_shown_prompt_replies_and_rewards_and_its_last_instruction_is_taken(
    address, monkeypatch, capsys
):
    monkeypatch.setenv("THEIR_KEY", "a-key")
    said = "They add wrong. <instruction>draft</instruction> Better: <instruction>\nAdd slowly.\n</instruction>"
    assert await reflected(said, url=address, model="m", key_variable="THEIR_KEY") == "Add slowly."
    asked = Model.bodies[-1]["messages"][0]["content"]
    for part in ("Old.", "2 + 2", "<reply>\n5\n</reply>", "<reward>1</reward>"):
        assert part in asked
    assert (Model.bodies[-1]["model"], Model.keys[-1]) == ("m", "Bearer a-key")
    capsys.readouterr()
    for says_nothing in ("I would not change it: Tom.", "<instruction> \n</instruction>"):
        assert await reflected(says_nothing, url=address) == "Old."
        assert "nothing between <instruction> and </instruction>" in "".join(capsys.readouterr())


async def test_an_answer_that_is_none_is_an_error_with_the_address(address):
    with pytest.raises(RemoteError, match=rf"(?s){address}, failed: the answer is not a chat completion: .*error"):
        await reflected({"error": "no"}, url=address)
    with pytest.raises(RemoteError, match="the answer is not a JSON object"):
        await reflected([1], url=address)


async def test_requests_are_retried_on_429_and_5xx_and_other_errors_show_the_response(address, monkeypatch):
    monkeypatch.setattr(proposers, "PAUSE_S", 0.01)
    Model.codes = [503, 429, 500]
    assert await reflected("<instruction>New.</instruction>", url=address) == "New."
    Model.codes = [401]
    with pytest.raises(AccessRefused, match=r"(?s)status 401: .*bad key.*THEIR_KEY \(trainer.key_variable\)"):
        await reflected("bad key", url=address, key_variable="THEIR_KEY")
    Model.codes = [404]
    with pytest.raises(RemoteError, match=r"(?s)status 404: .*no such model.*trainer.model"):
        await reflected("no such model", url=address)
    Model.codes = [500] * 5
    with pytest.raises(RemoteError, match=r"did not answer in 5 tries; the last one: status 500: .*out of memory"):
        await reflected("out of memory", url=address)
    with pytest.raises(RemoteError, match=r"did not answer in 5 tries; the last one: ConnectError"):
        await reflected("", url="http://127.0.0.1:9/v1")


PROPOSERS = """
def plain(prompt, examples, rng):
    return "x"

async def breaks(prompt, examples, rng):
    return {}["x"]

async def counts(prompt, examples, rng):
    return 5
"""


async def test_a_proposer_of_ones_own_that_breaks_what_it_must_keep_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(PROPOSERS)

    def made(name):
        return proposers.proposer(GepaOptions(proposer=f"{tmp_path}/mine.py:{name}"))

    with pytest.raises(ConfigError, match="(?s)is not a coroutine function.*async def"):
        made("plain")
    with pytest.raises(PluginError, match=r"raised KeyError: 'x' \(mine.py:6\)"):
        await made("breaks")("p", [], random.Random(0))
    with pytest.raises(PluginError, match="returned 5, which is not a str"):
        await made("counts")("p", [], random.Random(0))
