"""Tests that every sandbox of this machine passes: a program's directories, streams and limits, and its end."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import stat
import sys
from pathlib import Path

import pytest

from atropos_core.errors import ConfigError, SandboxError
from plugins.agent_api.tests.poisoned import POISONED
from plugins.agent_api.tests.sandboxes import NETWORK, marked, opened, program, python, run

NOT_SEEN_IN_A_CONTAINER = "fills the disk with files without a name"  # docs/agent-sandboxes.md says so


@pytest.fixture(params=list(NETWORK))
async def sandbox(request):
    async with opened(request.param) as made:
        made.network = NETWORK[request.param]
        made.label = request.param
        yield made
        folder = made.folder()
    assert not folder.exists()


async def of_shell(sandbox, folder, text, **more):
    return await run(sandbox, program(folder, ["sh", "-c", text], network=sandbox.network, **more))


async def test_a_program_starts_in_a_work_directory_of_its_own_with_its_files_and_a_home(sandbox, tmp_path):
    text = 'pwd; echo "$HOME"; cat notes/a.txt "$HOME/.agent.json"; cat; echo more >&2; touch "$HOME/x" "$TMPDIR/y" z; exit 3'
    ended, printed = await of_shell(
        sandbox, tmp_path, text, files={"notes/a.txt": b"one\n"}, home_files={".agent.json": b"{}\n"}, stdin=b"read\n"
    )
    inside = sandbox.inside("one", "", sandbox.network)
    assert printed == f"{inside.work}\n{inside.home}\none\n{{}}\nread\n"
    assert (ended.code, ended.signal, ended.limit, ended.stopped, ended.left_running) == (3, None, None, False, 0)
    assert (tmp_path / "one.stderr").read_text() == "more\n"
    assert stat.S_IMODE((tmp_path / "one.stdout").stat().st_mode) == 0o600


async def test_nothing_of_our_own_environment_reaches_a_program(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "ours")
    _, printed = await of_shell(sandbox, tmp_path, "env", environment={"MY": "own"})
    names = set(re.findall(r"^(\w+)=", printed, re.M))
    assert names <= {
        "MY",
        "HOME",
        "TMPDIR",
        "PATH",
        "TZ",
        "LANG",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "HOSTNAME",
        "ATROPOS_SANDBOX",
    }
    assert "MY=own" in printed


async def test_a_signal_that_ends_a_program_is_named(sandbox, tmp_path):
    ended, _ = await of_shell(sandbox, tmp_path, "kill -SEGV $$")
    assert (ended.code, ended.signal) == (None, signal.SIGSEGV)


async def test_what_a_program_left_is_there_until_it_is_closed(sandbox, tmp_path):
    running = await sandbox.start(program(tmp_path, ["sh", "-c", "echo 42 > answer.txt"], network=sandbox.network))
    work = await running.work()
    assert (work / "answer.txt").read_text() == "42\n"
    await running.close()
    assert not work.exists()
    await running.close()


async def test_a_program_finds_a_copy_of_its_inputs_outside_its_work_directory(sandbox, tmp_path):
    made = tmp_path / "made"
    (made / "deep").mkdir(parents=True)
    (made / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (made / "deep" / "run.sh").chmod(0o755)
    (made / "link").symlink_to("/etc/hostname")
    os.mkfifo(made / "pipe")
    _, printed = await of_shell(
        sandbox,
        tmp_path,
        "ls -A; cd ../inputs; readlink link; ls -A . deep; deep/run.sh; echo x > deep/new",
        inputs=made,
    )
    assert printed == "/etc/hostname\n.:\ndeep\nlink\n\ndeep:\nrun.sh\nran\n"
    assert not (made / "deep" / "new").exists()


async def test_a_program_is_stopped_with_all_that_it_started(sandbox, tmp_path):
    mark = secrets.token_hex(8)
    text = f"(trap '' TERM; sleep 60) & setsid sleep 60 & echo up; : {mark}; sleep 60"
    running = await sandbox.start(
        program(tmp_path, ["sh", "-c", text], network=sandbox.network, environment={"MARK": mark})
    )
    while "up" not in (tmp_path / "one.stdout").read_text():
        await asyncio.sleep(0.01)
    assert len(marked(mark)) >= 3
    await running.stop()
    ended = await running.wait()
    assert (ended.code, ended.signal, ended.stopped, ended.limit) == (None, signal.SIGKILL, True, None)
    assert not marked(mark)
    await running.stop()
    await running.close()


@pytest.mark.parametrize("kind", list(POISONED))
async def test_a_poisoned_program_ends_with_its_cause_and_leaves_nothing(sandbox, tmp_path, kind):
    poison, mark = POISONED[kind], secrets.token_hex(8)
    if (sandbox.label, kind) == ("docker", NOT_SEEN_IN_A_CONTAINER):
        pytest.skip("outside a container, only its daemon sees such files")
    wanted = program(
        tmp_path,
        poison.argv(mark, python(sandbox.label)),
        limits=poison.limits,
        network=sandbox.network,
        environment={"MARK": mark},
    )
    async with asyncio.timeout(40):
        ended, _ = await run(sandbox, wanted)
    assert ended.limit == poison.limit
    assert ended.code == poison.code
    assert ended.left_running == poison.left_running or poison.left_running is None
    assert not marked(mark)
    assert not os.listdir(sandbox.folder())
    assert wanted.stdout.stat().st_size <= wanted.limits.output_bytes


async def test_output_ends_exactly_at_its_bound(sandbox, tmp_path):
    ended, printed = await of_shell(sandbox, tmp_path, "yes 12345678", limits={"output_bytes": 100_001})
    assert ended.limit == "output"
    assert printed == ("12345678\n" * 20_000)[:100_001]


async def test_a_directory_of_any_depth_and_closed_to_its_owner_is_removed(sandbox, tmp_path):
    text = (
        "import os\n"
        "for _ in range(1500): os.mkdir('d' * 100); os.chdir('d' * 100)\n"
        "open('last', 'w').close()\n"
        "os.chdir(os.environ['HOME']); os.mkdir('closed'); open('closed/file', 'w').close(); os.chmod('closed', 0)\n"
    )
    ended, _ = await run(sandbox, program(tmp_path, [python(sandbox.label), "-S", "-c", text], network=sandbox.network))
    assert ended.limit == "disk"  # paths that can no longer be named
    assert not os.listdir(sandbox.folder())


async def test_a_program_that_is_not_there_is_an_error_that_names_it(sandbox, tmp_path):
    with pytest.raises(SandboxError, match="no-such-program could not be started: No such file"):
        await run(sandbox, program(tmp_path, ["no-such-program"], network=sandbox.network))
    assert not os.listdir(sandbox.folder())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"files": {"../out": b""}}, "would not be in the program's own directory"),
        ({"home_files": {"/etc/x": b""}}, "would not be in the program's own directory"),
        ({"environment": {"HOME": "/root"}}, "HOME of a program is set by the sandbox itself"),
        ({"name": "../one"}, "cannot be named"),
        ({"argv": []}, "command is empty"),
    ],
)
async def test_what_would_reach_out_of_its_directories_is_refused(sandbox, tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        await sandbox.start(program(tmp_path, **{"argv": ["true"], "network": sandbox.network, **more}))


async def test_two_programs_at_once_with_one_name_are_refused(sandbox, tmp_path):
    running = await sandbox.start(program(tmp_path, ["sleep", "20"], network=sandbox.network))
    with pytest.raises(ConfigError, match="a program named 'one' in this sandbox already"):
        await sandbox.start(program(tmp_path, ["true"], network=sandbox.network))
    await running.close()


async def test_closing_the_sandbox_ends_what_still_runs(sandbox, tmp_path):
    mark = secrets.token_hex(8)
    running = await sandbox.start(
        program(tmp_path, ["sleep", "60"], network=sandbox.network, environment={"MARK": mark})
    )
    assert marked(mark)
    await sandbox.close()
    assert not marked(mark)
    with pytest.raises(SandboxError, match="closed while a program ran"):
        await running.wait()


async def test_after_a_program_that_was_closed_while_it_ran_another_can_start(sandbox, tmp_path):
    running = await sandbox.start(program(tmp_path, ["sleep", "60"], network=sandbox.network))
    await running.close()
    assert (await of_shell(sandbox, tmp_path, "exit 4"))[0].code == 4


async def test_many_programs_at_once_each_have_their_own_end(sandbox, tmp_path):
    wanted = [
        program(
            tmp_path,
            ["sh", "-c", f"echo {number} > mine; cat mine; exit {number}"],
            name=f"p{number}",
            network=sandbox.network,
        )
        for number in range(12)
    ]
    ended = await asyncio.gather(*(run(sandbox, one) for one in wanted))
    assert [(one.code, printed) for one, printed in ended] == [(number, f"{number}\n") for number in range(12)]


def test_the_poisoned_programs_would_do_harm():
    """Each names a limit, or leaves something: a program that a sandbox need not hold shows nothing."""
    assert all(one.limit or one.left_running for one in POISONED.values())
    assert Path(sys.executable).exists()


async def test_a_program_that_is_closed_while_it_runs_leaves_room_for_the_next(tmp_path):
    async with opened("process") as sandbox:
        for name in ("one", "two", "three"):
            running = await sandbox.start(program(tmp_path, ["sleep", "60"], name=name, network="host"))
            await running.close()
        assert (await run(sandbox, program(tmp_path, ["true"], name="last", network="host")))[0].code == 0
