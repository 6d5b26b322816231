"""Bugs planted by hand, in every folder of core and in every plugin: does a test notice each of them?

    python -m benchmarks.planted_bugs [FOLDER ...]

`benchmarks/bugs/*.toml` holds them: what is wrong, the file, its text as it is and with the bug, and the tests that must
notice. They are planted one at a time, in a copy of this tree. It is an error if a bug's text is not in its file exactly once, if a
folder that was asked for has no bug, and if a test fails without any bug. Writes benchmarks/results/planted_bugs.json: the
folders that were asked for, next to what is there of others.

This process loads no module of ours until all is done: tests run in forks of it, which load the copy's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, described

ROOT = Path(__file__).parents[1]
BUGS = Path(__file__).parent / "bugs"
LIBRARIES = (
    "numpy",
    "pydantic",
    "httpx",
    "hypothesis",
    "pytest_asyncio",
    "torch",
    "transformers",
)  # loaded once for all
PASSED, FAILED = 0, 1  # pytest's exit codes; any other is an error of the run, and says nothing about the bug
A_TEST_S, A_BUG_S, WITHOUT_BUGS_S = 60, 600, 3600  # a bug may leave a test without end
TAIL = 3000  # characters of pytest's output in an error


@dataclass(frozen=True)
class Bug:
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # files, or single tests as pytest names them
    fix_of: str = ""  # the commit whose fix it takes out

    @property
    def folder(self) -> str:
        """`hub`, `core` for the modules at core's root, or the plugin."""
        second = Path(self.file).parts[1]
        return "core" if second.endswith(".py") else second


def read_bugs() -> list[Bug]:
    return [
        Bug(**{**entry, "tests": tuple(entry["tests"])})
        for file in sorted(BUGS.glob("*.toml"))
        for entry in tomllib.loads(file.read_text())["bug"]
    ]


def all_folders() -> set[str]:
    """Every folder of core that has modules, its root, every library and every plugin."""
    core = {path.parent.name for path in (ROOT / "atropos_core").glob("*/__init__.py")}
    return {"core", *core, *(path.parent.name for path in ROOT.glob("[lp]*s/*/pyproject.toml"))}


def errors_in(bugs: list[Bug], asked: set[str]) -> list[str]:
    """Return one sentence for each bug that cannot be planted, and for each folder in `asked` without a bug."""
    found = [f"{folder}: no bug is planted there" for folder in sorted(asked - {bug.folder for bug in bugs})]
    for bug in bugs:
        file = ROOT / bug.file
        places = file.read_text().count(bug.old) if file.is_file() else 0
        if places != 1:
            found.append(
                f"{bug.what!r}: its text is in {bug.file} {places} times, not once: write it as the file is now"
            )
        if bug.new == bug.old:
            found.append(f"{bug.what!r}: old and new are the same text")
    return found


class Tree:
    """A copy of this tree, in which planted bugs reach nobody."""

    def __init__(self, scratch: Path) -> None:
        self._root, self._output = scratch / "tree", scratch / "output"
        self._times = count(1)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name)

    def first_failure(self, bug: Bug) -> str | None:
        """The first test that fails with the bug; None where all pass. Raises SystemExit where they could not run."""
        file = self._root / bug.file
        text, at = file.read_text(), file.stat().st_mtime
        # A time of its own for each text: bytecode is taken for that of the file where time and size are the same.
        _write(file, text.replace(bug.old, bug.new), next(self._times))
        try:
            code, output = self.run(bug.tests, A_BUG_S)
        finally:
            _write(file, text, at)
        if code is None:
            return f"no end within {A_BUG_S} s"
        if code not in (PASSED, FAILED):
            raise SystemExit(f"{bug.what!r}: pytest ended with {code}:\n{output[-TAIL:]}")
        failed = (line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR ")))
        return None if code == PASSED else next(failed, "a test that pytest does not name")

    def run(self, tests: tuple[str, ...], deadline_s: float) -> tuple[int | None, str]:
        """pytest's exit code, None where it had to be ended, and its output."""
        running = multiprocessing.get_context("fork").Process(target=self._run_here, args=(tests,))
        running.start()
        running.join(deadline_s)
        code = running.exitcode
        if code is None:
            assert running.pid is not None, "it was started"
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.join()
        return code, self._output.read_text(errors="replace")

    def _run_here(self, tests: tuple[str, ...]) -> None:
        import pytest

        os.setsid()
        descriptor = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        paths = [str(path) for path in (self._root, *sorted(self._root.glob("[lp]*s/*/")))]
        sys.path[:0] = paths  # before the installed ones, here and in what the tests start
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.chdir(self._root)
        code = pytest.main(["-x", "-rfE", "--timeout", str(A_TEST_S), *tests])
        sys.stdout.flush()
        os._exit(int(code))


def _write(file: Path, text: str, at: float) -> None:
    file.write_text(text)
    os.utime(file, (at, at))


def main() -> None:
    parser = argparse.ArgumentParser(description="Are planted bugs noticed by the tests?")
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="folders of core or plugins; without any: all")
    asked = set(parser.parse_args().folders) or all_folders()
    if unknown := asked - all_folders():
        raise SystemExit(f"no folder {', '.join(sorted(unknown))}; there are {', '.join(sorted(all_folders()))}")
    bugs = read_bugs()
    if errors := errors_in(bugs, asked):
        raise SystemExit("\n".join(errors))
    bugs = [bug for bug in bugs if bug.folder in asked]
    machine = described()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if (triton := ROOT / ".venv-triton/bin/python").exists():  # or `make .venv-triton/stamp`
        os.environ.setdefault("TRITON_PYTHON", str(triton))
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="atropos-planted-") as scratch:
        tree = Tree(Path(scratch))
        code, output = tree.run(tuple(dict.fromkeys(test for bug in bugs for test in bug.tests)), WITHOUT_BUGS_S)
        if code != PASSED:
            raise SystemExit(f"without any bug pytest ended with {code}:\n{output[-TAIL:]}")
        noticed = {bug: tree.first_failure(bug) for bug in bugs}
    raise SystemExit(report(machine, noticed))


def report(machine: dict[str, Any], noticed: dict[Bug, str | None]) -> int:
    """Says and writes what was noticed. The exit code."""
    from atropos_core import console

    folders = {
        folder: {
            "machine": machine,
            "caught": sum(noticed[bug] is not None for bug in noticed if bug.folder == folder),
            "missed": sum(noticed[bug] is None for bug in noticed if bug.folder == folder),
            "bugs": [
                {"what": bug.what, "fix_of": bug.fix_of, "noticed_by": by}
                for bug, by in noticed.items()
                if bug.folder == folder
            ],
        }
        for folder in sorted({bug.folder for bug in noticed})
    }
    missed = [bug for bug, by in noticed.items() if by is None]
    console.table(
        ("folder", "caught", "missed"),
        [(folder, str(one["caught"]), str(one["missed"])) for folder, one in folders.items()],
    )
    for bug in missed:
        console.warn(f"{bug.folder}: no test notices that {bug.what}")
    console.say(f"{len(noticed) - len(missed)} of {len(noticed)} planted bugs were noticed")
    file = RESULTS / "planted_bugs.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    kept = {folder: one for folder, one in before.items() if folder in all_folders()}
    file.write_text(json.dumps(dict(sorted((kept | folders).items())), indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    main()
