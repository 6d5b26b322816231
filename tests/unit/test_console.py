"""What is printed is what was said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_core import console, errors
from atropos_core.console import waits


@pytest.mark.parametrize("cell", ["[bold]reward[/]", "adapter :bug: lora", "\\[trainer]"])
def test_a_table_shows_its_cells_as_they_are(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.table(("path", "value"), [("a", cell)])
    assert cell in capsys.readouterr().out


def test_a_line_shows_its_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("[a] :bug:")
    console.warn("[a] :bug:")
    said = capsys.readouterr()
    assert said.out == "[a] :bug:\n" and said.err == "warning [a] :bug:\n"


def shown(sent: str) -> list[str]:
    """The lines that a terminal shows at the end of what was sent: a line that was drawn again is as it was last."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", sent).replace("\r\n", "\n")
    return [line.rpartition("\r\x1b[2K")[2] for line in plain.rstrip("\n").split("\n")]


def test_nothing_that_python_prints_is_glued_to_the_line_that_changes() -> None:
    code = """
import logging, sys, warnings
handler = logging.StreamHandler()  # made before there is such a line, with the stream as it was
from atropos_core.builtin.progress import StepProgress
from atropos_core import console
metrics = {"reward/mean": 0.5, "tokens/s": 10.0, "time/step_s": 1.0}
progress = StepProgress(9)
progress.show(1, metrics)
warnings.warn_explicit("old name", DeprecationWarning, "m.py", 1, registry={})
warnings.showwarning("old name", UserWarning, "m.py", 1)
progress.show(2, metrics)
handler.handle(logging.LogRecord("x", logging.WARNING, "x.py", 1, "from a logger", None, None))
progress.show(3, metrics)
print("from print")
sys.stderr.write("no end of line")
progress.show(4, metrics)
progress.close()
sys.excepthook(ValueError, ValueError("a traceback"), None)
"""
    lines = shown(sent_to_a_terminal(code, 80))
    for alone in (
        "m.py:1: UserWarning: old name",
        "from a logger",
        "from print",
        "no end of line",
        "ValueError: a traceback",
    ):
        assert alone in lines, lines
    assert [line.split("/9")[0][-1] for line in lines if "step" in line] == ["1", "2", "3", "4"]


WAITS = """
import time
from atropos_core import console
from atropos_core.console import waits
waits.WAIT_S = 0.0
def until(there):
    end = time.monotonic() + 30
    while not there() and time.monotonic() < end:
        time.sleep(0.01)
with waits.waiting("the engine to load " + "a" * 60) as wait:
    until(lambda: wait.said or waits.LINE._on)
    console.say("a fact")
    time.sleep(2 * waits.WAIT_TICK_S)
    wait.done = "7 done"
    time.sleep(2 * waits.WAIT_TICK_S)
"""


def test_a_terminal_shows_what_is_waited_for_within_its_width_and_takes_it_away_again() -> None:
    sent = sent_to_a_terminal(WAITS, 60)
    assert "waiting for the engine to load aaa" in sent
    assert all(len(part.split("\r")[0]) < 60 for part in sent.split("\x1b[2K") if part.startswith("waiting"))
    assert shown(sent) == ["a fact", ""]


def test_elsewhere_a_line_on_standard_error_says_once_what_is_waited_for() -> None:
    ended = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "a fact\n"
    assert ended.stderr == f"waiting for the engine to load {'a' * 60}\n"


def test_what_takes_no_second_is_not_worth_a_line(capfd) -> None:
    with waits.waiting("nothing much"):
        pass
    assert capfd.readouterr().err == ""


def test_a_wait_with_a_time_of_its_own_is_shown_no_sooner(capfd, monkeypatch) -> None:
    monkeypatch.setattr(waits, "WAIT_S", 0.0)
    with waits.waiting("a step", after_s=60), waits.waiting("an engine") as other:
        end = time.monotonic() + 30
        while not other.said and time.monotonic() < end:
            time.sleep(0.01)
    assert capfd.readouterr().err == "waiting for an engine\n"


def test_a_path_is_said_as_a_shell_takes_it() -> None:
    assert console.quoted(Path("runs/a-1")) == "runs/a-1"
    assert console.quoted(Path("my data/rün 1")) == "'my data/rün 1'"


COLUMNS = ("kind", "name", "what it is", "from")
ROWS = [
    (
        "sink",
        "tensorboard",
        "event files in tensorboard/ of the run directory, and what else there is to be said of it",
        "core 0.1",
    ),
    ("", "csv", "a row a step", "atropos-plugin-engine-hf 0.1.0"),
]


def sent_to_a_terminal(code: str, columns: int) -> str:
    """What a program says to a terminal of that width."""
    import fcntl
    import os
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR", "PYTHONUNBUFFERED")
    }
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
    )
    os.close(theirs)
    sent = b""
    try:
        while more := os.read(ours, 65536):
            sent += more
    except OSError:  # nobody has the other end any more
        pass
    finally:
        os.close(ours)
        assert child.wait(timeout=60) == 0
    return sent.decode()


def on_a_terminal(columns: int) -> list[str]:
    sent = sent_to_a_terminal(f"from atropos_core import console; console.table({COLUMNS!r}, {ROWS!r})", columns)
    return re.sub(r"\x1b\[[\d;]*m", "", sent).splitlines()


def test_a_warning_beside_the_line_that_changes_begins_on_a_line_of_its_own() -> None:
    code = """
from atropos_core.builtin.progress import StepProgress
from atropos_core import console
metrics = {"reward/mean": 0.5, "tokens/s": 10.0, "time/step_s": 1.0}
progress = StepProgress(9)
progress.show(1, metrics)
console.warn("something is odd")
progress.show(2, metrics)
progress.show(3, metrics)
progress.close()
console.say("done")
"""
    sent = re.sub(r"\x1b\[[\d;]*m", "", sent_to_a_terminal(code, 80))
    lines = [line.rpartition("\r\x1b[2K")[2] for line in sent.replace("\r\n", "\n").rstrip().split("\n")]
    assert ["step 1/9" in lines[0], lines[1], "step 3/9" in lines[2], lines[3]] == [
        True, "warning something is odd", True, "done",
    ]  # fmt: skip
    assert len(lines) == 4


def test_a_table_on_a_terminal_is_broken_between_words() -> None:
    lines = on_a_terminal(80)
    assert max(map(len, lines)) <= 80 and len(lines) > 4
    words = " ".join(lines).split()
    assert {word for row in ROWS for cell in row for word in cell.split()} <= set(words), "no word is in two parts"


def test_names_are_whole_where_a_word_of_the_text_is_longer_than_its_column() -> None:
    rows = [("environment", "learning_progress", "x" * 40 + " and more", "atropos-plugin-launcher-kubernetes 0.1.0")]
    text = sent_to_a_terminal(f"from atropos_core import console; console.table({COLUMNS!r}, {rows!r})", 80)
    assert {"environment", "learning_progress", "atropos-plugin-launcher-kubernetes", "0.1.0"} <= set(text.split())
    assert max(map(len, text.splitlines()[2:])) <= 80 and text.count("x") == 40


def test_a_table_that_fits_no_terminal_still_loses_nothing() -> None:
    lines = on_a_terminal(30)
    assert max(map(len, lines)) <= 30
    assert sum(line.count("b") for line in lines) == sum(cell.count("b") for row in ROWS for cell in row)


@pytest.mark.parametrize("columns", ["20", "80", "400"])
def test_a_table_that_goes_elsewhere_is_whole(columns: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    console.table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(ROWS)
    for row, line in zip(ROWS, lines[2:], strict=True):
        assert all(cell in line for cell in row)
    assert len({line.index(name) for line, name in zip(lines[2:], ("tensorboard", "csv"), strict=True)}) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize(
    "how", ["say(odd)", "warn(odd)", "facts([('a', odd)])", "table(('a',), [(odd,)])", "document({'a': odd})"]
)
def test_characters_that_cannot_be_written_are_escaped_and_end_nothing(encoding: str, how: str) -> None:
    code = f"from atropos_core import console; odd = 'half \\ud800 \u2192'; console.{how}; console.say('later')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert ran.returncode == 0, ran.stderr.decode()
    said = (ran.stdout + ran.stderr).decode(encoding)
    assert "half \\ud800" in said and "later" in said


def test_a_traceback_stands_below_what_to_do(capsys: pytest.CaptureFixture[str]):
    error = errors.NoProgress("all failed: KeyError: 'x'", remedy="Fix it.")
    error.add_note("Traceback (most recent call last):\n  ...")
    console.fail(error)
    assert capsys.readouterr().err.splitlines() == [
        "NoProgress all failed: KeyError: 'x'", "What to do: Fix it.", "Traceback (most recent call last):", "  ..."
    ]  # fmt: skip
