"""Code of a user's own, named by its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core.errors import PluginError
from atropos_core.plugins.references import load_reference


def test_a_file_that_could_not_be_imported_is_read_anew_and_never_half_made(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("half = 1\nraise RuntimeError('not yet')\n")
    for _ in range(2):
        with pytest.raises(PluginError, match="could not be imported: RuntimeError: not yet"):
            load_reference(f"{file}:half")
    file.write_text("half = 2  # and this time all of it\nwhole = half\n")
    assert load_reference(f"{file}:whole") == 2
    assert load_reference(f"{file}:half") == 2
