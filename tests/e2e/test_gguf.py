"""A run and its resume, of a model that is a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Ended
from tests.gguf_files import write_gguf

pytest.importorskip("gguf", reason="the extra atropos-torch-models[gguf] is not installed")

SMALL = (
    "--set", "training.groups_per_step=2", "--set", "training.group_size=2", "--set", "sampling.max_tokens=16",
    "--set", "evaluation.problems=2",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_a_gguf_file_trains_and_is_resumed_like_any_model(tmp_path: Path, atropos: Callable[..., Ended]) -> None:
    write_gguf(tmp_path / "policy.gguf", "Q8_0")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = f"model: policy.gguf, dequantized from Q8_0 to float32 in {tmp_path}/cache/atropos/gguf/policy-"
    run = atropos(
        "run", "--model", "policy.gguf", "--env", "gsm8k", "--steps", "1", "--dir", "run", *SMALL, timeout=300, **cache
    )
    assert run.code == 0, run.err
    assert said in run.err.replace("\n", " ") and run.err.count("dequantized") == 1
    assert f'model = "{tmp_path}/policy.gguf"' in (tmp_path / "run/config.toml").read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    resumed = atropos("resume", str(tmp_path / "run"), "--steps", "2", timeout=300, cwd=elsewhere, **cache)
    assert resumed.code == 0, resumed.err
    assert "to be converted" not in resumed.err, "the directory is there"
    (tmp_path / "policy.gguf").write_bytes(b"GGUF")
    bad = atropos("plan", "--model", str(tmp_path), **cache)
    assert bad.code == 2 and "policy.gguf is not a GGUF file that can be read" in " ".join(bad.err.split())
