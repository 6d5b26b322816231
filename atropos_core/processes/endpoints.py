"""A bridge's connection to the process of an engine or a trainer: a child, or this one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Endpoint
from atropos_core.processes.child import CALL_DEADLINE_S
from atropos_core.processes.extension import Extension
from atropos_core.processes.rpc import Peer


class PeerEndpoint(Endpoint):
    """A bridge's connection to a child."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.host = peer.other_host

    async def load_extension(self, reference: str) -> None:
        await self._peer.call("load_extension", reference, deadline_s=CALL_DEADLINE_S)

    async def call(
        self, method: str, *arguments: Any, descriptors: Sequence[int] = (), deadline_s: float = CALL_DEADLINE_S
    ) -> tuple[Any, list[int]]:
        return await self._peer.call_with_descriptors(
            "call_extension", method, *arguments, descriptors=descriptors, deadline_s=deadline_s
        )


class LocalEndpoint(Endpoint):
    """A bridge's connection to a component in its own process."""

    def __init__(self, component: Any) -> None:
        self.component = component
        self._extension: Extension

    async def load_extension(self, reference: str) -> None:
        self._extension = Extension.load(reference, self.component)

    async def call(
        self, method: str, *arguments: Any, descriptors: Sequence[int] = (), deadline_s: float = CALL_DEADLINE_S
    ) -> tuple[Any, list[int]]:
        from atropos_core.processes.rpc import Reply

        # A socket would have duplicated them: the extension owns what it is given, the caller still owns its own.
        given = [os.dup(descriptor) for descriptor in descriptors]
        answer = await within(self._extension.call(method, arguments, given), deadline_s, f"extension: {method}()")
        return (answer.value, answer.descriptors) if isinstance(answer, Reply) else (answer, [])
