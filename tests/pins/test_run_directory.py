"""What an earlier Atropos left is taken up by this one."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import metrics_of
from tests.pins.run_directory import POLICY, RECORDED, atropos


@pytest.fixture
def left(tmp_path: Path) -> Path:
    with tarfile.open(RECORDED) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_run_of_an_earlier_atropos_is_resumed_and_ends_as_if_it_had_not_stopped(left):
    before = metrics_of(left / "run")
    assert [line["step"] for line in before] == [0, 1, 2, 3, 4]
    atropos(left, "resume", "run", "--steps", "8")
    lines = metrics_of(left / "run")
    assert [line["step"] for line in lines] == list(range(9))
    assert lines[:5] == before, "what was written before stays"
    assert np.load(left / "run" / POLICY) == pytest.approx(np.load(left / "whole.npy"), abs=1e-5)


def test_a_run_directory_of_an_earlier_atropos_is_diagnosed(left):
    assert "step 4" in atropos(left, "doctor", "run")
