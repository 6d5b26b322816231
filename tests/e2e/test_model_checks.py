"""A model that a run cannot use is refused before anything is started, by `atropos run` as by its dry run, with what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_core.plugins.manager import load_plugins
from tests.disks import mounted

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


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def remove_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(model / "tokenizer_config.json", chat_template=None)


def add_sliding_window(model: Path) -> None:
    edit_json(model / "config.json", layer_types=["sliding_attention"] * 4, sliding_window=64, use_sliding_window=True)


def truncate_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def remove_a_shard(model: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def remove_end_tokens(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", eos_token=None)
    edit_json(model / "config.json", eos_token_id=None)
    (model / "generation_config.json").unlink(missing_ok=True)


def template(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "chat_template.jinja").write_text(text)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LORA = ("--bridge", "lora", "--set", 'trainer.lora.targets=["q_proj","query"]')
CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "template": (remove_template, (), ("has no chat template", "Add a chat_template.jinja")),
    "endless template": (template(ENDLESS), (), ("took more than 1 s of CPU time", "that the model's authors publish")),
    "template with a fault": (template("{{ nothing.more }}"), (), ("refuses these messages: 'nothing' is undefined",)),
    "template for other tasks": (
        template("{% if messages[0].content not in ('.', 'What is 38 + 7?') %}{{ raise_exception('not this one') }}{% endif %}"),
        (), ("and the others at the beginning, cannot be shown", "not this one"),
    ),
    "window": (
        add_sliding_window, ("--set", "engine.decode=slots"),
        ("engine.decode = 'slots' is not exact for 'qwen3' models", "of the logits' spread", "takes 'cohort'"),
    ),
    "vocabulary": (lambda model: edit_json(model / "config.json", vocab_size=9), (), ("only 9 embeddings", "own tokenizer")),
    "positions": (
        lambda model: edit_json(model / "config.json", max_position_embeddings=100), ("--set", "sampling.max_tokens=256"),
        ("leaves no room for a prompt", "sampling.max_tokens=50"),
    ),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), (), ("lacks its weights", "save_pretrained")),
    "cut off": (truncate_weights, (), ("model.safetensors is damaged", "fetch it again")),
    "a shard": (remove_a_shard, (), ("1 of the 2 files of weights", "model-00002-of-00002.safetensors")),
    "an end": (remove_end_tokens, (), ("nothing ends a reply", '"eos_token" in tokenizer_config.json')),
    "precision": (
        lambda model: None, ("--bridge", "ipc", "--set", "trainer.dtype=bfloat16"),
        ("trainer's weights are bfloat16 and those of engine float32", "--set engine.dtype=bfloat16"),
    ),
    "rounding": (
        lambda model: None, ("--bridge", "checkpoint", "--set", "engine.dtype=float16"),
        ("weights of engine are float16 and the trainer's float32", "--set engine.dtype=float32", "training.max_logprob_diff=0.5"),
    ),
    "targets": (lambda model: None, LORA, ("names 'query'", "Choose from: down_proj, gate_proj, k_proj")),
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
    assert not (tmp_path / "run").exists(), "no process was started, and the directory is free for the next try"


def test_weights_of_fewer_bits_in_the_engine_are_a_choice_that_a_run_file_can_make(atropos):
    differing = ("--bridge", "checkpoint", "--set", "engine.dtype=bfloat16", "--dry-run")
    ended = atropos("run", "--env", "gsm8k", *differing, "--set", "training.max_logprob_diff=0.5")
    assert ended.code == 0, ended.err
    finer = ("--bridge", "checkpoint", "--set", "trainer.dtype=bfloat16", "--dry-run")
    ended = atropos("run", "--env", "gsm8k", *finer)
    assert ended.code == 0, f"weights of more bits round less than is allowed: {ended.err}"


def test_an_environment_that_renders_its_own_prompts_needs_no_template(model, atropos, tmp_path):
    remove_template(model)
    (tmp_path / "raw.py").write_text(OWN_PROMPTS)
    ended = atropos(*RUN, "--env", "./raw.py", "--dry-run")
    assert ended.code == 0, ended.err


def test_a_disk_without_room_for_the_checkpoints_is_named_with_its_numbers(atropos, tmp_path):
    run = ("run", "--model", "tiny", "--env", "gsm8k", "--set", "evaluation.problems=2", "--steps", "3")
    with mounted(tmp_path / "small", "15M") as small:
        ended = atropos(*run, "--dir", str(small / "run"))
        assert ended.code and "for checkpoints in" in ended.err and "What to do: Free some of that disk" in ended.err, (
            ended.err
        )
        needed, free, most, each = re.findall(r"([\d.]+)(?: MB|(?= of ))", " ".join(ended.err.split()))[:4]
        assert float(needed) == pytest.approx(int(most) * float(each), abs=0.2) and most == "3" and float(free) <= 15.8
        assert not list(small.glob("run/logs/*")), "no process was started"
        for fits in ("checkpoint.every=0", "oversubscribe=true"):
            assert atropos(*run, "--dry-run", "--dir", str(small / "other"), "--set", fits).code == 0


def test_checkpoints_that_a_rollback_may_need_count_as_well(atropos, tmp_path):
    (tmp_path / "again.py").write_text("async def again(task, episodes):\n    return [0.0 for _ in episodes]\n")
    rewards = '[reward.again]\nuse = "./again.py:again"\n[reward.gold]\nuse = "./again.py:again"\n[reward.gold.gold]\nshare = 0.5\n'
    run = ("run", "run.toml", "--model", "tiny", "--env", "gsm8k", "--dry-run", "--set", "checkpoint.every=10")
    with mounted(tmp_path / "small", "15M") as small:
        for action, steps, wanted in (("warn", 500, 3), ("rollback", 500, 8), ("rollback", 3, 2)):
            (tmp_path / "run.toml").write_text(f'{rewards}[health.reward_hacking]\naction = "{action}"\n')
            ended = atropos(*run, "--dir", str(small / "run"), "--steps", str(steps))
            said = " ".join(ended.err.split())
            assert f"up to {wanted} of" in said, said
            assert ("older ones for a rollback" in said) == (action == "rollback")


def test_a_checkpoint_is_as_large_as_was_said(atropos, tmp_path):
    ended = atropos("run", "--model", "tiny", "--env", "gsm8k", "--set", "evaluation.problems=0", "--steps", "1",
                    "--set", "training.groups_per_step=2", "--dir", "run")  # fmt: skip
    assert ended.code == 0, ended.err
    [checkpoint] = (tmp_path / "run/checkpoints").iterdir()
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert size == pytest.approx(3 * 4 * 766_080, rel=0.02), "weights and two moments in float32"


def test_prompts_that_are_too_long_are_counted_named_and_left_out_by_an_option(atropos, tmp_path):
    rows = [{"prompt": f"{n} + 7?" + " and so on" * (400 if n % 10 == 3 else 0), "answer": n + 7} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dry = ("run", "--model", "tiny", "--env", "dataset:rows.jsonl", "--dry-run", "--set", "sampling.max_tokens=100")
    dry += ("--set", "evaluation.max_tokens=100")
    ended = atropos(*dry, "--set", "environment.rows.held_out=0.4")
    assert ended.code == 0, ended.err
    said = " ".join(ended.err.split())
    counts = [
        int(count)
        for count in re.findall(r"(\d+) of \d+ tasks of the \w+ split have a prompt of more than 924 tokens", said)
    ]
    assert sum(counts) == 6 and len(counts) == 2, said
    assert "'4' (" in said and "--set environment.rows.max_prompt_tokens=924; or lower" in said
    ended = atropos(*dry, "--set", "environment.rows.max_prompt_tokens=924", "--set", "environment.rows.held_out=0.4")
    assert "more than 924 tokens" not in ended.err
    assert "6 of 60 rows have more than 924 tokens, and are left out" in " ".join(ended.out.split())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[3::10]))
    ended = atropos(*dry, "--set", "environment.rows.held_out=0.4")
    assert ended.code == 2 and "so that their rollouts fail" in " ".join(ended.err.split())
