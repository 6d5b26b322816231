"""Options of a server of the trajectory API."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from atropos_core.plugins.options import Options


class ServeOptions(Options):
    """One server."""

    directory: Path = Path("api")  # journal, pieces of groups, socket of the rings
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    token_file: Path | None = None
    hub_mb: float = Field(256.0, gt=0)
    hub_sequences: int | None = Field(None, ge=1)
    journal: bool = True
    sync: Literal["always", "second", "never"] = "second"
    model: Path | None = None  # the policy's directory, if no trainer says which ids exist
    same_host: bool = True  # offer shared-memory rings to producers on this machine
    hold_s: float = Field(
        240.0, gt=0, le=290
    )  # how long a POST of an old client may wait for room; its client gives up after 300 s
    lease_s: float = Field(60.0, gt=0)  # a trainer that is silent for this long loses what it leased
    silent_s: float = Field(
        60.0, gt=0
    )  # a worker that is silent for this long is dropped; old environments after five times that
    allocation_grace_s: float = Field(30.0, gt=0)
    body_mb: float = Field(64.0, gt=0)  # of one request, after decompression
    # For bodies that are being read or wait for room, and waiting ring groups:
    in_flight_mb: float = Field(256.0, gt=0)
    request_s: float = Field(60.0, gt=0)  # for a body to arrive
    connections: int = Field(512, ge=1)
    cors: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
