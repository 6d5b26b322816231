"""An engine on another machine, with the interface of a local one: `[engine] use = "remote"`.

The other end is `atropos engine`, or the endpoint that `atropos train` opens for its workers (which samples, and takes no weights).
Prompts and completions travel as codec frames, weights and adapters file by file. All samples that are requested in one turn of the
event loop travel in one request, so that the engine can batch them; each is answered as soon as it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.codec import encode_bytes
from atropos_core.console.waits import waited
from atropos_core.errors import ApiError, AtroposError, DataError, DeadlineExceeded, FitError
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience
from atropos_core.interfaces import Endpoint, Engine, ModelInfo, Transport
from atropos_core.types import Completion, Floats, Sampling, Tokens
from atropos_trajectory_client.client import Api
from atropos_trajectory_client.http import error_of

OPEN_DEADLINE_S = 1800.0  # the other end may still be loading its model
LOAD_DEADLINE_S = 1800.0
CALL_DEADLINE_S = 60.0
_SLACK_S = 2.0  # for the answer "too late" of the other end, which says more than silence
_PIECE_BYTES = 1 << 20
_REQUEST_BYTES = 4 << 20  # of prompts in one request; endpoints take 16 MB
_REQUEST_CALLS = 1024
_HERE = "/v1/engine"

_Call = tuple[dict[str, Any], "asyncio.Future[list[Completion]]"]


class RemoteEngine(Engine):
    """All calls raise ApiError if no answer comes before their deadline, and EngineReplaced if another process answers than was opened.
    `sample` raises ApiError as soon as the other end is gone, and DeadlineExceeded if it is merely late."""

    outlives_run = True

    def __init__(
        self,
        url: str,
        token: str | None = None,
        transport: Transport | None = None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """`transport`: how a run will send weights. The other end must have been started for it."""
        self._api = Api(url, token, timeout_s=CALL_DEADLINE_S, patience=patience)
        self._transport = transport
        self._holder = secrets.token_hex(8)  # who changes what it samples from: a newer one takes the engine over
        self._instance = ""  # of the engine that was opened: another one at its address is refused
        self._outbox: list[_Call] = []
        self._requests: set[asyncio.Task[None]] = set()
        self.endpoint = RemoteEndpoint(self)

    async def open(self) -> ModelInfo:
        """Open the engine. Raises FitError if the other end does not accept the run's transport."""
        body = {} if self._transport is None else {"transport": self._transport}
        what = f"the engine at {self._api.url} to open ({OPEN_DEADLINE_S:g} s at most)"
        info: ModelInfo = await waited(what, self._call("open", body, OPEN_DEADLINE_S))
        self._instance = info.instance
        return info

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        prompt = np.asarray(prompt)
        body = {"prompt": prompt, "n": n, "sampling": sampling, "seeds": list(seeds), "deadline_s": deadline_s}
        body |= self._named()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Completion]] = loop.create_future()
        if not self._outbox:
            loop.call_soon(self._send)
        self._outbox.append((body, answer))
        try:
            async with asyncio.timeout(deadline_s + _SLACK_S):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{self._api.url} gave no sample within {deadline_s:g} s") from None

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        body = {"sequences": list(sequences), "temperature": temperature, **self._named()}
        scored: list[Floats] = await self._call("logprobs", body, LOAD_DEADLINE_S)
        return scored

    async def pause(self) -> None:
        await self._change("pause", {}, CALL_DEADLINE_S)

    async def resume(self, version: int) -> None:
        await self._change("resume", {"version": version}, CALL_DEADLINE_S)

    async def load_weights(self, directory: Path) -> None:
        await self._change("load_weights", {"upload": await self._upload(directory)}, LOAD_DEADLINE_S)

    async def load_adapter(self, directory: Path, version: int) -> None:
        body = {"upload": await self._upload(directory), "version": version}
        await self._change("load_adapter", body, LOAD_DEADLINE_S)

    async def call_extension(self, method: str, arguments: Sequence[Any], deadline_s: float) -> Any:
        """Call the bridge's extension. The call may arrive twice if an answer was lost."""
        return await self._change("call_extension", {"method": method, "arguments": list(arguments)}, deadline_s)

    async def load_extension(self, reference: str) -> None:
        """Raises FitError if the other end was not started with the bridge that this extension belongs to."""
        await self._change("load_extension", {"reference": reference}, CALL_DEADLINE_S)

    async def close(self) -> None:
        """Hang up. The engine at the other end keeps running; it is ended by the user or process that started it."""
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self._api.close()

    def _send(self) -> None:
        """Send everything that was requested in this turn as one request, or as few as the limits allow."""
        outbox, self._outbox = self._outbox, []
        prompts: dict[tuple[str, bytes], Tokens] = {}  # the rollouts of a group have one prompt, which travels once
        calls: list[_Call] = []
        size = 0
        for body, answer in outbox:
            if answer.done():
                continue
            prompt: Tokens = body["prompt"]
            same = prompt.dtype.str, prompt.tobytes()
            more = 0 if same in prompts else prompt.nbytes
            if calls and (len(calls) == _REQUEST_CALLS or size + more > _REQUEST_BYTES):
                self._begin(calls)
                prompts, calls, size, more = {}, [], 0, prompt.nbytes
            size += more
            calls.append((body | {"prompt": prompts.setdefault(same, prompt)}, answer))
        if calls:
            self._begin(calls)

    def _begin(self, calls: Sequence[_Call]) -> None:
        try:
            frame = encode_bytes({"calls": [body for body, _ in calls]})
        except DataError as error:  # of one call: the others go without it
            if len(calls) == 1:
                calls[0][1].set_exception(error)
            else:
                for call in calls:
                    self._begin([call])
            return
        self._requests.add(request := asyncio.create_task(self._request(frame, [answer for _, answer in calls])))
        request.add_done_callback(self._requests.discard)

    async def _request(self, frame: bytes, answers: Sequence[asyncio.Future[list[Completion]]]) -> None:
        """Send one request. It ends, and with it the work at the other end, when none of its answers is wanted any more."""
        waiting = dict(enumerate(answers))
        request = asyncio.current_task()
        assert request is not None, "a coroutine runs in a task"

        def left(_: asyncio.Future[list[Completion]]) -> None:
            if waiting and all(answer.done() for answer in waiting.values()):
                request.cancel()

        for answer in answers:
            answer.add_done_callback(left)
        error: Exception = ApiError(f"{self._api.url} ended its answer before every sample was in it.")
        try:
            async with contextlib.aclosing(self._api.stream(f"{_HERE}/samples", frame)) as items:
                async for item in items:
                    if not item:
                        continue
                    if not (answer := waiting[item["call"]]).done():
                        if "error" in item:
                            answer.set_exception(error_of(**item["error"]))
                        else:
                            answer.set_result(item["value"])
                    del waiting[item["call"]]
        except (AtroposError, NotImplementedError) as raised:
            error = raised
        except (LookupError, TypeError, ValueError, AttributeError) as raised:
            error = DataError(f"{self._api.url} sent an invalid sample: {type(raised).__name__}: {raised}")
        finally:
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    async def _call(self, what: str, body: Mapping[str, Any], deadline_s: float) -> Any:
        return await self._api.call("POST", f"{_HERE}/{what}", body, wait_s=deadline_s, deadline_s=_SLACK_S)

    async def _change(self, what: str, body: Mapping[str, Any], deadline_s: float) -> Any:
        """Change the engine's state. Raises LeaseLost once another trainer has taken the engine over."""
        return await self._call(what, {**body, **self._named(), "holder": self._holder}, deadline_s)

    def _named(self) -> dict[str, str]:
        return {"instance": self._instance} if self._instance else {}

    async def _upload(self, directory: Path) -> str:
        """Upload every file of a directory, under a unique name at the other end."""
        name = f"{self._holder}.{secrets.token_hex(8)}"
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            where = f"{_HERE}/uploads/{name}/{path.relative_to(directory).as_posix()}"
            await self._api.call("PUT", where, content=_pieces(path), wait_s=LOAD_DEADLINE_S, deadline_s=0.0)
        return name


class RemoteEndpoint(Endpoint):
    """A bridge's connection to its extension in that engine's process."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    async def load_extension(self, reference: str) -> None:
        await self._engine.load_extension(reference)

    async def call(
        self, method: str, *arguments: Any, descriptors: Sequence[int] = (), deadline_s: float = CALL_DEADLINE_S
    ) -> tuple[Any, list[int]]:
        if descriptors:
            raise FitError(f"an engine at another address shares no memory, which {method}() would.")
        return await self._engine.call_extension(method, arguments, deadline_s), []


def _pieces(path: Path) -> Callable[[], AsyncIterator[bytes]]:
    async def read() -> AsyncIterator[bytes]:
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield piece

    return read
