"""The bridge's extension in the engine's process. Does not import torch: the weights may be in the workers of a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_bridge_ipc import handles
from atropos_core.errors import WeightsMismatch
from atropos_core.interfaces import Transport, WeightServer
from atropos_core.processes.rpc import Reply

VERSION_SLOT = 2  # of the sentinel page of a copy


def extension_for(engine: Any) -> Any:
    """Return a ServerExtension if the workers of a server hold the engine's weights, else an OwnerExtension."""
    if hasattr(engine, "transfer_weights"):
        return ServerExtension(engine)
    from atropos_bridge_ipc.owner_extension import OwnerExtension

    return OwnerExtension(engine)


class ServerExtension:
    """Calls the workers of a server through it. The server does not return their answers, so they write these into handle files.
    `where`, made by the bridge, has `directory`, `file`, `nonce`, `model` and `deadline_s`."""

    def __init__(self, server: WeightServer) -> None:
        self._server = server
        self._where: Mapping[str, Any] = {}

    async def export(self, transport: Transport, where: Mapping[str, Any]) -> Reply:
        """Have the worker describe its segment in terms of the trainer's tensors, `where["wanted"]`. The offer has
        only `impossible` if these weights cannot be shared. Raises WeightsMismatch."""
        self._where = where
        answers = await self._call(do="share", wanted=list(where["wanted"]))
        refused = [answer["impossible"] for answer in answers if "impossible" in answer]
        if refused:
            return Reply({"impossible": refused[0]}, [])
        (offer,) = answers
        if offer["transport"] != transport:
            return Reply({"impossible": f"the engine's memory can be shared by {offer['transport']} only"}, [])
        descriptors = []
        if offer["descriptor"] is not None:
            descriptors = [handles.open_descriptor(self._path(0), where["nonce"], where["model"], offer)]
        return Reply(offer, descriptors)

    async def takes_copies(self) -> bool:
        return True

    async def attach(self, where: Mapping[str, Any], source: str) -> list[Any]:
        """Have every worker map the trainer's copy of the weights. Returns what each of them has mapped."""
        self._where = where
        return [answer["segment"] for answer in await self._call(do="attach", source=source)]

    async def load(self, version: int) -> None:
        """Have every worker load that version of the trainer's copy. The engine is paused."""
        await self._transfer("start", {})
        await self._transfer("update", {"version": version, "slot": VERSION_SLOT})
        await self._transfer("finish", {})

    async def write_sentinel(self, slot: int, value: int) -> None:
        await self._call(do="write", slot=slot, value=value)

    async def read_sentinel(self, slot: int) -> int:
        found = {int(answer["value"]) for answer in await self._call(do="read", slot=slot)}
        return found.pop() if len(found) == 1 else -1

    async def _call(self, **request: Any) -> list[dict[str, Any]]:
        """Every worker's answer, in the order of ranks."""
        where = self._where
        self._path(0).unlink(missing_ok=True)  # an answer to an earlier question must not pass for one to this
        info = {key: where[key] for key in ("directory", "file", "nonce")}
        await self._transfer("init", {**info, **request})
        first = self._read(0)
        answers = [first, *(self._read(rank) for rank in range(1, first["ranks"]))]
        for answer in answers:
            if "failed" in answer:
                raise WeightsMismatch(answer["failed"])
        return answers

    async def _transfer(self, stage: Any, info: Mapping[str, Any]) -> None:
        await self._server.transfer_weights(stage, info, self._where["deadline_s"])

    def _read(self, rank: int) -> dict[str, Any]:
        return handles.read(self._path(rank), self._where["nonce"], self._where["model"])

    def _path(self, rank: int) -> Path:
        return Path(self._where["directory"]) / f"{self._where['file']}.rank{rank}.json"
