"""The contract of sandboxes: ours keep it, and each planted bug breaks the checks that name it and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atropos_core.errors import FitError
from atropos_testing import check, sandbox_contract
from plugins.agent_api.tests.broken_sandboxes import SANDBOXES

test_process = sandbox_contract("process")


def broken(target: Any, **options: Any) -> set[str]:
    return {finding.subject for finding in check("sandbox", target, options) if finding.ok is False}


def test_bubblewrap() -> None:
    found = check("sandbox", "bubblewrap")
    if found[0].ok is False and FitError.__name__ in found[0].detail:
        pytest.skip(f"bubblewrap is not permitted here: {found[0].detail}")
    assert not [finding for finding in found if finding.ok is not True]


@pytest.mark.parametrize("sandbox", SANDBOXES, ids=lambda one: one.__name__)
def test_a_planted_bug_breaks_the_checks_that_name_it_and_no_others(sandbox: Callable[..., Any]) -> None:
    assert broken(sandbox) == SANDBOXES[sandbox]
