"""atroposlib's 13 routes on the hub, as its clients know them. README.md lists the differences and their reasons.

Plain ASGI: an environment polls ten times a second, and a framework would take most of that time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from atropos_core import console
from atropos_core.errors import DataError, HubClosed, HubFull
from atropos_core.hub.records import HubStatus
from atropos_http_server.answers import send_whole
from atropos_http_server.body_limits import GoneAway
from atropos_trajectory_api.http.answers import answer, plain_error, refuse
from atropos_trajectory_api.legacy.batches import OldTrainer
from atropos_trajectory_api.legacy.intake import Intake
from atropos_trajectory_api.legacy_groups.incoming_groups import parse
from atropos_trajectory_api.legacy_groups.stored_group import as_wire
from atropos_trajectory_api.misspelt import refuse_misspelt
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.old_registrations import EnvIdentifier, RegisterEnv, Registration
from atropos_trajectory_api.service.old_state import OldEnvironment
from atropos_trajectory_api.service.service import Service

NO_EXAMPLE: Mapping[str, list[Any]] = {
    name: []
    for name in (
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs", "messages",
        "images",
    )
}  # fmt: skip
_M = TypeVar("_M", bound=BaseModel)
Handler = Callable[[Scope, Receive, Send, bytes], Awaitable[Any]]  # returns the value to answer with, or ANSWERED
ANSWERED = object()
MOST_BYTES, MOST_VALUES = 100_000, 100  # of a body that registers an environment or a trainer: some numbers and names
NEARLY_FULL = 0.9


class LegacyRoutes:
    """An ASGI application for the paths in `routes`."""

    def __init__(
        self, service: Service, options: ServeOptions, vocabulary: int = 0, killed_at: float | None = None
    ) -> None:
        self._service = service
        self._old = service.old
        self._silent_s = 5 * options.silent_s
        self._warned_further = False
        self.intake = Intake(service, options, vocabulary, killed_at)
        self.trainer = OldTrainer(service, options)
        self.routes: dict[str, dict[str, Handler]] = {
            "/": {"GET": self._root},
            "/register": {"POST": self._register},
            "/register-env": {"POST": self._register_env},
            "/disconnect-env": {"POST": self._disconnect_env},
            "/wandb_info": {"GET": self._wandb_info},
            "/info": {"GET": self._info},
            "/batch": {"GET": self._batch},
            "/latest_example": {"GET": self._latest_example},
            "/scored_data": {"POST": self._scored_data},
            "/scored_data_list": {"POST": self._scored_data_list},
            "/status": {"GET": self._status},
            "/status-env": {"GET": self._status_env},
            "/reset_data": {"GET": self._reset_data},
        }
        for one in self._old.environments.values():
            self._share(one)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handlers = self.routes[scope["path"]]
        scope["atropos.route"] = scope["path"]
        handler = handlers.get(scope["method"])
        if handler is None:
            allowed = [(b"allow", ", ".join(handlers).encode())]
            await answer(scope, send, 405, {"detail": "Method Not Allowed"}, allowed)
            return
        body = (await receive()).get("body", b"")
        try:
            value = await handler(scope, receive, send, body)
        except GoneAway:
            return
        except ValidationError as error:
            detail = error.errors(include_url=False, include_context=False)
            await answer(scope, send, 422, {"detail": [{**one, "loc": ["body", *one["loc"]]} for one in detail]})
        except DataError as error:
            await refuse(scope, send, 422, error)
        except (HubFull, HubClosed) as error:
            await refuse(scope, send, 503, error, [(b"retry-after", b"10")])
        else:
            if value is not ANSWERED:
                await answer(scope, send, 200, value)

    async def close(self) -> None:
        """Called when no connection is left."""
        await self.trainer.close()

    async def tick(self) -> None:
        """Once a second."""
        self.trainer.renew()
        for one in self._old.silent(time.monotonic() - self._silent_s):
            console.warn(
                f"environment {one.name} has been silent for {self._silent_s:g} s and lost its share of batches."
            )
            self._service.hub.forget(one.name)
        await self.intake.queue_wholes()

    async def _root(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        return {"message": "AtroposLib API"}

    async def _register(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        wanted = _read(Registration, body)
        if self.trainer.native_holder() is not None:
            console.warn("an old trainer has registered while a trainer of the native protocol holds the session.")
        elif not self._old.register(wanted) and wanted != self._old.registration:
            console.warn(
                "a further trainer has registered; the first one's batch size and step stay (GET /reset_data)."
            )
        return {"uuid": uuid.uuid4().int}

    async def _register_env(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        wanted = _read(RegisterEnv, body)
        registration = self._old.registration
        if registration is None or not self._old.started:
            return {"status": "wait for trainer to start"}
        made = self._old.add(wanted, time.monotonic())
        self._share(made)
        return {
            "status": "success",
            "env_id": made.id,
            "wandb_name": made.name,
            "checkpoint_dir": registration.checkpoint_dir,
            "starting_step": self._old.step,
            "checkpoint_interval": registration.save_checkpoint_interval,
            "num_steps": registration.num_steps,
        }

    async def _disconnect_env(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        wanted = _read(EnvIdentifier, body)
        one = self._old.environments.get(wanted.env_id)
        if one is None:
            return {"status": "failure", "error": f"unknown environment {wanted.env_id}"}
        if one.connected:
            one.connected = False
            self._old.on_change()
            self._service.hub.forget(one.name)
        return {"status": "success"}

    async def _wandb_info(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        known = self._old.registration
        return {"group": known.wandb_group if known else None, "project": known.wandb_project if known else None}

    async def _info(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        known = self._old.registration
        return {"batch_size": known.batch_size if known else -1, "max_token_len": known.max_token_len if known else -1}

    async def _batch(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        return ANSWERED if await self.trainer.serve(scope, send) else {"batch": None}

    async def _latest_example(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        frame = self.intake.latest
        return NO_EXAMPLE if frame is None else as_wire(frame)

    async def _scored_data(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        (reply,) = await self.intake.take(scope, receive, body, many=False)
        return reply

    async def _scored_data_list(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        replies = await self.intake.take(scope, receive, body, many=True)
        buffered = [reply["buffer_size"] for reply in replies if reply["status"] == "buffered"]
        more = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return {"status": "received", "groups_processed": len(replies), **more}

    async def _status(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        return {"current_step": self._old.step, "queue_size": self._service.hub.status().groups}

    async def _status_env(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if not body and "env_id" in query:  # proxies drop the body of a GET
            asking = EnvIdentifier.model_validate({"env_id": query["env_id"][-1]})
        else:
            asking = _read(EnvIdentifier, body)
        one = self._old.environments.get(asking.env_id)
        if one is None:
            await plain_error(
                scope, send, 404, "DataError", f"unknown environment {asking.env_id}.", "POST /register-env first."
            )
            return ANSWERED
        scope["atropos.worker"] = one.name
        self._seen(one)
        hub = self._service.hub.status()
        waiting = {name: held.sequences for name, held in hub.environments.items() if held.sequences}
        return self._old.status(one, waiting, nearly_full=_nearly_full(hub))

    async def _reset_data(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> Any:
        if (holder := self.trainer.native_holder()) is not None:
            await plain_error(
                scope, send, 409, "DataError", f"trainer {holder} of the native protocol uses these data.",
                "End it first; then reset.",
            )  # fmt: skip
            return ANSWERED
        dropped = await self.trainer.drop_all()
        self.intake.pieces.clear()
        self.intake.retries.forget()
        for one in self._old.environments.values():
            self._service.hub.forget(one.name)
        self._old.reset()
        self._old.on_change()
        if dropped:
            console.warn(f"a client called /reset_data: {dropped} waiting groups are dropped.")
        await send_whole(send, 200, b"Reset successful", [(b"content-type", b"text/plain; charset=utf-8")])
        return ANSWERED

    def _share(self, one: OldEnvironment) -> None:
        if one.connected:
            self._service.hub.share(one.name, weight=max(one.weight, 0.01), minimum=one.minimum)

    def _seen(self, one: OldEnvironment) -> None:
        one.seen = time.monotonic()
        if not one.connected:
            one.connected = True
            self._old.on_change()
            self._share(one)


def _nearly_full(hub: HubStatus) -> bool:
    full = hub.held_bytes >= NEARLY_FULL * hub.limits.size_bytes or bool(hub.puts_waiting)
    most = hub.limits.sequences
    return full or (most is not None and hub.held_sequences >= NEARLY_FULL * most)


def _read(model: type[_M], body: bytes) -> _M:
    """Raises DataError, before parsing, for a body too long or too deep for a registration: other requests wait in the meantime."""
    marks = body.count(b"[") + body.count(b"{")
    if len(body) > MOST_BYTES or marks > MOST_VALUES:
        raise DataError(
            f"the body of this registration has {len(body):,} bytes with {marks:,} lists and objects, but it may have only "
            f"{MOST_BYTES:,} with {MOST_VALUES}.",
            remedy="Send only the fields of the route.",
        )
    given = parse(body)
    if isinstance(given, dict):
        refuse_misspelt(given, model.model_fields)
    return model.model_validate(given)
