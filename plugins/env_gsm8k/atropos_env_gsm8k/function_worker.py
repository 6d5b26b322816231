"""A plain function in a process of its own, for what is heavy on the CPU or may never return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atropos_core.processes.child import Child
from atropos_core.processes.replaceable import ReplaceableChild


class Worker:
    """Calls `"pkg.mod:function"` in a child process, one call at a time; the child starts with the first call, and is
    replaced where a call hangs. Arguments and results are what `atropos_core.codec` can carry."""

    def __init__(self, function: str, log: Path = Path("/dev/null")) -> None:
        build = {"kind": "function", "name": function}
        self._process = ReplaceableChild(lambda: Child.start(f"worker of {function}", build, log, threads=1))

    async def call(self, *arguments: Any, deadline_s: float) -> Any:
        """What the function returns. Raises DeadlineExceeded, ProcessDied, or what the function raised."""
        return await self._process.call("call", *arguments, deadline_s=deadline_s)

    async def close(self) -> None:
        await self._process.close()
