"""The journal: what was appended is there again, whole; what was torn or damaged is named and cut."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_core.errors import DataError, RunDirectoryError, StoreFull
from atropos_trajectory_api.journal.log import Journal, RecordPosition
from tests.unit.disk import watch_disk
from tests.waiting import wait_until

BODIES = [b"", b"one", os.urandom(300), b"\xa7rec" * 20, b"last record"]


def written(directory: Path, bodies: list[bytes] = BODIES) -> list[RecordPosition]:
    journal = Journal(directory, sync="never")
    list(journal.replay())
    if not journal.segments:
        journal.roll()
    places = [journal.append(7, body[:2], body[2:]) for body in bodies]
    journal.close()
    return places


def found(directory: Path) -> list[bytes]:
    journal = Journal(directory, sync="never")
    bodies = [bytes(body) for kind, _, body in journal.replay() if kind == 7]
    journal.close()
    return bodies


def segment(directory: Path) -> Path:
    [path] = directory.glob("*.journal")
    return path


def test_records_are_there_again_in_their_order_and_each_can_be_read_alone(tmp_path):
    places = written(tmp_path)
    assert found(tmp_path) == BODIES
    journal = Journal(tmp_path, sync="never")
    assert [journal.read(place) for place in places] == BODIES
    journal.close()
    journal.close()


def test_a_record_half_written_at_the_end_is_cut_off_wherever_the_process_was_killed(tmp_path, capsys):
    places = written(tmp_path)
    whole = segment(tmp_path).read_bytes()
    last = places[-2].offset + places[-2].length
    for length in range(last + 1, len(whole)):
        segment(tmp_path).write_bytes(whole[:length])
        assert found(tmp_path) == BODIES[:-1]
        assert segment(tmp_path).stat().st_size == last
    assert f"{length - last} bytes at the end were incomplete, and are cut off" in capsys.readouterr().err
    written(tmp_path, [b"new"])
    assert found(tmp_path) == [*BODIES[:-1], b"new"]


def test_zeros_at_the_end_as_a_power_cut_leaves_them_are_cut_off(tmp_path, capsys):
    written(tmp_path)
    with segment(tmp_path).open("ab") as file:
        file.write(bytes(5000))
    assert found(tmp_path) == BODIES
    assert "5000 bytes at the end" in capsys.readouterr().err


@pytest.mark.parametrize("record", range(len(BODIES) - 1))
def test_a_flipped_bit_costs_the_record_that_it_is_in_and_no_other(tmp_path, capsys, record):
    places = written(tmp_path)
    whole = segment(tmp_path).read_bytes()
    start = places[record].offset - 16
    for at in range(start, places[record].offset + places[record].length):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        segment(tmp_path).write_bytes(damaged)
        assert found(tmp_path) == BODIES[:record] + BODIES[record + 1 :]
    size = 16 + len(BODIES[record])
    assert f"{size} bytes from byte {start} on are damaged" in capsys.readouterr().err


@settings(max_examples=200)
@given(at=st.integers(16, 16 + 5 * 16 + sum(map(len, BODIES)) - 1), garbage=st.binary(min_size=1, max_size=200))
def test_garbage_anywhere_never_makes_up_a_record(tmp_path_factory, at, garbage):
    directory = tmp_path_factory.mktemp("journal")
    written(directory)
    whole = segment(directory).read_bytes()
    segment(directory).write_bytes(whole[:at] + garbage + whole[at + len(garbage) :])
    assert all(body in BODIES for body in found(directory))


def test_a_body_that_holds_records_of_another_journal_cannot_pass_for_one_of_this(tmp_path, capsys):
    """Damage at the head of a record makes the reader look for the next one inside its body."""
    other, own = tmp_path / "other", tmp_path / "own"
    written(other, [b"forged"])
    forged = segment(other).read_bytes()[16:]
    [place] = written(own, [forged])
    damaged = bytearray(segment(own).read_bytes())
    damaged[place.offset - 1] ^= 1
    segment(own).write_bytes(damaged)
    assert found(own) == []


def test_a_record_that_was_damaged_since_it_was_written_is_not_given_out(tmp_path):
    places = written(tmp_path)
    journal = Journal(tmp_path, sync="never")
    with segment(tmp_path).open("r+b") as file:
        file.seek(places[2].offset + 5)
        file.write(b"x!")
    with pytest.raises(DataError, match=f"byte {places[2].offset} of segment 1 .* is damaged"):
        journal.read(places[2])
    assert journal.read(places[1]) == BODIES[1]
    journal.close()


def test_a_second_process_gets_the_owner_of_the_directory(tmp_path):
    code = "import sys; from pathlib import Path; from atropos_trajectory_api.journal.log import Journal; Journal(Path(sys.argv[1]))"
    journal = Journal(tmp_path)
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert f"RunDirectoryError: the journal directory {tmp_path} is in use by process {os.getpid()}" in ended.stderr
    journal.close()
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


def test_a_directory_that_cannot_be_made_and_a_file_that_is_no_segment_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be used: Not a directory"):
        Journal(tmp_path / "file" / "journal")
    (tmp_path / "000000000001.journal").write_bytes(b"something else, long enough")
    with pytest.raises(DataError, match="is not a journal segment"):
        Journal(tmp_path)


@contextmanager
def no_file_descriptors() -> Iterator[None]:
    """As in a server whose clients have taken them all."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_without_a_free_file_descriptor_says_once_that_it_cannot_sync_and_syncs_later(tmp_path, capsys):
    journal = Journal(tmp_path, sync="second")
    journal.roll()
    journal.append(7, b"body")
    with no_file_descriptors():
        with pytest.raises(StoreFull, match=r"could not be synced to the disk: Too many open files"):
            journal.sync()
        said, until = "", time.monotonic() + 60
        while "Trying again every second" not in " ".join(said.split()):
            assert time.monotonic() < until
            time.sleep(0.05)
            said += capsys.readouterr().err
        time.sleep(1.5)  # and a second time
        said += capsys.readouterr().err
    wait_until(lambda: not journal._dirty, "the thread that syncs has survived it")
    assert " ".join(said.split()).count("Too many open files. Trying again every second") == 1
    journal.close()
    assert found(tmp_path) == [b"body"]


def test_it_survives_that_as_well_where_it_cannot_even_say_so(tmp_path):
    code = (
        "import resource, sys, time\n"
        "from pathlib import Path\n"
        "from atropos_trajectory_api.journal.log import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "journal.roll()\n"
        "journal.append(7, b'body')\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))\n"
        "time.sleep(2.5)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, before)\n"
        "until = time.monotonic() + 50\n"
        "while journal._dirty and time.monotonic() < until:\n"
        "    time.sleep(0.05)\n"
        "assert not journal._dirty\n"
    )  # nothing was printed before, so the module that writes to the terminal is not loaded yet
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


def test_a_roll_can_be_undone(tmp_path):
    journal = Journal(tmp_path, sync="always")
    journal.roll()
    journal.append(7, b"one")
    size = journal.size_bytes
    journal.roll()
    journal.unroll()
    assert journal.size_bytes == size
    assert segment(tmp_path).stat().st_size == size
    journal.append(7, b"two")
    journal.close()
    assert found(tmp_path) == [b"one", b"two"]


@pytest.mark.parametrize("sync", ["always", "second"])
def test_what_nobody_waits_for_is_synced_soon(tmp_path, sync):
    journal = Journal(tmp_path, sync=sync)
    journal.roll()
    journal.append(1, b"a settlement")
    until = time.monotonic() + 30
    while journal._dirty:
        assert time.monotonic() < until
        time.sleep(0.05)
    journal.close()


@pytest.mark.parametrize("sync", ["always", "second"])
async def test_what_is_written_is_synced(tmp_path, sync):
    journal = Journal(tmp_path, sync=sync)
    journal.roll()
    journal.append(7, b"body")
    await journal.written()
    journal.sync()
    journal.roll()
    journal.drop_first()
    journal.append(7, b"next")
    journal.close()
    assert found(tmp_path) == [b"next"]


async def test_what_is_called_written_is_on_the_disk_with_the_name_of_its_file(tmp_path, monkeypatch):
    calls = watch_disk(monkeypatch)
    journal = Journal(tmp_path, sync="always")
    journal.roll()
    for body in (b"one", b"two"):
        journal.append(7, body)
        await journal.written()
        assert ("sync", segment(tmp_path), segment(tmp_path).stat().st_size) in calls
        assert tmp_path in [path for _, path, _ in calls], "or a power cut takes the file's name"
    journal.close()


async def test_what_is_appended_during_a_sync_waits_for_the_next(tmp_path, monkeypatch):
    calls = watch_disk(monkeypatch)
    journal = Journal(tmp_path, sync="always")
    journal.roll()
    syncing, go_on, real = threading.Event(), threading.Event(), os.fdatasync

    def slow(descriptor: int) -> None:
        real(descriptor)
        syncing.set()
        assert go_on.wait(60)

    monkeypatch.setattr(os, "fdatasync", slow)
    journal.append(7, b"before")
    first = asyncio.create_task(journal.written())
    assert await asyncio.to_thread(syncing.wait, 60)
    journal.append(7, b"meanwhile")
    go_on.set()
    await first
    await journal.written()
    assert ("sync", segment(tmp_path), segment(tmp_path).stat().st_size) in calls
    journal.close()
