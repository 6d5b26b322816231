"""`atropos serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", rich_help_panel="Connect")(serve)


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than this machine's own only with --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.")] = 8000,
    directory: Annotated[Path, typer.Option("--dir", help="The server's directory: journal, pieces, socket.")] = Path(
        "api"
    ),
    token_file: Annotated[Path | None, typer.Option(help="A file with a token, readable only by you.")] = None,
    hub_mb: Annotated[float, typer.Option(help="Most megabytes of groups, in memory and journal.")] = 256.0,
    hub_sequences: Annotated[int | None, typer.Option(help="Most sequences in the hub. Unset: no such limit.")] = None,
    journal: Annotated[bool, typer.Option(help="Keep groups on disk, to survive a crash.")] = True,
    sync: Annotated[
        str, typer.Option(help="When to wait for the disk: always, second or never. All survive kill -9.")
    ] = "second",
    same_host: Annotated[bool, typer.Option(help="Shared-memory rings for producers on this machine.")] = True,
    model: Annotated[
        Path | None, typer.Option(help="The policy's directory: ids beyond its vocabulary are refused.")
    ] = None,
    hold_s: Annotated[float, typer.Option(help="Seconds that an old client's group may wait for room.")] = 240.0,
    lease_s: Annotated[float, typer.Option(help="Seconds of silence after which a trainer loses its groups.")] = 60.0,
    silent_s: Annotated[float, typer.Option(help="Seconds of silence after which a worker is dropped.")] = 60.0,
    body_mb: Annotated[float, typer.Option(help="Most megabytes of one request, decompressed.")] = 64.0,
    in_flight_mb: Annotated[
        float,
        typer.Option(
            help="Most megabytes of bodies being read (JSON counts eight times) or waiting for room, and of waiting ring groups."
        ),
    ] = 256.0,
    request_s: Annotated[float, typer.Option(help="Seconds for a request to arrive.")] = 60.0,
    connections: Annotated[int, typer.Option(help="Most connections at one time.")] = 512,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may call. Repeatable.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
) -> None:
    """Connect environments with a trainer: take scored groups, keep them on disk, serve batches.

    Speaks atroposlib's HTTP protocol, so existing environments and trainers need no change, and its own under /v1.

    [bold]Examples[/]

      atropos serve

      atropos serve --host 0.0.0.0 --token-file token
    """
    from pydantic import ValidationError

    from atropos_core.errors import ConfigError
    from atropos_trajectory_api.options import ServeOptions

    try:
        options = ServeOptions.model_validate(
            {
                "directory": directory, "host": host, "port": port, "token_file": token_file, "hub_mb": hub_mb,
                "hub_sequences": hub_sequences, "journal": journal, "sync": sync, "same_host": same_host, "model": model,
                "hold_s": hold_s, "lease_s": lease_s, "silent_s": silent_s, "body_mb": body_mb,
                "in_flight_mb": in_flight_mb, "request_s": request_s, "connections": connections,
                "cors": tuple(cors or ()), "tls_cert": tls_cert, "tls_key": tls_key,
            }
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flag = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-").replace("directory", "dir")
        raise ConfigError(f"{flag}: {first['msg']} (given: {first['input']!r}).") from None

    if not options.journal and options.changed("sync"):
        raise ConfigError(
            "--sync has no effect with --no-journal: it says how often the journal waits for the disk.",
            remedy="Leave one of them out.",
        )

    from atropos_trajectory_api.server.serving import serve as run

    run(options)
