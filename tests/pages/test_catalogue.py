"""docs/catalogue.md is what the script makes of the results."""

from __future__ import annotations

import json
import re

from benchmarks.worlds import without_folder, write_rows
from tests.conftest import REPOSITORY
from tools.make_catalogue import NOTES, PAGE, files_page, learned_page, page, whole


def test_the_page_is_what_the_results_say():
    assert PAGE.read_text() == whole(), "run `python -m tools.make_catalogue`"


def test_the_rows_of_a_source_replace_its_own_alone(tmp_path):
    row = {"name": "a", "imports": True, "runs": False, "trains": None, "note": "no | answer"}
    write_rows("one", "1.0", [row], tmp_path / "worlds.json")
    write_rows("two", "2.0", [row, {**row, "name": "B", "runs": True, "trains": True}], tmp_path / "worlds.json")
    write_rows("one", "1.1", [{**row, "name": "c"}], tmp_path / "worlds.json")
    made = page(json.loads((tmp_path / "worlds.json").read_text()))
    assert "## one 1.1" in made and "## two 2.0" in made and "1.0\n" not in made
    assert "| c | yes | no | – | no \\| answer |" in made
    assert "2 of 2 import, 1 run, 1 of 1 that were tried train." in made


def test_a_file_trains_whose_groups_had_unequal_scores_and_whose_ids_were_sampled() -> None:
    trained = {"steps": 5, "replies": 3, "other_ids": 0, "alignment": 4e-6}
    row = {"file": "a.py", "imports": True, "opens": True, "group": 8, "ids": 8}
    faulty, fault = next(iter(NOTES.items()))
    rows = [
        {**row, "trained": trained},
        {**row, "trained": {**trained, "replies": 0}},
        {**row, "trained": {**trained, "other_ids": 1}},
        {**row, "trained": {"steps": 0, "why": "tmp | run"}},
        {**row, "file": faulty, "trained": {"steps": 0, "why": "tmp | run"}},
        {**row, "group": 0, "evaluates": 2, "why": "none | no"},
    ]
    counts = dict.fromkeys(("files", "import", "open", "give a group", "evaluate alone", "trained"), 4)
    made = files_page({"counts": counts, "rows": rows})
    assert "| a.py | yes | yes | 8 | – | 4e-06 |  |" in made
    assert "| no group had unequal scores |" in made and "| no: other ids |" in made
    assert (
        "| a.py | yes | yes | 8 | – | no: tmp \\| run |  |" in made
        and f"| {faulty} | yes | yes | 8 | – | no | {fault} |" in made
    )
    assert "| a.py | yes | yes | no | 2 | – | none \\| no |" in made


def test_no_result_and_no_page_says_where_a_package_was_installed() -> None:
    files = [*(REPOSITORY / "benchmarks/results").glob("*"), *(REPOSITORY / "docs").rglob("*.md")]
    assert not [file.name for file in files if re.search(r"/\S*/site-packages/", file.read_text(encoding="utf-8"))]


def test_a_note_names_a_file_as_it_is_in_its_package() -> None:
    note = "No such file: '/somewhere/lib/python3.11/site-packages/textarena/a.json'"
    assert without_folder(note) == "No such file: 'textarena/a.json'"


def test_what_is_learned_is_a_mean_over_seeds_with_the_least() -> None:
    rows = [{"seed": 0, "before": 0.1, "after": 0.3}, {"seed": 1, "before": 0.2, "after": 0.35}]
    assert "| gem | 2 | 15 | 32 | +18 | +15 |" in learned_page(
        {"gem": {"gain": 0.175, "least_gain": 0.15, "rows": rows}}
    )
