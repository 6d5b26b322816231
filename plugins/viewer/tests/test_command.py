"""`atropos view` as a user types it: what it writes, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_core.cli import run_app


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_app(["view", *arguments]) != 0
    return " ".join(capsys.readouterr().err.split())


def test_what_is_no_run_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    said = refused(capsys, "nowhere")
    assert "nowhere does not exist" in said and "`ls -t runs` shows the newest." in said
    Path("empty").mkdir()
    assert "empty is not a run directory: it has no config.toml" in refused(capsys, "empty")
    assert "no run was named, and there is none in" in refused(capsys)
    Path("broken").mkdir()
    Path("broken/config.toml").write_text("[training\n")
    assert "broken/config.toml cannot be read" in refused(capsys, "broken")


def test_a_flag_without_effect_is_refused(toy_run, capsys):
    assert "--port has no effect with --html" in refused(capsys, str(toy_run), "--html", "a.html", "--port", "8000")
    for name, *value in (["--force"], ["--html-mb", "3"]):
        said = refused(capsys, str(toy_run), name, *value)
        assert f"{name} has no effect without --html" in said and "Add --html FILE, or leave it out." in said


def test_a_port_that_is_taken_is_named(toy_run, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refused(capsys, str(toy_run), "--port", str(port))
        assert f"nothing can listen at 127.0.0.1:{port}" in said and "give another port with --port" in said


def test_a_file_is_written_and_where_it_cannot_be_the_error_says_so(toy_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert run_app(["view", str(toy_run), "--html", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert "left out" not in capsys.readouterr().out
    (tmp_path / "a.html").write_text("of somebody")
    said = refused(capsys, str(toy_run), "--html", str(tmp_path / "a.html"))
    assert "a.html exists already." in said and "add --force to write over it" in said
    assert (tmp_path / "a.html").read_text() == "of somebody"
    assert run_app(["view", str(toy_run), "--html", str(tmp_path / "a.html"), "--force"]) == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert "no/such/a.html" in refused(capsys, str(toy_run), "--html", str(tmp_path / "no/such/a.html"))


def test_without_a_run_it_is_the_newest_one(toy_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    for name, age in (("older", 100), ("newer", 0)):
        Path("runs", name).mkdir(parents=True)
        (config := Path("runs", name, "config.toml")).write_text('model = "toy"\n')
        os.utime(config, (config.stat().st_mtime - age,) * 2)
    assert run_app(["view", "--html", "a.html"]) == 0
    assert "the newest run: runs/newer" in capsys.readouterr().out


def test_it_serves_until_ctrl_c_and_ends_with_0(toy_run):
    command = [sys.executable, "-m", "atropos_core", "view", str(toy_run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            text = process.stdout.readline() + process.stdout.readline()
            assert re.search(r"http://127\.0\.0\.1:\d+/#token=[\w-]{32}", text), text
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
