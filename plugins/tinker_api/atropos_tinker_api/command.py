"""`atropos tinker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atropos_core.cli.options import EngineOption, FileArgument, SetOption, TrainerOption, Uses

USES = Uses("atropos tinker", ("model", "date", "seed", "deterministic", "engine", "trainer", "watch"))


def add(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tinker", rich_help_panel="Connect")(tinker)


def tinker(
    file: FileArgument = None,
    model: Annotated[
        str | None,
        typer.Option(help="The base model: a directory, a Hugging Face id, or tiny. \\[default: tiny]"),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A further name of the model for clients, as Qwen/Qwen3-8B. Repeatable. \\[default: its directory]"
        ),
    ] = None,
    engine: EngineOption = None,
    trainer: TrainerOption = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="The server's directory: journals, adapters, checkpoints.")
    ] = Path("tinker"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than this machine's own only with --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8020,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the API key of clients, readable only by you: one word that begins with tml-."),
    ] = None,
    adapters: Annotated[
        int,
        typer.Option(min=1, help="Most adapters in the trainer's memory, and in the engine's; others wait on disk."),
    ] = 16,
    snapshots: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most snapshots on disk of one session (save_weights_and_get_sampling_client); the one that was used longest ago goes.",
        ),
    ] = 32,
    snapshot_hours: Annotated[
        float,
        typer.Option(min=0.001, help="Hours after the last request of a session until its snapshots are removed."),
    ] = 24.0,
    body_mb: Annotated[float, typer.Option(min=0.01, help="Most megabytes of one request.")] = 64.0,
    queue_mb: Annotated[
        float, typer.Option(min=0.01, help="Most megabytes of training requests that wait for the trainer.")
    ] = 512.0,
    request_s: Annotated[float, typer.Option(min=1.0, help="Seconds for a request to arrive.")] = 60.0,
    connections: Annotated[int, typer.Option(min=1, help="Most connections at one time.")] = 2048,
    changes: SetOption = None,
) -> None:
    """Serve the Tinker protocol on this machine: scripts for tinker and tinker-cookbook train and sample here, unchanged.

    Requests are kept in a journal. If the server is killed, start it again with the same --dir: clients continue.

    [bold]Examples[/]

      atropos tinker --model tiny

      atropos tinker --model Qwen/Qwen3-0.6B --name Qwen/Qwen3-8B --dir tinker-qwen

      TINKER_BASE_URL=http://127.0.0.1:8020 TINKER_API_KEY=tml-local python script.py
    """
    from atropos_core.cli.options import configure
    from atropos_tinker_api.serving import ServeOptions, serve

    loaded, resolved, plugins = configure(file, model=model, engine=engine, trainer=trainer, changes=changes, uses=USES)
    options = ServeOptions(
        names=tuple(name or ()),
        directory=directory,
        host=host,
        port=port,
        token_file=token_file,
        adapters=adapters,
        body_bytes=int(body_mb * 1e6),
        queue_bytes=int(queue_mb * 1e6),
        request_s=request_s,
        connections=connections,
        snapshots=snapshots,
        snapshot_hours=snapshot_hours,
    )
    serve(options, loaded.config, resolved, plugins)
