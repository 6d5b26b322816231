"""What a sandbox costs: python -m benchmarks.sandboxes [docker IMAGE].

From start to exit of a program that does nothing, and until nothing of it is left; one at a time and eight at once; the
memory that a monitor holds of its own; and what the listener in a network namespace adds to a small request. Writes
benchmarks/results/sandboxes.json. A sandbox that this machine does not permit is left out, aloud.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from atropos_agent_api.sandboxes.bubblewrap import BubblewrapSandbox
from atropos_agent_api.sandboxes.docker import DockerSandbox
from atropos_agent_api.sandboxes.process import ProcessSandbox
from atropos_core import console
from atropos_core.errors import FitError
from atropos_core.sandboxes import Network, Program, Sandbox
from benchmarks.machine import RESULTS, described

STARTS = 20
AT_ONCE = 8
CALLS = 400
CALL = """
import http.client, sys, time
from urllib.parse import urlsplit
parts = urlsplit(sys.argv[1])
times = []
connection = http.client.HTTPConnection(parts.hostname, parts.port)
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    connection.request("POST", "/", b"x" * 2000)
    connection.getresponse().read()
    times.append(time.perf_counter() - began)
print(sorted(times)[len(times) // 2])
"""


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


def program(folder: Path, name: str, argv: list[str], network: Network, api: str = "") -> Program:
    return Program(name, argv, folder / f"{name}.stdout", folder / f"{name}.stderr", network=network, api_url=api)


async def once(sandbox: Sandbox, wanted: Program) -> tuple[float, float]:
    """Seconds until its exit is known, and until nothing is left."""
    began = perf_counter()
    running = await sandbox.start(wanted)
    ended = await running.wait()
    exited = perf_counter() - began
    await running.close()
    assert ended.code == 0, ended
    return exited, perf_counter() - began


async def measured(sandbox: Sandbox, network: Network, python: str, folder: Path) -> dict[str, Any]:
    alone = [await once(sandbox, program(folder, f"one{at}", ["true"], network)) for at in range(STARTS)]
    began = perf_counter()
    await asyncio.gather(*(once(sandbox, program(folder, f"many{at}", ["true"], network)) for at in range(AT_ONCE)))
    together = perf_counter() - began
    running = await sandbox.start(program(folder, "held", ["sleep", "30"], network))
    [monitor] = [one for one in psutil.Process().children() if "held" in one.cmdline()]
    monitor_bytes = monitor.memory_full_info().uss
    await running.close()
    found = {
        "exit_s": [one for one, _ in alone],
        "gone_s": [one for _, one in alone],
        "at_once_s": together,
        "monitor_bytes": monitor_bytes,
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for way in sorted({"api", "host"} & sandbox.networks):
            inner = sandbox.inside("calls", url, way).api_url
            wanted = program(folder, "calls", [python, "-c", CALL, inner, str(CALLS)], way, url)
            await once(sandbox, wanted)
            found[f"call_{way}_s"] = float(wanted.stdout.read_text())
        server.shutdown()
    return found


async def main() -> None:
    about, taken = described(), {}
    ways: dict[str, tuple[Sandbox, Network, str]] = {
        "process": (ProcessSandbox(), "host", sys.executable),
        "bubblewrap": (BubblewrapSandbox(), "none", sys.executable),
    }
    if sys.argv[1:2] == ["docker"]:
        ways["docker"] = (DockerSandbox(sys.argv[2]), "none", "python3")
    with tempfile.TemporaryDirectory() as folder:
        for name, (sandbox, network, python) in ways.items():
            try:
                await sandbox.open()
                taken[name] = await measured(sandbox, network, python, Path(folder))
            except FitError as error:
                console.warn(f"{name} is left out: {error}")
            finally:
                await sandbox.close()
    rows = [
        (
            name,
            *(
                f"{1e3 * value:.0f}"
                for value in (statistics.median(one["exit_s"]), max(one["exit_s"]), statistics.median(one["gone_s"]))
            ),
            f"{1e3 * one['at_once_s']:.0f}",
            f"{one['monitor_bytes'] / 1e6:.1f}",
            " ".join(f"{way} {1e3 * one[f'call_{way}_s']:.2f}" for way in ("host", "api") if f"call_{way}_s" in one),
        )
        for name, one in taken.items()
    ]
    console.table(
        ("sandbox", "exit p50 [ms]", "most", "gone p50", f"{AT_ONCE} at once", "monitor [MB]", "a call [ms]"), rows
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sandboxes.json").write_text(json.dumps({**about, "sandboxes": taken}, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
