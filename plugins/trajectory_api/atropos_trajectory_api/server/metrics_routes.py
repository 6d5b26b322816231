"""/health, /ready and /metrics, and the middleware that times every request.

`/health` answers as long as the process can answer at all, and needs no token. `/ready` says if a client should send here now, and
if not, why. `/metrics` is for Prometheus.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_core.hub.records import HubStatus
from atropos_core.observe.latency import QUANTILES, Latency
from atropos_http_server.body_limits import resident_bytes
from atropos_http_server.connection import SCOPE_KEY, Connection
from atropos_trajectory_api.server.prometheus_format import CONTENT_TYPE, Exposition
from atropos_trajectory_api.service.counters import OTHER, STALENESS_BOUNDS, Counters

ABORTED = 499  # the client went away before the answer was whole


class _Hub(Protocol):
    def status(self) -> HubStatus: ...


class Watched(Protocol):
    """The parts of a Service that are read here."""

    @property
    def hub(self) -> _Hub: ...
    @property
    def counters(self) -> Counters: ...


def metrics_routes(service: Watched, unready: Callable[[], str | None] = lambda: None) -> APIRouter:
    """`unready` gives the reason why clients should not send here now (draining, journal on a full disk), or None."""
    router = APIRouter(tags=["observability"])

    @router.get("/health", summary="Does the process answer?")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready", summary="Should a client send here now?", responses={503: {"description": "No: why"}})
    async def ready() -> JSONResponse:
        why = unready()
        return JSONResponse({"status": "unready" if why else "ready", "why": why}, 503 if why else 200)

    @router.get("/metrics", summary="For Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(render_prometheus(service), media_type=CONTENT_TYPE)

    return router


class Timing:
    """Outermost ASGI middleware: times each request, from its head to the last byte of the answer.

    The route is what the application put into `scope["atropos.route"]`, or the pattern that matched; an unknown path is "other".
    The worker is what a handler put into `scope["atropos.worker"]`.
    """

    def __init__(self, app: ASGIApp, counters: Counters) -> None:
        self.app, self.counters = app, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, bytes_in, bytes_out, ended = 500, 0, 0, False

        async def counted_receive() -> Message:
            nonlocal bytes_in
            message = await receive()
            if message["type"] == "http.request":
                bytes_in += len(message.get("body", b""))
            return message

        connection: Connection | None = scope.get(SCOPE_KEY)

        async def counted_send(message: Message) -> None:
            nonlocal status, bytes_out, ended
            try:
                await send(message)
            except RuntimeError:  # uvloop's, on a closed connection
                if connection is None or not connection.is_gone:
                    raise
                return  # one of several requests that were sent at once: the client no longer reads answers
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                bytes_out += len(message.get("body", b""))
                ended = not message.get("more_body", False)

        started = time.perf_counter()
        failed = True
        try:
            await self.app(scope, counted_receive, counted_send)
            failed = False
        finally:
            if not ended and not failed:
                status = ABORTED
            self.counters.request(
                _route(scope),
                scope.get("atropos.worker", ""),
                time.perf_counter() - started,
                status,
                bytes_in,
                bytes_out,
            )


def _route(scope: Scope) -> str:
    said = scope.get("atropos.route") or getattr(scope.get("route"), "path", None)
    return str(said) if said else OTHER


def render_prometheus(service: Watched) -> str:
    """The whole answer to one scrape. Its size is bounded, because the labels are."""
    counters, hub = service.counters, service.hub.status()
    page = Exposition()
    page.gauge("atropos_up_seconds", "Since the server started.", [({}, counters.clock() - counters.started)])
    page.gauge("atropos_resident_bytes", "Resident memory of the server.", [({}, resident_bytes())])
    _hub(page, hub)
    page.counter(
        "atropos_dropped_groups_total",
        "Groups that were taken, or offered, and will not be trained.",
        [({"cause": cause}, count.n) for cause, count in counters.drops.items()],
    )
    page.counter(
        "atropos_refused_connections_total",
        "Connections that were turned away, by cause.",
        [({"cause": cause}, count.n) for cause, count in counters.refusals.items()],
    )
    page.histogram(
        "atropos_staleness_versions",
        "Policy versions between a group's oldest token and the step that leased it.",
        STALENESS_BOUNDS,
        counters.staleness,
        counters.staleness_sum,
    )
    routes = [({"route": name}, route) for name, route in counters.routes.items()]
    page.counter(
        "atropos_requests_total",
        "Answered requests.",
        [({**labels, "status": str(s)}, n) for labels, route in routes for s, n in sorted(route.statuses.items())],
    )
    page.summary(
        "atropos_request_seconds",
        "From the head of a request to the last byte of its answer; waiting for room or data is part of it.",
        [(labels, _quantiles(route.latency), route.latency.sum_s, route.latency.count) for labels, route in routes],
    )
    page.counter("atropos_request_bytes_total", "Bodies as received.", [(x, r.bytes_in) for x, r in routes])
    page.counter("atropos_response_bytes_total", "Bodies as sent.", [(x, r.bytes_out) for x, r in routes])
    for kind, senders in (("worker", counters.workers.items()), ("environment", counters.environments.items())):
        named = [({kind: name}, sender) for name, sender in senders]
        page.counter(f"atropos_{kind}_groups_total", f"Groups taken, by {kind}.", [(x, s.groups) for x, s in named])
        page.counter(
            f"atropos_{kind}_sequences_total", f"Sequences taken, by {kind}.", [(x, s.sequences) for x, s in named]
        )
        page.counter(f"atropos_{kind}_bytes_total", f"Bytes taken, by {kind}.", [(x, s.size_bytes) for x, s in named])
        page.gauge(
            f"atropos_{kind}_sequences_per_second",
            f"Sequences taken per second, of the last half minute, by {kind}.",
            [(x, s.rate.per_second()) for x, s in named],
        )
    page.summary(
        "atropos_worker_request_seconds",
        "As atropos_request_seconds, by the worker that called.",
        [({"worker": n}, _quantiles(s.latency), s.latency.sum_s, s.latency.count) for n, s in counters.workers.items()],
    )
    return page.text()


def _hub(page: Exposition, hub: HubStatus) -> None:
    for name, text, value in (
        ("waiting_groups", "Groups that wait to be leased.", hub.groups),
        ("waiting_sequences", "Sequences that wait to be leased.", hub.sequences),
        ("waiting_bytes", "Bytes that wait to be leased.", hub.size_bytes),
        ("leased_groups", "Groups that the trainer has leased.", hub.leased),
        ("trained_groups", "Groups that were trained and are in no durable checkpoint yet.", hub.trained),
        ("held_bytes", "Bytes that count towards the limit.", hub.held_bytes),
        ("limit_bytes", "The limit.", hub.limits.size_bytes),
        ("held_sequences", "Sequences that count towards the limit.", hub.held_sequences),
        ("puts_waiting", "Groups that wait for room outside the hub.", hub.puts_waiting),
        ("oldest_seconds", "How long the oldest group has waited.", hub.oldest_s or 0.0),
        ("no_batch", "1 while no batch can be formed from what waits; /v1/status says why.", float(bool(hub.why))),
    ):
        page.gauge(f"atropos_hub_{name}", text, [({}, value)])
    page.counter("atropos_hub_committed_groups_total", "Groups in durable checkpoints.", [({}, hub.committed)])


def _quantiles(latency: Latency) -> dict[float, float | None]:
    return {share: latency.quantile(share) for share in QUANTILES}
