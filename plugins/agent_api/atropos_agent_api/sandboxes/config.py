"""Options of the sandboxes."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.options import Options


class BubblewrapOptions(Options):
    visible: tuple[str, ...] = Field(
        (),
        description="files and folders that programs may read, besides the system's and the command's installation, such as the "
        "folder of a program's own modules",
    )


class DockerOptions(Options):
    image: str = Field(description="image that programs run in; it must already exist on this machine")
    python: str = Field("python3", description="Python 3.9 or later in that image, which starts the program")


class ExternalOptions(Options):
    host: str = Field(
        "127.0.0.1", description="address for the episodes and the agent API; 0.0.0.0: other machines can reach it"
    )
    port: int = Field(8010, ge=0, le=65535, description="0: any free port")
    token_file: AbsolutePath | None = Field(
        None,
        description="file with the token that programs need to take episodes, readable only by you; unset: made in the run's directory",
    )
    patience_s: float = Field(
        3600.0,
        gt=0,
        description="seconds that episodes wait without any program asking for one, before their rollouts fail",
    )
