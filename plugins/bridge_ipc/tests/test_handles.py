"""Handle files: written whole and private, and believed only with a living owner, this run's nonce and its model."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_bridge_ipc import handles
from atropos_core.errors import WeightsMismatch

NONCE, MODEL = "a" * 32, "b" * 64
CONTENT = {"handle": {"memory": b"\x00\xff", "sizes": [1, b"x"]}, "descriptor": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    handles.write(tmp_path / "engine0.rank0.json", NONCE, MODEL, CONTENT)
    return tmp_path / "engine0.rank0.json"


def ended() -> int:
    """The number of a process that there was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_written_is_read_with_its_bytes_and_its_owner(path: Path) -> None:
    assert handles.read(path, NONCE, MODEL) == {**CONTENT, "pid": os.getpid()}


def test_a_file_is_private_and_replaced_in_one_step(path: Path) -> None:
    before = path.stat().st_ino
    handles.write(path, NONCE, MODEL, {"new": True})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_ino != before
    assert handles.read(path, NONCE, MODEL)["new"] and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: edit(path, owner={"pid": ended(), "started": 5}), r"dead owner of .*there is no process \d+ any more"),
        (lambda path: edit(path, owner={"pid": os.getpid(), "started": 5}), "dead owner of .* is another one now, started at"),
        (lambda path: edit(path, nonce="c" * 32), "foreign nonce in .*another run that is alive .*says cccccccc, this run's is aaaaaaaa"),
        (lambda path: edit(path, nonce="c" * 32, owner={"pid": ended(), "started": 5}), "stale handle file .*written by an earlier run"),
        (lambda path: edit(path, model="d" * 64), "is of another model: it says dddddddd, this run's is bbbbbbbb"),
        (lambda path: path.chmod(0o640), "has mode 0640: others could have"),
        (lambda path: path.write_text('{"format": 1, "own'), "is not one of this version's"),
        (lambda path: path.write_text("[]"), "is not one of this version's"),
        (lambda path: edit(path, format=2), "is not one of this version's"),
        (lambda path: path.unlink(), "there is no handle file .*the process that should have written it did not"),
        (lambda path: path.symlink_to(path.rename(path.with_name("other"))), "cannot be opened: Too many levels"),
    ],
)  # fmt: skip
def test_each_reason_not_to_believe_a_file_is_named(path: Path, change: Callable[[Path], Any], message: str) -> None:
    change(path)
    with pytest.raises(WeightsMismatch, match=message):
        handles.read(path, NONCE, MODEL)


def test_a_descriptor_of_another_process_is_opened_while_that_one_lives(tmp_path: Path) -> None:
    path = tmp_path / "engine0.rank0.json"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None and owner.stdout is not None
    owner.stdout.readline()
    found = handles.read(path, NONCE, MODEL)
    descriptor = handles.open_descriptor(path, NONCE, MODEL, found)
    assert os.pread(descriptor, 5, 0) == b"hello" and not os.get_inheritable(descriptor)
    with pytest.raises(WeightsMismatch, match=r"is not the segment \[1, 2\] that handle file"):
        handles.open_descriptor(path, NONCE, MODEL, {**found, "segment": [1, 2]})
    owner.kill()
    owner.wait()
    assert os.pread(descriptor, 5, 0) == b"hello", "the memory outlives the owner as long as it is open"
    os.close(descriptor)
    with pytest.raises(WeightsMismatch, match="cannot open /proc/.*No such file"):
        handles.open_descriptor(path, NONCE, MODEL, found)


OWNER = f"""
import os, sys
from pathlib import Path
from atropos_bridge_ipc import handles
descriptor = os.memfd_create("test")
os.write(descriptor, b"hello")
state = os.fstat(descriptor)
content = {{"descriptor": descriptor, "segment": [state.st_dev, state.st_ino]}}
handles.write(Path(sys.argv[1]), {NONCE!r}, {MODEL!r}, content)
print(flush=True)
sys.stdin.read()
"""


def test_a_sweep_removes_what_dead_owners_left_and_nothing_else(path: Path) -> None:
    kept = [path, path.with_name("notes.json"), path.with_name(f"x.json.{os.getpid()}.tmp")]
    kept[1].write_text("{}")
    kept[2].touch()
    left = path.with_name("engine1.rank0.json")
    handles.write(left, NONCE, MODEL, {})
    gone = ended()
    edit(left, owner={"pid": gone, "started": 5})
    half = path.with_name(f"engine1.rank0.json.{gone}.tmp")
    half.touch()
    assert handles.sweep(path.parent) == [left, half]
    assert sorted(path.parent.iterdir()) == sorted(kept)


def test_a_process_that_was_not_waited_for_counts_as_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert handles.started(process.pid) is None
    process.wait()
    assert handles.started(os.getpid()) is not None


def test_the_hash_of_a_model_tells_config_and_shapes(tiny: Path, make_model: Any, tmp_path: Path) -> None:
    same = make_model(tmp_path / "same")
    assert handles.model_hash(tiny) == handles.model_hash(same)
    other = make_model(tmp_path / "other", num_hidden_layers=3)
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert len({handles.model_hash(directory) for directory in (tiny, other, same)}) == 3
