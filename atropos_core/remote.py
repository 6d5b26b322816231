"""An engine on another machine, behind the interface that it has here: `[engine] use = "remote"`.

The other end is `atropos engine`, or the door that `atropos train` opens for its workers (which samples, and takes no
weights). What travels: prompts and completions as codec frames, weights and adapters file by file.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core.client import Api
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.types import Completion, Floats, Sampling, Tokens

OPEN_DEADLINE_S = 1800.0  # the other end may still be loading its model
LOAD_DEADLINE_S = 1800.0
CALL_DEADLINE_S = 60.0
_SLACK_S = 2.0  # for the answer "too late" of the other end, which says more than silence
_PIECE_BYTES = 1 << 20
_HERE = "/v1/engine"


class RemoteEngine(Engine):
    """Everything raises ApiError where no answer comes before the call's deadline. A sample whose answer was lost is
    asked for again: the seeds make it the same one."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._api = Api(url, token, timeout_s=CALL_DEADLINE_S)

    async def open(self) -> ModelInfo:
        info: ModelInfo = await self._call("open", {}, OPEN_DEADLINE_S)
        return info

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        body = {"prompt": prompt, "n": n, "sampling": sampling, "seeds": list(seeds), "deadline_s": deadline_s}
        made: list[Completion] = await self._call("sample", body, deadline_s)
        return made

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        body = {"sequences": list(sequences), "temperature": temperature}
        scored: list[Floats] = await self._call("logprobs", body, LOAD_DEADLINE_S)
        return scored

    async def pause(self) -> None:
        await self._call("pause", {}, CALL_DEADLINE_S)

    async def resume(self, version: int) -> None:
        await self._call("resume", {"version": version}, CALL_DEADLINE_S)

    async def load_weights(self, directory: Path) -> None:
        await self._call("load_weights", {"upload": await self._upload(directory)}, LOAD_DEADLINE_S)

    async def load_adapter(self, directory: Path, version: int) -> None:
        body = {"upload": await self._upload(directory), "version": version}
        await self._call("load_adapter", body, LOAD_DEADLINE_S)

    async def close(self) -> None:
        """Hang up. The engine over there goes on: whoever started it ends it."""
        await self._api.close()

    async def _call(self, what: str, body: Mapping[str, Any], deadline_s: float) -> Any:
        return await self._api.call("POST", f"{_HERE}/{what}", body, wait_s=deadline_s, deadline_s=_SLACK_S)

    async def _upload(self, directory: Path) -> str:
        """Every file of a directory, under a name of its own over there."""
        name = secrets.token_hex(8)
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            where = f"{_HERE}/uploads/{name}/{path.relative_to(directory).as_posix()}"
            await self._api.call("PUT", where, content=_pieces(path), wait_s=LOAD_DEADLINE_S, deadline_s=0.0)
        return name


def _pieces(path: Path) -> Callable[[], AsyncIterator[bytes]]:
    async def read() -> AsyncIterator[bytes]:
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield piece

    return read
