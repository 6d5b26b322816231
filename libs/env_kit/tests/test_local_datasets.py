"""Data sets of the hub that are files here: what is needed for them."""

from __future__ import annotations

import sys

import pytest

from atropos_core.errors import ConfigError
from atropos_env_kit.local_datasets import serve_datasets


def test_files_for_data_sets_without_the_package_are_one_error_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    serve_datasets({})
    with pytest.raises(ConfigError, match="(?s)needs the package of that name.*pip install datasets"):
        serve_datasets({"example/sums": str(tmp_path)})
