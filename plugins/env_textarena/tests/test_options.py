"""What is known without textarena: the environment's options, and that textarena is missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.requirements import check_requires
from atropos_env_textarena.config import TextarenaOptions


def test_what_follows_the_colon_is_the_game():
    provider = load_plugins().registry.find("environment", "textarena:TicTacToe-v0").provider
    assert provider.options().game == "TicTacToe-v0"


@pytest.mark.parametrize(
    ("options", "says"), [({}, "(?s)game.*required"), ({"game": "x", "players": 0}, "greater than or equal to 1")]
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        TextarenaOptions(**options)


@pytest.mark.skipif(find_spec("textarena") is not None, reason="textarena is installed here")
def test_a_package_that_is_missing_is_named_before_anything_is_built():
    with pytest.raises(FitError, match="'textarena', which is not installed.*\n.*pip install textarena"):
        check_requires(load_plugins().registry.find("environment", "textarena"))
