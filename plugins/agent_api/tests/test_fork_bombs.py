"""Programs that start processes as fast as they can are ended at their limit, before there are thousands.

Each program stops after some seconds, and all run below a limit of the kernel, so that a test that fails harms no machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time

import pytest

from atropos_agent_api.sandboxes import cgroups, monitored
from plugins.agent_api.tests.sandboxes import NETWORK, marked, opened, program, run

STOPS_S = 8.0
BOMB = """
import os, time
until = time.time() + STOPS_S
while time.time() < until:
    try:
        FORK
    except OSError:
        pass
"""
FORKS = {
    "forks": "os.fork()",
    "forks that leave their session": "if os.fork() == 0: os.setsid()",
    "forks that leave their parent": "if os.fork() == 0 and os.fork(): os._exit(0)",
    "starts programs": "import subprocess; subprocess.Popen(['sleep', str(STOPS_S)])",
    "forks that end at once": "os.fork() or os._exit(0)",  # zombies, which only count as tasks
}
LIMITS = {"processes": 64, "wall_time_s": 20.0}
has_groups = {"pids", "kill"} <= set(cgroups.parents())


def bomb(kind: str) -> list[str]:
    return [sys.executable, "-S", "-c", BOMB.replace("FORK", FORKS[kind]).replace("STOPS_S", str(STOPS_S))]


@pytest.mark.skipif(not has_groups, reason="without control groups, nothing would stop a test that fails")
@pytest.mark.parametrize("kind", list(FORKS))
@pytest.mark.parametrize("name", ["process", "bubblewrap"])
async def test_two_programs_that_fork_without_end_are_ended_by_their_limit_and_before_they_end_by_themselves(
    name, kind, tmp_path
):
    mark = secrets.token_hex(8)
    async with opened(name) as sandbox:
        wanted = [
            program(tmp_path, bomb(kind), name=one, limits=LIMITS, network=NETWORK[name], environment={"MARK": mark})
            for one in ("one", "two")
        ]
        for ended, _ in await asyncio.gather(*(run(sandbox, one) for one in wanted)):
            assert ended.limit == "processes"
            assert ended.seconds < STOPS_S
    assert not marked(mark)


LOOK_THAT_WAITS = """
import os, sys, time
sys.path.insert(0, {!r})
from atropos_agent_api.sandboxes import monitor
measure = monitor.deleted_files
def waits(processes, most):
    while any(one.state != "Z" for one in monitor.descendants()):
        time.sleep(0.01)
    return measure(processes, most)
monitor.deleted_files = waits
monitor.main()
"""
STARTS_100 = """
import os, time
while not os.path.exists("go"): time.sleep(0.01)
for _ in range(100):
    if os.fork() == 0: break
time.sleep(25)
"""


@pytest.mark.parametrize("with_groups", [True, False])
async def test_a_program_is_ended_while_the_monitor_waits_to_look_at_it(with_groups, tmp_path, monkeypatch):
    """The look here waits until the program has ended, as it waits for a lock that the program's processes hold."""
    monkeypatch.setattr(monitored, "BOOT", LOOK_THAT_WAITS)
    async with opened("process") as sandbox:
        if not with_groups:
            sandbox._group_parents = {}
        running = await sandbox.start(
            program(tmp_path, [sys.executable, "-S", "-c", STARTS_100], limits=LIMITS, network="host")
        )
        await asyncio.sleep(0.5)  # the monitor looks, and waits; if it does not yet, the test shows less, but passes
        (sandbox.directory("one") / "work/go").touch()
        ended = await running.wait()
        await running.close()
    assert ended.limit == "processes"
    assert ended.seconds < 20.0, "only its own end let the look continue"


@pytest.mark.skipif(not has_groups, reason="this process may not make control groups for processes")
def test_a_group_is_ended_without_cgroup_kill_while_it_forks():
    """As where only version 1 is mounted. Its processes may not fork once the end began, so one pass finds them all."""
    path = os.path.join(cgroups.parents()["pids"], f"atropos-test-{secrets.token_hex(8)}")
    group = cgroups.Groups([path])
    group.make(1 << 30, 100)
    text = f"open({path!r} + '/cgroup.procs', 'w').write('0')" + BOMB.replace("FORK", "os.fork()")
    try:
        with subprocess.Popen([sys.executable, "-S", "-c", text.replace("STOPS_S", "30")], start_new_session=True):
            until = time.monotonic() + 20.0
            while group.processes() < 20 and time.monotonic() < until:
                time.sleep(0.01)
            assert group.processes() >= 20
            group.end()
            while group.processes() and time.monotonic() < until:
                time.sleep(0.01)
            assert not group.processes()
    finally:
        group.remove()
    assert not os.path.exists(path)


async def test_programs_that_start_at_once_in_two_sandboxes_print_how_limits_are_enforced_once(tmp_path, capsys):
    monitored.say_once.cache_clear()
    async with opened("process") as one, opened("process") as other:
        wanted = [program(tmp_path, ["true"], name=f"p{number}", network="host") for number in range(8)]
        await asyncio.gather(*(run(box, each) for box, each in zip([one, other] * 4, wanted, strict=True)))
    assert capsys.readouterr().out.count("limits of programs in sandboxes") == 1
