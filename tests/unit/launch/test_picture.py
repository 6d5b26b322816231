"""The picture of a run, and the terminals that show it."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atropos_core.errors import ConfigError, DataError, RunDirectoryError
from atropos_core.launch.picture import (
    HELD_OUT,
    ILL,
    REWARD,
    SUSPECT,
    draw,
    draw_at_end,
    draw_several,
    figure_of,
    figure_of_several,
    where,
)
from atropos_core.launch.terminal_pictures import escapes
from atropos_core.scripting.results import RunResult


def run_of(folder: Path, *, evaluated: bool = True, health: list[dict[str, object]] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text('model = "tiny$x$"\n[environment.sums]\n')
    rows: list[dict[str, object]] = [{"step": 0, "eval/accuracy": 0.25, "reward/mean": 9.0}] if evaluated else []
    rows += [{"step": step, "reward/mean": step / 10, "reward/std": 0.2} for step in range(1, 21)]
    if evaluated:
        rows[-1]["eval/accuracy"] = 0.75
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "health.jsonl").write_text("".join(json.dumps(row) + "\n" for row in health or []))
    return folder


def pixels(path: Path, color: str) -> int:
    """How many have just this colour."""
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return int((np.asarray(Image.open(path).convert("RGB")) == wanted).all(axis=-1).sum())


CHANGES = [
    {"step": 5, "check": "entropy", "state": "suspect", "since": 5},
    {"step": 8, "check": "entropy", "state": "ill", "since": 5},
    {"step": 12, "check": "entropy", "state": "ok", "since": 12},
]


def test_rewards_evaluations_and_findings_are_drawn_each_in_its_colour(tmp_path: Path) -> None:
    path = draw(run_of(tmp_path / "run", health=CHANGES))
    assert path == tmp_path / "run/plot.png"
    assert Image.open(path).size == (800, 500)
    assert pixels(path, "#ffffff") > 250_000
    for color in (REWARD, HELD_OUT, SUSPECT, ILL):
        assert pixels(path, color) > 20, color


def test_lines_and_labels_are_at_the_values_that_were_recorded(tmp_path: Path) -> None:
    rewards, held_out = figure_of(run_of(tmp_path / "run", health=CHANGES)).axes
    mean, *marks = rewards.lines
    assert np.allclose(mean.get_xydata(), [(step, step / 10) for step in range(1, 21)]), "no reward at step 0"
    assert [float(mark.get_xdata()[0]) for mark in marks] == [5, 8]
    [spread] = rewards.collections
    edges = spread.get_paths()[0].get_extents()
    assert np.allclose([edges.ymin, edges.ymax], [0.1 - 0.2, 2.0 + 0.2])
    evaluated, *_ = held_out.lines
    assert np.allclose(evaluated.get_xydata(), [(0, 0.25), (20, 0.75)])
    assert [(one.get_text(), tuple(map(float, one.xy))) for one in held_out.texts] == [
        ("25.0%", (0.0, 0.25)), ("75.0%", (20.0, 0.75)),
    ]  # fmt: skip
    assert [one.get_text() for one in rewards.texts] == [" entropy: suspect", " entropy: ill"]


def test_what_a_run_has_not_is_not_drawn(tmp_path: Path) -> None:
    path = draw(run_of(tmp_path / "run", evaluated=False), tmp_path / "other.png")
    assert pixels(path, REWARD) > 20
    assert [pixels(path, color) for color in (HELD_OUT, SUSPECT, ILL)] == [0, 0, 0]
    assert not (tmp_path / "run/plot.png").exists()


def test_a_run_without_metrics_and_a_place_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        draw(run, tmp_path / "no/such/folder.png")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="has no metrics to draw"):
        draw(run)
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        draw(tmp_path)


def test_several_runs_are_lines_of_one_picture_at_the_values_that_were_recorded(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a", health=CHANGES), run_of(tmp_path / "b$1$"), run_of(tmp_path / "c", evaluated=False)]
    assert draw_several(runs, tmp_path / "all.png") == tmp_path / "all.png"
    assert Image.open(tmp_path / "all.png").size == (800, 500)
    rewards, held_out = figure_of_several(runs).axes
    assert [line.get_label() for line in rewards.lines] == ["a", r"b\$1\$", "c"]
    for line in rewards.lines:
        np.testing.assert_allclose(line.get_ydata(), np.arange(1, 21) / 10)
    assert len({line.get_color() for line in rewards.lines}) == 3
    assert [line.get_color() for line in held_out.lines] == [line.get_color() for line in rewards.lines[:2]]
    for line in held_out.lines:
        assert [*line.get_xdata()] == [0, 20] and [*line.get_ydata()] == [0.25, 0.75]


def test_several_runs_of_one_name_are_labelled_by_their_paths_and_need_a_file(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    runs = [run_of(tmp_path / "one/run"), run_of(tmp_path / "two/run")]
    assert [line.get_label() for line in figure_of_several(runs).axes[0].lines] == [str(run) for run in runs]
    with pytest.raises(ConfigError, match="a picture of 2 runs") as refused:
        draw_several(runs, None)
    assert refused.value.remedy == "Say where: --out FILE"


def test_at_the_end_it_is_drawn_as_the_run_file_says_and_never_ends_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    for seconds, wanted in ((29.0, "auto"), (31.0, "never")):
        draw_at_end(run, seconds, wanted)
        assert not (run / "plot.png").exists()
        assert where(run) == f"`atropos plot {run}` draws one"
    for seconds, wanted in ((31.0, "auto"), (1.0, "always")):
        draw_at_end(run, seconds, wanted)
        assert where(run) == str(run / "plot.png")
        (run / "plot.png").unlink()
    (run / "metrics.jsonl").write_text("")
    draw_at_end(run, 31.0, "auto")
    assert "plot.png was not drawn" in capsys.readouterr().err


def test_python_has_the_picture_as_notebooks_show_it(tmp_path: Path) -> None:
    made = RunResult(run_of(tmp_path / "run"), "finished").plot()
    assert made._repr_png_() == (tmp_path / "run/plot.png").read_bytes()


PNG = bytes(range(256)) * 40


@pytest.mark.parametrize(
    "environment", [{"KITTY_WINDOW_ID": "1"}, {"TERM": "xterm-kitty"}, {"TERM_PROGRAM": "ghostty"}], ids=str
)
def test_kittys_protocol_carries_the_picture_in_chunks(environment: dict[str, str]) -> None:
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", escapes(PNG, environment))
    assert base64.b64decode("".join(data for _, data in parts)) == PNG
    assert all(len(data) <= 4096 for _, data in parts) and len(parts) > 2
    assert [keys for keys, _ in parts] == ["a=T,f=100,m=1", *["m=1"] * (len(parts) - 2), "m=0"]


@pytest.mark.parametrize(
    "environment", [{"TERM_PROGRAM": "iTerm.app"}, {"TERM_PROGRAM": "WezTerm"}, {"LC_TERMINAL": "iTerm2"}], ids=str
)
def test_iterms_protocol_carries_the_picture(environment: dict[str, str]) -> None:
    [(size, data)] = re.findall(r"\x1b\]1337;File=inline=1;size=(\d+);[^:]*:([^\a]*)\a", escapes(PNG, environment))
    assert base64.b64decode(data) == PNG and int(size) == len(PNG)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TERM": "xterm-256color"},
        {"KITTY_WINDOW_ID": "1", "TMUX": "x"},
        {"TERM_PROGRAM": "WezTerm", "TERM": "screen"},
    ],
    ids=str,
)
def test_no_other_terminal_is_sent_what_it_would_print(environment: dict[str, str]) -> None:
    assert escapes(PNG, environment) == ""


def test_the_command_shows_it_on_a_terminal_and_prints_the_path_alone_elsewhere(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    command = [sys.executable, "-m", "atropos_core", "plot", str(run)]
    own = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TERM_PROGRAM", "LC_TERMINAL")}
    own |= {"KITTY_WINDOW_ID": "1", "TERM": "xterm-kitty"}
    piped = subprocess.run(
        [*command, "--out", str(tmp_path / "x.png")], env=own, capture_output=True, text=True, timeout=120, check=True
    )
    assert piped.stdout == f"{tmp_path}/x.png\n" and not (run / "plot.png").exists()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=own, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        said = b""
        while chunk := read(ours):
            said += chunk
        assert running.wait(120) == 0
    os.close(ours)
    parts = re.findall(rb"\x1b_G[^;]*;([^\x1b]*)\x1b\\", said)
    assert base64.b64decode(b"".join(parts)) == (run / "plot.png").read_bytes()


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # of a terminal whose other end is closed
        return b""


def test_a_damaged_file_with_a_name_of_any_length_is_drawn(tmp_path: Path) -> None:
    ill = {"step": 3, "check": "x" * 100_000, "state": "ill", "since": 2, "says": "", "do": ""}
    run = run_of(tmp_path / "run", health=[ill])
    (run / "config.toml").write_text(f'model = "{"y" * 100_000}"\n')
    texts = [one.get_text() for axes in figure_of(run).axes for one in (axes.title, axes._left_title, *axes.texts)]
    assert max(map(len, texts)) < 200
