"""Processes below a monitor, by /proc and by ps, and trees of files that a program has made hard to measure."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from atropos_agent_api.sandboxes import trees
from atropos_agent_api.sandboxes.descendants import descendants, listed_by_ps
from atropos_agent_api.sandboxes.trees import TooMuch, copy_tree, remove_tree, size_bytes


@pytest.fixture
def shell():
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo up; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        assert started.stdout.readline() == b"up\n"
        yield started
        os.killpg(started.pid, 9)


def test_a_child_and_its_child_are_below_this_process(shell):
    found = {one.pid: one for one in descendants()}
    assert [one.parent for one in found.values()].count(shell.pid) == 1
    assert found[shell.pid].parent == os.getpid()
    assert found[shell.pid].resident_bytes > 100_000


@pytest.mark.skipif(shutil.which("ps") is None, reason="ps is not here")
def test_ps_lists_what_proc_does_and_a_group_as_children_of_this_process(shell):
    listed = {one.pid: one for one in listed_by_ps(None)}
    for one in descendants():
        assert listed[one.pid].parent == one.parent
    assert {one.parent for one in listed_by_ps(shell.pid) if one.pid == shell.pid} == {os.getpid()}
    assert sum(one.parent == os.getpid() for one in listed_by_ps(shell.pid)) >= 2
    assert listed[shell.pid].resident_bytes > 100_000


def test_a_tree_is_measured_by_what_its_disk_gives_and_a_hard_link_once(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**9)
    (tmp_path / "away").symlink_to("/usr")
    assert 100_000 <= size_bytes(str(tmp_path), 10**9) < 120_000
    assert size_bytes(str(tmp_path), 1000) > 1000


def test_names_count_though_nothing_is_in_them(tmp_path):
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert size_bytes(str(tmp_path), 10**9) >= 100 * trees.ENTRY_BYTES


def test_a_copy_has_files_folders_and_links_as_links_within_its_bound(tmp_path):
    made, copy = tmp_path / "made", tmp_path / "copy"
    (made / "deep").mkdir(parents=True)
    copy.mkdir()
    (made / "deep/run").write_text("x")
    (made / "deep/run").chmod(0o4755)
    (made / "secret").symlink_to("/etc/shadow")
    os.mkfifo(made / "pipe")
    copy_tree(str(made), str(copy), 10**6)
    assert sorted(os.listdir(copy)) == ["deep", "secret"]
    assert os.readlink(copy / "secret") == "/etc/shadow"
    assert (copy / "deep/run").stat().st_mode & 0o7777 == 0o755
    with pytest.raises(TooMuch, match="takes more than 10 bytes"):
        copy_tree(str(made), str(copy), 10)


def test_a_tree_is_removed_and_what_its_links_lead_to_is_not(tmp_path):
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    (gone / "a" / "b").mkdir(parents=True)
    kept.mkdir()
    (kept / "file").touch()
    (gone / "a" / "link").symlink_to(kept)
    remove_tree(str(gone))
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(kept) == ["file"]
    remove_tree(str(gone))
