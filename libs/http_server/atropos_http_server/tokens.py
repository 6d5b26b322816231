"""The token of a server: one word in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from atropos_core.console import quoted
from atropos_core.errors import ConfigError

LEAST_CHARACTERS = 16


def read_server_token(path: Path) -> bytes:
    """Return the token in a file that only its owner can read. Raises ConfigError; messages never contain the token."""
    try:
        mode = path.stat().st_mode
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the token file {path} cannot be read: {error.strerror}.",
            remedy=f"Make one: (umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > {quoted(path)})",
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"others on this machine can read the token file {path} (mode {stat.S_IMODE(mode):o}).",
            remedy=f"chmod 600 {quoted(path)}",
        )
    if len(token) < LEAST_CHARACTERS or not token.isascii() or not token.decode("ascii").isprintable() or b" " in token:
        raise ConfigError(
            f"the token file {path} must hold one word of {LEAST_CHARACTERS} or more ASCII characters.",
            remedy=f"python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > {quoted(path)}",
        )
    return token


def make_token_file(path: Path) -> None:
    """Make the file with a new token, unless it exists. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
