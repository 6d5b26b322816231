"""The memory that a run may have: the machine's, within the limits of control groups and of the shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atropos_core.launch.machine_memory import group_limits, host_memory

GIB = 1 << 30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group(path: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, str(used), ""), strict=True):
        (path / name).write_text(text)
    (path / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def limits(root: Path, own: str) -> list[tuple[int, int]]:
    (root / "own").write_text(own)
    return list(group_limits(root / "groups", root / "own"))


def test_a_process_has_the_limits_of_its_control_group_and_of_those_above_it(tmp_path):
    root = tmp_path / "groups"
    group(root / "job/step", V2, str(8 * GIB), 3 * GIB, GIB)
    group(root / "job", V2, str(16 * GIB), 4 * GIB, 0)
    group(root, V2, "max", 9 * GIB, 0)
    group(root / "other", V2, str(GIB), 0, 0)
    assert limits(tmp_path, "0::/job/step\n") == [(8 * GIB, 2 * GIB), (16 * GIB, 4 * GIB)]


def test_in_a_container_the_root_is_the_containers_own_group(tmp_path):
    group(tmp_path / "groups", V2, str(4 * GIB), GIB, 0)
    assert limits(tmp_path, "0::/docker/unseen\n") == [(4 * GIB, GIB)]


def test_control_groups_of_version_one_are_read_and_their_number_for_no_limit_is_none(tmp_path):
    root = tmp_path / "groups/memory"
    group(root / "job", V1, str(2 * GIB), GIB, GIB // 2)
    group(root, V1, str(9223372036854771712), GIB, 0)
    assert limits(tmp_path, "5:cpu,memory:/job\n0::/\n") == [(2 * GIB, GIB // 2)]
    assert limits(tmp_path, "4:memory:/\n") == []


def test_without_control_groups_there_are_no_limits(tmp_path):
    assert list(group_limits(tmp_path / "none", tmp_path / "nothing")) == []


@pytest.mark.parametrize("flag", ["-v", "-d"])
def test_what_the_shell_limits_is_all_that_there_is(flag):
    code = "from atropos_core.launch.machine_memory import host_memory; print(*host_memory())"
    shell = f"ulimit {flag} {3 * GIB // 1024} && exec {sys.executable} -c '{code}'"
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    total, free = map(int, ended.stdout.split())
    assert total == 3 * GIB and free <= total


def test_this_machine_has_memory_to_give():
    total, free = host_memory()
    assert 0 < free <= total
