"""`atropos simulate`, and its lines in a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core.cli import run_app
from plugins.simulation.tests.figures_of_one import ONE
from plugins.simulation.tests.test_measured import write_run

SPANNING = """
from atropos_core.processes.local import LocalLauncher

class Spanning(LocalLauncher):
    several_machines = True
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")


def write_figures(path: Path, **changes: object) -> Path:
    """Write figures as TOML. In a keyword, two underscores stand for a figure's dot."""
    values = ONE | {name.replace("__", "."): value for name, value in changes.items()}
    sections: dict[str, list[str]] = {}
    for name, value in values.items():
        section, _, figure = name.partition(".")
        sections.setdefault(section, []).append(f"{figure} = {list(value) if isinstance(value, tuple) else value}\n")
    path.write_text("".join(f"[{section}]\n{''.join(lines)}" for section, lines in sections.items()))
    return path


def test_a_table_has_a_line_for_each_fleet_and_every_figure_its_origin(tmp_path, capsys):
    file = write_figures(tmp_path / "figures.toml")
    assert (
        run_app(
            ["simulate", "--figures", str(file), "--set", "trainer.step_s=2.5", "--engines", "1,2", "--workers", "1,3"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert any(line.split() == ["trainer.step_s", "2.5", "--set"] for line in said.splitlines())
    assert said.count("--set") == 1
    assert said.count(str(file)) == len(ONE) - 1
    lines = [line.split() for line in said.splitlines() if line[:2] in ("1 ", "2 ")]
    assert [line[:2] for line in lines] == [["1", "1"], ["2", "3"]]
    assert f"{100 / 50 + 0.0625 + 2.5 + 1.0 + 0.25 + 0.125:.2f}" in lines[0], "its step, exactly"
    assert "what saturates first" in said and "1 engine: the trainer" in said and "nothing fails" in said


def test_the_seed_and_a_growing_batch_change_the_table(tmp_path, capsys):
    file = write_figures(tmp_path / "figures.toml", rollout__tokens=(10, 300), run__groups_per_step=3)
    found = []
    for more in ((), ("--seed", "5"), ("--batch-grows",)):
        assert run_app(["simulate", "--figures", str(file), "--engines", "2", *more]) == 0
        found.append(capsys.readouterr().out)
    assert len(set(found)) == 3


def test_a_figure_that_is_not_known_is_named_and_none_is_guessed(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert run_app(["simulate", str(run)]) != 0
    said = capsys.readouterr().err
    assert "hub.group_s: a run does not record it" in said and "worker.rollout_s" in said
    assert (
        run_app(["simulate", str(run), "--set", "hub.group_s=0.001", "--set", "worker.rollout_s=0", "--engines", "1"])
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), "a simulation needs figures"),
        (("--figures", "none.toml"), "cannot be read"),
        (("--figures", "figures.toml", "--set", "trainer"), "SECTION.FIGURE=VALUE"),
        (("--figures", "figures.toml", "--set", "trainer.stepp_s=1"), "trainer.stepp_s"),
        (
            ("--figures", "figures.toml", "--set", "engine.single_tokens_per_s=1e9"),
            "no engine is faster with one sequence",
        ),
        (("--figures", "figures.toml", "--set", "bridge.bytes=5"), "give the speed of the link"),
        (("--figures", "figures.toml", "--engines", "0"), "--engines 0"),
        (("--figures", "figures.toml", "--engines", "1,2", "--workers", "1,2,3"), "3 numbers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, monkeypatch, capsys, arguments, wanted):
    monkeypatch.chdir(tmp_path)
    write_figures(Path("figures.toml"))
    assert run_app(["simulate", *arguments]) != 0
    assert wanted in " ".join(capsys.readouterr().err.replace("│", " ").split())


def dry_run(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "spanning.py").write_text(SPANNING)
    return ["run", "--dry-run", "--env", "gsm8k", "--bridge", "checkpoint", *more]


def test_a_dry_run_that_spans_machines_says_what_more_engines_would_bring(tmp_path, capsys):
    file = write_figures(tmp_path / "figures.toml", run__groups_per_step=999)
    spanning = ("--launcher", f"{tmp_path}/spanning.py:Spanning", "--set", "training.groups_per_step=2")
    assert run_app(dry_run(tmp_path, *spanning)) == 0
    assert "--figures" in capsys.readouterr().out
    assert run_app(dry_run(tmp_path, *spanning, "--set", "training.group_size=2", "--figures", str(file))) == 0
    said = capsys.readouterr().out
    assert "512 engines: " in said and "what saturates first" in said
    assert "has 1 engine" in said


def test_a_run_on_one_machine_says_nothing_of_it(tmp_path, capsys):
    assert run_app(dry_run(tmp_path)) == 0
    assert "engines would bring" not in capsys.readouterr().out


def test_figures_without_a_dry_run_are_refused(capsys):
    assert run_app(["run", "--env", "gsm8k", "--figures", "x.toml"]) != 0
    assert "no effect without --dry-run" in capsys.readouterr().err
