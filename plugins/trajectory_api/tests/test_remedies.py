"""What an error of the server says to do, where no other test reads it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atropos_core.api_client.client import Api
from atropos_core.cli import run_app
from atropos_core.codec import encode_bytes
from atropos_core.errors import AtroposError
from atropos_trajectory_api.legacy.intake import MOST_GROUPS
from atropos_trajectory_api.legacy.wire_json import MOST_IN_LIST, MOST_VALUES, parse
from atropos_trajectory_api.native.workers import Workers
from atropos_trajectory_api.roles.environment_worker import await_policy
from atropos_trajectory_api.server.checking import read_frame
from atropos_trajectory_api.server.options import ServeOptions
from atropos_trajectory_api.server.service import Service
from plugins.trajectory_api.tests.running import Running, running

FEWER = "Send fewer groups at once."
MADE: dict[str, tuple[Callable[[], object], str]] = {
    "many lists": (lambda: parse(b"[" + b"[]," * MOST_IN_LIST + b"[]]"), FEWER),
    "many values": (lambda: parse(b'{"images":[' + b"1,\n" * MOST_VALUES + b'"",1]}'), FEWER),
    "no weight": (
        lambda: Workers(time.monotonic, 60.0).register({"name": "one", "environment": "sums", "weight": 0.0}),
        "A weight is above 0.",
    ),
    "a cause that a trainer has not": (
        lambda: Service(ServeOptions(directory=Path("none"))).drop(0, [], "boredom"),
        "Known causes: other_timeline, damaged.",
    ),
    "half a pair": (lambda: read_frame(encode_bytes({"a": "\ud83d"})), "Send text that can be encoded as UTF-8."),
}


@pytest.mark.parametrize("what", MADE)
def test_an_error_says_what_to_do(what: str) -> None:
    make, remedy = MADE[what]
    with pytest.raises(AtroposError) as found:
        make()
    assert found.value.remedy == remedy


COMMANDS = {
    "serve --no-journal --sync always": (2, "Leave one of them out."),
    "serve --port 0 --dir file/api": (1, "Choose another with --dir."),
    "env gsm8k --api http://127.0.0.1:1 --model tiny --wait-s 1": (2, "Leave one of them out."),
    "process --env gsm8k --model tiny --as sft --old-schema --out a.jsonl": (2, "Give one of the two."),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_refused_says_what_to_do(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    code, remedy = COMMANDS[command]
    assert run_app(command.split()) == code
    assert remedy in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "headers", "remedy"),
    [
        ("/scored_data", b"[]", {}, "Lists go to /scored_data_list."),
        ("/scored_data_list", b"{}", {}, "One group goes to /scored_data."),
        ("/scored_data", b"{}", {"content-encoding": "br"}, "Send it plain, or with gzip."),
        ("/scored_data_list", b"[" + b"{}," * MOST_GROUPS + b"{}]", {}, "Send them in several requests."),
    ],
)
def test_a_body_that_is_refused_is_answered_with_what_to_do(
    server: Running, path: str, body: bytes, headers: dict[str, str], remedy: str
) -> None:
    answer = server.client.post(path, content=body, headers=headers)
    assert answer.status_code in (400, 422) and remedy in answer.text


async def test_a_worker_to_which_no_trainer_comes_says_what_starts_one(server: Running) -> None:
    api = Api(server.url)
    try:
        with pytest.raises(AtroposError) as found:
            await await_policy(api, 0.0, asyncio.Event())
    finally:
        await api.close()
    assert found.value.remedy == f"Start one: atropos train --api {server.url}; or name the model: --model NAME"


def test_a_worker_that_is_not_known_is_answered_with_how_it_registers(server: Running) -> None:
    answer = server.client.post("/v1/workers/nobody/heartbeat", content=encode_bytes({}))
    assert answer.status_code >= 400 and b"Register (again): POST /v1/workers" in answer.content
