"""All packages are of one version, and a tag that says it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from datetime import date
from importlib.metadata import entry_points
from importlib.metadata import version as installed
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import atropos_core
from atropos_core.cli import run_app
from atropos_core.plugins.provider import CORE_API
from tests import wheels
from tests.conftest import REPOSITORY
from tools import metadata, release

WHO = ("-c", "user.name=a", "-c", "user.email=a@b")


def test_every_package_says_the_version_of_core_and_wants_a_core_of_that_version():
    said = release.versions(REPOSITORY)
    assert len(said) == 2 + len(list(REPOSITORY.glob("[lp]*s/*/pyproject.toml")))
    assert set(said.values()) == {atropos_core.__version__}
    assert release.core_range(Version(atropos_core.__version__)) == CORE_API
    for path in said.keys() - {release.CORE}:
        assert CORE_API in (REPOSITORY / path).read_text(), path


def test_what_is_installed_has_that_version_too():
    ours = {entry.dist.name for entry in entry_points(group="atropos") if entry.dist and "atropos" in entry.dist.name}
    assert "atropos-core" in ours
    assert {installed(name) for name in ours} == {atropos_core.__version__}


def test_the_command_line_says_its_version(capsys):
    assert run_app(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"atropos {atropos_core.__version__}"


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.1.0", ">=0.1,<0.2"), ("0.9.3", ">=0.9,<0.10"), ("1.4.2", ">=1.4,<2"), ("2.0.0", ">=2.0,<3")],
)
def test_the_range_of_core_holds_its_version_and_none_that_may_break_it(version, wanted):
    assert release.core_range(Version(version)) == wanted
    assert SpecifierSet(wanted).contains(version)


def git(root: Path, *arguments: str) -> str:
    ended = subprocess.run(["git", *WHO, *arguments], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """What a release changes and what a wheel is made of, as a repository of its own."""
    root = tmp_path / "checkout"
    kept = ("atropos_core", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "changes")
    files = git(
        REPOSITORY,
        "ls-files",
        "--",
        *kept,
        "distribution",
        "plugins/sinks",
        "libs/*/pyproject.toml",
        "plugins/*/pyproject.toml",
    ).splitlines()
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    for change in set((root / "changes").glob("*.md")) - {
        root / "changes/README.md"
    }:  # of the next release, which is not this one
        change.unlink()
    git(tmp_path, "init", "-q", str(root))
    (root / "CHANGELOG.md").write_text(
        "# Changes\n\n<!-- towncrier release notes start -->\n\n## 9.9.0, unreleased\n\n- Something.\n\n## 0.0.1, 2020-01-01\n"
    )
    git(root, "add", ".")
    git(root, "commit", "-qm", "before")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@b")
    return root


def test_a_release_is_one_commit_and_one_tag_and_the_version_of_wheels_that_an_export_makes(checkout, tmp_path):
    release.main(["9.9.0"], checkout)
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "describe", "--exact-match") == "v9.9.0"
    assert set(release.versions(checkout).values()) == {"9.9.0"}
    assert f"## 9.9.0, {date.today().isoformat()}" in (checkout / "CHANGELOG.md").read_text()
    git(checkout, "archive", "--output", str(tmp_path / "export.zip"), "HEAD")
    with zipfile.ZipFile(tmp_path / "export.zip") as packed:
        packed.extractall(tmp_path / "export")
    [core] = wheels.build(tmp_path / "core", tmp_path / "export")
    [plugin] = wheels.build(tmp_path / "plugin", tmp_path / "export/plugins/sinks")
    assert core.name.startswith("atropos_core-9.9.0-") and plugin.name.startswith("atropos_plugin_sinks-9.9.0-")
    with zipfile.ZipFile(plugin) as packed:
        [metadata] = [name for name in packed.namelist() if name.endswith("METADATA")]
        assert "Requires-Dist: atropos-core<10,>=9.9" in packed.read(metadata).decode()
    with zipfile.ZipFile(core) as packed:
        assert 'CORE_API = ">=9.9,<10"' in packed.read("atropos_core/plugins/provider.py").decode()


@pytest.mark.parametrize(
    ("version", "change", "said"),
    [
        ("nonsense", None, "'nonsense' is no version"),
        ("0.0.1", None, "0.0.1 is below"),
        ("9.9.0", "README.md", "uncommitted changes"),
        ("9.9.0", "plugins/sinks/pyproject.toml", "several versions"),
        ("9.9.0", "CHANGELOG.md", "no heading"),
        ("9.9.0", "tag", "a tag v9.9.0 already"),
        ("9.9.0", "changes/sink.md", "lacks sink.md of changes/"),
    ],
)
def test_what_cannot_be_released_is_refused_and_nothing_is_changed(checkout, version, change, said):
    if change == "tag":
        git(checkout, "tag", "v9.9.0")
    elif change is not None:
        path = checkout / change
        path.touch()
        git(checkout, "add", change)
        path.write_text(path.read_text().replace('version = "0', 'version = "1').replace(", unreleased", "") + "\n")
        if change != "README.md":
            git(checkout, "commit", "-qam", "change")
    before = git(checkout, "rev-parse", "HEAD"), git(checkout, "status", "--porcelain")
    with pytest.raises(SystemExit, match=said):
        release.main([version], checkout)
    assert (git(checkout, "rev-parse", "HEAD"), git(checkout, "status", "--porcelain")) == before


def test_changes_are_built_of_their_files_under_a_heading_that_a_release_finds(checkout):
    (checkout / "changes/sink.md").write_text("A sink writes `metrics.parquet`.\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "a change")
    built = ["-m", "towncrier", "build", "--yes", "--version", "10.0.0"]
    subprocess.run([sys.executable, *built], cwd=checkout, check=True, capture_output=True)
    written = (checkout / "CHANGELOG.md").read_text()
    assert "## 10.0.0, unreleased\n\n- A sink writes `metrics.parquet`.\n\n## 9.9.0, unreleased\n" in written
    assert not (checkout / "changes/sink.md").exists()
    git(checkout, "commit", "-qm", "changes")
    assert release.refusal(checkout, Version("10.0.0")) is None


def test_every_package_says_the_same_of_licence_python_and_kind():
    metadata.main(["--check"])


def test_a_package_that_says_something_else_is_named(checkout):
    for project in metadata.projects(checkout):
        shutil.copy(REPOSITORY / "LICENSE", project)
    metadata.main(["--check"], checkout)
    path = checkout / "plugins/sinks/pyproject.toml"
    path.write_text(path.read_text().replace("Typing :: Typed", "Typing :: Stubs Only"))
    with pytest.raises(SystemExit, match="sinks/pyproject.toml"):
        metadata.main(["--check"], checkout)
    metadata.main([], checkout)
    assert "Typing :: Typed" in path.read_text()
