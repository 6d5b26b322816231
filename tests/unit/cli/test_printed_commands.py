"""Commands that are printed to be copied: the shell gives a program the path that was meant, whatever is in it."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_agent_api.sandboxes.config import ExternalOptions
from atropos_agent_api.sandboxes.external import ExternalSandbox
from atropos_core import console
from atropos_core.launch.picture import where
from atropos_evaluation.policies import no_checkpoint
from atropos_http_server.tokens import read_server_token
from atropos_testing.new_command import new

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"\b(atropos|pip|python3?|curl|docker|sbatch|kubectl|chmod) [\w-]|secrets.*> $")
IS_A_PATH = re.compile(
    r"\b(path|file|folder|directory|out|model|run|parents|target|image|token_file|_image|_directory|executable|TAKER)\b"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / 'Jo\'s "own" $HOME `runs`;'
    made.mkdir()
    return made


def commands(said: str) -> Iterator[str]:
    for line in said.splitlines():
        if found := re.search(r"(atropos|pip|python|curl) (?!comes).*", line):
            yield found[0]


def arguments(command: str) -> list[str]:
    """What bash gives the program that a command begins with."""
    stub = "() { printf '%s\\0' \"$@\"; }; "
    ended = subprocess.run(
        ["bash", "-c", stub.join(["atropos", "pip", "python", "curl", ""]) + command],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\0")[:-1]


def test_a_shell_reads_a_printed_path_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new("reward", "brevity", tools=False, directory=folder)
    made = str(folder / "reward_brevity")
    printed = [arguments(command) for command in commands(capsys.readouterr().out)]
    assert ["install", "-e", f"{made}[test]"] in printed and ["-m", "pytest", made] in printed

    picture = re.findall(r"`(atropos plot .*)` draws one", where(folder))[0]
    assert arguments(picture) == ["plot", str(folder)]

    (folder / "config.json").touch()
    assert arguments(str(no_checkpoint(folder).remedy)) == ["eval", "--env", "NAME", "--model", str(folder)]
    (folder / "config.toml").touch()
    saved = folder / "checkpoints/step-00000012"
    assert arguments(str(no_checkpoint(saved).remedy)) == ["eval", str(folder), "--step", "12"]


def test_a_file_whose_name_begins_with_a_dash_is_no_option() -> None:
    assert arguments(f"atropos resume {console.quoted('-r')}") == ["resume", "./-r"]


async def test_a_token_file_is_read_by_the_command_that_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox = ExternalSandbox(ExternalOptions(port=0), folder / "token")
    await sandbox.open()
    try:
        sandbox.announce("http://127.0.0.1:1")
    finally:
        await sandbox.close()
    curl, loop = [arguments(command) for command in commands(capsys.readouterr().out.replace("curl ", "", 1))]
    assert f"Authorization: Bearer {read_server_token(folder / 'token').decode()}" in curl
    assert str(folder / "token") in loop


def test_every_path_of_a_printed_command_is_quoted() -> None:
    """In the sources of core and of each plugin: a path after the name of a program."""
    bare = []
    for file in [*ROOT.glob("atropos_core/**/*.py"), *ROOT.glob("plugins/*/atropos_*/**/*.py")]:
        source = file.read_text()
        for text in ast.walk(ast.parse(source)) if COMMAND.search(source) else ():
            before = ""
            for part in text.values if isinstance(text, ast.JoinedStr) else ():
                if isinstance(part, ast.Constant):
                    before += str(part.value)
                    continue
                shown = ast.unparse(part)
                if COMMAND.search(before.rpartition(". ")[2]) and IS_A_PATH.search(shown) and "quote" not in shown:
                    bare.append(f"{file.relative_to(ROOT)}:{text.lineno}: {shown}")
                before += "..."
    assert not bare
