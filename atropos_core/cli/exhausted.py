"""What the system refuses a command, wherever in it that was: memory, descriptors. Said by name, and with what to do."""

from __future__ import annotations

import errno

from atropos_core.contained import innermost_line
from atropos_core.errors import AtroposError, EndsProcess, OutOfMemory


def named(error: OSError | MemoryError) -> AtroposError | None:
    """None for what has nothing to do with that."""
    where, said = innermost_line(error.__traceback__), f"{type(error).__name__}: {error}"
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    if number == errno.ENOMEM:
        return OutOfMemory(f"this process was refused memory{where}: {said}")
    if number == errno.EMFILE:
        return AtroposError(f"this process may open no more files{where}: {said}", remedy="Raise `ulimit -n`.")
    if number == errno.EBADF:
        return EndsProcess(
            f"a descriptor of this process was closed by code that does not own it; noticed{where}: {said}",
            remedy="Look for os.close and os.closerange in the components of this run: they may close what they opened, no more.",
        )
    return None
