"""What the tests with a real vLLM share: random models. Engines are started by `tests.vllm.hosted`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.vllm.models import FAMILIES, make_model

HERE = Path(__file__).parent


LONG = (
    "test_gpu_checks",
    "test_families",
    "test_runs",
    "test_attached",
    "test_kills",
    "test_load",
)  # they start early, so that both cores end together


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG and HERE in item.path.parents else 9
    )
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="needs vLLM, which is not installed in this environment: `make test-vllm`")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random tiny model of each family: tests.vllm.models.FAMILIES."""
    folder = tmp_path_factory.mktemp("models")
    return {family: make_model(folder / family, family) for family in FAMILIES}
