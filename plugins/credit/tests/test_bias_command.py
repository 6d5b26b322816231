"""`atropos bias`."""

from __future__ import annotations

import json

import pytest

from atropos_core.cli import run_app

MINE = """
def shifted(group):
    return [turns.rewards * 0 + turns.score for turns in group]

def short(group):
    return [turns.rewards[:1] for turns in group][:1]

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")


def test_a_name_prints_its_rows_of_the_table(capsys):
    assert run_app(["bias", "group_advantage", "maxrl", "--group-size", "2"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {line[0]: [one.strip() for one in line[1:] if one.strip()] for line in lines if len(line) > 4}
    assert [one for one in cells["group_advantage, baseline = others"] if "1e-9" in one] == ["below 1e-9"] * 4
    assert cells["group_advantage, divide_by_std = false"][1:5] == ["50 %", "50 %", "50 %", "below 1e-9"]
    assert "bias: answer" in cells["estimator"]


def test_a_function_of_a_file_is_measured_as_json(capsys):
    assert run_app(["bias", "./mine.py:shifted", "--group-size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["group_size"], found["seed"]) == (2, 0)
    [row] = found["rows"]
    assert (row["estimator"], row["objective"], row["average"]) == ("./mine.py:shifted", "expected score", "sum")
    assert set(row["worlds"]) == {"fixed", "stopping", "rooms"}
    for measured in row["worlds"].values():
        assert measured["bias"] < 1e-9 and measured["turned"] < 1e-9 and measured["noise"] > 0
        assert measured["scale"] == pytest.approx(1)
    assert run_app(["bias", "./mine.py:shifted", "--group-size", "2", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] != found["rows"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("turn_return", "'turn_return' is not in the table of estimators"),
        ("./mine.py:number", "is a int, but an estimator is a function"),
        ("./mine.py:short", "returned 1 arrays for 3 episodes"),
        ("./other.py:f", "/other.py"),
    ],
)
def test_what_is_not_an_estimator_is_refused(name, error, capsys):
    assert run_app(["bias", name]) != 0
    assert error in " ".join(capsys.readouterr().err.split())
