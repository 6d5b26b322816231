"""What namespaces hold: which files a program sees, what it reaches, and whom it can signal. Beside it the same of `process`,
where docs/agent-sandboxes.md says that it does not hold that."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from atropos_agent_api.config import AgentOptions
from atropos_agent_api.environment.program import Files, program_of, shown_to, values_of
from atropos_agent_api.sandboxes import bubblewrap, private_files
from atropos_agent_api.sandboxes.bubblewrap import BubblewrapSandbox
from atropos_agent_api.sandboxes.installations import needed_by
from atropos_agent_api.sandboxes.local import LocalSandbox
from atropos_agent_api.sandboxes.private_files import private_in
from atropos_core.errors import ConfigError, FitError, SandboxError
from atropos_core.types import Task
from plugins.agent_api.tests.sandboxes import opened, program, run


@pytest.fixture
async def sandbox():
    async with opened("bubblewrap") as made:
        yield made


async def of_python(sandbox, folder, text, **more):
    return await run(sandbox, program(folder, [sys.executable, "-S", "-c", text], **more))


def of_paths(folder, text, paths, **more):
    """A program that gets paths in a variable, since files among its arguments would be shown to it."""
    return program(folder, [sys.executable, "-S", "-c", text], environment={"PATHS": ":".join(paths)}, **more)


class Echo(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments): ...


@pytest.fixture
def api():
    """A server of this machine, and another one that no program may reach."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/s/abc/v1"
        server.shutdown()


POST = """
import sys, urllib.request
for size in (10, 5_000_000):
    body = bytes(range(256)) * (size // 256 + 1)
    assert urllib.request.urlopen(sys.argv[1], body, timeout=20).read() == body, size
print("reached")
"""


@pytest.mark.parametrize(("name", "network"), [("bubblewrap", "api"), ("bubblewrap", "host"), ("process", "host")])
async def test_the_api_is_reached_under_the_url_that_the_sandbox_says(name, network, api, tmp_path):
    async with opened(name) as sandbox:
        url = sandbox.inside("one", api, network).api_url
        wanted = program(tmp_path, [sys.executable, "-c", POST, url], network=network, api_url=api)
        ended, printed = await run(sandbox, wanted)
        assert (ended.code, printed) == (0, "reached\n"), wanted.stderr.read_text()


CONNECT = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)
    print("reached")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("name", "network", "found"),
    [
        ("bubblewrap", "none", "ConnectionRefusedError"),
        ("bubblewrap", "api", "ConnectionRefusedError"),
        ("bubblewrap", "host", "reached"),
        ("process", "host", "reached"),
    ],
)
async def test_another_server_of_this_machine_is_reached_with_the_hosts_network_alone(
    name, network, found, api, tmp_path
):
    async with opened(name) as sandbox:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = str(other.getsockname()[1])
            wanted = program(tmp_path, [sys.executable, "-S", "-c", CONNECT, port], network=network, api_url=api)
            assert (await run(sandbox, wanted))[1] == f"{found}\n"


INTERFACES = "import socket; print([name for _, name in socket.if_nameindex()])"


@pytest.mark.parametrize("network", ["none", "api"])
async def test_inside_is_no_network_but_the_loopback(network, sandbox, api, tmp_path):
    _, printed = await of_python(sandbox, tmp_path, INTERFACES, network=network, api_url=api)
    assert printed == "['lo']\n"


async def test_many_connections_of_many_programs_are_carried_at_once(sandbox, api, tmp_path):
    text = """
import sys, threading, urllib.request
failed = []
def call(number):
    body = f"{sys.argv[2]} {number} ".encode() * 1000
    if urllib.request.urlopen(sys.argv[1], body, timeout=30).read() != body:
        failed.append(number)
threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
[one.start() for one in threads], [one.join() for one in threads]
print(failed)
"""
    url = sandbox.inside("p", api, "api").api_url
    wanted = [
        program(tmp_path, [sys.executable, "-c", text, url, str(at)], name=f"p{at}", network="api", api_url=api)
        for at in range(4)
    ]
    assert [printed for _, printed in await asyncio.gather(*(run(sandbox, one) for one in wanted))] == ["[]\n"] * 4


READ_ALL = """
import os
for path in os.environ["PATHS"].split(":"):
    try:
        print(os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError as error:
        print(type(error).__name__)
"""


async def test_another_episodes_directory_is_not_there(sandbox, tmp_path):
    other = await sandbox.start(program(tmp_path, ["sh", "-c", "echo secret > answer; sleep 60"], name="other"))
    folder = str(sandbox.folder())
    paths = [folder, f"{folder}/other/work/answer", "/tmp", "/agent/work"]
    _, printed = await run(sandbox, of_paths(tmp_path, READ_ALL, paths))
    assert printed.split() == ["FileNotFoundError", "FileNotFoundError", "[]", "[]"]
    await other.close()


async def test_a_process_can_read_another_episodes_directory(tmp_path):
    """As the table says: here is what bubblewrap is for."""
    async with opened("process") as sandbox:
        other = await sandbox.start(
            program(tmp_path, ["sh", "-c", "echo secret > answer; sleep 60"], name="other", network="host")
        )
        answer = sandbox.folder() / "other" / "work" / "answer"
        while not (answer.exists() and answer.read_text()):
            await asyncio.sleep(0.01)
        _, printed = await run(sandbox, of_paths(tmp_path, READ_ALL, [str(answer)], network="host"))
        assert printed == "secret\n\n"
        await other.close()


async def test_neither_the_users_home_nor_this_directory_nor_sockets_of_services_are_there(sandbox, tmp_path):
    (tmp_path / "tasks.jsonl").write_text("answers")
    paths = [
        str(tmp_path),
        str(Path.cwd() / "pyproject.toml"),
        "/run",
        "/var/run",
        "/home",
        str(Path.home() / ".ssh"),
        "/sys",
    ]
    _, printed = await run(sandbox, of_paths(tmp_path, READ_ALL, paths))
    assert set(printed.splitlines()) == {"FileNotFoundError"}


async def test_what_only_its_owner_may_read_of_the_system_is_empty(sandbox, tmp_path):
    assert "/etc/shadow" in private_in("/etc"), "this system has no /etc/shadow: name another file here"
    _, printed = await run(sandbox, of_paths(tmp_path, READ_ALL, ["/etc/shadow"]))
    assert printed in ("\n", "PermissionError\n")


WRITE_ALL = """
import os
for path in os.environ["PATHS"].split(":"):
    try:
        open(os.path.join(path, "written"), "w").write("x")
        print(path)
    except OSError:
        pass
"""


async def test_a_program_writes_in_its_own_directories_alone(sandbox, tmp_path):
    paths = [
        "/",
        "/usr",
        "/etc",
        "/dev",
        "/opt",
        "/agent",
        sys.prefix,
        "/proc",
        "/agent/work",
        "/agent/home",
        "/tmp",
        "/dev/shm",
    ]
    _, printed = await run(sandbox, of_paths(tmp_path, WRITE_ALL, paths))
    assert printed.split() == ["/agent/work", "/agent/home", "/tmp", "/dev/shm"]
    assert not os.path.exists("/tmp/written")
    assert not os.path.exists("/dev/shm/written")


async def test_shared_memory_is_bounded_by_the_kernel(sandbox, tmp_path):
    text = """
file = open("/dev/shm/big", "wb", buffering=0)
try:
    for count in range(400):
        file.write(b"x" * 1_000_000)
except OSError as error:
    print(error.strerror)
"""
    ended, printed = await of_python(sandbox, tmp_path, text)
    assert (ended.code, printed) == (0, "No space left on device\n")


async def test_no_namespace_can_be_made_inside(sandbox, tmp_path):
    """A program could mount memory there that is not counted."""
    text = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.unshare(0x10000000), ctypes.get_errno() != 0)"
    _, printed = await of_python(sandbox, tmp_path, text)
    assert printed == "-1 True\n"


async def test_no_process_outside_is_seen_or_signalled(sandbox, tmp_path):
    text = """
import os, sys
print(sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()) == [1, os.getpid()])
try:
    os.kill(int(sys.argv[1]), 0)
except ProcessLookupError:
    print("unseen")
try:
    os.kill(-1, 9)
except ProcessLookupError:
    print("alone")
"""
    wanted = program(tmp_path, [sys.executable, "-S", "-c", text, str(os.getpid())])
    ended, printed = await run(sandbox, wanted)
    assert (ended.code, printed) == (0, "True\nunseen\nalone\n")


async def test_a_program_has_no_rights_and_is_not_root(sandbox, tmp_path):
    text = "import os; print(os.getuid(), [line for line in open('/proc/self/status') if line.startswith(('CapEff', 'CapBnd'))])"
    _, printed = await of_python(sandbox, tmp_path, text)
    assert printed == "1000 ['CapEff:\\t0000000000000000\\n', 'CapBnd:\\t0000000000000000\\n']\n"


@pytest.mark.parametrize("made", [BubblewrapSandbox, LocalSandbox])
async def test_the_option_visible_shows_a_folder_and_nobody_can_write_there(made, sandbox, tmp_path):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "mine.py").write_text("print('imported')\n")
    text = f"import sys; sys.path.insert(0, {str(modules)!r})\nimport mine\nopen({str(modules / 'x')!r}, 'w')"
    ended, printed = await of_python(sandbox, tmp_path, text)
    assert (ended.code, printed) == (1, "")
    shown = made(visible=(str(modules),))
    await shown.open()
    try:
        ended, printed = await of_python(shown, tmp_path, text)
        assert (ended.code, printed) == (1, "imported\n")
        assert "Read-only file system" in (tmp_path / "one.stderr").read_text()
    finally:
        await shown.close()


PRIVATE = {
    "closed.txt": ("closed", 0o600), "shared.txt": ("shared", 0o640), "open.txt": ("open", 0o644),
    "inner/closed/open.txt": ("closed", 0o644), ".env": ("KEY=secret", 0o644), "inner/.ssh/config": ("secret", 0o644),
    "tls.pem": ("-----BEGIN RSA PRIVATE KEY-----\nsecret", 0o644), "ca.pem": ("-----BEGIN CERTIFICATE-----", 0o644),
}  # fmt: skip


def fill_with_private(folder):
    for name, (text, mode) in PRIVATE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(mode)
    (folder / "inner/closed").chmod(0o700)


@pytest.mark.parametrize("how", ["visible", "installation"])
async def test_what_is_private_in_a_folder_that_is_shown_is_hidden(how, sandbox, tmp_path):
    folder = tmp_path / "tool"
    (folder / "bin").mkdir(parents=True)
    fill_with_private(folder)
    (folder / "bin/run").write_text("#!/bin/sh\nexit 0\n")
    (folder / "bin/run").chmod(0o755)
    shown = [folder] if how == "visible" else needed_by([str(folder / "bin/run")], "")
    paths = [str(folder / name) for name in PRIVATE]
    _, printed = await run(sandbox, of_paths(tmp_path, READ_ALL, paths, shown=shown))
    assert "secret" not in printed
    assert "closed" not in printed and "shared" not in printed
    assert "open" in printed and "CERTIFICATE" in printed


async def test_a_file_that_is_named_is_seen_and_a_folder_closed_by_its_user_shows_all_but_keys(sandbox, tmp_path):
    folder, key = tmp_path / "tool", tmp_path / "tool" / ".env"
    folder.mkdir()
    fill_with_private(folder)
    shown = [folder, folder / "closed.txt"]
    _, printed = await run(sandbox, of_paths(tmp_path, READ_ALL, [str(folder / "closed.txt"), str(key)], shown=shown))
    assert printed in ("closed\n\n", "closed\nPermissionError\n")
    folder.chmod(0o700)
    private_in.cache_clear()
    _, printed = await run(
        sandbox, of_paths(tmp_path, READ_ALL, [str(folder / "shared.txt"), str(key)], shown=[folder])
    )
    assert printed in ("shared\n\n", "shared\nPermissionError\n")


def test_a_folder_with_very_many_private_files_is_not_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(private_files, "MOST", 10)
    for number in range(12):
        (tmp_path / f"{number}").touch(0o600)
    tmp_path.chmod(0o755)
    assert private_in(str(tmp_path)) == (str(tmp_path),)
    assert "do not see" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", [("{task.prompt}",), ("sh", "-c", 'cat "$1"', "sh", "{task.prompt}")])
async def test_only_the_template_of_a_command_decides_what_is_seen(words, sandbox, tmp_path):
    """A task that names a file of this machine opens nothing."""
    secret = tmp_path / "bin" / "secret"
    secret.parent.mkdir()
    secret.write_text("#!/bin/sh\nexit 0\n")
    secret.chmod(0o755)
    options = AgentOptions.model_validate(
        {"command": words, "tasks_from": "gsm8k", "here": str(tmp_path), "env": {"PATH": "{task.prompt}:/usr/bin:/bin"}}
    )
    assert not any(path in secret.parents or path == secret for path in shown_to(options))
    task = Task("1", ({"role": "user", "content": str(secret)},), answer="")
    values = values_of(options, task, sandbox.inside("one", "", "none"), "key", 0)
    wanted = program_of(
        options,
        Files({}),
        task,
        values,
        name="one",
        streams=tmp_path,
        network="none",
        api_url="",
        shown=shown_to(options),
    )
    assert str(secret) in wanted.argv
    try:
        running = await sandbox.start(wanted)
    except SandboxError as error:
        assert "No such file" in str(error)
        return
    assert (await running.wait()).code == 1
    assert "No such file" in wanted.stderr.read_text()
    await running.close()


def test_what_the_options_name_is_shown(tmp_path):
    (tmp_path / "notes.txt").touch()
    command = ["{python}", "{here}/notes.txt", "{here}/{task.id}", "./agent.sh"]
    options = AgentOptions.model_validate({"command": command, "tasks_from": "gsm8k", "here": str(tmp_path)})
    shown = shown_to(options)
    assert tmp_path / "notes.txt" in shown and Path(sys.prefix) in shown
    relative = options.model_copy(update={"command": ("./notes.txt",)})
    assert shown_to(relative) == (), "it is meant in the work directory"


@pytest.mark.parametrize("kept", ["here", "tasks", "reward", "nothing"])
@pytest.mark.parametrize("folder", [".", "bin", "../elsewhere", "link"])
def test_no_folder_with_tasks_or_the_reward_is_shown_for_its_program_alone(kept, folder, tmp_path):
    project = tmp_path / "project"
    agent = project / folder / "agent"
    (tmp_path / "elsewhere").mkdir()
    (project / "bin").mkdir(parents=True)
    (project / "link").symlink_to(".")
    agent.touch()
    agent.chmod(0o755)
    for name in ("tasks.jsonl", "grade.py"):
        (project / name).touch()
    away = tmp_path / "away"
    given = {
        "command": [str(agent)], "held_out": 0.0, "here": str(project if kept == "here" else away),
        "tasks": str((project if kept == "tasks" else away) / "tasks.jsonl"),
        "reward": {"function": f"{project if kept == 'reward' else away}/grade.py:grade"},
    }  # fmt: skip
    shown = shown_to(AgentOptions.model_validate(given))
    at = Path(os.path.normpath(agent))
    if kept == "nothing" or folder == "../elsewhere":
        assert shown == (project if folder == "bin" else at.parent,)
    else:
        assert shown == (at,)


async def test_a_folder_that_is_not_there_cannot_be_made_visible(tmp_path):
    with pytest.raises(FitError, match="sandbox.visible names .*nowhere, which does not exist"):
        await BubblewrapSandbox(visible=(str(tmp_path / "nowhere"),)).open()


async def test_a_network_that_a_process_cannot_be_held_to_is_refused(tmp_path):
    async with opened("process") as sandbox:
        with pytest.raises(ConfigError, match='network = "api" is not possible here: this sandbox gives host'):
            await sandbox.start(program(tmp_path, ["true"], network="api", api_url="http://127.0.0.1:1/v1"))


async def test_where_bubblewrap_cannot_be_had_local_says_so_in_one_line_and_is_process(monkeypatch, tmp_path, capsys):
    """PATH has a bwrap that is refused by the system, as where user namespaces are forbidden."""
    forbidden = tmp_path / "bwrap"
    forbidden.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.11.0 && exit\n'
        "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n"
    )
    forbidden.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = LocalSandbox()
    await sandbox.open()
    try:
        said = " ".join(capsys.readouterr().err.split())
        assert "bubblewrap does not work on this machine" in said
        assert "setting up uid map: Permission denied" in said
        assert "programs may read and write what you may, and reach the network" in said
        assert sandbox.networks == {"host"}
        assert (await run(sandbox, program(tmp_path, ["sh", "-c", "exit 7"], network="host")))[0].code == 7
    finally:
        await sandbox.close()


def test_a_command_is_visible_with_its_installation_and_what_interprets_it(tmp_path):
    node, tool = tmp_path / "node20", tmp_path / "tool"
    for folder in (node / "bin", node / "lib/node_modules/codex/bin", tool / "bin"):
        folder.mkdir(parents=True)
    for path, text in (
        (node / "bin/node", "\x7fELF"), (node / "lib/node_modules/codex/bin/codex.js", "#!/usr/bin/env node\n"),
        (tool / "bin/wrapper", f"#!{node}/bin/node --flag\n"),
    ):  # fmt: skip
        path.write_text(text)
        path.chmod(0o755)
    (node / "bin/codex").symlink_to("../lib/node_modules/codex/bin/codex.js")
    asked = tmp_path / "prompt.txt"
    asked.write_text("x")
    path = f"{node}/bin:/usr/bin"
    assert needed_by(["codex", str(asked), str(tool)], path)[0] == node
    assert set(needed_by(["codex", str(asked), str(tool)], path)) <= {node, node / "lib/node_modules/codex", asked}
    assert asked in needed_by(["codex", str(asked)], path)
    assert set(needed_by([str(tool / "bin/wrapper")], path)) == {tool, node}
    assert needed_by(["no-such-program"], path) == []


async def test_a_program_may_reach_its_limit_before_it_is_said_to_have_started(sandbox, tmp_path, monkeypatch):
    late = tmp_path / "inside.py"
    text = bubblewrap.INSIDE.read_text()
    says = '    say(control, {"event": "not_started"'
    assert says in text
    late.write_text(text.replace(says, f"    import time\n    time.sleep(0.5)\n{says}"))
    monkeypatch.setattr(bubblewrap, "INSIDE", late)
    flood = program(tmp_path, ["sh", "-c", "yes 12345678"], limits={"output_bytes": 100_001})
    ended, printed = await run(sandbox, flood)
    assert ended.limit == "output"
    assert len(printed) == 100_001
