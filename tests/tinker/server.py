"""A real `atropos tinker` process, and scripts of the official client, which run in a separate environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.served import free_port
from tests.waiting import wait_until

CLIENT = os.path.abspath(os.environ["TINKER_PYTHON"]) if os.environ.get("TINKER_PYTHON") else ""
SCRIPTS = Path(__file__).parent / "scripts"
START_S = 120
SCRIPT_S = 400


@dataclass
class TinkerServer:
    """`kill` and `start` may be called again and again: the directory and the port stay."""

    directory: Path
    model: str
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    key: str = "tml-x"
    start_s: float = START_S
    before: tuple[str, ...] = ()  # a command that runs the one after it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        command = [
            *self.before, sys.executable, "-m", "atropos_core", "tinker", "--model", self.model, "--dir", str(self.directory / "server"),
            "--port", str(self.port), *self.arguments,
        ]  # fmt: skip
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        if wait:
            wait_until(self.is_open, f"the server answers; it said:\n{self.said()}", self.start_s)

    def is_open(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        return self.call("GET", "healthz")[0] == 200

    def call(
        self, method: str, path: str, body: bytes | Mapping[str, Any] | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Return status and answer; status 0 if nothing listens."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}", data, {"x-api-key": self.key, **headers}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, content, kind = answer.status, answer.read(), answer.headers["content-type"]
        except urllib.error.HTTPError as error:
            status, content, kind = error.code, error.read(), error.headers["content-type"]
        except (urllib.error.URLError, ConnectionError):
            return 0, None
        return status, json.loads(content) if "json" in kind else content

    def kill(self) -> None:
        """kill -9 the server; its children end with it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)

    def said(self) -> str:
        log = self.directory / "server.log"
        return log.read_text()[-3000:] if log.exists() else ""

    def adapter(self, path: str) -> Path:
        """Return the directory of the checkpoint at a tinker:// path."""
        model, folder, name = path.removeprefix("tinker://").split("/")
        return self.directory / "server/models" / model.replace(":", "-") / folder / name

    # -- clients

    def begin(self, script: str, *arguments: object, out: Path, client: str = CLIENT) -> subprocess.Popen[bytes]:
        """Start a script of the client, which writes what it found to `out` as JSON."""
        environment = {
            "TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore", "TINKER_TELEMETRY": "1",
        }  # fmt: skip
        command = [client, str(SCRIPTS / script), str(out), *map(str, arguments)]
        with out.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})

    def run(self, script: str, *arguments: object, out: Path, client: str = CLIENT, hint: str = "") -> Any:
        """Run a script to its end, and return what it wrote."""
        return ended(self.begin(script, *arguments, out=out, client=client), out, hint)


def ended(process: subprocess.Popen[bytes], out: Path, hint: str = "") -> Any:
    try:
        code = process.wait(SCRIPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the script did not end:\n{out.with_suffix('.log').read_text()[-4000:]}") from None
    assert code == 0, "\n".join([hint, out.with_suffix(".log").read_text()[-4000:]])
    return json.loads(out.read_text())


@contextmanager
def tinker_server(
    directory: Path, model: str, *arguments: str, key: str = "tml-x", start_s: float = START_S
) -> Iterator[TinkerServer]:
    server = TinkerServer(directory, model, arguments, key=key, start_s=start_s)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.stop()
            time.sleep(0.1)
