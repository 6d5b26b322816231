"""Says which SkyRL is tested, and what of it the adapter does not know: `SKYRL_SOURCE=/a/checkout make test-skyrl`."""

from __future__ import annotations

from importlib.util import find_spec


def pytest_report_header() -> list[str]:
    if find_spec("skyrl") is None:
        return []
    from atropos_adapter_skyrl.rows import output_of
    from atropos_adapter_skyrl.signatures import form, unknown

    others = unknown(output_of([], [], [], step_wise=True, own_advantages=False))
    return [f"SkyRL: {form()}", *(f"not known to the adapter: {one}" for one in others)]
