"""Many samples in one request, each answered as soon as it is ready.

The calls of a request begin in one turn of the event loop, in order, so the engine sees them together and can batch them. The answer
is a row of frames, {"call": which, "value": completions} or {"call": which, "error": {...}}. An empty frame shows from time to time
that this end is alive.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.types import Receive, Send

from atropos_core.codec import encode_bytes
from atropos_core.errors import AtroposError, DataError, RemoteError
from atropos_core.types import Completion
from atropos_trajectory_api.http.frame_app import (
    Gone,
    Request,
    error_record,
    read_body,
    read_frame_of,
    refusal,
    unless_gone,
)
from atropos_trajectory_client.client import CONTENT_TYPE
from atropos_trajectory_client.http import BEAT_S

CALLS = 4096  # of one request
_HEADERS = [(b"content-type", CONTENT_TYPE.encode())]

Sample = Callable[[Request], Awaitable[list[Completion]]]


async def give_samples(sample: Sample, receive: Receive, send: Send) -> None:
    """Answer one request. Calls that are not finished are cancelled when the client hangs up."""
    try:
        calls = _calls(await read_frame_of(await read_body(receive)))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await unless_gone(_answer(sample, calls, send), receive)
    except Gone:
        return
    except AtroposError as error:
        status, headers, pieces = refusal(error)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(pieces)})


def _calls(body: Any) -> list[Request]:
    calls = Request("", body, {}).get("calls", list)
    if not 0 < len(calls) <= CALLS:
        raise DataError(f"a request of {len(calls)} samples is refused.", remedy=f"Send 1 to {CALLS}.")
    return [Request("", call, {}) for call in calls]


async def _answer(sample: Sample, calls: Sequence[Request], send: Send) -> None:
    ready: list[bytes] = []
    news = asyncio.Event()

    async def one(number: int, request: Request) -> None:
        frame = await _frame(sample, number, request)
        ready.append(frame)
        news.set()

    running = [asyncio.create_task(one(number, request)) for number, request in enumerate(calls)]
    left = len(running)
    try:
        while left:
            try:
                async with asyncio.timeout(BEAT_S):
                    await news.wait()
            except TimeoutError:
                ready_now = [encode_bytes({})]
            else:
                news.clear()
                ready_now, ready = ready, []
                left -= len(ready_now)
            await send({"type": "http.response.body", "body": b"".join(ready_now), "more_body": left > 0})
    finally:
        for task in running:
            task.cancel()


async def _frame(sample: Sample, number: int, request: Request) -> bytes:
    try:
        return encode_bytes({"call": number, "value": await sample(request)})
    except (AtroposError, NotImplementedError) as error:
        record = error_record(error)
    except Exception as error:  # noqa: BLE001 - the plugin boundary: every error goes to the caller
        trace = "".join(traceback.format_exception(error)).rstrip()
        record = error_record(RemoteError(f"the engine raised {type(error).__name__}: {error}\n{trace}"))
    return encode_bytes({"call": number, "error": record})
