"""The merged policy of a LoRA run, in plain transformers, says what the run's engine said with the adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_core.rollouts.tokenizer import ChatTokenizer
from tests.conftest import Ended
from tests.real.runs import Runs, plain
from tests.real.vowels import Vowels


def greedy(model: Any, tokenizer: ChatTokenizer) -> list[str]:
    said = []
    for task in Vowels().tasks("test"):
        prompt = torch.from_numpy(tokenizer.render(task.messages).astype("int64"))[None]
        whole = model.generate(prompt, max_new_tokens=16, do_sample=False)
        said.append(tokenizer.decode(whole[0, prompt.shape[1] :].numpy()))
    return said


@pytest.mark.timeout(500)
def test_a_merged_export_generates_what_the_engine_does(
    runs: Runs, tmp_path: Path, atropos: Callable[..., Ended]
) -> None:
    run = runs["lora"]
    ended = atropos("export", str(run), "--as", "hf", "--merged", "--out", "merged", timeout=300)
    assert ended.code == 0, ended.err
    lines = (run / "rollouts/eval-000002.jsonl").read_text().splitlines()
    engine = [json.loads(line)["samples"][0]["messages"][-1]["content"] for line in lines]
    merged = greedy(plain(tmp_path / "merged"), ChatTokenizer(tmp_path / "merged"))
    assert sorted(merged) == sorted(engine)
    assert sorted(merged) != sorted(greedy(plain(runs.model), ChatTokenizer(runs.model))), "training changed it"
