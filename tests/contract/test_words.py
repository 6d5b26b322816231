"""Names and words that were given up stay given up: docs/glossary.md lists them, with what they are called now."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator

import pytest

from tests.conftest import REPOSITORY

PACKAGES = [REPOSITORY / "atropos_core", *REPOSITORY.glob("libs/*/atropos_*"), *REPOSITORY.glob("plugins/*/atropos_*")]
STAYS = {  # the same word for another thing
    ("Source", "atropos_core/rollouts/source.py"): "where the loop's groups come from",
}


def given_up() -> set[str]:
    text = (REPOSITORY / "docs/glossary.md").read_text()
    [table] = re.findall(r"^## Names that code no longer has\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return {
        name.rpartition(".")[2]
        for row in table.strip().splitlines()[2:]
        for name in re.findall(r"`([\w.]+)`", row.split("|")[1])
    }


def defined(text: str) -> Iterator[str]:
    """Names of classes, and of methods that an environment could have."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield node.name
            if any(isinstance(base, ast.Name) and base.id == "Environment" for base in node.bases):
                yield from (one.name for one in node.body if isinstance(one, ast.AsyncFunctionDef))


def test_no_class_and_no_module_has_a_name_that_was_given_up() -> None:
    words, found = given_up(), []
    assert {"Player", "play", "hosting"} <= words
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            where = str(path.relative_to(REPOSITORY))
            found += [
                f"{where}: {name}"
                for name in {path.stem, *defined(path.read_text())} & words
                if (name, where) not in STAYS
            ]
    assert not found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("class Player: pass", ["Player"]),
        ("class Chess(Environment):\n    async def play(self, task, policy): ...", ["Chess", "play"]),
        ("player = 3", []),
    ],
)
def test_what_a_file_defines_is_seen(text: str, names: list[str]) -> None:
    assert list(defined(text)) == names


# -- words, in comments, docstrings, messages and pages

RETIRED = re.compile(r"\b(?<!self-)(plays?|played|playing|players?|doors?|news|hands)\b", re.I)
QUOTED = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}")  # an identifier in a sentence, or in an f-string
ALLOWED = {  # names on the wire, of files, of options that are refused, and of records that are kept
    (
        "benchmarks/bugs/core.toml",
        '(("play", "rollout"), ("play_group", "rollout_group"))',
    ): "code that refuses the old names",
    ("benchmarks/soak_skyrl.py", "groups played again"): "a key of its result file",
    ("docs/glossary.md", "what the names were before"): "the table of names that code no longer has",
    ("plugins/trajectory_api/atropos_trajectory_api/native/openapi.py", "playing"): "a field on the wire",
    ("plugins/env_textarena/README.md", "players = 2"): "an option, by textarena's own word",
    ("docs/recipes.md", "players = 2"): "an option, by textarena's own word",
    (
        "libs/recipes/atropos_recipes/run_files/24gb-qwen2.5-1.5b-self-play.toml",
        "players = 2",
    ): "an option, by textarena's own word",
    ("plugins/env_textarena/atropos_env_textarena/environment.py", "players of"): "an option, by textarena's own word",
    ("tests/worlds/test_textarena.py", "players of"): "an option, by textarena's own word",
    ("tests/worlds/test_textarena.py", "Player "): "what textarena says",
    ("tests/contract/test_options.py", "game parameters players"): "an option, by textarena's own word",
    ("tests/contract/test_flags.py", "--hands"): "a flag that is refused",
    ("tests/contract/test_words.py", "these words themselves"): "this test",
    ("tests/e2e/role_kills.py", "played.jsonl"): "a file that the programs of the test write",
    ("tests/e2e/test_roles.py", "Path('playing')"): "a file that the programs of the test write",
    ("tests/pages/test_figures.py", "groups played again"): "a key of a result file",
}
WHOLE_FILES = {file for file, _ in ALLOWED if file in ("docs/glossary.md", "tests/contract/test_words.py")}
NOT_READ = ("CHANGELOG.md", "benchmarks/results/", "docs/decisions/", "docs/catalogue.md")
# What was true when it was written, and what other packages say.


def sentences(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Lines that a person reads: comments and texts with a space in a program, all of a page."""
    if not path.endswith(".py"):
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and re.search(r"\s", token.string)):
            yield from enumerate(token.string.splitlines(), token.start[0])


def retired(path: str, text: str) -> list[str]:
    if path in WHOLE_FILES:
        return []
    allowed = [phrase for file, phrase in ALLOWED if file == path]
    found = []
    for number, line in sentences(path, text):
        rest = QUOTED.sub("", line)
        for phrase in allowed:
            rest = rest.replace(phrase, "")
        found += [f"{path}:{number}: {one.group()!r} in {line.strip()[:100]!r}" for one in RETIRED.finditer(rest)]
    return found


def test_no_comment_message_or_page_has_a_word_that_was_given_up() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.py", "*.md", "*.toml", "*.tmpl", "Makefile"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    paths = [path for path in listed.split("\0") if path and not path.startswith(NOT_READ)]
    assert len(paths) > 500
    assert not [one for path in paths for one in retired(path, (REPOSITORY / path).read_text())]


def test_each_allowed_use_is_still_there() -> None:
    missing = {
        (file, phrase)
        for file, phrase in ALLOWED
        if file not in WHOLE_FILES and phrase not in (REPOSITORY / file).read_text()
    }
    assert not missing


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("a.py", "x = 1  # played twice", ["played"]),
        ("a.py", 'raise ValueError("the door is shut")', ["door"]),
        ("a.py", 'def f():\n    """One line.\n\n    Each play has news."""', ["play", "news"]),
        ("a.py", 'row = {"playing": 3}  # a name on the wire is no sentence', []),
        ("a.py", '"""`playing` is sent, {player} is named: a display."""', []),
        ("page.md", "A worker has its hands full, plays on, and writes `play`.", ["hands", "plays"]),
    ],
)
def test_a_sentence_with_such_a_word_is_found(path: str, text: str, words: list[str]) -> None:
    assert [one.split("'")[1] for one in retired(path, text)] == words
