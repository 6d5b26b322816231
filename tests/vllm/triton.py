"""A Triton with a backend for CPUs, for vLLM's second model runner: Triton's own interpreter."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_BACKEND = """
from triton.backends.{0} import {1}


class Interpreted({1}):
    is_active = staticmethod(lambda: True)
    supports_target = staticmethod(lambda target: False)


Interpreted.__abstractmethods__ = frozenset()  # the interpreter calls none of them
"""


def interpreter(python: str, folder: Path) -> dict[str, str]:
    """The environment of a server that finds it, made in `folder`. `python` is a Python in whose environment Triton is."""
    find = "import triton, numpy; print(triton.__file__, numpy.__file__)"  # it does not run with any numpy
    found = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True)
    for package in (Path(name).parent for name in found.stdout.split()):
        for part in package.parent.glob(f"{package.name}*"):
            (folder / part.name).symlink_to(part)
    (backend := folder / "interpreted_backend").mkdir()
    for module, base in (("driver", "DriverBase"), ("compiler", "BaseBackend")):
        (backend / f"{module}.py").write_text(_BACKEND.format(module, base))
    (metadata := folder / "interpreted_backend-0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-backend\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted_backend\n")
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "TRITON_INTERPRET": "1"}
