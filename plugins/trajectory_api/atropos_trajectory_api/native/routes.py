"""The native protocol: `/v1`, with codec frames in both directions (http/frame_app.py) and long polls instead of short ones."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from atropos_core import __version__
from atropos_core.errors import DataError, HubFull
from atropos_core.group_schema import check_draw, check_group
from atropos_core.guards.worker_threads import apart
from atropos_core.rollouts.policy_versions import check_versions
from atropos_core.types import Sampling, ScoredGroup
from atropos_trajectory_api.http.frame_app import LONG_BYTES, FrameApp, Request
from atropos_trajectory_api.legacy_groups.stored_group import as_frame
from atropos_trajectory_api.service.service import Service, Trainer
from atropos_trajectory_api.service.workers import Policy, WorkerState, numbers
from atropos_trajectory_client.client import UnknownThere
from atropos_trajectory_client.http import GROUP_FRAMES

MANY = 64  # groups to read, or put, before other tasks get a turn


def native_routes(service: Service) -> FrameApp:
    """Every call of the native protocol. A star stands for a worker's id or a session's number."""
    routes = NativeRoutes(service)
    return FrameApp(
        {
            ("GET", ""): routes.about,
            ("POST", "workers"): routes.register,
            ("DELETE", "workers/*"): routes.sign_off,
            ("POST", "workers/*/heartbeat"): routes.heartbeat,
            ("POST", "workers/*/draws"): routes.take,
            ("POST", "workers/*/failed"): routes.failed,
            ("POST", "groups"): routes.put,
            ("POST", "sessions"): routes.open,
            ("DELETE", "sessions/*"): routes.end,
            ("POST", "sessions/*/lease"): routes.lease,
            ("POST", "sessions/*/give_back"): routes.give_back,
            ("POST", "sessions/*/commit"): routes.commit,
            ("POST", "sessions/*/drop"): routes.drop,
            ("POST", "sessions/*/renew"): routes.renew,
            ("POST", "sessions/*/draws"): routes.offer,
            ("POST", "sessions/*/version"): routes.set_version,
            ("GET", "environments"): routes.environments,
            ("POST", "engines"): routes.add_engine,
            ("GET", "engines"): routes.engines,
            ("GET", "status"): routes.status,
        },
        waits=lambda value: (
            isinstance(value, dict) and type(value.get("wait_s")) in (int, float) and value["wait_s"] > 0
        ),
    )


class NativeRoutes:
    """The handlers: each reads what its call needs from a body, and returns the answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def about(self, request: Request) -> dict[str, Any]:
        service = self._service
        return {
            "protocol": 1,
            "frames": GROUP_FRAMES,
            "version": __version__,
            "policy": _policy(service),
            "same_host": service.same_host,
        }

    # -- workers

    async def register(self, request: Request) -> dict[str, Any]:
        service = self._service
        worker = service.register(request.body)
        return {"worker": worker.id, "heartbeat_s": service.heartbeat_s, **self._news()}

    async def sign_off(self, request: Request) -> dict[str, Any]:
        self._service.sign_off(self._worker(request))
        return {}

    async def heartbeat(self, request: Request) -> dict[str, Any]:
        worker = self._worker(request)
        returned = numbers(request.get("returned", (list, tuple), ()))
        self._service.heartbeat(worker, draining=request.get("draining", bool, False), returned=returned)
        return self._news()

    async def take(self, request: Request) -> dict[str, Any]:
        service, worker = self._service, self._worker(request)
        running = numbers(request.get("playing", (list, tuple), ()))
        draws = await service.take(worker, request.count("n", least=1), running=running, wait_s=request.wait_s())
        rules = service.draws.rules
        return {
            "draws": tuple(draws),
            "group_size": rules.group_size if rules else 0,
            "min_group": rules.min_group if rules else 0,
            "sampling": rules.sampling if rules else Sampling(),
            "version": service.version,
            "deadline_s": rules.deadline_s if rules else None,
        }

    async def failed(self, request: Request) -> dict[str, Any]:
        worker = self._worker(request)
        group = request.get("group", ScoredGroup)
        check_group(group, self._service.vocabulary, episodes=False)
        check_versions(group, self._service.newest_version)
        self._service.failed(worker, group)
        return {}

    async def put(self, request: Request) -> dict[str, Any]:
        """Check all groups before any is taken."""
        entries = [Request("", entry, request.scope) for entry in request.get("groups", (list, tuple))]
        frames = [entry.get("frame", bytes) for entry in entries]
        if sum(map(len, frames)) >= LONG_BYTES or len(frames) > MANY:
            read = await apart(lambda: [self._service.read(frame) for frame in frames])
        else:
            read = [self._service.read(frame) for frame in frames]
        puts = [
            (frame, checked, entry.get("key", str, ""), entry.get("worker", str, ""))
            for frame, checked, entry in zip(frames, read, entries, strict=True)
        ]
        if puts and (sender := self._service.workers.find(puts[0][3])) is not None:
            request.scope["atropos.worker"] = sender.name
        until = asyncio.get_running_loop().time() + request.wait_s()
        ids: list[int | None] = []
        for place, (frame, checked, key, worker) in enumerate(puts):
            if place % MANY == MANY - 1:
                await asyncio.sleep(0)  # others have a turn
            left = max(until - asyncio.get_running_loop().time(), 0.0)
            try:
                ids.append(await self._service.put(frame, checked, key=key, worker=worker, deadline_s=left))
            except HubFull as error:
                if not ids:
                    raise
                return {"ids": ids, "full": Exception.__str__(error)}
        return {"ids": ids, "full": None}

    # -- the trainer

    async def open(self, request: Request) -> dict[str, Any]:
        trainer = Trainer(
            holder=request.get("holder", str),
            policy=Policy(
                request.get("tokenizer", str, ""),
                request.count("vocabulary", 0),
                request.get("model", str, ""),
                request.get("date", str, ""),
            ),
            group_size=request.count("group_size", least=1),
            min_group=request.count("min_group", 1),
            sampling=request.sampling(),
            batch_groups=request.count("batch_groups", 1, least=1),
            max_staleness=request.count("max_staleness", 0),
            max_token_len=request.count("max_token_len", 0),
            deadline_s=_deadline_s(request),
        )
        committed = numbers(request.get("committed", (list, tuple), ()))
        service = self._service
        version, hub_id = request.count("version", 0), request.get("hub_id", (str, type(None)), None)
        newest = service.newest_version
        number = service.open_session(trainer, committed, version, hub_id=hub_id)
        await service.written()
        return {
            "session": number,
            "boot": service.boot,
            "lease_s": service.options.lease_s,
            "environments": service.workers.environments(),
            "waiting_draws": service.draws.present,
            "played_draws": service.draws.in_progress,
            "hub_id": service.hub_id,
            "next_id": service.next_id,
            "newest_version": newest,
        }

    async def end(self, request: Request) -> dict[str, Any]:
        self._service.end_session(request.session())
        return {}

    async def lease(self, request: Request) -> dict[str, Any]:
        service, trained = self._service, _ids(request, "trained", ())
        leased = await service.lease(
            request.session(),
            request.count("groups", least=1),
            version=request.count("version"),
            wait_s=request.wait_s(),
            trained=trained,
            holding=numbers(request.get("holding", (list, tuple), ())),
            seen=request.count("seen", 0) if request.get("boot", str, "") == service.boot else 0,
        )
        if leased.entries or trained:
            await service.written()
        return {
            "boot": service.boot,
            "entries": [{"id": entry.id, "frame": as_frame(entry.payload)} for entry in leased.entries],
            "failed": leased.failed,
            "dropped": leased.dropped,
            "seen": leased.posted,
            "commit_due": leased.commit_due,
            "why": leased.why,
        }

    async def give_back(self, request: Request) -> dict[str, Any]:
        self._service.session(request.session()).give_back(_ids(request))
        return self._boot()

    async def commit(self, request: Request) -> dict[str, Any]:
        settled = self._service.commit(request.session(), _ids(request))
        await self._service.written()
        return self._boot() | {"settled": settled}

    async def drop(self, request: Request) -> dict[str, Any]:
        dropped = self._service.drop(request.session(), _ids(request), request.get("cause", str))
        await self._service.written()
        return self._boot() | {"dropped": dropped}

    async def renew(self, request: Request) -> dict[str, Any]:
        trained = _ids(request, "trained", ())
        self._service.session(request.session()).trained(trained)
        if trained:
            await self._service.written()
        return self._boot()

    async def offer(self, request: Request) -> dict[str, Any]:
        draws = request.get("draws", (list, tuple))
        for draw in draws:
            check_draw(draw)
            if draw.id < 0:
                raise DataError(
                    f"draw {draw.id}: an id below 0 is for groups without a draw", remedy="Number draws from 0 on."
                )
        self._service.session(request.session()).renew()
        return self._boot() | {"new": self._service.draws.offer(draws, self._service.workers.running())}

    async def set_version(self, request: Request) -> dict[str, Any]:
        version = request.count("version")
        self._service.set_version(request.session(), version, request.count("newest", version, least=version))
        await self._service.written()
        return self._boot()

    # -- what there is

    async def environments(self, request: Request) -> dict[str, Any]:
        return self._service.workers.environments()

    async def add_engine(self, request: Request) -> dict[str, Any]:
        url = request.get("url", str)
        if not url.startswith(("http://", "https://")) or len(url) > 1000:
            raise DataError(f"{url[:100]!r} is not the address of an engine", remedy="Send http://HOST:PORT, or https.")
        self._service.add_engine(request.count("session"), url)
        return {}

    async def engines(self, request: Request) -> dict[str, Any]:
        return {"engines": list(self._service.engines)}

    async def status(self, request: Request) -> dict[str, Any]:
        return self._service.status()

    def _worker(self, request: Request) -> WorkerState:
        worker = self._service.workers.find(request.named)
        if worker is None:
            raise UnknownThere(
                f"this server knows no worker {request.named[:40]!r}.",
                remedy="Register (again): POST /v1/workers",
            )
        request.scope["atropos.worker"] = worker.name
        return worker

    def _news(self) -> dict[str, Any]:
        service = self._service
        return {"version": service.version, "engines": list(service.engines), "policy": _policy(service)}

    def _boot(self) -> dict[str, Any]:
        return {"boot": self._service.boot}


def _policy(service: Service) -> dict[str, Any] | None:
    return asdict(service.policy) if service.policy is not None else None


def _deadline_s(request: Request) -> float | None:
    """The deadline of one rollout, if the trainer gives one."""
    return request.number("deadline_s", None, above=0, most=1e9)


def _ids(request: Request, name: str = "ids", *otherwise: Any) -> list[int]:
    return sorted(numbers(request.get(name, (list, tuple), *otherwise)))
