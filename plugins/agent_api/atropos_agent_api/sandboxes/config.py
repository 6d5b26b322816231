"""Options of the sandboxes."""

from __future__ import annotations

from pydantic import Field

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
