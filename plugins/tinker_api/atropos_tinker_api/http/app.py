"""The ASGI application: it finds the endpoint of a request, and gives every error the protocol's form."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from atropos_core.errors import AtroposError, DataError, HubClosed, HubFull, RunDirectoryError, StoreFull
from atropos_http_server.answers import Headers, send_whole
from atropos_tinker_api.http.access import check_access
from atropos_tinker_api.http.call import JSON, Answer, Call
from atropos_tinker_api.http.list_routes import ListRoutes
from atropos_tinker_api.http.sampling_routes import SamplingRoutes
from atropos_tinker_api.http.session_routes import SessionRoutes
from atropos_tinker_api.http.training_routes import TrainingRoutes
from atropos_tinker_api.refused import Refused, error_body, said
from atropos_tinker_api.service import Service

API = "/api/v1/"
Handler = Callable[[Call], Awaitable[Answer]]
NOT_HERE = {  # addresses of the hosted service that this server does not have
    "create_custom_loss": "custom losses that run on the server",
    "retrieve_futures": "polling for several results at once",
    "join_sampling_session": "joining a sampling session",
    "copy_weights": "copying checkpoints between projects",
    "auth/token": "tokens of a login",
    "sessions/search": "searching sessions",
}


class TinkerApp:
    """`key`: what callers must send; None: any key, from this machine only."""

    def __init__(self, service: Service, key: bytes | None) -> None:
        self._key = key
        sessions, lists = SessionRoutes(service), ListRoutes(service)
        training, self._sampling = TrainingRoutes(service), SamplingRoutes(service)
        checkpoint = "training_runs/{}/checkpoints/{}/{}"
        self._routes = _compiled(
            {
                "POST client/config": sessions.config,
                "POST client/dynamic_config": sessions.dynamic_config,
                "GET healthz": sessions.health,
                "POST telemetry": sessions.telemetry,
                "GET get_server_capabilities": sessions.capabilities,
                "POST create_session": sessions.create,
                "POST session_heartbeat": sessions.heartbeat,
                "POST sessions/{}/finish": sessions.finish,
                "GET sessions/{}": sessions.show,
                "GET sessions": sessions.list,
                "POST create_model": training.create_model,
                "POST get_info": training.info,
                "POST load_weights": training.load_weights,
                "POST forward_backward": training.forward_backward,
                "POST optim_step": training.optim_step,
                "POST save_weights": training.save_weights,
                "POST save_weights_for_sampler": training.save_for_sampler,
                "POST save_weights_external": training.save_external,
                "POST create_sampling_session": self._sampling.create,
                "GET samplers/{}": self._sampling.show,
                "POST asample": self._sampling.sample,
                "POST retrieve_future": self._sampling.retrieve,
                "POST cancel_future": self._sampling.cancel,
                "GET training_runs": lists.runs,
                "GET training_runs/{}": lists.run,
                "GET training_runs/{}/checkpoints": lists.checkpoints_of,
                "GET checkpoints": lists.checkpoints,
                "POST weights_info": lists.weights_info,
                f"DELETE {checkpoint}": lists.delete,
                f"PUT {checkpoint}/ttl": lists.expire,
                f"POST {checkpoint}/publish": lists.publish,
                f"DELETE {checkpoint}/publish": lists.publish,
                f"GET {checkpoint}/external_weights_urls": lists.external_urls,
            }
        )

    def stop(self) -> None:
        self._sampling.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        found = await self._answer(scope, receive)
        more: Headers = [(b"retry-after", b"1")] if found.status in (429, 503) else []
        await send_whole(send, found.status, found.body, [(b"content-type", found.content_type), *more])

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        try:
            check_access(scope, self._key)
            handler, parts = self._find(scope["method"], scope["path"])
            body = (await receive()).get("body", b"")
            return await handler(Call(scope, body, parts))
        except Refused as error:
            return Answer(error.status, JSON, error_body(str(error), error.category))
        except AtroposError as error:
            status = status_of(error)
            return Answer(status, JSON, error_body(said(error), "user" if status < 429 else "server"))

    def _find(self, method: str, path: str) -> tuple[Handler, tuple[str, ...]]:
        """Raises Refused."""
        if not path.startswith(API):
            raise Refused(
                f"{path[:100]!r} is not an address of the Tinker protocol, which begin with {API}.", status=404
            )
        asked, allowed = path[len(API) :], []
        for verb, pattern, handler in self._routes:
            if (matched := pattern.fullmatch(asked)) is not None:
                if verb == method:
                    return handler, matched.groups()
                allowed.append(verb)
        if allowed:
            raise Refused(f"use {' or '.join(allowed)} here.", status=405)
        what = NOT_HERE.get(asked, f"what the address {path[:100]!r} names")
        raise Refused(f"{what} is not offered by `atropos tinker`.", status=404)


def status_of(error: AtroposError) -> int:
    """Return the HTTP status for an error. The official client sends a request again after 408, 429 and 5xx."""
    if isinstance(error, DataError):
        return 400
    if isinstance(error, StoreFull | HubClosed | RunDirectoryError):
        return 503
    return 429 if isinstance(error, HubFull) else 500


async def refuse(scope: Scope, send: Send, status: int, error: AtroposError, headers: Headers = ()) -> None:
    """A `Refuse`: answer a request that is refused before the application is called."""
    body = error_body(said(error), "user" if status < 500 else "server")
    await send_whole(send, status, body, [(b"content-type", JSON), *headers])


def _compiled(routes: dict[str, Handler]) -> list[tuple[str, re.Pattern[str], Handler]]:
    found = []
    for route, handler in routes.items():
        verb, _, path = route.partition(" ")
        found.append((verb, re.compile(re.escape(path).replace(r"\{\}", "([^/]+)")), handler))
    return found
