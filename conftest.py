"""In which order the test files run, and `--quick`: both by the seconds that each file took when they were last recorded.
And which signals the processes that tests start begin with."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import platform
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent
RECORDED = REPOSITORY / "tests" / "seconds.json"
QUICK_S = 3.0  # a file that takes longer is no part of --quick; nearly all of those start processes or wait
# What test files import at their beginning: imported once, for all workers, which all collect all of them. (pandas and datasets begin a
# thread as they are imported, and a process with threads is not forked.)
COLLECTED = ("anthropic", "openai", "wandb", "renderers", "hypothesis", "schemathesis", "aiohttp.web")
LEAST_S = 0.1  # what a file must take to be recorded

pytest_plugins = ["tests.shared_directories"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("atropos")
    group.addoption("--quick", action="store_true", help=f"only files of at most {QUICK_S:g} s, and new ones")
    group.addoption(
        "--warm", action="store_true", help="start our own commands from an interpreter that has imported them"
    )
    group.addoption("--record-seconds", action="store_true", help=f"write what each file took into {RECORDED.name}")


def pytest_configure(config: pytest.Config) -> None:
    children_begin_with_default_signals()
    without_stopwatch()
    if config.getoption("--warm") and can_be_warm():
        from tests.warm.requests import install_with_template, installed

        if not installed():
            install_with_template(COLLECTED if getattr(config.option, "numprocesses", None) else ())
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(), "seconds")


def pytest_collection_finish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        from tests.warm.requests import start_template

        start_template()  # or a test that starts its first process in a thread would start it cold


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that is imported and collected stays: Python's collector of cycles would look through it again and again."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a test marked `cold` starts, and its fixtures, starts as a user starts it."""
    if item.get_closest_marker("cold") is None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLD", "1")
        return (yield)


@pytest.fixture(autouse=True)
def environment_stays(pytestconfig: pytest.Config) -> Iterator[None]:
    """With --warm, what an interpreter reads of its environment when it starts is after a test as it was before: or every process that
    later tests start would begin elsewhere, and cold."""
    if not pytestconfig.getoption("--warm"):
        yield
        return
    from tests.warm.requests import read_at_start

    before = read_at_start(os.environ)
    yield
    assert read_at_start(os.environ) == before, "a test leaves something in the environment of the processes of others"


def without_stopwatch() -> None:
    """No example of hypothesis is too slow: how long it takes is the machine's doing, where six files run at the same time."""
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        settings.register_profile("without stopwatch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("without stopwatch")


def can_be_warm() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def children_begin_with_default_signals() -> None:
    """A signal that is ignored stays ignored in every program that is started: SIGHUP under `nohup`, SIGINT for what a script
    starts with `&`. One that has a handler does not, so these get one that does nothing, here as before."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    longest_s = QUICK_S if config.getoption("--quick") else math.inf
    return True if seconds_of(collection_path) > longest_s else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that no worker is left alone with it at the end; a new file, of which nothing is known, is
    taken for a short one."""
    items.sort(key=lambda item: -seconds_of(item.path))


def seconds_of(path: Path) -> float:
    return recorded().get(path.relative_to(REPOSITORY).as_posix(), 0.0) if path.is_relative_to(REPOSITORY) else 0.0


def recorded() -> dict[str, float]:
    if not _recorded:
        _recorded.update(json.loads(RECORDED.read_text()))
    return _recorded


_recorded: dict[str, float] = {}


class Recorder:
    """Of a whole run: a part of the files replaces their own lines only."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.taken[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        RECORDED.write_text(written({**recorded(), **self.taken}))


def written(seconds: dict[str, float]) -> str:
    kept = (
        (file, round(taken, 1)) for file, taken in seconds.items() if taken >= LEAST_S and (REPOSITORY / file).is_file()
    )
    return json.dumps(dict(sorted(kept, key=lambda one: (-one[1], one[0]))), indent=1) + "\n"
