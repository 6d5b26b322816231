"""Objects of Python as the flags of a run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from atropos_core.errors import ConfigError
from atropos_core.scripting.arguments import Arguments


def test_a_function_of_a_module_is_named_where_an_option_names_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text("def correct(completions, answer):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    correct = importlib.import_module("own_rewards").correct
    arguments = Arguments()
    arguments.several("environment", {"use": "dataset", "tasks": "rows.jsonl", "score": ["numeric", correct]})
    assert f'environment.dataset.score=["numeric", "{tmp_path}/own_rewards.py:correct"]' in arguments.changes


def test_a_function_that_no_process_can_import_is_told_to_move_into_a_file() -> None:
    def correct(completions: list[str]) -> list[float]:
        return [1.0]

    with pytest.raises(ConfigError, match="environment.dataset.score was given <function") as refused:
        Arguments({"environment.dataset.score": correct})
    assert refused.value.remedy == "Put the function into a file, and give its place: './score.py:correct'."
