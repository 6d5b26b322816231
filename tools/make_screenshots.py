"""The pictures of docs/view.md, by `make screenshots`: .venv-view/bin/python -m tools.make_screenshots RUN [RUN ...]

The first run's rollouts and evaluations are shown, the curves of all.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from atropos_records.rollout_records import RolloutRecords
from tests.view.conftest import CHROMIUM, go, until, viewing

IMAGES = Path(__file__).parents[1] / "docs/images"
COLOURS = 128  # of a picture: it is small, and letters stay sharp


def main(runs: list[Path]) -> None:
    IMAGES.mkdir(exist_ok=True)
    records = RolloutRecords(runs[0])
    step = records.steps()[5]
    row = next(one.line for one in records.step(step).episodes if one.outcome == "trained" and one.sampled_tokens > 20)
    draw = records.step(step).episodes[row].draw
    with sync_playwright() as library, viewing(*runs) as url:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def taken(name: str, at: str, scheme: str, width: int = 1400, height: int = 860, value: str = "") -> None:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page: Page = context.new_page()
            page.goto(url)
            page.wait_for_selector("html[data-ready]", state="attached")
            go(page, at)
            page.wait_for_timeout(1000)
            if value:
                page.locator(f'.segments [data-name="{value}"]').click()
                page.locator(".tokens").focus()
                page.keyboard.press("End")
                page.keyboard.press("ArrowLeft")
            if at == "curves":
                until(page, "() => document.querySelectorAll('.card canvas').length > 7")
            page.wait_for_timeout(300)
            Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS).save(
                IMAGES / f"view-{name}.png", optimize=True
            )
            context.close()

        taken("curves", "curves", "light")
        taken("rollout", f"rollouts?run=0&step={step}&row={row}", "light", value="entropy")
        taken("group", f"rollouts?run=0&step={step}&group={draw}", "dark")
        taken("evaluation", "evaluations?problem=0", "light", height=520)
        taken("narrow", f"rollouts?run=0&step={step}&row={row}", "dark", width=360, height=760)
        browser.close()


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
