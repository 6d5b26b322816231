"""Call a command as a function. It blocks until its end, even if an event loop is running, as in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

from atropos_core.guards.system_errors import named_error
from atropos_core.launch.signals import FROM_OUTSIDE, EndRequests

T = TypeVar("T")


def blocking(work: Callable[[], T]) -> T:
    """Call `work` and return its result. If an event loop runs here, `work` gets a thread with its own loop, and a Ctrl-C, which
    arrives here, is passed on to it as a request to end."""
    if not _in_a_loop():
        return _with_named_errors(work)
    requests, result = EndRequests(), Future[T]()
    context = copy_context()
    context.run(FROM_OUTSIDE.set, requests)

    def run() -> None:
        try:
            result.set_result(context.run(_with_named_errors, work))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)

    thread = Thread(target=run, name="atropos")
    thread.start()
    while True:
        try:
            thread.join()
            return result.result()
        except KeyboardInterrupt:
            if result.done():
                raise
            requests.request()


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _with_named_errors(work: Callable[[], T]) -> T:
    try:
        return work()
    except (OSError, MemoryError) as raised:
        if (found := named_error(raised)) is None:
            raise
        raise found from raised
