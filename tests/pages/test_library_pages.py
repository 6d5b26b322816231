"""The examples in the READMEs of libs/."""

from __future__ import annotations

from typing import Any

import pytest

from atropos_core.errors import FitError, ProcessSilent
from atropos_core.interfaces import Finding
from tests.pages.blocks import the_block


def test_a_server_that_never_answers_is_given_up(capfd):
    with pytest.raises(ProcessSilent, match="the server gave no answer to POST /v1/completions"):
        exec(the_block("libs/server_watch/README.md", "import asyncio").text, {})
    assert "has given no answer" in capfd.readouterr().err


def test_a_device_that_torch_does_not_find_is_refused():
    with pytest.raises(FitError, match="cuda:99"):
        exec(the_block("libs/torch_models/README.md", "from atropos_torch_models").text, {})


def test_an_adapters_doctor_says_what_is_not_installed():
    names: dict[str, Any] = {}
    exec(
        the_block("libs/adapter_kit/README.md", "from atropos_adapter_kit").text.replace('"ray"', '"no-such-package"'),
        names,
    )
    [finding] = names["doctor"](None)
    assert finding == Finding("no-such-package", False, "not installed", "pip install ray")
