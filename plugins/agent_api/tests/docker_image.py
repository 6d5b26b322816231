"""An image for tests, of this machine's own Python and shell: nothing is downloaded.

`python -m plugins.agent_api.tests.docker_image NAME`.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

TOOLS = ("sh", "cat", "env", "false", "ls", "readlink", "setsid", "sleep", "touch", "true", "yes")


def libraries_of(binary: str) -> set[str]:
    said = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", said))


def make_image(name: str) -> None:
    """Raises CalledProcessError if the daemon refuses the image."""
    python, library = os.path.realpath(sys.executable), Path(sysconfig.get_path("stdlib"))
    found = {f"/bin/{tool}": str(shutil.which(tool)) for tool in TOOLS} | {python: python}
    files = {inside: os.path.realpath(path) for inside, path in found.items()}
    modules = [*library.rglob("*.py"), *library.rglob("*.so")]
    files |= {
        str(path): str(path) for path in modules if not {"site-packages", "test", "__pycache__"} & set(path.parts)
    }
    needed = {binary for binary in files.values() if not binary.endswith(".py")}
    files |= {path: os.path.realpath(path) for binary in needed for path in libraries_of(binary)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for inside, path in sorted(files.items()):
            tar.add(path, inside, recursive=False)
        link = tarfile.TarInfo("bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, python
        tar.addfile(link)
    subprocess.run(["docker", "import", "-", name], input=packed.getvalue(), check=True, capture_output=True)


if __name__ == "__main__":
    make_image(sys.argv[1])
