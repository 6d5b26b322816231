"""An engine over HTTP: the other end of `atropos_trajectory_client.remote_engine`.

access.py decides who may reach it. Unless it takes weights (`takes`), it only samples and scores: a worker can neither stop the
trainer's engine nor change what it samples from.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from atropos_core.errors import AccessRefused, AtroposError, DataError, EngineReplaced, FitError, LeaseLost
from atropos_core.group_schema import brief, check_temperature
from atropos_core.guards.deadlines import within
from atropos_core.guards.worker_threads import apart
from atropos_core.interfaces import Engine, ModelInfo, Transport
from atropos_core.storage.tempdirs import owned_prefix
from atropos_core.types import Completion, Tokens
from atropos_trajectory_api.engine_http.samples import give_samples
from atropos_trajectory_api.http.frame_app import FrameApp, Gone, Handler, Request, refusal

LOAD_S = 1800.0
SAMPLE_S = 3600.0  # the longest deadline that a call may ask for
SILENT_S = 60.0  # how long an upload may stand still; LOAD_S for each of its files
FILES = 10_000  # of one upload
MANY = 1000  # more sequences than this are checked outside the event loop
FORMER = 1000  # trainers to remember
SENT: Mapping[Transport, str] = {
    "checkpoint": "whole models (--bridge checkpoint)",
    "adapter": "adapters (--bridge lora)",
    "prompt": "no weights (--bridge prompt)",
}
_UPLOADS = "/v1/engine/uploads/"
_SAMPLES = "/v1/engine/samples"


def engine_app(
    engine: Engine,
    takes: Transport | None,
    info: ModelInfo | None = None,
    *,
    extension: str = "",
    silent_s: float = SILENT_S,
) -> EngineRoutes:
    """`takes`: the kind of weights that the engine was started for, one of SENT; None: none. `extension`: the code of the bridge
    that it was started with ("pkg.mod:Class"); a run can load only this code. `info` is the result of `engine.open()`; without
    it, the first caller's `open` opens the engine. `silent_s`: how long an upload may stand still."""
    return EngineRoutes(engine, takes, info, extension, silent_s)


class EngineRoutes:
    """An ASGI application. `close` removes what uploads have left."""

    def __init__(
        self, engine: Engine, takes: Transport | None, info: ModelInfo | None, extension: str, silent_s: float
    ) -> None:
        self._engine = engine
        self._extension = extension
        self._silent_s = silent_s
        self._info = info
        self._instance = secrets.token_hex(8)
        self._opening = asyncio.Lock()
        self._uploads: Path | None = None
        self._loading: set[Path] = set()
        self._takes = takes
        self._holder: str | None = None  # the trainer that changes what the engine samples from
        self._former: dict[str, None] = {}  # trainers that lost the engine to a newer one, oldest first
        calls = {"open": self._open, "logprobs": self._logprobs}
        changes = {
            "pause": self._pause, "resume": self._resume,
            "load_weights": self._load_weights, "load_adapter": self._load_adapter,
            "load_extension": self._load_extension, "call_extension": self._call_extension,
        }  # fmt: skip
        table: dict[tuple[str, str], Handler] = {("POST", f"engine/{name}"): call for name, call in calls.items()}
        table |= {("POST", f"engine/{name}"): self._held(call) if takes else _refuse for name, call in changes.items()}
        self._calls = FrameApp(table)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_upload(scope):
            await self._take_upload(scope["path"][len(_UPLOADS) :], receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == _SAMPLES:
            await give_samples(self._sample, receive, send)
        elif scope["type"] == "http":
            await self._calls(scope, receive, send)

    def close(self) -> None:
        uploads, self._uploads = self._uploads, None
        if uploads is not None:
            shutil.rmtree(uploads, ignore_errors=True)

    def _held(self, call: Handler) -> Handler:
        async def checked(request: Request) -> Any:
            self._refuse_for_another(request)
            self._take_over(request.get("holder", str))
            return await call(request)

        return checked

    def _take_over(self, holder: str) -> None:
        """Give the engine to the newest trainer, as the hub does. Raises LeaseLost for a trainer that had it earlier."""
        if holder in self._former:
            raise LeaseLost(
                "another trainer has taken this engine over: what it samples from is no longer this run's.",
                remedy="Give each run its own engine, or end the other run and resume this one.",
            )
        if holder != self._holder:
            if self._holder is not None:
                self._former[self._holder] = None
                if len(self._former) > FORMER:
                    del self._former[next(iter(self._former))]
            self._holder = holder

    async def _open(self, request: Request) -> ModelInfo:
        """`transport` says what the run will send, if it sends weights. Raises FitError if the engine does not take that."""
        sends: Any = request.get("transport", str, None)
        if self._takes is None and sends is not None:
            await _refuse(request)
        elif self._takes is not None and sends not in (None, self._takes):
            raise FitError(
                f"this engine was started for {SENT[self._takes]}, but the run would send it {SENT.get(sends, repr(sends))}.",
                remedy="Give `atropos engine` the --bridge of the run.",
            )
        async with self._opening:
            if self._info is None:
                self._info = await self._engine.open()
        return replace(self._info, instance=self._instance)

    def _refuse_for_another(self, request: Request) -> None:
        """Raises EngineReplaced for a call that is meant for an earlier engine at this address."""
        if request.get("instance", str, self._instance) != self._instance:
            raise EngineReplaced(
                "the engine at this address is not the process that the run opened: its model, stop tokens and adapters may "
                "differ, and it does not have the run's weights.",
                remedy="Find out who started it. `atropos resume` opens it anew, compares its model and sends it the run's weights; "
                "with `restarts = N` a run does so automatically.",
            )

    async def _sample(self, request: Request) -> list[Completion]:
        self._refuse_for_another(request)
        prompt, n, seeds = (
            _tokens(request.get("prompt", np.ndarray)),
            request.count("n", least=1),
            request.get("seeds", list),
        )
        deadline_s = _seconds(request, "deadline_s")
        if len(seeds) != n or not all(type(seed) is int for seed in seeds):
            raise DataError("'seeds' does not fit the request", remedy=f"Send {n} whole numbers, one for each sample.")
        sampling = request.sampling()
        return await within(self._engine.sample(prompt, n, sampling, seeds, deadline_s), deadline_s, "sample()")

    async def _logprobs(self, request: Request) -> Any:
        self._refuse_for_another(request)
        sequences: Sequence[Any] = request.get("sequences", list)
        check_temperature("'temperature'", temperature := request.get("temperature", (int, float), 1.0))
        checked = await apart(_all_tokens, sequences) if len(sequences) > MANY else _all_tokens(sequences)
        return await self._engine.logprobs(checked, float(temperature))

    async def _pause(self, request: Request) -> None:
        await self._engine.pause()

    async def _resume(self, request: Request) -> None:
        await self._engine.resume(request.count("version"))

    async def _load_weights(self, request: Request) -> None:
        await self._with_upload(request, self._engine.load_weights)

    async def _load_adapter(self, request: Request) -> None:
        version = request.count("version")
        await self._with_upload(request, lambda directory: self._engine.load_adapter(directory, version))

    async def _load_extension(self, request: Request) -> None:
        """Raises FitError for another bridge's code: only the user who starts the engine decides what is imported here."""
        if (reference := request.get("reference", str)) != self._extension:
            raise FitError(
                f"the run's bridge needs its own code in the engine's process ({brief(reference)}), but this engine was started "
                "without it.",
                remedy="Give `atropos engine` the --bridge of the run.",
            )
        await self._engine.endpoint.load_extension(reference)

    async def _call_extension(self, request: Request) -> Any:
        method = request.get("method", str)
        if not self._extension or not method.isidentifier() or method.startswith("_"):
            raise DataError(f"no code of a bridge here takes a call {brief(method)}")
        answer, _ = await self._engine.endpoint.call(method, *request.get("arguments", list), deadline_s=LOAD_S)
        return answer

    async def _with_upload(self, request: Request, load: Any) -> None:
        directory = self._directory() / _plain(request.get("upload", str))
        if not directory.is_dir():
            raise DataError(f"nothing was uploaded as {directory.name!r}")
        self._loading.add(directory)
        try:
            await within(load(directory), LOAD_S, "loading")
        finally:
            self._loading.discard(directory)
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _take_upload(self, where: str, receive: Receive, send: Send) -> None:
        status, headers, answer = 200, [(b"content-length", b"0")], b""
        try:
            if self._takes is None:
                await _refuse(None)
            await within(self._write(where, receive), LOAD_S, "the upload of a file")
        except Gone:
            return
        except AtroposError as error:
            status, headers, pieces = refusal(error)
            answer = b"".join(pieces)
        except OSError as error:
            status, headers, pieces = refusal(DataError(f"{where[:200]!r} cannot be written here: {error.strerror}"))
            answer = b"".join(pieces)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _write(self, where: str, receive: Receive) -> None:
        """Write one file of an upload, piece by piece."""
        parts = PurePosixPath(where).parts
        if len(parts) < 2 or any(_plain(part) != part for part in parts):
            raise DataError(f"{where[:200]!r} does not name a file of an upload")
        self._take_over(parts[0].partition(".")[0])
        directory = self._directory() / parts[0]
        if not directory.exists():  # a new upload, so earlier ones that were not loaded were broken off
            for other in set(directory.parent.iterdir()) - self._loading:
                await asyncio.to_thread(shutil.rmtree, other, ignore_errors=True)
        path = directory.joinpath(*parts[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        if sum(1 for _ in directory.rglob("*")) > FILES:
            raise DataError(f"an upload of more than {FILES} files")
        with path.open("wb") as file:
            more = True
            while more:
                message = await within(receive(), self._silent_s, "the client of an upload")
                if message["type"] == "http.disconnect":
                    raise Gone
                more = message.get("more_body", False)
                if piece := message.get("body", b""):
                    await asyncio.to_thread(file.write, piece)

    def _directory(self) -> Path:
        if self._uploads is None:
            self._uploads = Path(tempfile.mkdtemp(prefix=owned_prefix("engine")))
        return self._uploads


def is_upload(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["method"] == "PUT" and scope["path"].startswith(_UPLOADS))


async def _refuse(request: Request | None) -> None:
    raise AccessRefused(
        "this endpoint of the engine is only for sampling: the trainer controls its weights.",
        remedy="Start an engine that others may control with `atropos engine`.",
    )


def _plain(part: str) -> str:
    """A plain name of a file or folder. Raises DataError."""
    if part in ("", ".", "..") or "/" in part or "\\" in part or "\0" in part or len(part) > 200:
        raise DataError(f"{part[:200]!r} is not a file name")
    return part


def _tokens(values: Any) -> Tokens:
    if not isinstance(values, np.ndarray) or values.dtype != np.int32 or values.ndim != 1 or not len(values):
        raise DataError("token ids have another type or shape", remedy="Send an int32 array in one dimension.")
    if values.min() < 0:
        raise DataError("a token id is below 0", remedy="Send ids of the engine's tokenizer.")
    return values


def _all_tokens(sequences: Sequence[Any]) -> list[Tokens]:
    return [_tokens(sequence) for sequence in sequences]


def _seconds(request: Request, key: str) -> float:
    return min(request.number(key, above=0, most=sys.float_info.max), SAMPLE_S)
