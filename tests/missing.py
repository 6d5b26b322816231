"""A pytest plugin, `-p tests.missing`: a test that needs torch, or a plugin of ours that does, is skipped where that is not installed,
and the reason names it. For `make test-pythons`, whose environments have no torch; nothing else loads it, so that no other suite
skips what it should run.

A failure counts as such a need where its own text says so: an import of what is missing, or a component of a plugin that is missing. Tests
whose failure says something else are in `NEEDS`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Generator

import pytest

COMPONENTS = {
    "hf": "atropos_engine_hf", "grpo": "atropos_trainer_grpo", "ipc": "atropos_bridge_ipc",
    "checkpoint": "atropos_bridge_checkpoint", "delta": "atropos_bridge_delta", "lora": "atropos_bridge_lora",
    "nccl": "atropos_bridge_nccl",
}  # fmt: skip
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", *COMPONENTS.values())
NEEDS = {
    "libs/doctor/tests/test_machine_checks.py::test_a_torch_that_takes_too_long_is_a_note": "torch",
    "libs/config/tests/test_schema.py::test_every_option_in_it_says_what_it_means_and_its_default": "atropos_trainer_grpo",
    "libs/config/tests/test_schema.py::test_every_valid_run_file_of_pages_and_tests_is_taken": "atropos_bridge_checkpoint",
    "tests/unit/test_site.py::test_the_reference_has_every_option_of_a_component": "atropos_engine_hf",
}


def missing() -> set[str]:
    return {name for name in PACKAGES if importlib.util.find_spec(name) is None}


def needed(text: str) -> str | None:
    """The missing package that a failure of this text is about."""
    named = re.findall(r"No module named '(\w+)", text)
    named += [COMPONENTS.get(name, "") for name in re.findall(r"there is no \w+ named '(\w+)'", text)]
    return next((name for name in named if name in missing()), None)


class Module(pytest.Module):
    def _getobj(self) -> object:
        try:
            return super()._getobj()
        except self.CollectError as error:
            if name := needed(str(error)):
                pytest.skip(reason(name), allow_module_level=True)
            raise


def reason(name: str) -> str:
    return f"needs {name}, which is not installed"


def pytest_pycollect_makemodule(module_path: object, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = missing()
    for item in items:
        name = NEEDS.get(item.nodeid.partition("[")[0])
        if name in absent:
            item.add_marker(pytest.mark.skip(reason=reason(name)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (name := needed(f"{report.longreprtext}\n{report.capstderr}\n{report.capstdout}")):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], f"Skipped: {reason(name)}")
    return report
