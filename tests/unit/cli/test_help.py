"""What help texts say is shown: square brackets in them are text, and no markup that nobody sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
import typer
from rich.text import Text

from atropos_core.cli import make_app, run_app
from atropos_core.cli.overview import GROUPS, OTHERS, show_alone


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for each, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {each}")


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, id=name) for name, each in commands(typer.main.get_command(make_app()), "atropos")],
)
def test_every_default_that_a_help_text_names_is_shown(command: click.Command) -> None:
    for parameter in command.params:
        message = getattr(parameter, "help", None) or ""
        assert Text.from_markup(message).plain == message.replace("\\[", "["), f"{parameter.name}: {message}"


@pytest.mark.parametrize(
    ("flag", "key"),
    [("--learning-rate", "trainer.learning_rate"), ("--lr", "trainer.learning_rate"), ("--group-size", "training.group_size"),
     ("--max_tokens", "sampling.max_tokens"), ("--warmup-ratio", "trainer.warmup_steps"), ("--bf16", "trainer.dtype")],
)  # fmt: skip
def test_a_flag_that_is_a_key_of_the_run_file_is_named_with_how_it_is_set(
    flag: str, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for given in ((flag, "1"), (f"{flag}=1",)):
        assert run_app(["run", "--env", "gsm8k", *given]) == 2
        assert f"No such option: {flag}. Keys of a run file are set with --set: --set {key}=VALUE" in _words(capsys)
    assert run_app(["plugins", flag]) == 2
    assert "with --set" not in _words(capsys)


@pytest.mark.parametrize(
    ("flag", "written"),
    [("--report-to", "--set sink.NAME.use=NAME"), ("--report_to", "--set sink.NAME.use=NAME"), ("--output-dir", "--dir"),
     ("--model_name_or_path", "--model"), ("--dataset-name", "--env dataset:FILE")],
)  # fmt: skip
def test_a_flag_of_another_library_that_is_no_key_is_named_with_what_is_written_here(
    flag: str, written: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run_app(["run", flag, "x"]) == 2
    assert f"No such option: {flag}. Write {written}" in _words(capsys)
    assert run_app(["plugins", flag, "x"]) == 2
    assert "Write" not in _words(capsys)


def test_any_other_flag_is_refused_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["run", "--stepz", "1"]) == 2
    assert "No such option: --stepz" in (words := _words(capsys)) and "with --set" not in words


def _words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_parser_is_made_of_the_typed_command_alone() -> None:
    def names(*arguments: str) -> set[str]:
        return set(typer.main.get_command(make_app(arguments)).commands)  # type: ignore[attr-defined]

    assert names("serve", "--port", "0") == {"serve"}
    assert names("run") == {"run"} and names("config", "show") == {"config"}
    assert names("nonsense") == names() > {"run", "config", "serve", "env"}


def test_help_shows_four_commands_to_begin_with_and_then_each_command_in_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # rich prints it if another test has imported IPython
    assert run_app(["--help"]) == 0
    shown = _sections(capsys.readouterr().out)
    assert list(shown) == ["Start here", *GROUPS, "Options"]
    installed = set(typer.main.get_command(make_app()).commands)  # type: ignore[attr-defined]
    assert [row.split()[1] for row in shown["Start here"]] == [
        name for name in ("run", "view", "new", "plan") if name in installed
    ]
    listed = {group: {row.split()[0] for row in shown[group]} for group in GROUPS}
    assert {"run", "resume"} <= listed["Train"] and {"view", "doctor"} <= listed["Look"]
    assert ("plan" in listed["Train"]) == ("plan" in installed)
    assert {"new", "check", "config"} <= listed["Build"] and {"serve", "adapter"} <= listed["Connect"]


def test_a_command_of_a_plugin_is_in_the_group_that_it_names_and_else_in_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def command() -> None:
        """Do it."""

    app = make_app(["run"])
    app.command("mine", rich_help_panel="Look")(command)
    app.command("unknown", rich_help_panel="Somewhere")(command)
    app.command("plain")(command)
    show_alone(app)
    without_parsers = capsys.readouterr().out
    assert app(args=["--help"], standalone_mode=False) in (0, None)
    assert capsys.readouterr().out.rstrip() == without_parsers.rstrip()
    shown = _sections(without_parsers)
    assert list(shown) == ["Start here", "Train", "Look", OTHERS, "Options"]
    assert [row.split()[0] for row in shown["Look"]] == ["mine"]
    assert [row.split()[0] for row in shown[OTHERS]] == ["unknown", "plain"]


def test_help_that_is_piped_imports_no_rich() -> None:
    code = "import sys; from atropos_core.cli import run_app; run_app(['--help']); sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def _sections(help_text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in help_text.split("\n\n")[2:]:
        title, *rows = part.splitlines()
        found[title] = rows
    return found
