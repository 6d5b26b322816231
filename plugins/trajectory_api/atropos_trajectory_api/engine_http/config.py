"""Options of the engine `remote`."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.options import Options


class RemoteEngineOptions(Options):
    url: str = Field(description="of `atropos engine` on another machine, like http://10.0.0.5:8001")
    token_file: AbsolutePath | None = Field(None, description="file with its token")
