"""`--json`: one document on standard output, and nothing else there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atropos_core.cli import run_app
from atropos_doctor.diagnose import diagnose
from tests.contract.test_flags import CONSTANT, TASKS


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert run_app(list(arguments)) == code
    return json.loads(capsys.readouterr().out)


def test_a_listing_has_every_component_with_where_it_is_from(capsys):
    found = printed(capsys, "plugins", "--json")
    gsm8k = next(one for one in found["components"] if one["name"] == "gsm8k")
    assert gsm8k["kind"] == "environment" and gsm8k["distribution"] == "atropos-plugin-env-gsm8k" and gsm8k["version"]
    assert {one["name"] for one in found["plugins"]} >= {"env_gsm8k"} and not any(
        one["blocked"] or one["broken"] for one in found["plugins"]
    )
    assert {one["kind"] for one in printed(capsys, "plugins", "--kind", "sink", "--json")["components"]} == {"sink"}


def test_a_component_has_its_options_with_type_default_and_meaning(capsys):
    found = printed(capsys, "plugins", "grpo", "--kind", "trainer", "--json")
    options = {one["name"]: one for one in found["options"]}
    assert options["clip_low"]["type"] == "number >= 0, <= 1" and options["clip_low"]["default"] is None
    assert options["betas"] == {
        "name": "betas", "type": "[number >= 0, < 1, number >= 0, < 1]", "required": False, "default": [0.9, 0.99],
        "meaning": "decay of AdamW's first and second moment",
    }  # fmt: skip
    assert options["lora.rank"]["default"] == 16 and options["learning_rates[].pattern"]["required"]
    members = {one["name"] for one in printed(capsys, "plugins", "ensemble", "--json")["options"]}
    assert {"members", "members.NAME.use", "members.NAME.veto"} <= members


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("gsm8",), "there is no component named 'gsm8'. Did you mean 'gsm8k'?"),
        (("csw", "--kind", "sink"), "there is no sink named 'csw'. Did you mean 'csv'?"),
        (("toy",), "'toy' is of the kinds engine, trainer. What to do: Say which: --kind engine"),
        (("--kind", "sinks"), "there is no kind 'sinks'. Choose one of: environment, reward"),
    ],
)
def test_what_is_not_installed_is_named_with_what_is_near(arguments, wanted, capsys):
    assert run_app(["plugins", *arguments]) == 2
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_a_component_of_your_own_has_its_options_listed_too(capsys):
    found = printed(capsys, "plugins", f"{TASKS}:Unsteady", "--json")
    assert found["kind"] == "environment" and found["version"] is None
    assert "fails" in [one["name"] for one in found["options"]]


def test_a_value_of_a_run_comes_with_its_origin_and_its_meaning(capsys):
    wanted = ("config", "show", "--env", "gsm8k", "--model", "tiny", "--set", "health.length.ratio=3", "--json")
    rows = {one["path"]: one for one in printed(capsys, *wanted, "--explain")}
    assert rows["health.length.ratio"] == {
        "path": "health.length.ratio", "value": 3, "from": "flag",
        "meaning": "wrong above this multiple of the usual length, or below its inverse",
    }  # fmt: skip
    assert rows["environment.gsm8k.grading_deadline_s"]["meaning"] == "seconds to compare one pair of expressions"
    assert rows["trainer.betas"]["meaning"] == "decay of AdamW's first and second moment"
    assert [path for path, row in rows.items() if not row["meaning"]] == []
    assert "meaning" not in printed(capsys, *wanted)[0]


def test_a_doctor_prints_one_document_and_ends_as_it_would(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('model = "toy"\n')
    findings = diagnose(tmp_path / "run")
    ill = any(finding.ok is False for finding in findings)
    found = printed(capsys, "doctor", str(tmp_path / "run"), "--json", code=int(ill))
    assert found["ok"] is not ill and [one["check"] for one in found["checks"]] == [one.subject for one in findings]


def test_a_check_says_of_each_promise_whether_it_is_kept(capsys):
    kept = printed(capsys, "check", "length", "--json")
    assert kept["kind"] == "reward" and kept["name"] == "length" and kept["ok"] and len(kept["checks"]) > 3
    broken = printed(capsys, "check", f"{TASKS}:Unsteady", "--set", "fails=true", "--json", code=1)
    wrong = [one for one in broken["checks"] if one["ok"] is False]
    assert not broken["ok"] and wrong and all(one["found"] for one in wrong)


def test_an_evaluation_prints_its_figures_and_all_that_they_depend_on(tmp_path, capsys):
    wanted = ("eval", "--env", CONSTANT, "--model", "toy", "--engine", "toy", "--problems", "2", "--json")
    found = printed(capsys, *wanted)
    assert found["metrics"]["eval/problems"] == 2 and found["environment"]["constant"]["use"] and found["files"] == {}
    written = printed(capsys, *wanted, "--out", str(tmp_path / "figures"))
    assert json.loads((tmp_path / "figures.json").read_text())["metrics"] == written["metrics"]
    assert written["files"] == {"figures": f"{tmp_path}/figures.json", "replies": f"{tmp_path}/figures.jsonl"}
