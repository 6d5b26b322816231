"""tools/install.py: pip's settings reach uv, and each environment has its table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

from tools.install import PINS, REPOSITORY, editable, make, uv_variables, without_folder

HELP = """
  -i, --index-url <url>       Base URL of the Python Package Index (default
                              https://index.example/simple). This should point
  --extra-index-url <url>     Extra URLs of package indexes
"""


def test_indexes_are_searched_in_pips_order_its_default_one_first():
    found = uv_variables("global.extra-index-url='file:///a/simple file:///b/simple'\n", HELP, {})
    assert found["UV_INDEX"] == "https://index.example/simple file:///a/simple file:///b/simple"
    assert found["UV_DEFAULT_INDEX"] == "file:///b/simple"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_the_environment_wins_over_files_and_uvs_own_variables_over_both():
    listed = (
        ":env:.find-links='/mine'\n:env:.index-url='https://mine.example/simple'\nglobal.find-links='/all'\n"
        "global.index-url='https://all.example/simple'\nglobal.cert='/all.pem'\nfreeze.timeout='1'\n"
    )
    found = uv_variables(listed, HELP, {"SSL_CERT_FILE": "/own.pem"})
    assert found["UV_FIND_LINKS"] == "/mine" and found["UV_DEFAULT_INDEX"] == "https://mine.example/simple"
    assert "SSL_CERT_FILE" not in found and "UV_HTTP_TIMEOUT" not in found


def test_several_lines_of_a_setting_are_several_of_uvs(tmp_path, monkeypatch):
    """As pip itself says it, of a file as people write it."""
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nextra-index-url =\n    https://a.example/simple\n    https://b.example/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    said = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(said, capture_output=True, text=True, timeout=60, check=True).stdout
    assert uv_variables(listed, HELP, {})["UV_INDEX"].endswith(
        "simple https://a.example/simple https://b.example/simple"
    )


@pytest.mark.parametrize("help_text", ["", "  --index-url <url>  Base URL"])
def test_without_an_index_that_is_known_uv_takes_its_own(help_text):
    assert "UV_INDEX" not in uv_variables("", help_text, {}) and "UV_DEFAULT_INDEX" not in uv_variables(
        "", help_text, {}
    )


def test_pip_says_its_default_index_as_this_reads_it():
    said = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--help"]
    text = subprocess.run(said, capture_output=True, text=True, timeout=60, check=True).stdout
    assert uv_variables("", text, {})["UV_INDEX"].startswith("https://")


def test_each_file_of_pins_has_its_table_and_its_target():
    tables = tomllib.loads((PINS / "packages.toml").read_text())
    files = {path.stem for path in PINS.glob("*.txt")} - {"constraints"}
    makefile = (REPOSITORY / "Makefile").read_text()
    named = re.search(r"^NAMES := (.+)$", makefile, re.MULTILINE)
    assert named and set(named[1].split()) == files == set(tables)


def test_each_package_of_a_table_is_in_the_checkout():
    for how in tomllib.loads((PINS / "packages.toml").read_text()).values():
        for path in editable(how.get("packages", [])):
            folder = path.partition("[")[0]
            assert path == "-e" or (REPOSITORY / folder / "pyproject.toml").is_file(), path


def test_sets_of_packages():
    everything = {*editable(["all"]), *editable(["worlds"]), *editable(["launcher_ray"])}
    projects = {f"./{path.parent.relative_to(REPOSITORY)}" for path in REPOSITORY.glob("*/*/pyproject.toml")}
    assert {one.partition("[")[0] for one in everything - {"-e"}} == {
        one for one in projects if one.startswith(("./libs/", "./plugins/"))
    } | {"."}
    assert editable(["core"])[:2] == ["-e", "."] and "./plugins/env_gem" not in editable(["all"])


def test_a_python_that_the_pins_are_not_for_is_refused_before_anything_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("tools.install.REPOSITORY", tmp_path)
    with pytest.raises(SystemExit, match="the pins are for an older one; this is"):
        make("old", {"python": [3.2, 3.3], "because": "the pins are for an older one"})
    assert not list(tmp_path.iterdir())


def test_a_package_whose_folder_was_removed_is_to_be_uninstalled(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/pyproject.toml").touch()
    (tmp_path / "gone/__pycache__").mkdir(parents=True)
    listed = [{"name": name, "editable_project_location": str(tmp_path / name)} for name in ("here", "gone", "never")]
    assert without_folder(json.dumps(listed)) == ["gone", "never"]
