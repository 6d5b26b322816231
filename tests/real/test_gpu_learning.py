"""The checks `learning_*` of benchmarks/gpu.py on a CPU: two steps of the same code, with engine "hf"."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from atropos_core.guards.deadlines import within
from tests.gpu.learning import learns
from tests.gpu.pair import Setting
from tests.gpu.report import Report


@pytest.mark.timeout(400)
@pytest.mark.parametrize("bridge", ["ipc", "lora"])
async def test_a_run_of_the_recipe_is_measured_and_its_page_is_written(
    model: Path, tmp_path: Path, bridge: str
) -> None:
    report = Report(print)
    setting = Setting("cpu", small=True, model=str(model), pages=tmp_path)
    await within(partial(learns, bridge=bridge)(setting, report), 380, bridge)
    report.settle()
    curve = report.figures["curve: step, reward, held-out accuracy, seconds"]
    assert [row[0] for row in curve] == [0, 1, 2]
    assert all(row[2] is not None for row in curve), "evaluated at each step"
    assert [page.name for page in tmp_path.iterdir()] == [f"gpu_learning_{bridge}.html"]
