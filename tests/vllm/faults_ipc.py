"""Faults planted between bridge "ipc" and a real vLLM: each name is an agent for an engine's end, "module:name", whose
server misbehaves in one way. Nothing of the bridge is replaced.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atropos_bridge_ipc import handles
from atropos_bridge_ipc.engine_extension import extension_for

TENSOR = "model.layers.1.self_attn.o_proj.weight"  # square


class Meddler:
    """The real server, whose answer to "share" is changed on its way; or which leaves a stage out."""

    def __init__(self, server: Any, change: Callable[[Path, dict[str, Any]], None] | None, without: str = "") -> None:
        self._server, self._change, self._without = server, change, without

    async def transfer_weights(self, stage: Any, info: Mapping[str, Any], deadline_s: float) -> None:
        if stage == self._without:
            return
        await self._server.transfer_weights(stage, info, deadline_s)
        if self._change is not None and info.get("do") == "share":
            path = Path(info["directory"]) / f"{info['file']}.rank0.json"
            self._change(path, json.loads(path.read_text()))


def _answers(change: Callable[[Path, dict[str, Any]], None]) -> Callable[[Any], Any]:
    return lambda server: extension_for(Meddler(server, change))


def _manifest(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Any], Any]:
    def changed(path: Path, entry: dict[str, Any]) -> None:
        change(entry["content"]["manifest"]["tensors"])
        path.write_text(json.dumps(entry))

    return _answers(changed)


def _of(tensors: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(tensor for tensor in tensors if tensor["name"] == name)


def _swap(tensors: list[dict[str, Any]], *names: str) -> None:
    one, other = (_of(tensors, name) for name in names)
    one["offset"], other["offset"] = other["offset"], one["offset"]


def _ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _owned(path: Path, entry: dict[str, Any], **changes: Any) -> None:
    path.write_text(json.dumps({**entry, **changes}))


tensor_missing = _manifest(lambda tensors: tensors.remove(_of(tensors, TENSOR)))
transposed = _manifest(lambda tensors: _of(tensors, TENSOR)["stride"].reverse())
gate_and_up_swapped = _manifest(
    lambda tensors: _swap(tensors, "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
)
out_of_bounds = _manifest(lambda tensors: _of(tensors, TENSOR).update(offset=1 << 40))
stale_file = _answers(
    lambda path, entry: _owned(path, entry, owner={"pid": _ended(), "started": 1}, nonce=secrets.token_hex(16))
)
dead_owner = _answers(lambda path, entry: _owned(path, entry, owner={"pid": _ended(), "started": 1}))
foreign_nonce = _answers(lambda path, entry: _owned(path, entry, nonce=secrets.token_hex(16)))
readable_by_others = _answers(lambda path, entry: path.chmod(0o644))
silent = _answers(lambda path, entry: path.unlink())
other_owner = _answers(
    lambda path, entry: _owned(path, entry, owner={"pid": os.getpid(), "started": handles.started(os.getpid())})
)
unshareable = _answers(
    lambda path, entry: _owned(path, entry, content={"ranks": 1, "impossible": "its weights are planted"})
)


def skips_publish(server: Any) -> Any:
    return extension_for(Meddler(server, None, without="update"))
