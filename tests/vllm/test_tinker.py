"""`atropos tinker --engine vllm` with the official client: samples come from snapshots while training continues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tinker.server import CLIENT, tinker_server
from tests.vllm.hosted import reference
from tests.vllm.models import make_model

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CLIENT, reason="needs the official client: `make test-vllm` installs it"),
]

CLOSE = 1e-4
REPOSITORY = Path(__file__).parents[2]
PAGES = ("docs/tinker.md", "plugins/engine_vllm/README.md")
COMMAND = re.compile(r"^atropos tinker --model \S+ (--engine vllm --set engine\.max_lora_rank=(\d+))$", re.M)


def gap(found: Sequence[float], expected: Any) -> float:
    return float(np.abs(np.array(found) - np.array(expected)).max())


def check(found: Any, tokens: list[int], prompt: list[int], model: Path, adapter: Path | None) -> float:
    """Return the largest difference of what a sampling client returned from transformers with peft's adapter, in nats."""
    wholes = [np.array(prompt + sampled, np.int32) for sampled, _, _ in found["sequences"]]
    [scored, *others] = reference(model, [np.array(tokens, np.int32), *wholes], adapter=adapter)
    assert found["scored"][0] is None and found["prompt"][0] is None
    gaps = [gap(found["scored"][1:], scored[1:]), gap(found["prompt"][1:], others[0][1 : len(prompt)])]
    for (sampled, logprobs, reason), expected in zip(found["sequences"], others, strict=True):
        gaps.append(gap(logprobs, expected[len(prompt) :]))
        assert reason == ("stop" if sampled[-1] == 2 else "length") and len(sampled) <= 12
    return max(gaps)


def test_clients_sample_from_snapshots_while_training_continues(tmp_path: Path) -> None:
    """With the command of the pages, on a tiny model."""
    model = make_model(tmp_path / "deep/model", "qwen3")
    [(command, rank)] = {found for page in PAGES for found in COMMAND.findall((REPOSITORY / page).read_text())}
    arguments = (*command.split(), "--set", "engine.kv_cache_gb=0.25")
    with tinker_server(tmp_path, str(model), *arguments, start_s=300) as server:
        found = server.run("snapshots.py", str(model), int(rank) + 1, out=tmp_path / "found.json")
        files: dict[str, Path | None] = {name: server.adapter(path) for name, path in found["files"].items()}
        files["base"] = None
        worst = 0.0
        for name, adapter in files.items():
            now = found["after"][name]
            worst = max(worst, check(now, found["tokens"], found["prompt"], model, adapter))
            if name in found["before"]:
                then = found["before"][name]
                assert [one[0] for one in then["sequences"]] == [one[0] for one in now["sequences"]], name
                assert gap(then["scored"][1:], now["scored"][1:]) <= CLOSE
        print(f"snapshots of two adapters and the base model: {worst:.1e} nats off")
        assert worst <= CLOSE
        scores = [found["after"][name]["scored"][1:] for name in files]
        assert min(gap(one, other) for at, one in enumerate(scores) for other in scores[:at]) > 0.05, "all differ"
        assert f"has rank {int(rank) + 1}" in found["refused"] and "engine.max_lora_rank" in found["refused"]
        assert "only at temperature 1" in found["warm"]
