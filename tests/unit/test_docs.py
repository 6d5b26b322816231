"""docs/hooks.md says what the hook specifications say, the README's example runs, and so could every command on a page."""

from __future__ import annotations

import inspect
import re
import shlex

import pytest
import typer

from atropos_core import hooks
from atropos_core.cli import make_app
from tests.conftest import REPOSITORY, metrics_of


def test_the_page_of_hooks_has_every_hook_with_its_docstring():
    page = (REPOSITORY / "docs/hooks.md").read_text()
    named = {name: value for name, value in vars(hooks).items() if name.startswith("atropos_")}
    assert set(re.findall(r"^### `(\w+)", page, re.M)) == set(named)
    for name, hook in named.items():
        assert inspect.getdoc(hook) in page, name


def test_the_readme_example_is_an_environment_that_trains(atropos, tmp_path):
    readme = (REPOSITORY / "README.md").read_text()
    [source] = re.findall(r"```python\n(.*?class \w+\(Environment\).*?)```", readme, re.S)
    assert len(source.splitlines()) <= 30
    (tmp_path / "sums.py").write_text(source)
    few = ("--steps", "3", "--set", "evaluation.problems=16")
    ended = atropos("run", "--model", "toy", "--env", "./sums.py", *few, "--dir", "run")
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    before, *steps = metrics_of(tmp_path / "run")
    assert [before["step"], *(one["step"] for one in steps)] == [0, 1, 2, 3]
    assert any(one["reward/std"] > 0 and one["groups/trained"] > 0 for one in steps), "it tells replies apart"
    assert all(one["rollouts/failed"] == 0 for one in steps)


PAGES = [path for pattern in ("*.md", "docs/*.md", "plugins/*/README.md") for path in sorted(REPOSITORY.glob(pattern))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_on_a_page_has_the_options_that_it_is_given(page):
    commands = typer.main.get_command(make_app())
    for block in re.findall(r"```(?:\w*)\n(.*?)```", page.read_text(), re.S):
        for line in re.findall(r"^(?:\S*/)?atropos (.*)$", block, re.M):
            words = shlex.split(line, comments=True)
            command, rest = commands, words
            while rest and (found := getattr(command, "commands", {}).get(rest[0])) is not None:
                command, rest = found, rest[1:]
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert command is not commands, f"{line!r}: no such command"
            given = {word.partition("=")[0] for word in rest if word.startswith("-")}
            assert given <= known | {"--help"}, f"{line!r}: {given - known}"
