"""What killed processes of a role left in the temporary directory is removed, and nothing that anyone else has."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from atropos_core.storage.tempdirs import owned_directory, owned_prefix, sweep

KILLED = """
import os, sys
from atropos_core.storage.tempdirs import owned_directory
with owned_directory(sys.argv[1]) as left:
    print(left, flush=True)
    os.kill(os.getpid(), 9)
"""
CHILD = """
import sys, tempfile, time
from pathlib import Path
from atropos_core.storage.tempdirs import owned_prefix
made = Path(tempfile.mkdtemp(prefix=owned_prefix("skyrl-env")))
(made / "weights").write_bytes(b"x")
print(made, flush=True)
time.sleep(120)
"""


def test_what_a_killed_process_left_is_removed_once_it_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = Path(tempfile.mkdtemp(prefix=owned_prefix("skyrl-env")))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            theirs = Path(child.stdout.readline().strip())
            assert theirs.parent == tmp_path
            sweep("skyrl-env")
            assert (theirs / "weights").exists(), "its owner lives"
        finally:
            child.kill()
    sweep("engine")
    assert theirs.exists(), "of another role"
    sweep("skyrl-env")
    assert not theirs.exists() and mine.exists()


def test_another_machine_that_shares_the_directory_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here = os.uname()
    with monkeypatch.context() as there:
        there.setattr(os, "uname", lambda: os.uname_result((here.sysname, "another", *here[2:])))
        prefix = owned_prefix("skyrl").rsplit("-", 2)[0]
    theirs = tmp_path / f"{prefix}-1-left"  # of a process that began when none of ours did
    theirs.mkdir()
    sweep("skyrl")
    assert theirs.exists()


def test_what_is_not_known_to_be_ours_and_dead_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, role, namespace, pid, started, _ = owned_prefix("env").split("-")
    others = [
        f"atropos-{role}-old", f"atropos-{role}-{namespace}-x-y-z", f"atropos-{role}-{int(namespace) + 1}-{pid}-1-z",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).mkdir()
    dead = f"atropos-{role}-{namespace}-{pid}-{int(started) + 1}"  # this number was another process's before
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / f"{dead}-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{dead}-file").touch()
    (tmp_path / f"{dead}-left").mkdir()
    sweep("env")
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {*others, "elsewhere", f"{dead}-link", f"{dead}-file"}
    assert (tmp_path / "elsewhere" / "file").exists()


def test_the_directory_of_a_killed_process_is_removed_by_the_next_of_its_role():
    role = f"test-{secrets.token_hex(4)}"
    child = [sys.executable, "-c", KILLED, role]
    left = Path(subprocess.run(child, capture_output=True, text=True, timeout=60).stdout.strip())
    assert left.is_dir()
    with owned_directory(role) as mine:
        assert mine.is_dir() and not left.exists()
    assert not mine.exists()
