"""Who may call: any process of this user on a loopback address, and who has the key at any other."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from starlette.types import Scope

from atropos_http_server.connection import SCOPE_KEY, Connection
from atropos_http_server.loopback import OWN_SITES, names_this_machine
from atropos_tinker_api.refused import Refused

BEARER = b"bearer "


def check_access(scope: Scope, key: bytes | None) -> None:
    """`key`: what callers must send; None: this server is only for its user on this machine, and takes any key. Raises Refused."""
    given: Mapping[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of several
    if b"origin" in given or given.get(b"sec-fetch-site") not in OWN_SITES:
        raise Refused("a page in a browser may not call this server.", status=403)
    if key is not None:
        if not hmac.compare_digest(_key(given), key):
            raise Refused(
                "the API key is not that of this server: set TINKER_API_KEY to the word in the file of its --token-file.",
                status=401,
            )
        return
    connection: Connection | None = scope.get(SCOPE_KEY)
    if connection is not None and not connection.may_call:
        connection.gate.count("user")
        raise Refused("another user of this machine runs this server, which has no key (--token-file).", status=403)
    host = (given.get(b"host") or b"localhost").decode("latin-1")
    if not names_this_machine(host):
        raise Refused(
            f"this server is only for this machine, and was called as {host[:100]!r}: start it with --host and --token-file.",
            status=403,
        )


def _key(given: Mapping[bytes, bytes]) -> bytes:
    authorization = given.get(b"authorization", b"")
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    return given.get(b"x-api-key", b"")
