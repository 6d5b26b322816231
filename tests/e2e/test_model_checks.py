"""A model that a run cannot use is refused before anything is started, by `atropos run` as by its dry run, with what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_core.plugins.manager import load_plugins

RUN = ("run", "--model", "./model", "--set", "evaluation.problems=2", "--steps", "1", "--dir", "run")
OWN_PROMPTS = """
from atropos_core.interfaces import Environment
from atropos_core.types import Task

class Raw(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ()) for n in range(4)]

    async def rollout(self, task, policy, *, seed):
        raise NotImplementedError
"""


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    changed(model / "tokenizer_config.json", chat_template=None)


def with_a_window(model: Path) -> None:
    changed(model / "config.json", layer_types=["sliding_attention"] * 4, sliding_window=64, use_sliding_window=True)


def cut_off(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def without_a_shard(model: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


LORA = ("--bridge", "lora", "--set", 'trainer.lora.targets=["q_proj","query"]')
CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "template": (without_template, (), ("has no chat template", "Add a chat_template.jinja")),
    "window": (with_a_window, (), ("see 64 tokens", "Use `--engine vllm`")),
    "vocabulary": (lambda model: changed(model / "config.json", vocab_size=9), (), ("only 9 embeddings", "own tokenizer")),
    "positions": (
        lambda model: changed(model / "config.json", max_position_embeddings=100), (),
        ("leaves no room for a prompt", "sampling.max_tokens=50"),
    ),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), (), ("there are no weights", "save_pretrained")),
    "cut off": (cut_off, (), ("model.safetensors is damaged", "fetch it again")),
    "a shard": (without_a_shard, (), ("1 of the 2 files of weights", "model-00002-of-00002.safetensors")),
    "targets": (lambda model: None, LORA, ("names 'query'", "It has: down_proj, gate_proj, k_proj")),
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny policy, to be spoilt."""
    return Path(shutil.copytree(load_plugins().resolve_model("tiny").directory, tmp_path / "model"))


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_cannot_be_used_is_refused_before_anything_is_started(case, model, atropos, tmp_path):
    spoil, arguments, wanted = CASES[case]
    spoil(model)
    dry = list(CASES).index(case) % 2
    ended = atropos(*RUN, "--env", "gsm8k", *arguments, *(("--dry-run",) if dry else ()))
    assert ended.code == 1 or ended.code == 2, ended.err
    assert all(text in ended.err for text in wanted), ended.err
    assert "What to do:" in ended.err
    assert not list((tmp_path / "run").glob("logs/*")), "no process was started"


def test_an_environment_that_renders_its_own_prompts_needs_no_template(model, atropos, tmp_path):
    without_template(model)
    (tmp_path / "raw.py").write_text(OWN_PROMPTS)
    ended = atropos(*RUN, "--env", "./raw.py", "--dry-run")
    assert ended.code == 0, ended.err
