"""What an error says to do, where no other test reads it: each is raised by what a user does, and read whole."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import atropos_core
from atropos_core.cli import run_app
from atropos_core.cli.resume import plan_resume
from atropos_core.errors import AtroposError
from atropos_core.group_schema import check_task
from atropos_core.guards.system_errors import named_error
from atropos_core.hub.records import Label, Limits
from atropos_core.hub.reports import check_fits
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.scripting.arguments import Arguments
from atropos_core.storage.run_directory import RunDirectory
from atropos_core.storage.run_records import RunRecords
from atropos_core.types import Task
from atropos_evaluation.chat_model import ChatModel
from atropos_http_server.tls import tls_context
from atropos_http_server.tokens import read_server_token
from atropos_records.dataset import DatasetExport
from atropos_records.hugging_face import Hub
from atropos_records.policy import checkpoint_of, export_policy
from atropos_records.selection import Selection
from atropos_trajectory_client.client import Api
from atropos_trajectory_client.shm.socket import listen


def raised(error: BaseException | None) -> None:
    assert error is not None
    raise error


def with_an_old_method() -> None:
    class Mine(atropos_core.Environment):
        async def play(self, task: Any, policy: Any) -> None: ...


def token_of_one_letter(folder: Path) -> None:
    path = folder / "token"
    path.write_text("a")
    path.chmod(0o600)
    read_server_token(path)


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "run"


def whole_policy(folder: Path) -> Any:
    (folder / "config.json").write_text("{}")
    return SimpleNamespace(policy=folder)


def run_records(folder: Path) -> RunRecords:
    (folder / "config.toml").write_text("")
    return RunRecords(folder)


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a model's address": (lambda at: ChatModel("ftp://there", "m"), "As http://127.0.0.1:8000/v1"),
    "an API's address": (lambda at: Api("there"), "Give one like http://127.0.0.1:8000"),
    "a certificate": (
        lambda at: tls_context(at / "cert.pem", at / "key.pem"),
        "Both are PEM files, the key is that of the certificate and has no passphrase.",
    ),
    "a token": (
        token_of_one_letter,
        "python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > {folder}/token",
    ),
    "descriptors": (lambda at: raised(named_error(OSError(errno.EMFILE, "too many"))), "Raise `ulimit -n`."),
    "a descriptor": (
        lambda at: raised(named_error(OSError(errno.EBADF, "bad"))),
        "Look for os.close and os.closerange in the components of this run: they may close what they opened, no more.",
    ),
    "a repository": (lambda at: Hub("nothing", public=False), "As --push OWNER/NAME"),
    "no checkpoint": (
        lambda at: checkpoint_of(run_records(at), None, print),
        "A run saves one at its end; checkpoint.every: before.",
    ),
    "no tokenizer": (
        ChatTokenizer,
        "Save a fast tokenizer there: AutoTokenizer.from_pretrained(model).save_pretrained(directory)",
    ),
    "a run's directory": (lambda at: RunDirectory(below_a_file(at)).make(), "Choose another with --dir."),
    "an old method": (
        lambda at: with_an_old_method(),
        "Rename it to rollout: what it is given and what it returns are the same.",
    ),
    "a group beyond the hub": (
        lambda at: check_fits(Limits(10), Label("one", 1, 11)),
        "Raise hub.size_mb, or make groups smaller (training.group_size, sampling.max_tokens).",
    ),
    "a form": (
        lambda at: DatasetExport("poem", at / "a.jsonl", Selection()),
        "Choose one of: sft, dpo, parquet.",
    ),
    "a kind": (lambda at: atropos_core.check(object()), 'Name the kind: kind="reward", for example.'),
    "no run to go on with": (lambda at: plan_resume(at), "`ls -t runs` shows the newest."),
    "no run to read": (lambda at: RunRecords(at), "`ls -t runs` shows the newest."),
    "nothing to merge": (lambda at: export_policy(run_records(at), whole_policy(at), at / "out", str), "Leave it out."),
    "a policy over another": (
        lambda at: export_policy(run_records(at), whole_policy(at), at, None),
        "Name another directory, or remove it.",
    ),
    "a socket of another": (
        lambda at: (listen(at / "own" / "ring", 1), listen(at / "own" / "ring", 1)),
        "End it, or give this one another directory.",
    ),
    "no use": (lambda at: Arguments()._read("reward", {"weight": 1}), '{"use": ..., options}'),
    "half a pair": (lambda at: check_task(Task("\ud83d", ())), "Send text that can be encoded as UTF-8."),
}  # fmt: skip


@pytest.mark.parametrize("what", MADE)
def test_an_error_says_what_to_do(what: str, tmp_path: Path) -> None:
    make, remedy = MADE[what]
    with pytest.raises(AtroposError) as found:
        make(tmp_path)
    assert found.value.remedy == remedy.replace("{folder}", str(tmp_path))


COMMANDS = {
    "new loss mine --tools": "Leave --tools out.",
    "run --dry-run --seed 1 --set seed=2": "Leave one of them out.",
    "run --dry-run --env ./one.py:Sums --env ./two.py:Sums": "Name them apart in a run file.",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_refused_says_what_to_do(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(command.split()) == 2
    assert COMMANDS[command] in re.sub(r"\s+", " ", capsys.readouterr().err)
