"""The whole server in a thread of the test's own process: real sockets, and options of a test's choosing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from atropos_http_server.connection_limits import Gate
from atropos_http_server.server import HttpServer
from atropos_trajectory_api.http.answers import REFUSALS
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.server.app import App
from atropos_trajectory_api.server.serving import bind
from atropos_trajectory_api.service.service import Service

REGISTER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 100, "checkpoint_dir": "here",
    "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 50,
}  # fmt: skip
ENVIRONMENT = {"max_token_length": 64, "desired_name": "maths", "weight": 1.0, "group_size": 4}


def group(sequences: int = 4, tag: int = 0, length: int = 3, **more: Any) -> dict[str, Any]:
    """As an old client sends it; the prompt is one token."""
    rows = [[1, *(2 + (tag + n + at) % 90 for at in range(length - 1))] for n in range(sequences)]
    return {
        "tokens": rows,
        "masks": [[-100, *row[1:]] for row in rows],
        "scores": [float(n) for n in range(sequences)],
        "generation_params": {"tag": tag},
        **more,
    }


def tags(batch: dict[str, Any]) -> list[int]:
    return [one["generation_params"]["tag"] for one in batch["batch"] or []]


class Running:
    """`client` speaks to it; `service` and `app` live on its own loop."""

    def __init__(self, options: ServeOptions, **more: Any) -> None:
        self.options, self._more = options, more
        self._socket = bind("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=30)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = Service.open(self.options)
        self.app = App(self.service, self.options, **self._more)
        gate = Gate(
            self.options.request_s,
            self.options.connections,
            check_users=self._more.get("token") is None,
            refused=self.service.counters.refused,
            refusals=REFUSALS,
        )
        self._server = HttpServer(self.app, gate, lifespan=True, stop=self.app.stop, grace_s=5, keep_alive_s=5)
        self._ready.set()
        await self._server.serve(sockets=[self._socket])
        await self.service.close()

    def settle(self) -> None:
        """Give its loop some turns: a call is counted once its answer has left."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), self.loop).result(60)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Its loop does nothing meanwhile, and then finds what has come."""
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait(60)

        self.loop.call_soon_threadsafe(stand)
        assert stands.wait(60)
        try:
            yield
        finally:
            goes_on.set()

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())

    def begin(self, *, batch_size: int = 4) -> None:
        """A trainer registers and asks once, then an environment of groups of 4."""
        self.post("/register", {**REGISTER, "batch_size": batch_size})
        assert self.client.get("/batch").json() == {"batch": None}
        assert self.post("/register-env", ENVIRONMENT).json()["status"] == "success"


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Running]:
    more = {name: options.pop(name) for name in ("token", "vocabulary", "killed_at") if name in options}
    server = Running(ServeOptions(directory=folder, same_host=False, **options), **more)
    try:
        yield server
    finally:
        server.close()
