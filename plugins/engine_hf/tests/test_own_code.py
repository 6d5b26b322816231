"""A model with its own Python code is refused: the code is not run, and the error says so."""

from __future__ import annotations

import json

import pytest

from atropos_core.errors import FitError
from atropos_engine_hf.loading import load_model


def test_a_model_with_code_of_its_own_is_refused_and_the_code_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "stranger", "auto_map": {"AutoConfig": "configuration_stranger.Stranger"}})
    )
    (tmp_path / "configuration_stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(FitError, match="does not run code that comes with a model"):
        load_model(tmp_path, "auto", "cpu")
    assert not (tmp_path / "ran").exists()
