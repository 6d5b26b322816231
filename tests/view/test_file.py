"""The file that is mailed, opened from the disk by a browser without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.view.conftest import MakeRun, Open, expect_texts_only, go, until


def made(run: Path, to: Path) -> str:
    subprocess.run(
        [sys.executable, "-m", "atropos_core", "view", str(run), "--html", str(to)],
        check=True,
        timeout=60,
        capture_output=True,
    )
    return to.as_uri()


def offline(page: Any) -> list[str]:
    """What the page asks the network for from here on: nothing is given."""
    asked: list[str] = []
    page.context.set_offline(True)
    page.on("request", lambda request: asked.append(request.url))
    return asked


def test_it_opens_from_the_disk_without_a_network_and_has_every_view(sound: Path, tmp_path: Path, open_page: Open):
    page = open_page(url=made(sound, tmp_path / "a.html"))
    asked = offline(page)
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.locator(".card").count() > 20
    until(page, "() => document.querySelectorAll('.card canvas').length > 0")
    go(page, "rollouts?run=0&step=3&row=5")
    page.wait_for_selector(".tokens .tok")
    page.get_by_label("Search texts and tasks").fill("train-1")
    until(page, "() => !document.querySelector('.filters .count').textContent.startsWith('64 of')")
    go(page, "evaluations")
    page.wait_for_selector(".evaluations .row")
    go(page, "times")
    page.wait_for_selector(".times table")
    assert [one for one in asked if not one.startswith("file:")] == []


def test_hostile_texts_stay_texts_in_it(make_run: MakeRun, tmp_path: Path, open_page: Open):
    page = open_page(url=made(make_run("Hostile"), tmp_path / "a.html"))
    expect_texts_only(page)


def test_it_says_what_it_does_not_have(sound: Path, tmp_path: Path, open_page: Open):
    subprocess.run(
        [sys.executable, "-m", "atropos_core", "view", str(sound), "--html", str(tmp_path / "a.html"), "--html-mb", "0.5"],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    page = open_page(url=(tmp_path / "a.html").as_uri())
    page.wait_for_selector(".card")
