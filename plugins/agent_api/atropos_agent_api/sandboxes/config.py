"""Options of the sandboxes."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.provider import Options


class BubblewrapOptions(Options):
    visible: tuple[str, ...] = Field(
        (),
        description="files and folders that programs may read, besides the system's and the installation of the command: the "
        "folder of a program's own modules, say",
    )


class DockerOptions(Options):
    image: str = Field(description="the image that programs run in; it must be there already")
    python: str = Field("python3", description="a Python of 3.9 or later in that image, which starts the program")


class ExternalOptions(Options):
    host: str = Field(
        "127.0.0.1", description="where episodes are offered, and the agent API is; 0.0.0.0: to other machines as well"
    )
    port: int = Field(8010, ge=0, le=65535, description="0: any free one")
    token_file: AbsolutePath | None = Field(
        None,
        description="a file with the token of those who take episodes, yours alone; made in the run's directory where it is left out",
    )
    patience_s: float = Field(
        3600.0, gt=0, description="how long episodes wait while no program takes any, before their rollouts fail"
    )
