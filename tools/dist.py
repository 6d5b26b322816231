"""A wheel and a source distribution of each package: python -m tools.dist FOLDER

Each is built by its own backend from a source distribution of it, as an index would get them; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.metadata import REPOSITORY, projects


def build(project: Path, out: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(project)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        sys.exit(f"{project} was not built:\n{ended.stdout}{ended.stderr}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description="Build every package of this repository.")
    parser.add_argument("folder", type=Path, help="where the files go")
    folder: Path = parser.parse_args(arguments).folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if left := sorted(path.name for path in folder.iterdir()):
        sys.exit(
            f"{folder} is not empty ({left[0]}): what is installed from it would be a mixture. Give an empty folder."
        )
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda project: build(project, folder), projects(REPOSITORY)))
    print(f"{len(list(folder.glob('*.whl')))} wheels in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
