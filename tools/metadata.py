"""What every package of this repository says of itself in the same words: python -m tools.metadata

Writes the lines between `license` and `dependencies` of each pyproject.toml that all of them share, and gives each package its copy of the
licence, which a wheel can only take from its own folder. `--check` changes nothing and ends with 1 where something would change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
KEYWORDS = ("reinforcement learning", "language models", "GRPO", "RLHF", "post-training")
CLASSIFIERS = (
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
)
BEGIN, END = 'license = "MIT"\n', 'requires-python = ">=3.11"\n'


def projects(root: Path) -> list[Path]:
    """The folder of each package: core, the libraries, the plugins and the distribution."""
    return [root, root / "distribution", *installed_with_core(root)]


def installed_with_core(root: Path) -> list[Path]:
    """The folder of each library, then of each plugin."""
    return [path.parent for storey in ("libs", "plugins") for path in sorted((root / storey).glob("*/pyproject.toml"))]


def shared() -> str:
    lines = ['license-files = ["LICENSE"]', f"keywords = [{', '.join(map(_quoted, KEYWORDS))}]", "classifiers = ["]
    return "\n".join([*lines, *(f"  {_quoted(one)}," for one in CLASSIFIERS), "]", ""])


def wanted(root: Path) -> dict[Path, str]:
    """What each file should hold."""
    licence = (root / "LICENSE").read_text()
    found = {}
    for project in projects(root):
        path = project / "pyproject.toml"
        before, began, rest = path.read_text().partition(BEGIN)
        _, ended, after = rest.partition(END)
        if not (began and ended):
            sys.exit(
                f"{path} has no line {BEGIN.strip()} with {END.strip()} below it: what is shared stands between the two."
            )
        found[path] = before + began + shared() + ended + after
        found[project / "LICENSE"] = licence
    return found


def main(arguments: list[str], root: Path = REPOSITORY) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.metadata", description="Write what all packages say alike.")
    parser.add_argument("--check", action="store_true", help="change nothing; end with 1 where something would change")
    check = parser.parse_args(arguments).check
    differing = {path: text for path, text in wanted(root).items() if not path.is_file() or path.read_text() != text}
    if check and differing:
        sys.exit(
            f"not as `python -m tools.metadata` writes them: {', '.join(str(path.relative_to(root)) for path in differing)}"
        )
    for path, text in differing.items():
        path.write_text(text)


def _quoted(text: str) -> str:
    return f'"{text}"'


if __name__ == "__main__":
    main(sys.argv[1:])
