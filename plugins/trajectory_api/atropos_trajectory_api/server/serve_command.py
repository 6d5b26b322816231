"""`atropos serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", rich_help_panel="Connect")(serve)


def serve(
    host: Annotated[str, typer.Option(help="Elsewhere than this machine only with --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    directory: Annotated[Path, typer.Option("--dir", help="Its own: journal, pieces, socket.")] = Path("api"),
    token_file: Annotated[Path | None, typer.Option(help="A file with a token, readable by you alone.")] = None,
    hub_mb: Annotated[float, typer.Option(help="Of groups, in memory and journal.")] = 256.0,
    hub_sequences: Annotated[int | None, typer.Option(help="A further bound.")] = None,
    journal: Annotated[bool, typer.Option(help="Outlive a crash.")] = True,
    sync: Annotated[
        str, typer.Option(help="always, second or never wait for the disk; kill -9 is safe in all.")
    ] = "second",
    same_host: Annotated[bool, typer.Option(help="Shared-memory rings for producers on this machine.")] = True,
    model: Annotated[
        Path | None, typer.Option(help="The policy's directory: ids beyond its vocabulary are refused.")
    ] = None,
    hold_s: Annotated[float, typer.Option(help="How long an old client's group may wait for room.")] = 240.0,
    lease_s: Annotated[float, typer.Option(help="A trainer that is silent for so long has lost its groups.")] = 60.0,
    silent_s: Annotated[float, typer.Option(help="A worker that is silent for so long is dropped.")] = 60.0,
    body_mb: Annotated[float, typer.Option(help="Of one request, decompressed.")] = 64.0,
    in_flight_mb: Annotated[
        float,
        typer.Option(
            help="Of bodies that are being read (JSON counts eight times) or wait for room, and of ring groups that wait."
        ),
    ] = 256.0,
    request_s: Annotated[float, typer.Option(help="In which a request must have arrived.")] = 60.0,
    connections: Annotated[int, typer.Option(help="At one time.")] = 512,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may call. Repeatable.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
) -> None:
    """Stand between environments and a trainer: take scored groups, keep them on disk, hand out batches.

    Speaks atroposlib's HTTP protocol, so existing environments and trainers need no change, and its own under /v1.

    [bold]Examples[/]

      atropos serve

      atropos serve --host 0.0.0.0 --token-file token
    """
    from pydantic import ValidationError

    from atropos_core.errors import ConfigError
    from atropos_trajectory_api.server.options import ServeOptions

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
