"""The site that `make site` built, opened from its folder in Chromium: `make test-site`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import CHROMIUM

SITE = os.environ.get("SITE")
pytestmark = pytest.mark.skipif(SITE is None, reason="needs a built site and .venv-view: `make test-site` makes both")


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens a page of the site from its file; what it asks of elsewhere, and a script's error, fails the test."""
    from playwright.sync_api import sync_playwright

    assert SITE is not None
    folder, wrong = Path(SITE).resolve(), []
    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 800})
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if not is_own(request.url) else None)

        def open_(name: str) -> Any:
            page.goto((folder / name).as_uri())
            return page

        yield open_
        browser.close()
    assert not wrong


def is_own(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "about:"))


@pytest.mark.parametrize("begin", ["index.html", "tutorial/01-first-run.html"])
def test_the_search_finds_a_word_in_a_site_that_is_opened_from_its_folder(opened: Any, begin: str) -> None:
    page = opened(begin)
    page.locator("[data-md-component=search-query]").click()
    page.keyboard.type("max_logprob_diff")
    found = page.locator(".md-search-result__item a.md-search-result__link")
    found.first.wait_for()
    places = [found.nth(index).get_attribute("href") for index in range(found.count())]
    assert any("/run-file.html" in str(place) for place in places), places
    index = next(index for index, place in enumerate(places) if "/run-file.html" in str(place))
    found.nth(index).click()
    page.wait_for_url("**/run-file.html*")
    assert "max_logprob_diff" in page.locator("article").inner_text()
