"""The page in Chromium: curves, rollouts, tokens, evaluations, keys, colours and widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_records.rollout_records import RolloutRecords
from tests.view.conftest import Open, command, expect_texts_only, go, until, viewing

PLACES = ("curves", "rollouts", "rollouts?run=0&step=2&row=0", "rollouts?run=0&step=2&group=8", "evaluations", "times")


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()]


def count(page: Any) -> str:
    return page.locator(".rollouts .filters .count").inner_text()


# -- curves


def test_every_metric_has_a_curve_that_ends_where_the_records_do(sound: Path, open_page: Open):
    page = open_page(sound)
    records = RolloutRecords(sound).metrics()
    assert (
        f"{len(records.columns)} of {len(records.columns)} metrics" in page.locator(".curves .count").first.inner_text()
    )
    for name in ("reward/mean", "accuracy", "tokens/mean"):
        label = page.locator(f'.card[data-metric="{name}"]').get_attribute("aria-label")
        values = records.columns[name][np.isfinite(records.columns[name])]
        shown = float(label.split(" to ")[-1].split(";")[0].replace(",", ""))
        assert shown == pytest.approx(values[-1], rel=1e-3)
    drawn = page.evaluate(
        """() => { const c = document.querySelector('.card[data-metric="reward/mean"] canvas');
                   return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size; }"""
    )
    assert drawn > 3, "something is drawn"


def test_metrics_are_searched_by_name(sound: Path, open_page: Open):
    page = open_page(sound)
    page.get_by_label("Search metrics").fill("reward/")
    until(page, "document.querySelectorAll('.card').length < 10")
    names = page.locator(".card .metric").all_inner_texts()
    assert names and all("reward/" in name for name in names)


def test_findings_stand_above_the_curves_and_on_those_that_they_judge(sound: Path, tmp_path: Path, open_page: Open):
    run = tmp_path / "ill"
    shutil.copytree(sound, run)
    change = {
        "step": 3,
        "check": "length",
        "state": "ill",
        "since": 2,
        "says": "rollouts are 9 times as long",
        "do": "Look.",
    }
    (run / "health.jsonl").write_text(json.dumps(change) + "\n")
    page = open_page(run)
    assert "rollouts are 9 times as long" in page.locator(".findings li.ill").inner_text()
    assert "length ill since step 2" in page.locator('.card[data-metric="tokens/mean"]').get_attribute("aria-label")
    assert "marked" not in page.locator('.card[data-metric="loss"]').get_attribute("class")
    page.locator(".findings").get_by_role("button", name="rollouts").click()
    until(page, "document.querySelector('.step').value === '2'")


def test_runs_lie_over_each_other_and_one_can_be_hidden(sound: Path, make_run: Any, open_page: Open):
    other = make_run("PaysForLength")
    page = open_page(sound, other)
    card = page.locator('.card[data-metric="reward/mean"]')
    assert "Sound from" in card.get_attribute("aria-label") and "PaysForLength from" in card.get_attribute("aria-label")
    page.locator(".run input").nth(1).uncheck()
    assert "PaysForLength" not in card.get_attribute("aria-label")


def test_a_run_that_goes_on_is_followed_without_loading_the_page_again(tmp_path: Path, open_page: Open):
    run = tmp_path / "going"
    slow = ("--set", "engine.latency_s=0.05")
    with subprocess.Popen(command(run, "Sound", *slow, steps=200), stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and not (run / "rollouts/step-000002.jsonl").exists():
                pass
            page = open_page(run)
            page.evaluate("() => { window.kept = true; }")
            first = page.evaluate("() => Number(/step ([0-9]+)/.exec(document.querySelector('.state').textContent)[1])")
            until(
                page,
                "first => Number(/step ([0-9]+)/.exec(document.querySelector('.state').textContent)[1]) > first + 2",
                arg=first,
            )
            assert "going on" in page.locator(".state").inner_text()
            go(page, "rollouts")
            page.wait_for_selector(".row")
            assert page.evaluate("window.kept"), "it is the same page"
        finally:
            process.kill()
    until(page, "!document.querySelector('.state').textContent.includes('going on')")


# -- rollouts


def test_the_list_has_every_rollout_of_the_step(sound: Path, open_page: Open):
    page = open_page(sound, at="rollouts?run=0&step=2")
    page.wait_for_selector(".row")
    rows = rows_of(sound, 2)
    assert count(page) == f"{len(rows)} of {len(rows)} rollouts"
    assert page.locator(".row").count() < len(rows), "only what is in sight is there"
    rewards = page.locator(".row .reward").all_inner_texts()[:5]
    assert [float(one) for one in rewards] == [pytest.approx(row["reward"], abs=1e-3) for row in rows[:5]]


def test_rollouts_are_searched_and_filtered(sound: Path, open_page: Open):
    page = open_page(sound, at="rollouts?run=0&step=2")
    page.wait_for_selector(".row")
    rows = rows_of(sound, 2)

    def shown(number: int) -> None:
        until(
            page,
            "text => document.querySelector('.filters .count').textContent === text",
            arg=f"{number} of {len(rows)} rollouts",
        )

    page.get_by_label("outcome").select_option("right")
    shown(sum(row["correct"] for row in rows))
    page.get_by_label("outcome").select_option("")
    text = rows[5]["messages"][-1]["content"][:6]
    page.get_by_label("Search texts and tasks").fill(text.upper())
    shown(
        sum(
            text.lower() in json.dumps([m["content"] for m in row["messages"]], ensure_ascii=False).lower()
            for row in rows
        )
    )
    page.get_by_label("Search texts and tasks").fill("")
    page.get_by_label("task", exact=True).fill(rows[0]["task"])
    shown(sum(rows[0]["task"] in row["task"] for row in rows))
    page.get_by_label("task", exact=True).fill("")
    page.get_by_label("least tokens").fill("20")
    shown(sum(row["tokens"] >= 20 for row in rows))
    page.get_by_label("most tokens").fill("30")
    shown(sum(20 <= row["tokens"] <= 30 for row in rows))
    page.get_by_label("least tokens").fill("")
    page.get_by_label("most tokens").fill("")
    page.get_by_label("lowest reward").fill("1")
    shown(sum(row["reward"] >= 1 for row in rows))


def test_groups_say_why_they_were_left_out_and_open_side_by_side(sound: Path, open_page: Open):
    step, flat = next((step, row) for step in range(1, 7) for row in rows_of(sound, step) if row["outcome"] == "flat")
    page = open_page(sound, at=f"rollouts?run=0&step={step}")
    page.get_by_role("button", name="By group").click()
    until(page, "document.querySelector('.filters .count').textContent.includes('groups')")
    under = page.locator(".row .under").all_inner_texts()
    assert f"{flat['task']} · 8 rollouts · left out: all rewards are equal (transform.drop_flat)" in under
    page.locator(".row").first.click()
    page.wait_for_selector(".group article")
    assert page.locator(".group article").count() == 8
    page.get_by_role("button", name="Pin to compare").click()
    page.locator(".row").nth(1).click()
    until(page, "document.querySelectorAll('.group').length === 2")


@pytest.mark.parametrize("value", ["advantage", "logprob", "difference", "entropy", "version"])
def test_each_token_has_the_value_of_the_records(sound: Path, open_page: Open, value: str):
    step = RolloutRecords(sound).step(3)
    line = next(one.line for one in step.episodes if one.outcome == "trained")
    [tokens] = step.sequences(step.episodes[line])
    assert tokens.trainer_logprobs is not None and tokens.entropy is not None
    wanted = {
        "advantage": tokens.advantages, "logprob": tokens.logprobs, "difference": tokens.trainer_logprobs - tokens.logprobs,
        "entropy": tokens.entropy, "version": np.where(tokens.versions < 0, np.nan, tokens.versions.astype(float)),
    }[value]  # fmt: skip
    page = open_page(sound, at=f"rollouts?run=0&step=3&row={line}")
    page.locator(f'.segments [data-name="{value}"]').click()
    shown = page.evaluate(
        "() => [...document.querySelectorAll('.tokens .tok')].map((one) => one.dataset.value ?? null)"
    )
    assert [np.nan if one is None else float(one) for one in shown] == pytest.approx(
        wanted.tolist(), rel=1e-6, nan_ok=True
    )
    classes = page.evaluate("() => [...document.querySelectorAll('.tokens .tok')].map((one) => one.className)")
    assert [name == "tok" for name in classes] == tokens.trained.tolist()
    colours = page.evaluate(
        "() => [...document.querySelectorAll('.tokens .tok')].map((one) => one.style.backgroundColor)"
    )
    assert all(not colour for colour, is_there in zip(colours, np.isfinite(wanted), strict=True) if not is_there)
    if value in ("logprob", "entropy"):
        known = [(abs(number), colour) for number, colour in zip(wanted, colours, strict=True) if np.isfinite(number)]
        assert known and all(colour for _, colour in known)
        strength = [float(colour.rstrip(")").split(",")[-1]) for _, colour in sorted(known)]
        assert strength == sorted(strength), "the larger, the stronger"


def test_the_tokens_spell_the_conversation(sound: Path, open_page: Open):
    row = rows_of(sound, 3)[0]
    page = open_page(sound, at="rollouts?run=0&step=3&row=0")
    text = re.sub(r"<\|\w+\|>", "", page.locator(".tokens").inner_text().replace("↵\n", "\n"))
    assert row["messages"][-1]["content"].strip() in text and row["messages"][0]["content"] in text


def test_each_branch_of_a_rollout_has_its_own_tokens(make_run: Any, open_page: Open):
    run = make_run("Branching")
    step = RolloutRecords(run).step(2)
    first, second = step.sequences(step.episodes[0])
    page = open_page(run, at="rollouts?run=0&step=2&row=0")
    page.wait_for_selector(".tokens .tok")
    assert page.locator(".tokens .tok").count() == len(first.ids)
    page.get_by_role("radio", name="branch 2").click()
    assert page.locator(".tokens .tok").count() == len(second.ids) == 3


def test_a_rollout_shows_the_tools_that_its_policy_was_given(make_run: Any, open_page: Open, tmp_path: Path):
    model = shutil.copytree(TOY_MODEL, tmp_path / "toy-with-tools")
    (model / "config.json").write_text('{"model_type": "toy", "vocab_size": 100}')
    template = model / "chat_template.jinja"
    shown = "{% for tool in tools or [] %}<|user|>{{ tool.function.description }}{% endfor %}"
    template.write_text(shown + template.read_text())
    page = open_page(make_run("WithTools", "--model", str(model)), at="rollouts?step=2&row=0")
    page.locator(".tools summary").click()
    assert "calculator Adds <b>." in page.locator(".tools .call").inner_text()


def test_a_run_without_tokens_is_shown_and_says_so(make_run: Any, open_page: Open):
    run = make_run("Sound", "--set", "sink.jsonl.tokens=false")
    page = open_page(run, at="rollouts?run=0&step=2&row=0")
    page.wait_for_selector(".conversation .said")
    assert "sink.jsonl.tokens is false" in page.locator(".detail .notice").inner_text()
    assert page.locator(".tokens").count() == 0


def test_a_damaged_file_is_one_clear_error_and_other_steps_are_shown(sound: Path, tmp_path: Path, open_page: Open):
    run = tmp_path / "damaged"
    shutil.copytree(sound, run)
    (run / "rollouts/step-000002.jsonl").write_bytes(b"\x00\xff not json\n")
    (run / "rollouts/step-000003.safetensors").write_bytes(b"short")
    page = open_page(run, at="rollouts?run=0&step=3&row=0")
    page.wait_for_selector(".conversation .said")
    assert "step-000003.safetensors is damaged" in page.locator(".detail .notice").inner_text()
    with page.expect_response(lambda answer: "rollouts/2" in answer.url) as answered:
        page.get_by_role("button", name="previous recorded step").click()
    assert answered.value.status == 404
    until(page, "document.querySelector('.detail').textContent.includes('step-000002.jsonl is damaged: line 1')")
    go(page, "rollouts?run=0&step=1")
    page.wait_for_selector(".row")


# -- evaluations, time


def test_held_out_problems_are_compared_before_and_after(sound: Path, open_page: Open):
    before, after = (RolloutRecords(sound).evaluation(step) for step in (0, 6))
    page = open_page(sound, at="evaluations")
    page.wait_for_selector(".row")
    figures = page.locator(".summary .figure").all_inner_texts()
    for figure, problems in zip(figures, (before, after), strict=True):
        share = np.mean([one.correct / one.total for one in problems])
        assert float(figure.removesuffix(" %")) == pytest.approx(100 * share, abs=0.1)
    page.locator(".row").first.click()
    page.wait_for_selector(".members.two")
    assert page.locator(".members.two article").count() == 2
    assert after[0].samples[0].messages[-1]["content"].strip()[:20] in page.locator(".members.two").inner_text()


def test_the_time_went_where_the_summary_says(sound: Path, open_page: Open):
    stages = [one for one in RolloutRecords(sound).summary["times"] if one["kind"] == "stage"]
    page = open_page(sound, at="times")
    names = page.locator("table").first.locator("tbody th").all_inner_texts()
    assert names == [one["name"] for one in sorted(stages, key=lambda one: -one["seconds"])]


def worse_after(run: Path, to: Path) -> Path:
    """A run of whose last evaluation the first two problems fell, the second cut off, and the third failed."""
    shutil.copytree(run, to)
    rows = [json.loads(line) for line in (to / "rollouts/eval-000000.jsonl").read_text().splitlines()]
    for row in rows[:3]:
        row["correct"], row["samples"] = row["total"], [one | {"correct": True} for one in row["samples"]]
    (to / "rollouts/eval-000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = [row | {"samples": [one | {"finish": "stop"} for one in row["samples"]]} for row in rows]
    for row in after[:2]:
        row["correct"], row["samples"] = 0, [one | {"correct": False} for one in row["samples"]]
    after[1]["samples"] = [one | {"finish": "length"} for one in after[1]["samples"]]
    after[2] |= {"correct": 0, "samples": [{"failed": "ValueError: no", "where": "rollout", "messages": []}]}
    (to / "rollouts/eval-000006.jsonl").write_text("".join(json.dumps(row) + "\n" for row in after))
    return to


def test_what_went_wrong_in_an_evaluation_is_flagged_and_each_flag_shows_its_problems(
    sound: Path, tmp_path: Path, open_page: Open
):
    page = open_page(worse_after(sound, tmp_path / "worse"), at="evaluations")
    page.wait_for_selector(".row")
    flags = page.locator(".evaluations .insights li").all_inner_texts()
    assert [flag.split(" of ")[0] for flag in flags] == [
        "3 fell right more often before than after",
        "1 cut off",
        "1 failed",
    ]
    for flag, tasks in (("3 fell", [0, 1, 2]), ("1 cut off", [1]), ("1 failed", [2])):
        page.get_by_role("button", name=flag).click()
        until(page, "n => document.querySelectorAll('.evaluations .row').length === n", len(tasks))
        under = page.locator(".evaluations .row .under").all_inner_texts()
        assert [text.split(" · ")[0] for text in under] == [f"test-{16 + n}" for n in tasks]
        assert all(flag.split(" ", 1)[1] in text for text in under)


def test_the_slider_is_marked_where_a_run_has_something(sound: Path, tmp_path: Path, open_page: Open):
    run = tmp_path / "marked"
    shutil.copytree(sound, run)
    (run / "rollouts/step-000004.jsonl").unlink()
    change = {"step": 4, "check": "length", "state": "ill", "since": 4, "says": "long", "do": "Look."}
    (run / "health.jsonl").write_text(json.dumps(change) + "\n")
    page = open_page(run, at="rollouts?step=2")
    until(page, "document.querySelector('.marks .finding') !== null")
    at = {
        kind: page.evaluate(f"[...document.querySelectorAll('.marks .{kind}')].map((one) => Number(one.dataset.step))")
        for kind in ("rollouts", "evaluation", "checkpoint", "finding")
    }
    assert at == {
        "rollouts": [1, 2, 3, 5, 6], "evaluation": RolloutRecords(run).evaluation_steps(),
        "checkpoint": RolloutRecords(run).checkpoint_steps(), "finding": [4],
    }  # fmt: skip
    assert at["evaluation"] and at["checkpoint"]
    thumb = page.locator(".slide input").bounding_box()
    left = {n: page.locator(f".marks .rollouts[data-step='{n}']").bounding_box()["x"] for n in (1, 6)}
    assert (
        thumb["x"] < left[1] < thumb["x"] + 16
        and thumb["x"] + thumb["width"] - 16 < left[6] < thumb["x"] + thumb["width"]
    )
    page.locator(".marks .finding").click()
    until(page, "['3', '5'].includes(document.querySelector('.step').value)")
    go(page, "rollouts?step=6")
    until(page, "document.querySelector('.slide input').getAttribute('aria-valuetext').includes('evaluation')")


# -- the address


def test_every_selection_is_in_the_address_and_survives_a_reload(sound: Path, make_run: Any, open_page: Open):
    page = open_page(sound, make_run("PaysForLength"), at="rollouts?run=0&step=2")
    page.wait_for_selector(".row")
    page.get_by_label("outcome").select_option("right")
    page.get_by_label("order").select_option("tokens")
    page.get_by_label("least tokens").fill("5")
    page.get_by_label("Search texts and tasks").fill("say")
    until(page, "location.hash.includes('text=say') && location.hash.includes('tokens_from=5')")
    page.locator(".run input").nth(1).uncheck()
    page.locator(".row").nth(1).click()
    page.locator('.segments [data-name="entropy"]').click()
    shown = count(page)
    assert shown != "64 of 64 rollouts"

    def what() -> Any:
        page.wait_for_selector(".tokens .tok")
        return [
            count(page), page.get_by_label("outcome").input_value(), page.get_by_label("order").input_value(),
            page.get_by_label("least tokens").input_value(), page.get_by_label("Search texts and tasks").input_value(),
            page.locator(".row .under").all_inner_texts(), page.locator(".detail h2").inner_text(),
            page.locator(".segments [data-name][aria-checked=true]").get_attribute("data-name"),
            page.locator(".run input").nth(1).is_checked(),
            page.locator(".row[aria-selected=true]").get_attribute("id"),
        ]  # fmt: skip

    before = what()
    assert before[0] == shown and before[7] == "entropy" and before[8] is False
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert what() == before
    page.keyboard.press("?")
    address = page.get_by_label("address of what is shown").input_value()
    other = open_page(url=address)  # another browser, which was never given the token
    page, first = other, page
    assert what() == before and "token=" not in page.url
    page = first
    page.keyboard.press("Escape")
    go(page, "rollouts?run=0&step=2")
    until(page, "document.querySelector('.filters .count').textContent === '64 of 64 rollouts'")
    page.go_back()
    until(page, "text => document.querySelector('.filters .count').textContent === text", shown)


def test_groups_metrics_and_problems_are_in_the_address(sound: Path, open_page: Open):
    page = open_page(sound, at="rollouts?run=0&step=2")
    page.wait_for_selector(".row")
    page.keyboard.press("g")
    until(page, "location.hash.includes('by=group')")
    page.locator(".row").first.click()
    page.get_by_role("button", name="Pin to compare").click()
    page.locator(".row").nth(1).click()
    until(page, "document.querySelectorAll('.group').length === 2")
    page.reload()
    until(page, "document.querySelectorAll('.group').length === 2")
    assert count(page).endswith("groups")
    page.keyboard.press("c")
    page.get_by_label("Search metrics").fill("reward/")
    until(page, "location.hash.includes('metric=reward')")
    page.keyboard.press("Tab")
    page.keyboard.press("e")
    page.get_by_label("change").select_option("right")
    until(page, "document.querySelector('.evaluations .row') !== null && location.hash.includes('change=right')")
    page.get_by_label("before", exact=True).select_option("0/6")
    until(page, "location.hash.includes('before=0%2F6')")
    page.locator(".row").first.click()
    page.wait_for_selector(".members.two")
    heading = page.locator(".detail h2").inner_text()
    page.reload()
    page.wait_for_selector(".members.two")
    assert page.locator(".detail h2").inner_text() == heading
    assert page.get_by_label("before", exact=True).input_value() == "0/6"
    page.keyboard.press("c")
    until(page, "location.hash.includes('curves')")
    page.go_back()
    page.wait_for_selector(".members.two")


# -- for everybody


def test_keys_reach_the_list_at_once_and_a_list_says_which_there_are(sound: Path, open_page: Open):
    page = open_page(sound)
    page.keyboard.press("r")
    page.wait_for_selector(".row")
    page.keyboard.press("l")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "rollouts"
    page.keyboard.press("[")
    until(page, "document.querySelector('.step').value === '5'")
    page.keyboard.press("j")
    page.wait_for_selector(".tokens")
    page.keyboard.press("j")
    until(page, "location.hash.includes('row=1')")
    page.keyboard.press("k")
    until(page, "location.hash.includes('row=0')")
    page.keyboard.press("/")
    page.keyboard.type("lr?")
    assert page.get_by_label("Search texts and tasks").input_value() == "lr?", "what is typed in a field is no command"
    page.get_by_label("Search texts and tasks").fill("")
    page.get_by_role("button", name="By group").focus()
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    named = " ".join(page.locator("dialog kbd").all_inner_texts())
    assert named == "c r e t l / [ ] k j g Esc Tab ← → ?"
    page.get_by_label("keys of one letter").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    page.wait_for_timeout(200)
    assert "#rollouts" in page.url, "keys of one letter can be turned off"
    page = open_page(sound, at="rollouts?step=5")
    page.wait_for_selector(".row")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "rollouts"


def test_everything_is_reached_by_keys_alone(sound: Path, open_page: Open):
    page = open_page(sound)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").startswith("Skip to the list")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-curves"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector(".row")

    def tab_until(script: str) -> None:
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate(script):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline == "solid", "the focus is seen"
                return
        raise AssertionError(f"Tab never comes to {script}")

    tab_until("document.activeElement.getAttribute('aria-label') === 'Search texts and tasks'")
    tab_until("document.activeElement.getAttribute('aria-label') === 'rollouts'")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".tokens")
    assert "row=1" in page.url
    assert page.evaluate("document.activeElement.classList.contains('detail')")
    tab_until("document.activeElement.getAttribute('role') === 'radio'")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-checked')") == "true"
    tab_until("document.activeElement.classList.contains('tokens')")
    page.keyboard.press("End")
    assert "policy version 5" in page.locator(".token-info").inner_text()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "rollouts"
    page.keyboard.press("End")
    last = len(rows_of(sound, 6)) - 1
    page.wait_for_selector(f"#row-{last}[aria-selected=true]")


def test_a_curve_is_read_step_by_step_and_opens_its_rollouts_with_keys(sound: Path, open_page: Open):
    records = RolloutRecords(sound).metrics()
    page = open_page(sound)
    card = page.locator('.card[data-metric="reward/mean"]')
    card.focus()
    until(page, "() => document.querySelector('.card[data-metric=\"reward/mean\"] canvas') !== null")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft"):  # from the last step, which is 6
        page.keyboard.press(key)
    shown = card.locator(".value").inner_text()
    assert shown.startswith("step 4")
    value = float(records.columns["reward/mean"][records.steps.tolist().index(4)])
    assert float(shown.split()[-1]) == pytest.approx(value, rel=1e-3)
    page.keyboard.press("Enter")
    until(page, "() => document.querySelector('.step')?.value === '4'")


def test_every_control_has_a_name(sound: Path, open_page: Open):
    page = open_page(sound)
    for place in PLACES:
        go(page, place)
        page.wait_for_timeout(300)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, [tabindex="0"]')]
                .filter((one) => one.offsetParent && !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length
                                                       || one.getAttribute('aria-labelledby')))
                .map((one) => one.outerHTML.slice(0, 200))"""
        )
        assert not nameless


def contrast(page: Any, selector: str) -> float:
    """Of text on what is behind it (WCAG 2.2, relative luminance)."""
    value: float = page.evaluate(
        """selector => {
          const light = (colour) => { const [r, g, b] = colour.match(/[0-9.]+/g).map((one) => one / 255)
            .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const one = document.querySelector(selector);
          let behind = one;
          while (behind && /rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
          const [a, b] = [getComputedStyle(one).color, getComputedStyle(behind ?? document.documentElement).backgroundColor].map(light);
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }""",
        selector,
    )
    return value


# Every text in sight against what is painted behind it, translucent colours over each other (WCAG 2.2, 1.4.3): [what, ratio] of those
# below 4.5, and how many there were.
POOR = """() => {
  const numbers = (colour) => { const found = colour.match(/[0-9.]+/g).map(Number); const unit = colour.startsWith('color(') ? 255 : 1;
    return [found[0] * unit, found[1] * unit, found[2] * unit, found[3] ?? 1]; };
  const over = (top, below) => below.map((one, i) => (i < 3 ? top[3] * top[i] + (1 - top[3]) * one : 1));
  const light = (colour) => { const [r, g, b] = colour.slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (one) => { const layers = [];
    for (let at = one; at; at = at.parentElement) layers.unshift(numbers(getComputedStyle(at).backgroundColor));
    return layers.reduce((below, top) => over(top, below), [255, 255, 255, 1]); };
  const seen = new Set(), poor = [];
  const texts = document.createTreeWalker(document.getElementById('app'), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || seen.has(one)
        || !one.checkVisibility() || one.closest('option, :disabled, .u-axis')) continue;
    seen.add(one);
    const back = behind(one);
    const [a, b] = [over(numbers(getComputedStyle(one).color), back), back].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([`${one.tagName}.${one.className} ${one.textContent.slice(0, 30)}`, Math.round(100 * ratio) / 100]);
  }
  return [seen.size, poor]; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(sound: Path, make_run: Any, open_page: Open, scheme: str):
    page = open_page(sound, make_run("MasksTheAnswer"), color_scheme=scheme)
    for place in (
        "curves",
        "rollouts?step=2",
        "rollouts?step=2&by=group",
        "rollouts?step=2&group=8",
        "evaluations?problem=0",
        "times",
    ):
        go(page, place)
        page.wait_for_timeout(300)
        seen, poor = page.evaluate(POOR)
        assert seen > 20 and not poor, place
    for run, colour in (
        (run, colour) for run in (0, 1) for colour in ("advantage", "logprob", "difference", "entropy", "version")
    ):
        go(page, f"rollouts?run={run}&step=3&row=0&colour={colour}")
        until(page, f"document.querySelector('.segments [aria-checked=true]')?.dataset.name === '{colour}'")
        assert page.locator(".legend .tok").count() >= 3
        seen, poor = page.evaluate(POOR)
        assert seen > 50 and not poor, (run, colour)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert not page.evaluate(POOR)[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(sound: Path, open_page: Open, scheme: str):
    page = open_page(sound, at="rollouts?run=0&step=3&row=0", color_scheme=scheme)
    page.wait_for_selector(".tokens")
    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, back[4:-1].split(","))) > 382) == (scheme == "light")
    for selector in (".preview", ".under", ".count", ".tok.prompt", ".facts dt", ".role", "h1 span", ".row .reward"):
        assert contrast(page, selector) >= 4.5, selector


@pytest.mark.parametrize(
    "place",
    ["curves", "rollouts", "rollouts?run=0&step=2&row=0", "rollouts?run=0&step=2&group=8", "evaluations", "times"],
)
def test_360_pixels_are_wide_enough(sound: Path, open_page: Open, place: str):
    page = open_page(sound, at=place, width=360)
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_on_a_narrow_page_the_list_is_on_the_first_screen(sound: Path, open_page: Open):
    page = open_page(sound, at="rollouts?step=2", width=360)
    page.wait_for_selector(".row")
    tops = [page.locator(one).first.bounding_box()["y"] for one in (".steps", ".insights", ".filters", ".row")]
    assert tops == sorted(tops) and tops[-1] < 480
    assert page.locator(".insights").bounding_box()["height"] < 90
    assert not page.get_by_label("outcome").is_visible()
    page.get_by_role("button", name="Filters").click()
    page.get_by_label("outcome").select_option("right")
    until(page, "document.querySelector('.filters .narrow').textContent === 'Filters (1)'")
    page.locator(".row").first.click()
    page.wait_for_selector(".tokens")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".detail").bounding_box()["y"] < 300


def test_nothing_moves_for_who_wants_less_motion(sound: Path, open_page: Open):
    page = open_page(sound, reduced_motion="reduce")
    page.evaluate("() => document.querySelector('.state').classList.add('living')")
    assert page.evaluate("getComputedStyle(document.querySelector('.state'), '::before').animationName") == "none"


# -- hostile texts, and other pages


def test_texts_of_a_model_are_never_html(make_run: Any, open_page: Open, tmp_path: Path):
    run = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(make_run("Hostile"), run)
    page = open_page(run)
    expect_texts_only(page)


def test_another_page_can_neither_read_nor_frame_it(sound: Path, chromium: Any):
    with viewing(sound) as url:
        context = chromium.new_context()
        page = context.new_page()
        page.route(
            "http://other.example/", lambda route: route.fulfill(body="<p>another site</p>", content_type="text/html")
        )
        page.goto("http://other.example/")
        base, token = url.split("/#token=")
        read = page.evaluate(
            """async ([base, token]) => {
                 const headers = {authorization: `Bearer ${token}`};
                 try { return await (await fetch(`${base}/records/runs`, {headers})).text(); }
                 catch (error) { return `refused: ${error.name}`; } }""",
            [base, token],
        )
        assert read == "refused: TypeError"
        page.set_content(f'<iframe src="{base}/"></iframe>')
        page.wait_for_timeout(500)
        assert all("atropos" not in frame.content() for frame in page.frames[1:])
        context.close()


def test_a_page_without_the_token_says_what_to_do(sound: Path, chromium: Any):
    with viewing(sound) as url:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(url.split("#")[0])
        page.wait_for_selector(".problem")
        assert "needs the token of its address" in page.locator(".problem").inner_text()
        context.close()


# -- large runs


def test_ten_thousand_rollouts_open_soon_and_a_thousand_steps_are_scrolled(
    sound: Path, tmp_path: Path, open_page: Open
):
    """Bounds for a busy machine; benchmarks/viewer.py measures."""
    run = tmp_path / "large"
    shutil.copytree(sound, run)
    rows = rows_of(sound, 6)
    many = [
        rows[n % 64] | {"draw": rows[n % 64]["draw"] + 8 * (n // 64), "task": f"task-{n // 8}", "sequences": []}
        for n in range(10_000)
    ]
    (run / "rollouts/step-000006.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    (run / "rollouts/step-000006.safetensors").unlink()
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    steps = [json.dumps(json.loads(last) | {"step": step}) for step in range(1000)]
    (run / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    page = open_page(run)
    took = page.evaluate(
        """async () => { const begin = performance.now(); location.hash = 'rollouts?run=0&step=6';
             while (!document.querySelector('.row')) await new Promise(requestAnimationFrame); return performance.now() - begin; }"""
    )
    assert took < 20_000
    assert count(page) == "10,000 of 10,000 rollouts"
    page.evaluate("() => { const box = document.querySelector('.list'); box.scrollTop = box.scrollHeight; }")
    page.wait_for_selector("#row-9999")
    assert page.locator(".row").count() < 60


NAMES = ("constructor", "__proto__", "toString", "hasOwnProperty", "valueOf", "__defineGetter__", "length")


def test_names_that_every_javascript_object_has_are_names_like_others(sound: Path, tmp_path: Path, open_page: Open):
    """Of metrics, parts, problems, environments, checks, tools and sections of the address."""
    run = tmp_path / "names"
    shutil.copytree(sound, run)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, **dict.fromkeys(NAMES, 0.5)}) + "\n" for row in steps)
    )
    changes = [{"step": 2, "check": name, "state": "ill", "since": 2, "says": "odd", "do": "Look."} for name in NAMES]
    (run / "health.jsonl").write_text("".join(json.dumps(change) + "\n" for change in changes))
    odd: dict[str, Any] = {key: {} for key in NAMES}
    call = {"id": odd, "function": {"name": odd, "arguments": odd}}
    spoken = [
        {"role": odd, "content": odd, "reasoning_content": odd, "tool_call_id": odd, "name": odd, "tool_calls": [call]}
    ]
    rows = rows_of(run, 2)
    for number, row in enumerate(rows):
        name = NAMES[number // 8 % len(NAMES)]
        more = {"task": name, "environment": name, "finish": name, "outcome": name, "parts": dict.fromkeys(NAMES, 1.0)}
        row |= {**more, "metrics": dict.fromkeys(NAMES, 2.0), "messages": [*row["messages"], *spoken]}
    (run / "rollouts/step-000002.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (0, 6):
        path = run / f"rollouts/eval-{step:06d}.jsonl"
        problems = [json.loads(line) for line in path.read_text().splitlines()]
        renamed = [{**one, "task": name, "environment": name} for one, name in zip(problems, NAMES, strict=False)]
        path.write_text("".join(json.dumps(one) + "\n" for one in renamed))
    summary = json.loads((run / "summary.json").read_text())
    summary["times"] = [
        {"name": name, "kind": "stage", "seconds": "x", "calls": odd, "p50_s": 10**400} for name in NAMES
    ]
    (run / "summary.json").write_text(json.dumps(summary))

    page = open_page(run, at=NAMES[0])
    for name in NAMES:
        go(page, name)
        until(page, f"document.querySelector('.card[data-metric=\"{name}\"]') !== null")
        assert "from 0.5 to 0.5" in page.locator(f'.card[data-metric="{name}"]').get_attribute("aria-label")
        assert page.locator(".findings li.ill").count() == len(NAMES)
        go(
            page,
            f"rollouts?run={name}&step=2&row=0&colour={name}&branch={name}&order={name}&outcome={name}&{name}={name}",
        )
        page.wait_for_selector(".tokens .tok")
        assert page.locator(".facts dt", has_text=f"reward {name}").count() == 1
        page.wait_for_selector(".conversation .turn.other")
        go(page, f"evaluations?before={name}&after={name}&change={name}&problem={name}")
        until(page, f"document.querySelectorAll('.evaluations .row').length === {len(NAMES)}")
        go(page, "times")
        until(page, f"document.querySelectorAll('.times tbody tr').length === {len(NAMES)}")
