"""Every table in TOML on a page is one that a run takes: its sections, its components, each of their options.

An option that a page shows in a comment is tried as well. Commented options below a commented `use` are those of that
component, and are tried with it. Other settings that an option needs may be missing then, so a refusal is not a mistake of
the page, but an option or a component that does not exist is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atropos_core.config.component import Component
from atropos_core.config.run_file import NAMED, SINGLE, Layer, load
from atropos_core.errors import ConfigError
from atropos_core.plugins.manager import load_plugins
from tests.pages.blocks import BLOCKS, Block

OTHERS = ("docs/simulation.md",)  # figures, which another test reads
TABLES = [
    block for block in BLOCKS if block.language == "toml" and "[project" not in block.text and block.page not in OTHERS
]
MINE = """
from atropos_core import Environment


class Mine(Environment):
    def tasks(self, split):
        return []

    async def score(self, task, reply):
        return 0.0


async def reward(task, episodes):
    return [0.0 for _ in episodes]
"""


@pytest.fixture(autouse=True)
def beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run files on the pages name."""
    (tmp_path / "mine.py").write_text(MINE)
    for block in BLOCKS:
        if saved := re.match(r"# (\w+\.py)\n", block.text):  # as pages of the tutorial name what to save
            (tmp_path / saved[1]).write_text(block.text)
    (tmp_path / "token").write_text("secret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "secret")


def components(values: Mapping[str, Any]) -> Iterator[tuple[str, Component]]:
    """Kind and component of everything that a run file with these tables has."""
    config = load([Layer("defaults", {"environment": {"gsm8k": {}}}), Layer("the page", values)]).config
    for kind in SINGLE:
        yield kind, getattr(config, kind)
    for kind in NAMED:
        for component in getattr(config, kind).values():
            yield kind, component


def take(values: Mapping[str, Any]) -> None:
    """Validate as a run does, up to what this machine has. Raises ConfigError, ValidationError."""
    registry = load_plugins().registry
    for kind, component in components(values):
        registry.find(kind, component.use).provider.options.model_validate(component.options)


def alternatives(text: str) -> Iterator[str]:
    """The text with one commented line, or one commented table with the comments below it, in force."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if re.match(r"# \[", lines[at]):
            end = at + 1
            while end < len(lines) and lines[end].startswith("# ") and not lines[end].startswith("# ["):
                end += 1
            yield "\n".join([*lines[:at], *(line[2:] for line in lines[at:end]), *lines[end:]])
            at = end
        elif found := re.match(r"# ([\w-]+) = ", lines[at]):
            start = max((n for n in range(at) if lines[n].startswith("[")), default=0)
            stop = next((n for n in range(at, len(lines)) if lines[n].startswith("[")), len(lines))
            other, last = re.compile(rf"{re.escape(found[1])} = "), at
            if found[1] == "use":  # with options of its own
                other = re.compile(r"[\w-]+ = ")
                while last + 1 < len(lines) and re.match(r"# (?!use\b)[\w-]+ = ", lines[last + 1]):
                    last += 1
            yield "\n".join(
                line[2:] if at <= n <= last else line
                for n, line in enumerate(lines)
                if not (start <= n < stop and other.match(line))
            )
            at = last
        at += 1


@pytest.mark.parametrize("block", TABLES, ids=str)
def test_a_run_takes_the_tables_on_a_page(block: Block) -> None:
    take(tomllib.loads(block.text))


@pytest.mark.parametrize("block", TABLES, ids=str)
def test_every_option_that_a_page_shows_in_a_comment_is_one(block: Block) -> None:
    for text in alternatives(block.text):
        try:
            take(tomllib.loads(text))
        except ValidationError as error:
            assert not [each for each in error.errors() if each["type"] == "extra_forbidden"], error
        except ConfigError as error:
            assert "unknown" not in str(error) and "there is no" not in str(error), error


def test_a_table_with_an_option_that_there_is_not_is_noticed() -> None:
    with pytest.raises((ConfigError, ValidationError)):
        take({"trainer": {"learning_rat": 1e-6}})
    [text] = alternatives('[trainer]\nuse = "grpo"\n# learning_rat = 1e-6\n')
    assert tomllib.loads(text)["trainer"]["learning_rat"] == 1e-6


def test_a_commented_use_is_tried_with_the_commented_options_below_it() -> None:
    page = (
        '[engine]\nuse = "hf"\nthreads = 2\n# use = "remote"\n# url = "http://127.0.0.1:8001"\n# token_file = "token"\n'
    )
    [text] = alternatives(page)
    assert tomllib.loads(text) == {"engine": {"use": "remote", "url": "http://127.0.0.1:8001", "token_file": "token"}}
    take(tomllib.loads(text))
    with pytest.raises((ConfigError, ValidationError)):
        take(tomllib.loads(text.replace("url", "ulr")))
