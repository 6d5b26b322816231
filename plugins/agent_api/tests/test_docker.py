"""Tests only for docker: a daemon that may be missing, an image, and containers that outlive the process that started them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import ThreadingHTTPServer
from itertools import pairwise

import psutil
import pytest

from atropos_agent_api.sandboxes.docker import DockerSandbox
from atropos_core.errors import FitError
from plugins.agent_api.tests.sandboxes import IMAGE, NETWORK, image, marked, opened, program, run
from plugins.agent_api.tests.test_bubblewrap import POST, Echo

needs_client = pytest.mark.skipif(shutil.which("docker") is None, reason="the command docker is not here")


async def refused(sandbox):
    try:
        with pytest.raises(FitError) as error:
            await sandbox.open()
    finally:
        await sandbox.close()
    return str(error.value)


@needs_client
async def test_a_daemon_that_is_not_there_is_one_error_with_its_own_words(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    said = await refused(DockerSandbox("python:3.12"))
    assert said.startswith("no docker daemon answers: ")
    assert "none.sock" in said
    assert "`docker version` must show a server" in said


async def test_a_client_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (await refused(DockerSandbox("python:3.12"))).startswith("the command docker is not on PATH.")


@needs_client
@pytest.mark.parametrize("network", ["none", "api", "host"])
def test_dockers_own_client_takes_the_command_that_makes_a_container(network, monkeypatch, tmp_path):
    """It looks at the flags before it looks for a daemon."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    sandbox = DockerSandbox("python:3.12")
    wanted = program(tmp_path, ["agent", "--now"], network=network, api_url="http://127.0.0.1:8080/v1")
    command = sandbox.command(wanted)
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
    assert "none.sock" in said and "unknown flag" not in said and "invalid" not in said
    command.insert(2, "--no-such-flag")
    assert "unknown flag" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
    sandbox.folder().rmdir()


def test_a_container_has_the_limits_and_the_network_of_its_program(tmp_path):
    sandbox = DockerSandbox(image="mine", python="/opt/python")
    wanted = program(
        tmp_path,
        ["agent"],
        limits={"memory_bytes": 1 << 30, "processes": 10},
        network="api",
        api_url="http://127.0.0.1:80/v1",
    )
    command = sandbox.command(wanted)
    pairs = dict(pairwise(command))
    assert (pairs["--memory"], pairs["--memory-swap"], pairs["--network"]) == ("1073741824", "1073741824", "none")
    assert (pairs["--entrypoint"], pairs["--cap-drop"], pairs["--pull"]) == ("/opt/python", "ALL", "never")
    assert command[command.index("/opt/python") + 1] == "mine"
    assert json.loads(command[-1]) == {"port": 8080, "processes": None, "most": 10, "argv": ["agent"]}
    assert sandbox.inside("one", "http://127.0.0.1:80/v1", "api").api_url == "http://127.0.0.1:8080/v1"
    assert dict(pairwise(sandbox.command(replace(wanted, network="host"))))["--network"] == "host"
    sandbox.folder().rmdir()


async def test_an_image_that_is_not_there_is_not_pulled(tmp_path):
    async with opened("docker"):
        pass  # or skipped
    assert (await refused(DockerSandbox("no-such-image-here"))).startswith(
        "image 'no-such-image-here' is not on this machine"
    )


async def test_an_image_without_that_python_is_named(tmp_path):
    async with opened("docker"):
        pass
    said = await refused(DockerSandbox(image(), "python9"))
    assert f"image '{IMAGE}' cannot start a program" in said and "python9" in said


async def test_the_api_is_reached_from_a_container_without_a_network(tmp_path):
    async with opened("docker") as sandbox:
        with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            api = f"http://127.0.0.1:{server.server_port}/s/abc/v1"
            url = sandbox.inside("one", api, "api").api_url
            wanted = program(tmp_path, ["python3", "-c", POST, url], network="api", api_url=api)
            ended, printed = await run(sandbox, wanted)
            server.shutdown()
        assert (ended.code, printed) == (0, "reached\n"), wanted.stderr.read_text()


async def test_a_container_whose_supervisor_and_monitor_were_killed_is_removed_by_the_next(tmp_path):
    async with opened("docker"):
        pass
    text = (
        "import asyncio, os, sys; from pathlib import Path; from plugins.agent_api.tests.sandboxes import *\n"
        "async def main():\n"
        "    sandbox = DockerSandbox(image()); await sandbox.open()\n"
        "    await sandbox.start(program(Path(sys.argv[1]), ['sleep', '60'], environment={'MARK': sys.argv[2]}))\n"
        "    print('up', flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    mark = f"left-{os.getpid()}"
    command = [sys.executable, "-c", text, str(tmp_path), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout.readline() == "up\n"
        monitors = [one for one in psutil.Process(supervisor.pid).children() if "one" in one.cmdline()]
        for one in (*monitors, psutil.Process(supervisor.pid)):
            one.kill()
    assert marked(mark), "a container does not end with the process that started it"
    async with opened("docker"):
        assert not marked(mark)


def test_every_sandbox_has_a_least_network():
    assert set(NETWORK) == {"process", "bubblewrap", "docker"}
