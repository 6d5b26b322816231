"""Five faults that runs have had: each is said on the page of the step, and shown where its rollouts are opened; a sound run has
none of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.storage.token_file import write_token_file
from atropos_records.rollout_records import RolloutRecords
from tests.view.conftest import MakeRun, Open, until


def flags(page: Any) -> str:
    page.wait_for_selector(".row")
    return "\n".join(page.locator(".insights .flag").all_inner_texts())


def stands_out(page: Any) -> str:
    """What the page says above the curves, once it has looked at every recorded step."""
    until(page, "() => document.querySelector('.standouts')?.textContent.includes('all ')")
    return str(page.locator(".standouts").inner_text())


def test_a_sound_run_has_no_flag(sound: Path, open_page: Open):
    assert flags(open_page(sound, at="rollouts?run=0&step=3")) == ""
    page = open_page(sound)
    stands_out(page)
    assert page.locator(".standouts strong").all_inner_texts() == ["cut off"], "as the toy's replies are"


def test_a_reward_that_ignores_the_answer(make_run: MakeRun, open_page: Open):
    page = open_page(make_run("IgnoresTheAnswer"), at="rollouts?run=0&step=2")
    assert "the reward does not follow the answer" in flags(page)
    page.get_by_label("outcome").select_option("wrong")
    page.get_by_label("order").select_option("reward")
    until(page, "() => document.querySelector('.row .under')?.textContent.includes('wrong')")
    assert float(page.locator(".row .reward").first.inner_text()) > 0.8, "a wrong answer with a high reward"


def test_a_masked_answer(make_run: MakeRun, open_page: Open):
    page = open_page(make_run("MasksTheAnswer"), at="rollouts?run=0&step=2")
    assert "are masked" in flags(page)
    page.get_by_label("outcome").select_option("masked")
    until(page, "() => document.querySelector('.row .under')?.textContent.includes('2 masked')")
    page.locator(".row").first.click()
    page.wait_for_selector(".tokens .tok.masked")
    assert page.locator(".tokens .tok.masked").count() == 2
    assert (
        page.evaluate("() => getComputedStyle(document.querySelector('.tokens .masked')).textDecorationLine")
        == "line-through"
    )


def test_a_stale_engine(sound: Path, tmp_path: Path, open_page: Open):
    run = with_a_stale_engine(sound, tmp_path / "stale")
    first = stands_out(open_page(run))
    assert "policy versions" in first and "step 6" in first and "trainer and engine" in first
    page = open_page(run, at="rollouts?run=0&step=6")
    said = flags(page)
    assert "3 to 5: up to 2 behind the policy of this step" in said
    assert "nats apart on average" in said, "its logprobs are not the trainer's"
    page.locator(".row").first.click()
    page.wait_for_selector(".tokens .tok")
    page.locator('.segments [data-name="version"]').click()
    assert "version 3, 2 behind" in page.locator(".legend").inner_text()
    page.locator('.segments [data-name="difference"]').click()
    assert "+0.5" in page.locator(".legend").inner_text()


def with_a_stale_engine(run: Path, to: Path) -> Path:
    """A copy in which half of step 6 is what an engine two versions behind would have sampled: a run itself stops at the first
    such token."""
    shutil.copytree(run, to)
    step = RolloutRecords(to).step(6)
    assert step.tokens is not None
    columns = {name: np.array(step.tokens.column(name)) for name in step.tokens.names}
    lines = np.repeat(columns["episodes"], np.diff(columns["sequence_offsets"]))
    stale = (lines < len(step.episodes) // 2) & columns["sampled"]
    columns["versions"][stale] -= 2
    columns["logprobs"][stale] -= 0.5
    write_token_file(step.tokens_path, columns)
    rows = [json.loads(line) for line in step.path.read_text().splitlines()]
    for row in rows[: len(rows) // 2]:
        row["versions"] = [version - 2 for version in row["versions"]]
    step.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return to


def test_a_hacked_length(make_run: MakeRun, open_page: Open):
    page = open_page(make_run("PaysForLength"), at="rollouts?run=0&step=2")
    assert "at the same outcome, the longer, the more reward" in flags(page)
    page.get_by_label("order").select_option("reward")
    page.wait_for_timeout(300)
    first = page.locator(".row .under").first.inner_text()
    page.get_by_label("order").select_option("low")
    page.wait_for_timeout(300)
    last = page.locator(".row .under").first.inner_text()
    assert tokens_in(first) > tokens_in(last)


def tokens_in(text: str) -> int:
    return next(int(part.split()[0]) for part in text.split(" · ") if part.endswith("tokens"))


def test_a_broken_tool(make_run: MakeRun, open_page: Open):
    page = open_page(make_run("BrokenTool"), at="rollouts?run=0&step=2&row=3")
    assert "tool calculator 64 calls in 64 rollouts; 100 % of its results are “error: connection refused”" in flags(
        page
    )
    page.wait_for_selector(".call")
    assert page.locator(".call strong").inner_text() == "calculator"
    assert "error: connection refused" in page.locator(".turn.tool").inner_text()


@pytest.mark.parametrize("fault", ["IgnoresTheAnswer", "MasksTheAnswer", "BrokenTool"])
def test_every_step_of_a_fault_is_counted_above_the_curves_which_lead_to_it(
    make_run: MakeRun, open_page: Open, fault: str
):
    page = open_page(make_run(fault))
    assert "3 steps, 1 to 3" in stands_out(page)
    page.locator(".standouts .link").first.click()
    assert flags(page), "of the step that it leads to"


@pytest.mark.parametrize("fault", ["IgnoresTheAnswer", "MasksTheAnswer", "BrokenTool"])
def test_no_fault_is_taken_for_another(make_run: MakeRun, open_page: Open, fault: str):
    page = open_page(make_run(fault), at="rollouts?run=0&step=2")
    flags(page)
    assert page.locator(".insights .flag").count() == 1
