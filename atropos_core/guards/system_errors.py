"""Name the error when the system refuses this process memory or file descriptors, anywhere in its code."""

from __future__ import annotations

import errno

from atropos_core.errors import AtroposError, EndsProcess, OutOfMemory
from atropos_core.guards.exits import innermost_line


def named_error(error: OSError | MemoryError) -> AtroposError | None:
    """Return the named error, or None if `error` has another cause."""
    where, cause = innermost_line(error.__traceback__), f"{type(error).__name__}: {error}"
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    if number == errno.ENOMEM:
        return OutOfMemory(f"this process was refused memory{where}: {cause}")
    if number == errno.EMFILE:
        return AtroposError(f"this process may open no more files{where}: {cause}", remedy="Raise `ulimit -n`.")
    if number == errno.EBADF:
        return EndsProcess(
            f"a descriptor of this process was closed by code that does not own it; noticed{where}: {cause}",
            remedy="Look for os.close and os.closerange in the components of this run: they may close what they opened, no more.",
        )
    return None
