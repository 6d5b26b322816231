"""A plain function in a child process, for work that is heavy on the CPU or may never return."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import ProcessDied, WorkerLost
from atropos_core.processes.child import Child
from atropos_core.processes.replaceable import ReplaceableChild


class Worker:
    """Calls `"pkg.mod:function"` in a child process, one call at a time. The child starts with the first call, and is replaced if a
    call hangs. Arguments and results must be values that `atropos_core.codec` can encode."""

    def __init__(
        self, function: str, log: Path = Path("/dev/null"), environment: Mapping[str, str] | None = None
    ) -> None:
        build, role = {"kind": "function", "name": function}, f"worker of {function}"
        self._process = ReplaceableChild(lambda: Child.start(role, build, log, threads=1, environment=environment))

    async def call(self, *arguments: Any, deadline_s: float) -> Any:
        """Call the function. Raises DeadlineExceeded, WorkerLost if the process ended meanwhile, or what the function raised."""
        try:
            return await self._process.call("call", *arguments, deadline_s=deadline_s)
        except ProcessDied as error:  # which would end the run, but only this call needs this process
            raise WorkerLost(str(error)) from error

    async def close(self) -> None:
        await self._process.close()
