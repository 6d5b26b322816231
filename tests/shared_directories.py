"""Fail a test that changes a directory which several tests share. File modes do not: tests may run as root.

A directory or file is shared if a fixture of a wider scope than one test returns it, as a Path or in a tuple. A fixture that makes
directories on demand calls `share_directory(directory)` for each. A fixture whose tests may change its folder returns an object that
holds the path. After each test every shared directory must have the files, sizes and times that it had. The test that changed one
fails and names the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

Files = dict[str, tuple[int, int, int]]  # by path: inode, size in bytes, time of the last change in ns

_shared: dict[Path, Files] = {}


@pytest.fixture(scope="session")
def share_directory() -> Callable[[Path], Path]:
    """Return a function that marks a finished directory as one that no test may change, and returns it."""
    return share


def share(path: Path) -> Path:
    _shared[path] = files_of(path)
    return path


def files_of(path: Path) -> Files:
    found = {}
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name != "__pycache__"]  # an import writes there
        for name in names:
            found[os.path.join(folder, name)] = state_of(os.path.join(folder, name))
    return found if path.is_dir() else {str(path): state_of(str(path))}


def state_of(file: str) -> tuple[int, int, int]:
    state = os.lstat(file)
    return state.st_ino, state.st_size, state.st_mtime_ns


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, object, object]:
    made = yield
    if fixturedef.scope != "function":
        for path in paths_of(made):
            fixturedef.addfinalizer(lambda path=path: _shared.pop(path, None))
            share(path)
    return made


def paths_of(made: object) -> Iterator[Path]:
    for one in made if isinstance(made, tuple) else (made,):
        if isinstance(one, Path) and one.exists():
            yield one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    changed = []
    for path, before in _shared.items():
        now = files_of(path)
        changed += [file for file in {**before, **now} if before.get(file) != now.get(file)]
        _shared[path] = now  # so that the tests that follow are not blamed too
    result = yield
    assert not changed, f"this test changed what other tests share: {', '.join(changed[:10])}"
    return result
