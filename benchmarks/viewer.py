"""How soon `atropos view` shows a large run, and how smoothly it scrolls: .venv-view/bin/python -m benchmarks.viewer

One step with 10,000 rollouts and 1,000 steps of every metric, made of a real toy run's own lines; headless Chromium on this
machine. Opening is from the address to a list that can be read (and to the first curves); scrolling is a wheel turned by
hand through the whole page, a frame at a time. Writes benchmarks/results/viewer.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.view.conftest import CHROMIUM, command, viewing

ROLLOUTS, STEPS, ROUNDS = 10_000, 1_000, 5
FRAMES = """async ([selector, pixels]) => {
  const box = selector ? document.querySelector(selector) : document.scrollingElement, taken = [];
  let last = await new Promise(requestAnimationFrame);
  for (let n = 0; n < 240; n++) {
    box.scrollTop += pixels;
    const now = await new Promise(requestAnimationFrame);
    taken.push(now - last); last = now;
  }
  return taken; }"""


def large(folder: Path) -> Path:
    """A finished toy run, its last step and its curves grown."""
    run = folder / "large"
    subprocess.run(command(run, "Sound", steps=4), check=True, capture_output=True)
    path = run / "rollouts/step-000004.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    many = [rows[n % len(rows)] | {"draw": n // 8, "task": f"task-{n // 8}"} for n in range(ROLLOUTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in many))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    grown = [lines[n % len(lines)] | {"step": n + 1} for n in range(STEPS)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in grown))
    return run


def opened(browser: Any, url: str, view: str, selector: str) -> tuple[Any, float]:
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    began = time.perf_counter()
    page.goto(url.replace("/#", f"/#{view}&" if view else "/#"))
    page.wait_for_selector(selector)
    return page, time.perf_counter() - began


def frames(page: Any, selector: str, pixels: int) -> dict[str, float]:
    taken = sorted(page.evaluate(FRAMES, [selector, pixels]))
    return {"p50_ms": statistics.median(taken), "p95_ms": taken[int(0.95 * len(taken))], "most_ms": taken[-1]}


def main() -> None:
    from playwright.sync_api import sync_playwright

    result: dict[str, Any] = {"machine": described(), "priority": os.getpriority(os.PRIO_PROCESS, 0), "rollouts": ROLLOUTS,
                              "steps": STEPS}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="atropos-viewer-") as scratch, sync_playwright() as library:
        run = large(Path(scratch))
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        result["browser"] = browser.version
        lists, curves = [], []
        for _ in range(ROUNDS):
            with viewing(run) as url:  # each with a server that has read nothing yet
                page, taken = opened(browser, url, "rollouts?run=0&step=4", ".row")
                lists.append(taken)
                result["list_frames"] = frames(page, ".list", 900)
                page.context.close()
                page, taken = opened(browser, url, "", ".card canvas")
                curves.append(taken)
                result["curve_frames"] = frames(page, "", 40)
                page.context.close()
        browser.close()
        began = time.perf_counter()
        file = Path(scratch) / "a.html"
        subprocess.run(
            [sys.executable, "-m", "atropos_core", "view", str(run), "--html", str(file)],
            check=True,
            capture_output=True,
        )
        result["file"] = {"write_s": time.perf_counter() - began, "mb": file.stat().st_size / 1e6}
    result["list_s"] = {"median": statistics.median(lists), "most": max(lists)}
    result["curves_s"] = {"median": statistics.median(curves), "most": max(curves)}
    console.table(
        ("", "median s", "most s"),
        [(name, *(f"{one:.2f}" for one in result[name].values())) for name in ("list_s", "curves_s")],
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "viewer.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
