"""What `atropos rescore --save` and `atropos replay --save` left in a run, and turn rewards, as the page shows them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_records.rollout_records import RolloutRecords
from tests.view.conftest import RUN_S, MakeRun, Open, go, until

REWARDS = """
import numpy as np

async def negated(task, episodes):
    return np.array([1.0 - episode.score for episode in episodes])

async def same(task, episodes):
    return np.array([episode.score for episode in episodes])
"""
AT = "() => [...document.querySelectorAll('.tokens .tok')].map((one) => one.dataset.value ?? null)"


def asked(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "atropos_core", *arguments, "--json"], capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def questioned(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was rescored and replayed, twice each."""
    folder = tmp_path_factory.mktemp("questioned")
    (folder / "rewards.py").write_text(REWARDS)
    run = folder / "run"
    shutil.copytree(
        make_run("Sound", "--deterministic", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=9"), run
    )
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    asked("rescore", str(run), "--reward", f"{folder}/rewards.py:same", "--save", "same")
    asked(
        "rescore",
        str(run),
        "--reward",
        f"{folder}/rewards.py:negated",
        "--save",
        "negated",
        "--out",
        str(folder / "out.jsonl"),
    )
    asked("replay", str(run), "--step", "2", "--save", "as-it-was")
    asked("replay", str(run), "--step", "2", "--reward", f"{folder}/rewards.py:negated", "--save", "other")
    assert {path: path.read_bytes() for path in before} == before, "a run's own records are never changed"
    return run


def rows_out(run: Path, step: int) -> list[dict[str, Any]]:
    rows = map(json.loads, (run.parent / "out.jsonl").read_text().splitlines())
    return [row for row in rows if row["step"] == step]


def test_old_and_new_scores_stand_side_by_side_and_groups_that_turn_are_marked(questioned: Path, open_page: Open):
    rows = rows_out(questioned, 2)
    page = open_page(questioned, at="rollouts?step=2")
    page.wait_for_selector(".row .reward .rescored")
    for at in range(4):
        shown = page.locator(f"#row-{at} .reward").inner_text()
        assert [float(one) for one in shown.split("→")] == pytest.approx(
            [rows[at]["reward_before"], rows[at]["reward"]]
        )
    turned = {row["draw"] for row in rows if np.sign(row["advantage"]) * np.sign(row["advantage_before"]) < 0}
    assert 0 < len(turned) < len({row["draw"] for row in rows})
    said = page.locator(".insights").inner_text()
    assert f"an advantage changes its sign in {len(turned)} of 8 groups" in said
    page.get_by_label("outcome").select_option("turned")
    until(page, "n => document.querySelector('.rollouts .filters .count').innerText.startsWith(`${n} of`)",
          sum(row["draw"] in turned for row in rows))  # fmt: skip
    page.get_by_label("outcome").select_option("")
    page.get_by_role("button", name="By group").click()
    until(page, "document.querySelector('.rollouts .filters .count').innerText === '8 groups'")
    marked = page.locator(".row", has_text="an advantage changes its sign")
    assert marked.count() == len(turned)


def test_a_rollout_names_each_rescoring_and_another_can_be_chosen(questioned: Path, open_page: Open):
    row = rows_out(questioned, 2)[0]
    page = open_page(questioned, at="rollouts?step=2&row=0")
    page.wait_for_selector(".detail .facts")
    facts = page.locator(".detail .facts").inner_text()
    for text in ("reward, rescored same", "reward, rescored negated", "advantage, rescored negated"):
        assert text in facts
    page.get_by_label("rescored", exact=True).select_option("same")
    until(page, "location.hash.includes('rescored=same')")
    same = f"{row['reward_before']:g} → {row['reward_before']:g}"
    until(page, "text => document.querySelector('#row-0 .reward').innerText === text", same)
    page.reload()
    until(page, "text => document.querySelector('#row-0 .reward').innerText === text", same)


def test_each_token_has_its_logprob_before_and_after_a_replayed_update(questioned: Path, open_page: Open):
    step = RolloutRecords(questioned).step(2)
    line = next(one.line for one in step.episodes if one.outcome == "trained")
    number = step.episodes[line].sequences[0]
    tokens = step.tokens
    assert tokens is not None
    span = slice(int(tokens.offsets[number]), int(tokens.offsets[number + 1]))
    with np.load(questioned / "replayed/other.npz") as file:
        columns = {name: file[name][span].astype(float) for name in ("before", "after", "changed")}
    trainer = tokens.sequence(number).trainer_logprobs
    assert trainer is not None
    known = np.isfinite(trainer)
    assert columns["before"][known] == pytest.approx(trainer[known], abs=1e-5), "as the run's trainer had it"
    wanted = {
        "replay_before": columns["before"], "replay_after": columns["after"], "replay_changed": columns["changed"],
        "replay_moved": columns["after"] - columns["before"], "replay_changed_moved": columns["changed"] - columns["before"],
    }  # fmt: skip
    assert (
        np.nanmax(np.abs(wanted["replay_moved"])) > 1e-4
        and np.nanmax(np.abs(columns["changed"] - columns["after"])) > 1e-4
    )
    page = open_page(questioned, at=f"rollouts?step=2&row={line}&replay=other")
    for name, values in wanted.items():
        page.locator(f'.segments [data-name="{name}"]').click()
        shown = [np.nan if one is None else float(one) for one in page.evaluate(AT)]
        assert shown == pytest.approx(values.tolist(), rel=1e-3, abs=1e-6, nan_ok=True), name
        drawn = page.evaluate(
            "() => [...document.querySelectorAll('.tokens .tok')].filter((one) => one.style.backgroundColor).length"
        )
        assert drawn > 0
    page.locator(".tokens .tok").nth(int(np.flatnonzero(known)[0])).hover()
    info = page.locator(".token-info").inner_text()
    assert all(text in info for text in ("before ", "after ", "moved ", "moved, changed "))
    page.get_by_role("radio", name="replay as-it-was").click()
    until(page, "!document.querySelector('.segments [data-name=replay_changed]')")
    until(page, "document.querySelector('.segments [data-name=replay_moved]').getAttribute('aria-checked') === 'true'")
    go(page, f"rollouts?step=3&row={line}")
    until(page, "document.querySelector('.detail h2').innerText.includes('step 3')")
    assert page.locator('[data-name="replay_before"]').count() == 0, "nothing of another step"


def test_a_run_without_saved_results_shows_nothing_of_them(sound: Path, open_page: Open):
    page = open_page(sound, at="rollouts?step=3&row=0")
    page.wait_for_selector(".tokens .tok")
    assert page.locator(".rescored, [data-name^=replay]").count() == 0
    assert page.get_by_label("rescored", exact=True).is_hidden()
    assert page.locator('option[value="turned"]').get_attribute("disabled") is not None
    assert page.get_by_role("radiogroup", name="replay").count() == 0


def test_the_single_file_has_them_too(questioned: Path, tmp_path: Path, open_page: Open):
    out = tmp_path / "run.html"
    subprocess.run(
        [sys.executable, "-m", "atropos_core", "view", str(questioned), "--html", str(out)], check=True, timeout=RUN_S
    )
    page = open_page(url=out.as_uri(), at="rollouts?step=2&row=0&colour=replay_moved")
    page.wait_for_selector("#row-0 .reward .rescored")
    assert page.locator('.segments [data-name="replay_moved"]').get_attribute("aria-checked") == "true"


def test_a_result_of_other_records_is_a_notice(questioned: Path, tmp_path: Path, open_page: Open):
    run = tmp_path / "run"
    shutil.copytree(questioned, run)
    path = run / "rollouts/step-000002.jsonl"
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["draw"] += 1000
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "replayed/other.npz").write_bytes(b"no archive")
    page = open_page(run, at="rollouts?step=2")
    page.wait_for_selector(".insights .notice")
    said = page.locator(".insights").inner_text()
    assert "rescored/same.npz is not shown: it was made from other records of step 2" in said
    assert "other.npz is damaged" in said
    assert page.locator(".row .rescored").count() == 0 and page.locator(".row").count() > 0


def test_turn_rewards_are_shown_along_a_rollout(make_run: MakeRun, open_page: Open):
    run = make_run("TurnRewards")
    step = RolloutRecords(run).step(2)
    line = next(one.line for one in step.episodes if one.outcome == "trained" and any(one.turn_rewards))
    one = step.episodes[line]
    [turns] = one.turn_rewards
    assert turns is not None and len(turns.ends) == 2
    page = open_page(run, at=f"rollouts?step=2&row={line}")
    page.wait_for_selector(".conversation .turn-reward")
    shown = page.locator(".conversation .turn.assistant").all_inner_texts()
    assert len(shown) == 2
    for text, value in zip(shown, turns.values.tolist(), strict=True):
        assert f"turn reward {value:g}" in text
    assert page.locator(".conversation .turn:not(.assistant) .turn-reward").count() == 0
    page.locator('.segments [data-name="turn_reward"]').click()
    values = page.evaluate(AT)
    assert {at: float(value) for at, value in enumerate(values) if value is not None} == dict(
        zip((turns.ends - 1).tolist(), turns.values.tolist(), strict=True)
    )
    assert f"outcome reward\n{one.reward - float(turns.values.sum()):g}" in page.locator(".detail .facts").inner_text()
