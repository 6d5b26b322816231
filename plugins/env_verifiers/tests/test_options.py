"""What can be known of the environment without verifiers: its options, and that it is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.requirements import check_requires
from atropos_env_verifiers.config import VerifiersOptions


def has_verifiers() -> bool:
    try:
        return bool(version("verifiers"))
    except PackageNotFoundError:
        return False


def test_all_that_follows_the_colon_is_the_id_and_a_folder_is_where_the_run_file_says():
    provider = load_plugins().registry.find("environment", "verifiers:owner/name@1.0").provider
    assert provider.options().id == "owner/name@1.0"
    assert VerifiersOptions(id="name", folder="environments").folder.is_absolute()


def test_an_id_is_needed():
    with pytest.raises(ValidationError, match="(?s)id.*required"):
        VerifiersOptions()


@pytest.mark.skipif(has_verifiers(), reason="verifiers is installed here")
def test_a_package_that_is_missing_is_named_as_it_is_installed():
    with pytest.raises(FitError, match="'verifiers', which is not installed.*\n.*pip install verifiers"):
        check_requires(load_plugins().registry.find("environment", "verifiers"))
