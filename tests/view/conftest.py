"""Chromium on pages of real runs: the toy policy in an environment of faults.py, and `atropos view` as a process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = "/usr/bin/chromium"
FAULTS = Path(__file__).with_name("faults.py")
TOY = ("--model", "toy", "--engine", "toy", "--trainer", "toy", "--bridge", "local")
START_S, RUN_S = 60.0, 120.0

Open = Callable[..., Any]
MakeRun = Callable[..., Path]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without playwright there is nothing to import: test_installed.py says so."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        return collection_path.name.startswith("test_") and collection_path.name != "test_installed.py"
    return None


def command(directory: Path, environment: str, *more: str, steps: int = 3) -> list[str]:
    return [
        sys.executable, "-m", "atropos_core", "run", *TOY, "--env", f"{FAULTS}:{environment}", "--steps", str(steps),
        "--set", "evaluation.problems=8", "--set", "training.groups_per_step=8", "--set", "training.group_size=8",
        "--set", "sampling.max_tokens=100",
        "--dir", str(directory), *more,
    ]  # fmt: skip


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A finished run in an environment, made once for all tests."""
    made: dict[tuple[str, ...], Path] = {}

    def make(environment: str, *more: str, steps: int = 3) -> Path:
        key = (environment, *more, str(steps))
        if key not in made:
            directory = tmp_path_factory.mktemp("runs") / environment
            done = subprocess.run(
                command(directory, environment, *more, steps=steps), capture_output=True, text=True, timeout=RUN_S
            )
            assert done.returncode == 0, done.stdout + done.stderr
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def sound(make_run: MakeRun) -> Path:
    return make_run("Sound", steps=6)


@contextmanager
def viewing(*runs: Path) -> Iterator[str]:
    """The address of a page on these runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "atropos_core", "view", *map(str, runs)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://127\.0\.0\.1:\d+/#token=\S+", line):
                    yield found[0]
                    break
            else:
                raise AssertionError("`atropos view` printed no address")
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            finally:
                process.kill()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert shutil.which(CHROMIUM), "install the package chromium: `apt-get install chromium`"
    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def address_of() -> Iterator[Callable[..., str]]:
    """One server for each set of runs, for all tests."""
    known: dict[tuple[Path, ...], str] = {}
    with ExitStack() as stack:

        def address(*runs: Path) -> str:
            if runs not in known:
                known[runs] = stack.enter_context(viewing(*runs))
            return known[runs]

        yield address


@pytest.fixture
def open_page(chromium: Any, address_of: Callable[..., str]) -> Iterator[Open]:
    """Opens an address, or the page of runs; a script's error or a refusal of the page's policy fails the test."""
    with ExitStack() as stack:
        wrong: list[str] = []

        def open_(*runs: Path, url: str = "", at: str = "", width: int = 1400, **more: Any) -> Any:
            address = url or address_of(*runs)
            context = chromium.new_context(viewport={"width": width, "height": 800}, **more)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(10_000)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda message: wrong.append(message.text) if is_wrong(message) else None)
            page.goto(address)
            page.wait_for_selector("html[data-ready]", state="attached")
            if at:
                go(page, at)
            return page

        yield open_
        assert not wrong


def is_wrong(message: Any) -> bool:
    """An error of a script or of the policy; an answer that is an error is shown on the page."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def until(page: Any, script: str, arg: Any = None, timeout_s: float = 15.0) -> None:
    """Until a function of the page is true; an element that it reads may be still to come. Playwright's own wait evaluates text
    inside the page, which its policy forbids."""
    from playwright.sync_api import Error

    def found() -> tuple[bool, str]:
        try:
            return bool(page.evaluate(script, arg)), ""
        except Error as error:
            if "of null" not in error.message:
                raise
            return False, f" ({error.message.splitlines()[0]})"

    end = time.monotonic() + timeout_s
    while not (is_so := found())[0]:
        assert time.monotonic() < end, f"this never came to be: {script}{is_so[1]}"
        page.wait_for_timeout(50)


def go(page: Any, at: str) -> None:
    """To a place of the page, as a link to it would."""
    page.evaluate("at => { location.hash = at; }", at)


def expect_texts_only(page: Any) -> None:
    """On no view of the run `Hostile` has a text of the model become an element."""
    one, group = "rollouts?run=0&step=2&row=0", "rollouts?run=0&step=2&group=8"
    for view in ("curves", "rollouts", one, group, "evaluations", "times"):
        go(page, view)
        page.wait_for_timeout(300)
        assert page.locator("#planted, img").count() == 0
        assert page.title() == "atropos view"
    go(page, one)
    page.wait_for_selector(".detail .facts")
    assert "</script><img src=x onerror=" in page.locator(".conversation").inner_text()
