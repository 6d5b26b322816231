"""Remedies of the server's errors that no other test reads."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atropos_core.cli import run_app
from atropos_core.codec import encode_bytes
from atropos_core.errors import AtroposError
from atropos_trajectory_api.engine_http.server import address
from atropos_trajectory_api.groups.frame_check import read_frame
from atropos_trajectory_api.journal.log import Journal
from atropos_trajectory_api.legacy.intake import MOST_GROUPS
from atropos_trajectory_api.legacy_groups.wire_json import MOST_IN_LIST, MOST_VALUES, parse
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.roles.environment_worker import await_policy
from atropos_trajectory_api.server.serving import bind, ids_of, serve
from atropos_trajectory_api.service.old_registrations import RegisterEnv
from atropos_trajectory_api.service.old_state import MOST_ENVIRONMENTS
from atropos_trajectory_api.service.service import Service
from atropos_trajectory_api.service.workers import Policy, Workers
from atropos_trajectory_client.client import Api
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


def remedy_of(call: Callable[[], object]) -> str:
    with pytest.raises(AtroposError) as found:
        call()
    assert found.value.remedy is not None
    return found.value.remedy


def test_a_port_that_is_taken_is_left_and_another_one_is_had() -> None:
    taken = bind("127.0.0.1", 0)
    try:
        remedy = remedy_of(lambda: bind("127.0.0.1", taken.getsockname()[1]))
        assert remedy.endswith("end it yourself, or choose --port.")
        bind("127.0.0.1", 0).close()
    finally:
        taken.close()


def test_a_directory_of_another_journal_is_moved_away_or_another_one_named(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "000000000001.journal").write_bytes(b"OTHERJRN" + bytes(8))
    remedy = remedy_of(lambda: Journal(folder))
    assert remedy == "Move the directory away, or serve from another one (--dir)."
    Journal(tmp_path / "another").close()
    folder.rename(tmp_path / "away")
    Journal(folder).close()


def test_a_server_for_others_wants_a_token_file_and_then_fails_over_what_is_in_it_alone(tmp_path: Path) -> None:
    options = {"host": "0.0.0.0", "port": 0, "directory": tmp_path / "api"}
    assert "Add --token-file FILE" in remedy_of(lambda: serve(ServeOptions(**options)))
    token = tmp_path / "token"
    token.write_text("short")
    token.chmod(0o600)
    assert "secrets.token_urlsafe" in remedy_of(lambda: serve(ServeOptions(**options, token_file=token)))


def test_a_model_without_a_vocabulary_is_replaced_by_one_that_save_pretrained_made(tmp_path: Path) -> None:
    assert "Name a directory as save_pretrained makes it" in remedy_of(lambda: ids_of(tmp_path))
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert ids_of(tmp_path) == 7


def test_an_engine_is_reached_at_the_name_of_its_machine() -> None:
    assert remedy_of(lambda: address("0.0.0.0:8001")) == "Give the name or address by which workers reach this machine."
    assert address("10.0.0.6:8001") == ("10.0.0.6", 8001)


@pytest.mark.parametrize("other", [{"tokenizer": "b", "vocabulary": 9}, {"tokenizer": "a", "vocabulary": 10}])
def test_a_worker_with_the_policy_s_own_model_is_let_in(other: dict[str, object]) -> None:
    policy = Policy(tokenizer="a", vocabulary=9, model="models/mine")
    remedy = remedy_of(lambda: policy.refuse_other("worker", **other))  # type: ignore[arg-type]
    assert remedy == "Give the worker the policy's own model directory (models/mine)."
    policy.refuse_other("worker", "a", 9)


def test_a_thousand_environments_make_room_when_one_that_has_ended_is_disconnected(tmp_path: Path) -> None:
    wanted = RegisterEnv(max_token_length=8, desired_name="sums", weight=1.0, group_size=4)
    with running(tmp_path, journal=False) as server:
        server.begin()
        old = server.service.old
        while len(old.environments) < MOST_ENVIRONMENTS:
            old.add(wanted, 0.0)
        refused = server.post("/register-env", wanted.model_dump())
        assert refused.status_code == 503 and "POST /disconnect-env for those that have ended" in refused.text
        assert server.post("/disconnect-env", {"env_id": next(iter(old.environments))}).json() == {"status": "success"}
        assert server.post("/register-env", wanted.model_dump()).json()["status"] == "success"
