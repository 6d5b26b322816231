"""These tests need verifiers in an environment of their own: of either contract, whose tests lie in `test_v0.py` and `test_v1.py`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tests.left_out import NONE_OF_THEM, stand_in


def contract() -> str:
    """Of the verifiers that is installed; empty where there is none."""
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        return ""
    return "v1" if installed.startswith("0.4.") else "v0"


OTHERS = {"v0": ["test_v1.py"], "v1": ["test_v0.py"], "": NONE_OF_THEM}
collect_ignore_glob = OTHERS[contract()]


pytest_collect_file = stand_in(__file__, "" if contract() else "verifiers", "make test-verifiers")
