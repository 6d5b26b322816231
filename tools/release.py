"""Give every package of this repository a version, and tag it: python -m tools.release 0.2.0

The version stands in `atropos_core/__init__.py`, and in the pyproject.toml of `distribution/`, of each library and of each plugin. The
range of core that they require follows it. The newest heading of CHANGELOG.md gets the version and the day. There is one commit
and one tag, so a tagged tree always says its own version. docs/decisions/0015-one-version.md says why no build backend asks git.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tools.metadata import projects

REPOSITORY = Path(__file__).resolve().parent.parent
CORE = Path("atropos_core/__init__.py")
PROVIDER = Path("atropos_core/plugins/provider.py")  # the range of core that a component wants unless it says another
CHANGES = Path("CHANGELOG.md")
FRAGMENTS = Path("changes")
HEADING = re.compile(r"^## (\S+), unreleased$", re.M)


def versions(root: Path) -> dict[Path, str]:
    """What each package says of itself, by the file that says it."""
    found = {CORE: _only(r'^__version__ = "(.+)"$', root / CORE)}
    for path in [folder / "pyproject.toml" for folder in projects(root)[1:]]:
        found[path.relative_to(root)] = _only(r'^version = "(.+)"$', path)
    return found


def core_range(version: Version) -> str:
    """Below 1.0 each minor version may break what plugins stand on; from then on each major one."""
    below = f"{version.major + 1}" if version.major else f"0.{version.minor + 1}"
    return f">={version.major}.{version.minor},<{below}"


def write(root: Path, version: Version, day: date) -> list[Path]:
    """The files that now say this version."""
    [before] = {Version(said) for said in versions(root).values()}
    changed = []
    for path, said in versions(root).items():
        text = (root / path).read_text()
        name = "__version__" if path == CORE else "version"
        text = text.replace(f'{name} = "{said}"', f'{name} = "{version}"', 1)
        (root / path).write_text(text.replace(core_range(before), core_range(version)))
        changed.append(path)
    provider = root / PROVIDER
    provider.write_text(provider.read_text().replace(core_range(before), core_range(version)))
    changes = root / CHANGES
    changes.write_text(HEADING.sub(f"## {version}, {day.isoformat()}", changes.read_text(), count=1))
    return [*changed, PROVIDER, CHANGES]


def refusal(root: Path, version: Version) -> str | None:
    """Why this cannot be released from here."""
    said = {Version(one) for one in versions(root).values()}
    if len(said) > 1:
        return f"the packages say several versions: {', '.join(map(str, sorted(said)))}. Make them one."
    if _git(root, "status", "--porcelain"):
        return "there are uncommitted changes. Commit them, or take them back."
    if _git(root, "tag", "--list", f"v{version}"):
        return f"there is a tag v{version} already. Take a higher version."
    if version < max(said):
        return f"{version} is below {max(said)}, which the packages say already. Take a higher version."
    if not HEADING.search((root / CHANGES).read_text()):
        return f"{CHANGES} has no heading `## VERSION, unreleased`. Run `make changes VERSION={version}`."
    if found := sorted(path.name for path in (root / FRAGMENTS).glob("*.md") if path.name != "README.md"):
        return f"{CHANGES} lacks {', '.join(found)} of {FRAGMENTS}/. Run `make changes VERSION={version}`."
    return None


def main(arguments: list[str], root: Path = REPOSITORY) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release", description="Version, commit and tag all packages."
    )
    parser.add_argument("version", help="such as 0.2.0")
    asked = parser.parse_args(arguments).version
    try:
        version = Version(asked)
    except InvalidVersion:
        sys.exit(f"{asked!r} is no version. Give one such as 0.2.0.")
    if why := refusal(root, version):
        sys.exit(f"{version} is not released: {why}")
    changed = write(root, version, date.today())
    _git(root, "add", *map(str, changed))
    _git(root, "commit", "--quiet", "-m", f"{version}")
    _git(root, "tag", "--annotate", f"v{version}", "-m", f"{version}")
    print(f"v{version} is committed and tagged here. Push both: git push --follow-tags")


def _only(pattern: str, path: Path) -> str:
    found = re.findall(pattern, path.read_text(), re.M)
    if len(found) != 1:
        sys.exit(f"{path} must say one version in a line of its own; it says {found or 'none'}.")
    return str(found[0])


def _git(root: Path, *arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"git {arguments[0]} failed: {ended.stderr.strip()}")
    return ended.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
