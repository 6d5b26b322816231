"""A stand-in for an engine with a server: its one worker's part of the protocol, over two plain tensors, without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from atropos_bridge_ipc import handles, segment, tensors
from atropos_bridge_ipc.manifest import PAGE, Manifest
from atropos_core.processes.endpoints import LocalEndpoint


class Server:
    """Cannot share, and loads copies. `weights` is what it last loaded, `calls` the calls that it got."""

    def __init__(self, model: Path) -> None:
        self.endpoint = LocalEndpoint(self)
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[Any] = []
        self._hash = handles.model_hash(model)
        self._copies: tuple[torch.Tensor, Manifest]

    async def transfer_weights(self, stage: str, info: Mapping[str, Any], deadline_s: float) -> None:
        self.calls.append(stage)
        if stage == "update":
            flat, manifest = self._copies
            assert int(flat[:PAGE].view(torch.int64)[info["slot"]]) == info["version"]
            self.weights = {entry.name: tensors.view(flat, entry).clone() for entry in manifest.tensors}
        if stage == "init":
            path = Path(info["directory"]) / f"{info['file']}.rank0.json"
            handles.write(path, info["nonce"], self._hash, {"ranks": 1, **self._answer(info)})

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "share":
            return {"impossible": "its experts are fused"}
        if request["do"] == "read":
            return {"value": int(self._copies[0][:PAGE].view(torch.int64)[request["slot"]])}
        path = Path(request["source"])
        handle = handles.read(path, request["nonce"], self._hash)
        descriptor = handles.open_descriptor(path, request["nonce"], self._hash, handle)
        flat, identity = segment.attach("posix_shm", {}, [descriptor])
        self._copies = flat, Manifest.decoded(handle["manifest"])
        return {"segment": identity}

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self, version: int) -> None:
        self.calls.append(version)
