"""Says which SkyRL is tested, and what of it the adapter does not know: `SKYRL_SOURCE=/a/checkout make test-skyrl`. At the
end, nothing that these tests started has left a file in /dev/shm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.shared_memory import SharedFiles

GONE_S = 60.0  # after a kill, multiprocessing's own process removes what is left


def pytest_report_header() -> list[str]:
    if find_spec("skyrl") is None:
        return []
    from atropos_adapter_skyrl.rows import output_of
    from atropos_adapter_skyrl.signatures import form, unknown

    others = unknown(output_of([], [], [], step_wise=True, own_advantages=False))
    return [f"SkyRL: {form()}", *(f"not known to the adapter: {one}" for one in others)]


@pytest.fixture(scope="session", autouse=True)
def no_file_is_left_in_shared_memory() -> Iterator[None]:
    with SharedFiles().watching() as files:
        yield
        until = time.monotonic() + GONE_S
        while files.left() and time.monotonic() < until:
            time.sleep(0.2)
    assert not files.left()
