"""The checks of engine "vllm" of `python -m benchmarks.gpu`: on a CPU in their small form, which is the same code."""

from __future__ import annotations

import itertools

import pytest

from atropos_core.guards.deadlines import within
from tests.gpu.checks import CHECKS
from tests.gpu.pair import Setting
from tests.gpu.report import Check, Report
from tests.gpu.vllm_checks import WAYS, missing
from tests.gpu.vllm_killed import NAMES
from tests.vllm.hosted import DEVICE

pytestmark = pytest.mark.timeout(1000)

SETTING = Setting(DEVICE, 5e7, small=DEVICE == "cpu")
OF_VLLM = {check.name: check for check in CHECKS if check.group == "vllm" or check.name == "loop"}
SHORT = ["vllm_ipc_eager_float32"]  # in .ci/run, which also runs test_sleep_mode


async def holds(check: Check) -> None:
    report = Report(print)
    await within(check.run(SETTING, report), 3 * check.deadline_s, check.name)  # two cores that others use too
    report.settle()
    assert "NOT RUN" not in report.figures


@pytest.mark.parametrize("name", SHORT)
async def test_the_check_holds(name: str) -> None:
    await holds(OF_VLLM[name])


@pytest.mark.parametrize("name", [name for name in OF_VLLM if name not in SHORT])
async def test_another_check_holds(name: str) -> None:
    await holds(OF_VLLM[name])


def test_the_checks_of_ipc_have_every_pair_of_settings_of_vllm_and_each_process_is_killed() -> None:
    ways = [way for way in WAYS.values() if way.bridge == "ipc"]
    for one, other in itertools.combinations(("compiled", "dtype", "runner"), 2):
        assert len({(getattr(way, one), getattr(way, other)) for way in ways}) == 4
    assert {victim for way in WAYS.values() for victim in way.kills} == set(NAMES)


def test_what_is_missing_is_named() -> None:
    assert missing() == []
    assert missing("a_package_of_nobody") == ["a_package_of_nobody"]
