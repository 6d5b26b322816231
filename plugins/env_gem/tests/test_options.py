"""What is known without gem: the environment's options, and that gem is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.requirements import check_requires
from atropos_env_gem.config import GemOptions


def has_gem() -> bool:
    try:
        return bool(version("gem-llm"))
    except PackageNotFoundError:
        return False


def test_all_that_follows_the_first_colon_is_the_id():
    provider = load_plugins().registry.find("environment", "gem:game:GuessTheNumber-v0-easy").provider
    assert provider.options().id == "game:GuessTheNumber-v0-easy"


def test_an_id_is_needed():
    with pytest.raises(ValidationError, match="(?s)id.*required"):
        GemOptions()


@pytest.mark.skipif(has_gem(), reason="gem is installed here")
def test_a_package_that_is_missing_is_named_as_it_is_installed():
    with pytest.raises(FitError, match="'gem-llm', which is not installed.*\n.*pip install gem-llm"):
        check_requires(load_plugins().registry.find("environment", "gem"))
