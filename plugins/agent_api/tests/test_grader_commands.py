"""Rewards by command, and programs that leave files which interpreters and tools take for their own: none of it is executed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_agent_api.grading import Case
from atropos_agent_api.grading.command import CommandGrader
from atropos_core.errors import AtroposError, ConfigError
from atropos_core.types import Episode, Task
from plugins.agent_api.tests.sandboxes import opened

TASK = Task("1", ({"role": "user", "content": "two and two"},), answer="4")
SANDBOXES = ["process", "bubblewrap"]
MARK = 'touch "$TMPDIR/ran"'
PYTHON = (
    "import os\nopen(os.path.join(os.environ['TMPDIR'], 'ran'), 'w').close()\nprint(1000, flush=True)\nos._exit(0)\n"
)
NODE = "require('fs').writeFileSync(process.env.TMPDIR + '/ran', ''); console.log(1000); process.exit(0)"
PERL = "system('touch', \"$ENV{TMPDIR}/ran\"); 1;"
MODULES = (
    "json",
    "sys",
    "site",
    "sitecustomize",
    "usercustomize",
    "conftest",
    "test_it",
    "encodings",
    "base64",
    "graders",
)
TOOLS = {  # each run without naming the files, or in their folder, as a careless grader would
    "python -c": '{python} -c "import json, base64, colorsys"',
    "python -m": "{python} -m base64 -h",
    "python, which goes to the files": """{python} -c "import os; os.chdir('{work}'); import colorsys" """,
    "pytest": "{python} -m pytest -q -p no:cacheprovider",
    "unittest": "{python} -m unittest discover",
    "sh": "grade; ./grade; sh grade; . ./grade",
    "bash": "bash -lc true; bash -ic true",
    "make": "make",
    "git": "git status; git -C {work} status; git -C {work} diff; cd {work} && git status; cd -",
    "node": """node -e "require('json')"; node --input-type=module -e "import 'json'" """,
    "perl": "perl -I. -MJson -e 1",
}


def leave_traps(work: Path) -> None:
    """Files that mark TMPDIR if they are executed."""
    for name in (*MODULES, "colorsys"):
        (work / f"{name}.py").write_text(PYTHON)
    for folder in ("package", "left"):
        (work / folder).mkdir()
        (work / folder / "__init__.py").write_text(PYTHON)
        (work / folder / "test_more.py").write_text(PYTHON)
    (work / "trap.pth").write_text(f"import os; exec({PYTHON!r})\n")
    (work / "node_modules").mkdir()
    (work / "node_modules" / "json.js").write_text(NODE)
    (work / "Json.pm").write_text(PERL)
    (work / "Makefile").write_text(f"all:\n\t{MARK.replace('$', '$$')}\n")
    (work / "pytest.ini").write_text("[pytest]\naddopts = -p conftest\n")
    (work / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-p conftest"\n')
    for name in ("grade", "git", "python", ".bashrc", ".bash_profile", ".profile", ".env", "sh"):
        (work / name).write_text(f"#!/bin/sh\n{MARK}\necho 1000\n")
        (work / name).chmod(0o755)
    if shutil.which("git"):
        subprocess.run(["git", "init", "-q", str(work)], check=True)
        for key in ("core.fsmonitor", "diff.external", "core.pager"):
            subprocess.run(["git", "-C", str(work), "config", key, f"{MARK}; false"], check=True)


@asynccontextmanager
async def grader(name: str, here: Path, *command: str, deadline_s: float = 30.0) -> AsyncIterator[CommandGrader]:
    async with opened(name) as sandbox:
        made = CommandGrader(command, sandbox, here, deadline_s)
        await made.open()
        yield made


async def score(grader: CommandGrader, work: Path, **changed: Any) -> Any:
    case = Case(TASK, TASK.messages, "4", 0, "", work)
    return await grader.score(case, Episode((), 0.0))


@pytest.fixture
def left(tmp_path: Path) -> Path:
    work = tmp_path / "left"
    work.mkdir()
    leave_traps(work)
    return work


@pytest.mark.parametrize("name", SANDBOXES)
async def test_no_tool_of_a_grader_executes_what_a_program_left(name: str, left: Path, tmp_path: Path) -> None:
    told = 'echo \'{"score": 0, "parts": {"none": 0\''
    for label, text in here().items():
        told += f'; ({text}) </dev/null >/dev/null 2>&1; [ -e "$TMPDIR/ran" ] && echo \', "{label}": 1\'; rm -f "$TMPDIR/ran"'
    script = f"({told}; echo '}}}}') | tr -d '\\n'"
    async with grader(name, tmp_path, "/bin/sh", "-c", script) as made:
        found = await score(made, left)
    assert dict(found.parts) == {"none": 0.0}


@pytest.mark.parametrize("name", SANDBOXES)
@pytest.mark.parametrize("command", [("-c", "import json, sys; json.load(sys.stdin); print(-1)"), ("-m", "graded")])
async def test_a_grader_by_text_or_module_scores_as_it_would(
    name: str, command: tuple[str, str], left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("{python}", *command)
    if command[0] == "-m":  # one that is installed: here by a folder of sys.path
        (tmp_path / "graded.py").write_text("import json, sys\njson.load(sys.stdin)\nprint(-1)\n")
        words = ("/usr/bin/env", f"PYTHONPATH={tmp_path}", *words)
    async with opened(name, **({"visible": (str(tmp_path),)} if name == "bubblewrap" else {})) as sandbox:
        made = CommandGrader(words, sandbox, tmp_path, 20.0)
        await made.open()
        assert (await score(made, left)).value == -1.0


async def test_a_grader_that_goes_to_the_files_starts_no_program_of_theirs(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with grader("process", tmp_path, "/bin/sh", "-c", "cd {work} && grade; echo $?") as made:
        monkeypatch.setenv("PATH", f".::{os.environ['PATH']}:")
        assert (await score(made, left)).value == 127.0, "the program is not found"


@pytest.mark.parametrize("name", SANDBOXES)
async def test_a_grader_starts_in_an_empty_directory_and_is_told_where_the_files_are(name: str, tmp_path: Path) -> None:
    work, script = tmp_path / "left", tmp_path / "mine" / "grade.py"
    work.mkdir(), script.parent.mkdir()
    (work / "answer.txt").write_text("4")
    (script.parent / "sibling.py").write_text("from pathlib import Path\n")
    script.write_text(
        "import json, os, sys\nfrom sibling import Path\ncase = json.load(sys.stdin)\n"
        "assert os.listdir() == os.listdir(os.environ['HOME']) == [], 'something is there already'\n"
        "assert case['work'] == sys.argv[1]\n"
        "print(Path(case['work'], 'answer.txt').read_text())\n"
    )
    async with opened(name, **({"visible": (str(script.parent),)} if name == "bubblewrap" else {})) as sandbox:
        made = CommandGrader(("{python}", "{here}/mine/grade.py", "{work}"), sandbox, tmp_path, 20.0)
        await made.open()
        assert (await score(made, work)).value == 4.0
    assert (work / "answer.txt").read_text() == "4"


@pytest.mark.parametrize("words", [("./grade.py", "x"), ("{python}", "grade.py"), ("bash", "./grade.py")])
async def test_a_file_beside_the_run_file_is_named_by_here(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text("print(1)\n")
    with pytest.raises(
        ConfigError, match=r"names the file '(\./)?grade.py', but a reward by command starts in an empty"
    ):
        async with grader("process", tmp_path, *words):
            pass


async def test_a_grader_that_is_not_there_stays_a_failure_of_its_own(left: Path, tmp_path: Path) -> None:
    for command, message in (
        (("./grade",), "./grade could not be started"),
        (("no-such",), "no-such could not be started"),
    ):
        async with grader("process", tmp_path, *command) as made:
            with pytest.raises(AtroposError, match=message):
                await score(made, left)


async def test_a_function_of_a_case_imports_its_own_modules_wherever_it_goes(left: Path, tmp_path: Path) -> None:
    from atropos_agent_api.grading.graders import FunctionGrader

    (tmp_path / "grade.py").write_text(
        "import os\ndef grade(case):\n    os.chdir(case.work)\n    import colorsys, base64, json\n"
        "    return float(bool(colorsys.rgb_to_hls(1, 1, 1)))\n"
    )
    made = FunctionGrader(f"{tmp_path}/grade.py:grade", tmp_path / "log", 20.0)
    try:
        await made.open()
        assert (await made.score(Case(TASK, TASK.messages, "4", 0, "", left), Episode((), 0.0))).value == 1.0
    finally:
        await made.close()


def here() -> dict[str, str]:
    """The tools of this machine."""
    return {label: text for label, text in TOOLS.items() if "python" in text or shutil.which(label)}


@pytest.mark.parametrize("label", here())
def test_the_traps_would_mark(label: str, left: Path, tmp_path: Path) -> None:
    """A grader that starts in their folder sets them off."""
    text = TOOLS[label].replace("{python}", sys.executable).replace("{work}", str(left))
    own = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "HOME": str(left)}
    subprocess.run(["bash", "-c", text], cwd=left, env=own, check=False, capture_output=True, stdin=subprocess.DEVNULL)
    (tmp_path / "ran").unlink()
