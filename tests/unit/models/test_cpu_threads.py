"""How many threads a model gets on a CPU: by its size, and never more than there are cores."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atropos_core.models.model_size import cpu_threads

CONFIG = {"num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}


@pytest.mark.parametrize(
    ("millions", "cores", "threads"), [(0.01, 16, 1), (4, 16, 1), (4.01, 16, 2), (33, 16, 9), (33, 4, 4), (33, 1, 1)]
)
def test_a_thread_for_every_four_million_parameters(
    millions: float, cores: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"weight": torch.zeros(int(millions * 1000), 1000, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert cpu_threads(tmp_path) == threads


def test_a_model_of_unknown_size_gets_every_core(tmp_path: Path) -> None:
    assert cpu_threads(tmp_path) == len(os.sched_getaffinity(0))
