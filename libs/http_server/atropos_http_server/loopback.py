"""Names and addresses that mean this machine, calls from pages in a browser, and the token that callers from elsewhere need."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

from atropos_core.errors import ConfigError

OWN_SITES = (None, b"same-origin", b"none")  # values of sec-fetch-site for a page of this server, or a typed address


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return True if a name or address means this machine, without asking a resolver."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def require_token(host: str, *, given: bool, what: str = "the server needs a token", remedy: str) -> None:
    """Raises ConfigError if the address that a server listens at can be reached from other machines, and no token is given."""
    if not given and not is_loopback(host):
        raise ConfigError(f"host {host} can be reached from elsewhere, so {what}.", remedy=remedy)


@lru_cache(256)
def names_this_machine(host: str) -> bool:
    """Return True if a `Host` header, with or without a port, names this machine."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
