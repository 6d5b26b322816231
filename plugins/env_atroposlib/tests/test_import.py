"""`atropos import`: a skeleton from a file that is read and not run, which keeps the contract once it has tasks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugins.env_atroposlib.tests.hosted import FILES
from tests.conftest import in_front

pytestmark = pytest.mark.slow

ROWS = """        numbers = range(8) if split == "train" else range(8, 12)
        return [(f"What is {number} + 100?", str(number + 100)) for number in numbers]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("imported")
    ended = subprocess.run(
        [sys.executable, "-m", "atropos_core", "import", str(FILES / "many_options.py"), "--dir", str(folder)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return folder / "env_sums", ended.stdout + ended.stderr


def test_options_are_its_configurations_fields_with_their_values(made: tuple[Path, str]) -> None:
    text = (made[0] / "atropos_env_sums/config.py").read_text()
    assert re.findall(r"^    (\w+: .*)$", text, re.MULTILINE) == [
        'digits: int = Field(default=4, description="As SumsEnv has it.")',
        'style: Literal["plain", "long"] = Field(default="long", description="How it asks.")',
        'limit: int | None = Field(default=None, description="Of tasks.")',
    ]


def test_each_body_stands_where_it_belongs(made: tuple[Path, str]) -> None:
    text = (made[0] / "atropos_env_sums/environment.py").read_text()
    parts = dict(re.findall(r"def (\w+)\(self(.*?)(?=\n    (?:async )?def |\Z)", text, re.DOTALL))
    assert "# async def setup(self):\n        #     self.at = 0" in parts["open"]
    assert "#     self.at += 1" in parts["rows"]
    assert "#     return await self.ask(item), []" in parts["score"]


def test_what_is_not_carried_over_is_said(made: tuple[Path, str]) -> None:
    said = re.findall(r"not carried over: (.*)", made[1])
    assert [line.rstrip() for line in said] == [
        "evaluate(): the held-out split, which the run evaluates",
        "ask(), which others call",
        "option made, line 16: made: float = not_installed_anywhere.number()",
        "config_init, group_size = 16: training.group_size",
        "line 3: from typing import Literal",
        "line 5: import not_installed_anywhere",
        "line 7: from pydantic import Field",
        "line 9: DIGITS = 3",
        "line 41: format_sum",
    ]


def test_the_skeleton_keeps_its_contract_where_it_has_tasks_and_says_what_is_missing_before(
    made: tuple[Path, str], atropos: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(made[0], tmp_path / "env_sums")
    code = folder / "atropos_env_sums/environment.py"
    info = folder / "sums-0.1.0.dist-info"  # as installing it would leave one
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atropos-plugin-env-sums\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[atropos]\nenv_sums = atropos_env_sums.plugin\n")
    named = ("check", "sums", "--kind", "environment")
    path = in_front(folder)
    before = atropos(*named, PYTHONPATH=path)
    assert before.code != 0 and "no task" in (before.out + before.err).lower(), before.out + before.err
    code.write_text(code.read_text().replace("        return ()\n", ROWS))
    ended = atropos(*named, PYTHONPATH=path)
    assert ended.code == 0, ended.out + ended.err
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin"],
        cwd=folder, capture_output=True, text=True, timeout=120,
        env={**{k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert tests.returncode == 0 and "passed" in tests.stdout, tests.stdout + tests.stderr


@pytest.fixture(scope="module")
def types_read(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of mypy's cache."""
    return str(tmp_path_factory.mktemp("mypy"))


def checked(folder: Path, types_read: str) -> str:
    """Lint and type the folder as its own pyproject.toml says. Return the text of its options."""
    commands = (
        ("ruff", "check", "--no-cache", "."),
        ("ruff", "format", "--no-cache", "--diff", "."),
        ("mypy", "--strict", "--cache-dir", types_read, "."),
    )
    for command in commands:
        ended = subprocess.run(
            [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return next(folder.glob("atropos_*/config.py")).read_text()


LONG = "a description of so many words that it has no place on one line with the name, the type and the default "
MANY = f"""
from typing import Any, Dict, List, Optional
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from pydantic import Field

class WideConfig(BaseEnvConfig):
    path: str = None
    bare: dict = {{}}
    both: List = ["it's", 'say "so"', "both ' and \\" and \\\\ and \\n"]
    pair: tuple = (1,)
    some: Optional[List[Optional[int]]] = None
    rate: float = 1e-6
    words: List[str] = {["word" * 4 + str(number) for number in range(12)]}
    table: Dict[str, Any] = {{"first": {list(range(60))}, "second": None}}
    said: int = Field(3, description={LONG!r})
    long: int = Field(3, description={LONG * 2!r})
    quoted: int = Field(3, description='as "this" and "that"')

class WideEnv(BaseEnv):
    env_config_cls = WideConfig
    async def get_next_item(self): return {"x" * 150!r}
"""


def test_its_folder_is_formatted_linted_and_typed(made: tuple[Path, str], types_read: str) -> None:
    checked(made[0], types_read)


def test_options_of_every_type_and_length_are_formatted_linted_and_typed(
    tmp_path: Path, types_read: str, atropos: Any
) -> None:
    (tmp_path / "wide.py").write_text(MANY)
    ended = atropos("import", str(tmp_path / "wide.py"), "--dir", str(tmp_path))
    assert ended.code == 0, ended.err
    text = checked(tmp_path / "env_wide", types_read)
    for option in ("path: str | None", "bare: dict[str, Any]", "both: list[Any]", "some: list[int | None] | None"):
        assert f"    {option} = Field(" in text
    made: dict[str, Any] = {}
    exec(compile(text, "config.py", "exec", dont_inherit=True), made)
    made["WideOptions"].model_rebuild(_types_namespace=made)
    options = made["WideOptions"]()
    assert options.both == ["it's", 'say "so"', "both ' and \" and \\ and \n"] and options.pair == (1,)
    assert options.table == {"first": list(range(60)), "second": None} and len(options.words) == 12


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("many_turns.py", "environments (Managed, Completing, "),
        ("many_turns.py:Nobody", "has no environment 'Nobody'"),
        ("needs.py", "has 0 environments (none)"),
        ("nothing.py", "cannot be read as Python"),
    ],
)
def test_what_cannot_be_imported_is_one_error(source: str, error: str, atropos: Any) -> None:
    ended = atropos("import", str(FILES / source))
    assert ended.code == 2 and error in " ".join(ended.err.split()), ended.err
