"""What an error says to do does help: it is done to the letter, and what was refused works."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atropos_core.cli import run_app
from atropos_core.errors import AtroposError
from atropos_core.rollouts.policy_versions import check_versions
from atropos_core.storage.run_directory import RunDirectory
from atropos_core.types import UNKNOWN_VERSION
from atropos_evaluation.chat_model import ChatModel
from atropos_http_server.connection_limits import Gate
from atropos_http_server.server import RunningServer, serve_in_loop
from atropos_http_server.tokens import LEAST_CHARACTERS, read_server_token
from atropos_records.dataset import DatasetExport
from atropos_records.files import new_file
from atropos_records.selection import Selection
from atropos_testing.new_command import write
from atropos_testing.samples import make_group
from atropos_trajectory_client.shm.socket import listen


def remedy_of(call: Callable[[], object]) -> str:
    with pytest.raises(AtroposError) as found:
        call()
    assert found.value.remedy is not None
    return found.value.remedy


def in_a_shell(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=True, timeout=30)


@pytest.mark.parametrize("wrong", ["missing", "short", "open to others"])
def test_the_command_that_a_refused_token_file_names_makes_one_that_is_taken(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    if wrong != "missing":
        path.write_text("a" * (1 if wrong == "short" else LEAST_CHARACTERS))
        path.chmod(0o600 if wrong == "short" else 0o644)
    in_a_shell(remedy_of(lambda: read_server_token(path)).removeprefix("Make one: "))
    assert len(read_server_token(path)) >= LEAST_CHARACTERS


def test_a_folder_that_was_closed_to_others_has_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    folder.chmod(0o755)
    in_a_shell(remedy_of(lambda: listen(folder / "ring", 1)))
    listen(folder / "ring", 1).close()


def test_the_key_that_was_exported_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = remedy_of(lambda: ChatModel("http://127.0.0.1:1", "m", key_variable="KEY_OF_THIS_TEST"))
    name = re.fullmatch(r"export (\w+)=\.\.\.", remedy)
    assert name is not None
    monkeypatch.setenv(name[1], "secret")
    ChatModel("http://127.0.0.1:1", "m", key_variable="KEY_OF_THIS_TEST")


def test_a_file_that_is_there_is_written_under_another_name_and_when_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    assert remedy_of(lambda: new_file(path, {})) == "Name another file, or remove it."
    new_file(tmp_path / "b.jsonl", {}).discard()
    path.unlink()
    new_file(path, {}).discard()


def test_a_file_of_no_kind_and_parquet_under_another_name(tmp_path: Path) -> None:
    assert remedy_of(lambda: new_file(tmp_path / "a.txt", {})) == "Name it NAME.jsonl or NAME.parquet."
    assert remedy_of(lambda: DatasetExport("parquet", tmp_path / "a.jsonl", Selection())) == "Name it NAME.parquet."
    for name in ("a.jsonl", "a.parquet"):
        new_file(tmp_path / name, {}).discard()
    DatasetExport("parquet", tmp_path / "a.parquet", Selection()).discard()


def test_a_run_s_directory_that_is_in_use_is_named_for_resume_and_another_is_taken(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").make()
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir()
    remedy = remedy_of(lambda: RunDirectory(tmp_path / "run").make())
    assert remedy == f"Choose another, or continue the run in it: atropos resume {tmp_path / 'run'}"
    assert RunDirectory(tmp_path / "another").make().is_dir()


def test_a_version_that_is_not_known_is_sent_as_such() -> None:
    def claim(version: int) -> None:
        group = make_group(0, [1.0, 0.0])
        for episode in group.episodes:
            for rollout in episode.rollouts:
                rollout.policy_version[:] = np.where(rollout.sampled, version, rollout.policy_version)
        check_versions(group, 3)

    remedy = remedy_of(lambda: claim(4))
    assert re.search(rf", or {UNKNOWN_VERSION} if it is unknown\.$", remedy)
    claim(UNKNOWN_VERSION)
    claim(3)


async def test_a_port_that_is_taken_is_another_s_and_0_is_any_free_one() -> None:
    async def nothing(*asgi: object) -> None: ...

    async def at(port: int) -> RunningServer:
        return await serve_in_loop(
            nothing, Gate(10, 10), "127.0.0.1", port, stop=lambda: None, grace_s=1, keep_alive_s=1
        )

    first = await at(0)
    try:
        with pytest.raises(AtroposError) as found:
            await at(int(first.url.rpartition(":")[2]))
        assert str(found.value.remedy).endswith("give another port; 0 takes any free one.")
        second = await at(0)
        await second.close()
    finally:
        await first.close()


def test_a_plugin_s_folder_that_exists_is_made_under_another_name_or_elsewhere(tmp_path: Path) -> None:
    first = write("sink", "ledger", tmp_path)
    remedy = remedy_of(lambda: write("sink", "ledger", tmp_path))
    assert remedy == "Choose another name, or another place with --dir."
    assert write("sink", "daybook", tmp_path) != first
    assert write("sink", "ledger", tmp_path / "elsewhere") != first


REWARD = """
class Sampled:
    async def __call__(self, task, episodes):
        return [float(sum(int(one.sampled.sum()) for one in episode.rollouts)) for episode in episodes]
"""
# as it is refused: what is advised, and the command that does so
COMMANDS: dict[str, tuple[str, str]] = {
    "check ./own.py:Sampled --skip everything": ("Say it: --kind reward, for example.", "check ./own.py:Sampled --kind reward"),
    "new environment gsm8k": ("Choose another name.", "new environment sums_of_mine"),
    "new environment Sums-Of-Mine": ("atropos new environment sums_of_mine", "new environment sums_of_mine"),
    "run --dry-run --env nowhere": ("`atropos plugins` lists what is installed.", "plugins"),
    "run --dry-run --env gsm8k --model ./nothing": (
        "Name a directory that save_pretrained wrote. In a run file, ./ is relative to that file's folder; in a flag, a relative "
        "path starts in the current directory.",
        "run --dry-run --env gsm8k --model tiny",
    ),
    "eval --model tiny --problems 8 --set training.steps=3": (
        "Leave it out. In a run file it may stay, for the other commands that read the file.",
        "config show run.toml",
    ),
}  # fmt: skip
RUN_FILE = '[training]\nsteps = 3\n[environment.gsm8k]\nuse = "gsm8k"\n'


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_does_as_it_was_advised_is_taken(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(REWARD)
    Path("run.toml").write_text(RUN_FILE)
    advised, better = COMMANDS[command]
    assert run_app(command.split()) == 2
    assert advised in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert run_app(better.split()) == 0, capsys.readouterr()


def test_a_folder_that_is_not_empty_is_exported_to_another_or_when_it_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("out/mine").touch()
    export = "adapter skyrl --env gsm8k --out".split()
    assert run_app([*export, "out"]) == 1
    assert "Name a new folder, or empty it." in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert run_app([*export, "another"]) == 0
    os.remove("out/mine")
    assert run_app([*export, "out"]) == 0
