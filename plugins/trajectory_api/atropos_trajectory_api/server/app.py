"""The ASGI application: timing, access and limits around atroposlib's routes, `/v1`, and the observability routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import Receive, Scope, Send

from atropos_core import __version__, console
from atropos_core.errors import AtroposError
from atropos_http_server.answers import AnswerAtOnce, WholeAnswer, send_whole, whole_answer
from atropos_http_server.body_limits import Limits
from atropos_trajectory_api.http.access import Access
from atropos_trajectory_api.http.answers import JSON, REFUSALS, body_cost
from atropos_trajectory_api.legacy.openapi import old_paths
from atropos_trajectory_api.legacy.routes import LegacyRoutes
from atropos_trajectory_api.legacy_groups.wire_json import dumps
from atropos_trajectory_api.native.openapi import native_paths
from atropos_trajectory_api.native.routes import native_routes
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.server.metrics_routes import Timing, metrics_routes
from atropos_trajectory_api.service.service import Service


class App:
    """The whole application. `stop` is called before the server waits for calls to end; `service` stays its owner's to close."""

    def __init__(
        self,
        service: Service,
        options: ServeOptions,
        *,
        token: bytes | None = None,
        vocabulary: int = 0,
        killed_at: float | None = None,
    ) -> None:
        self._service = service
        self.legacy = LegacyRoutes(service, options, vocabulary, killed_at)
        self._stopping: str | None = None
        web = FastAPI(title="Atropos trajectory API", version=__version__, lifespan=self._living)
        web.include_router(metrics_routes(service, lambda: self._stopping or service.unready))
        web.openapi = lambda: _document(web)  # type: ignore[method-assign]
        self._page: bytes | None = None  # /openapi.json, made once, since any client may ask a thousand times
        self._web, self._native = web, native_routes(service)
        limits = Limits(
            self._routed,
            body_bytes=int(options.body_mb * 1e6),
            in_flight_bytes=int(options.in_flight_mb * 1e6),
            request_s=options.request_s,
            hold_s=options.hold_s,
            cost=body_cost,
            refusals=REFUSALS,
        )
        self._limits = limits
        self.budget = limits.budget  # for all incoming groups, over HTTP or rings
        self._access = Access(limits, token=token, cors=options.cors)
        self._app = Timing(self._access, service.counters)
        self.at_once: Mapping[tuple[bytes, bytes], AnswerAtOnce] = {(b"POST", b"/scored_data"): self._store_at_once}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def _store_at_once(self, scope: Scope, body: bytes) -> WholeAnswer | None:
        """The same result as through all layers, for a group that no layer would treat specially."""
        started = time.perf_counter()
        if not self._access.lets_through(scope) or (plain := self._limits.short(scope, body)) is None:
            return None
        if (reply := self.legacy.intake.at_once(scope, plain)) is None:
            return None
        given = whole_answer(200, dumps(reply), JSON)
        self._service.counters.request(
            scope["path"], scope["atropos.worker"], time.perf_counter() - started, 200, len(body), len(given.body)
        )
        return given

    def stop(self) -> None:
        """Take nothing more: waiting requests get 503 now."""
        self._stopping = "the server is ending"
        self._limits.stop()
        self.legacy.intake.stopping.set()
        self._service.stop()

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self.legacy.routes:
            await self.legacy(scope, receive, send)
        elif scope["type"] == "http" and (scope["path"] == "/v1" or scope["path"].startswith("/v1/")):
            await self._native(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/openapi.json" and scope["method"] == "GET":
            scope["atropos.route"] = scope["path"]
            if self._page is None:
                self._page = json.dumps(_document(self._web)).encode()
            await send_whole(send, 200, self._page, [(b"content-type", b"application/json")])
        else:
            await self._web(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _living(self, web: FastAPI) -> AsyncIterator[None]:
        await self.legacy.intake.queue_wholes()
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            await self.legacy.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            try:
                await self._service.tick()
                await self.legacy.tick()
                self._limits.release_memory()
            except AtroposError as error:
                console.warn(str(error))  # for example a full disk, which may be over in a second
            except Exception:  # noqa: BLE001 - our own error: leases and silent workers must run out in any case
                console.warn(f"the server's own upkeep failed:\n{traceback.format_exc()}")


def create_app(service: Service, options: ServeOptions, **more: Any) -> App:
    return App(service, options, **more)


def _document(web: FastAPI) -> dict[str, Any]:
    if not web.openapi_schema:
        made = get_openapi(title=web.title, version=web.version, routes=web.routes)
        paths, schemas = old_paths()
        made["paths"] = {**paths, **native_paths(), **made.get("paths", {})}
        made.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        web.openapi_schema = made
    return web.openapi_schema
