"""`atropos eval --model-url` with the agents' API behind the URL: a server that refuses whatever it does not know by its name."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.served_api import api_of

SUMS = """
from atropos_core import Environment, Score, Task

class Sums(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"1 + {n}"},), answer=str(1 + n)) for n in range(4)]

    async def score(self, task, reply):
        return Score(float(reply["content"] == task.answer), correct=reply["content"] == task.answer)
"""


@pytest.mark.slow
async def test_it_is_evaluated_as_any_other_server(tmp_path: Path, qwen: ChatTokenizer) -> None:
    (tmp_path / "sums.py").write_text(SUMS)

    def says(prompt: str, number: int) -> str:
        return "3" if "1 + 2" in prompt else "1"

    async with api_of(qwen, says) as api:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "atropos_core", "eval", "--env", "./sums.py:Sums", "--model-url", f"{api.base}/v1",
            "--model-name", "policy", "--key-variable", "THE_KEY", "--out", "out",
            cwd=tmp_path, env={**os.environ, "THE_KEY": api.session.key}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    assert api.session.key.encode() not in out + err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["correct"] for row in rows] == [1, 0, 1, 0]
    figures = json.loads((tmp_path / "out.json").read_text())
    assert (
        figures["metrics"]["eval/accuracy"] == 0.5
        and figures["tokens"] == sum(row["samples"][0]["tokens"] for row in rows) > 0
    )
