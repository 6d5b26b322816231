import os
import threading
from pathlib import Path

import pytest

from atropos_core.storage.atomic import appearing, append_lines, cut_back, write_whole
from tests.unit.disk import watch_disk


def test_whoever_reads_meanwhile_finds_one_text_or_the_other(tmp_path):
    path, texts = tmp_path / "figures.json", ("a" * 3_000_000, "b" * 3_000_000)
    write_whole(path, texts[0])
    ended = threading.Event()

    def read():
        while not ended.is_set():
            found.add(path.read_text() in texts)

    found: set[bool] = set()
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(100):
            write_whole(path, texts[i % 2])
    finally:
        ended.set()
        reader.join()
    assert found == {True}


def test_a_text_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path):
    path = tmp_path / "holder"
    write_whole(path, "first", mode=0o600)
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["holder"]
    assert path.stat().st_mode & 0o777 == 0o600


def fill(directory: Path) -> None:
    (directory / "weights").write_text("w" * 1000)
    (directory / "sub").mkdir()
    (directory / "sub" / "part").write_text("p" * 10)


def test_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = watch_disk(monkeypatch)
    with appearing(tmp_path / "made") as partial:
        fill(partial)
    named = calls.index(("rename", tmp_path / "made", 0))
    before = {path.relative_to(partial): size for what, path, size in calls[:named]}
    assert before[Path("weights")] == 1000 and before[Path("sub/part")] == 10
    assert {Path(), Path("sub")} <= before.keys()
    assert [path for _, path, _ in calls[named + 1 :]] == [tmp_path]


def test_what_is_read_at_once_and_thrown_away_waits_for_no_disk(tmp_path, monkeypatch):
    calls = watch_disk(monkeypatch)
    with appearing(tmp_path / "made", durable=False) as partial:
        fill(partial)
    assert calls == [("rename", tmp_path / "made", 0)]


@pytest.mark.parametrize("durable", [True, False])
def test_a_directory_that_could_not_be_filled_leaves_the_one_before_and_nothing_else(tmp_path, durable):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "weights").write_text("before")
    with pytest.raises(RuntimeError, match="no more"), appearing(tmp_path / "made", durable=durable) as partial:
        fill(partial)
        raise RuntimeError("no more")
    assert os.listdir(tmp_path) == ["made"] and (tmp_path / "made" / "weights").read_text() == "before"


@pytest.mark.parametrize("there", ["", "one\n", "one\ntw", "half"])
def test_lines_are_appended_whole_whatever_a_killed_process_left(tmp_path, there):
    path = tmp_path / "health.jsonl"
    path.write_text(there)
    append_lines(path, ["next", "last \ud800"])
    assert path.read_text().splitlines() == [*there.splitlines(), "next", "last \\ud800"]


@pytest.mark.parametrize("size_bytes", [0, 3, 4, 5, 200_003, 200_004, 10**9])
def test_a_file_of_lines_is_cut_back_to_the_last_whole_line(tmp_path, size_bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_text("one\n" + "x" * 199_999 + "\nhalf")
    with path.open("a+b") as file:
        cut_back(file, size_bytes)
        file.write(b"next\n")
    kept = 0 if size_bytes < 4 else 1 if size_bytes < 200_004 else 2
    assert path.read_text().splitlines() == [*["one", "x" * 199999][:kept], "next"]
