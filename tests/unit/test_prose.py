"""tools/prose.py counts places in prose, and a folder may only come to have fewer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import prose

TEXT = '''"""What a module is for, as a clause."""

# It is no secret, and stands beside the code.
said = "write where there is room, alone"
x = "alone"  # three places: short texts such as that one are code
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name in ("plugins/one/module.py", "plugins/one/tests/test_one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "README.md").write_text("What is new\n\nNobody waits.\nWhere nobody is, `alone`.\n\n```\nalone\n```\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / prose.LIMITS).write_text('{".": 2, "plugins/one": 5}')
    return tmp_path


def test_places_are_counted_by_folder_without_tests_and_code(checkout: Path) -> None:
    assert prose.counts(checkout) == {".": 2, "plugins/one": 5}
    assert [line for line, _, _ in prose.places(checkout / "plugins/one/module.py")] == [1, 3, 3, 4, 4]


def test_more_places_than_recorded_fail_and_fewer_do_not(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prose.main([], checkout)
    assert capsys.readouterr().out == ""
    (checkout / "README.md").write_text("Plain.\n")
    prose.main([], checkout)
    assert "1 folders have fewer places than recorded" in capsys.readouterr().out
    (checkout / "README.md").write_text("The model alone.\nBy itself.\nIt works by itself.\n")
    with pytest.raises(SystemExit, match=r"\.: 3 places, 2 are allowed"):
        prose.main([], checkout)


def test_recording_only_lowers_limits_and_adds_new_folders(checkout: Path) -> None:
    (checkout / prose.LIMITS).write_text('{".": 0, "plugins/one": 9, "plugins/gone": 3}')
    prose.main(["--record"], checkout)
    assert json.loads((checkout / prose.LIMITS).read_text()) == {".": 0, "plugins/one": 5}


def test_every_limit_is_of_a_folder_that_is_there() -> None:
    limits = json.loads((prose.REPOSITORY / prose.LIMITS).read_text())
    assert {name for name in limits if not (prose.REPOSITORY / name).is_dir()} == set()
