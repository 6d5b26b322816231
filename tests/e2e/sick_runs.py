"""Runs that fall ill, each in its own way, and what health must say: for `make test`, and the soak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import in_front, plant

FROM, WITHIN = 6, 5  # ill from this step on; and named after at most so many
SOURCE = Path(__file__).with_name("sick_plugin.py")


@dataclass(frozen=True)
class Sickness:
    check: str  # the one that must name it; of an error, its class
    values: str  # of the run file
    error: bool = False


def _reward(name: str, more: str = "") -> str:
    return f'[reward.{name}]\nuse = "sick_{name}"\n{more}'


def _only_reward(name: str) -> str:
    return '[reward.environment]\nuse = "none"\n' + _reward(name)


def _transform(name: str) -> str:
    return f"[transform.sick_{name}]"


SICK: dict[str, Sickness] = {
    "frozen weights": Sickness("frozen_weights", 'trainer.use = "sick_frozen"'),
    "constant reward": Sickness("reward_collapse", _only_reward("constant")),
    "NaN in one rater": Sickness("failed_rewards", _reward("nan")),
    "exploding advantages": Sickness("advantages", _transform("growing")),
    "stale engine": Sickness("logprob_drift", 'bridge.use = "sick_bridge"\ntraining.max_logprob_diff = 100.0'),
    "stale engine, default bound": Sickness("Misaligned", 'bridge.use = "sick_bridge"', error=True),
    "swapped tokenizer": Sickness("TokenizerMismatch", 'engine.use = "sick_tokenizer"', error=True),
    "dead worker": Sickness("failed_plays", 'environment.sick_letters.use = "sick_worker"'),
    "slow disk": Sickness("slow_disk", "[sink.sick_disk]"),
    "entropy collapse": Sickness("entropy", 'trainer.use = "sick_collapsing"'),
    "length explosion": Sickness("length", 'trainer.use = "sick_lengthening"'),
    "non-deterministic reward": Sickness("reward_determinism", _only_reward("random")),
    "dead gradients": Sickness("dead_gradients", _transform("nothing")),
    "groups that fail partly": Sickness("partial_groups", 'environment.sick_letters.use = "sick_partly"'),
    "reward that drifts": Sickness("reward_drift", _only_reward("drift")),
    "hung rater": Sickness("failed_rewards", _reward("hung", "deadline_s = 0.3")),
    "hung rollout": Sickness(
        "silence",
        'environment.sick_letters.use = "sick_play"\nhealth.silence.after_s = 1.0\ntraining.rollout_deadline_s = 3.0',
    ),
    "exploding reward": Sickness("reward_explosion", _only_reward("exploding")),
    "loss that is no number": Sickness("not_finite", 'trainer.use = "sick_diverging"'),
    "slow engine": Sickness("throughput", 'engine.use = "sick_slow"'),
}


def run_file(values: str, *, steps: int = FROM + WITHIN, seed: int = 0, more: str = "") -> str:
    """Dotted keys come before the tables; a section that is named replaces the one here."""
    dotted = [line for line in values.splitlines() if "." in line.split("=")[0] and not line.startswith("[")]
    tables = [line for line in values.splitlines() if line not in dotted]
    defaults = {
        "trainer.use": '"sick_none"', "engine.use": '"toy"', "bridge.use": '"local"',
        "environment.sick_letters.use": '"sick_letters"',
    }  # fmt: skip
    given = {line.split("=")[0].strip() for line in dotted}
    lines = ['model = "toy"', f"seed = {seed}", f"training.steps = {steps}", "training.groups_per_step = 6",
             "training.group_size = 8", "sampling.max_tokens = 32", "evaluation.problems = 0",
             "transform.sick_clock = {}", "transform.group_advantage = {}", 'transform.drop_flat = {use = "none"}']  # fmt: skip
    lines += [f"{key} = {value}" for key, value in defaults.items() if key not in given]
    return "\n".join([*lines, *dotted, *more.splitlines(), *tables]) + "\n"


def run_sick(
    name: str, folder: Path, *, seed: int = 0, more: str = ""
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The run directory, and how the command ended."""
    folder.mkdir(parents=True, exist_ok=True)
    plant_once(folder)
    (folder / "run.toml").write_text(run_file(SICK[name].values if name in SICK else "", seed=seed, more=more))
    return folder / "run", command(folder, "run", "run.toml", "--dir", "run")


def plant_once(folder: Path) -> None:
    if not (folder / "sick.py").exists():
        plant(folder, "sick", SOURCE.read_text())


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "SICK_FROM": str(FROM)}
    environment["PYTHONPATH"] = in_front(folder)
    return subprocess.run(
        [sys.executable, "-m", "atropos_core", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def rows(run: Path) -> list[dict[str, Any]]:
    """Of health.jsonl."""
    path = run / "health.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def verdict(name: str, run: Path) -> dict[str, Any]:
    """When the sickness was named, what else was, and whether that holds."""
    sickness, ill = SICK[name], [row for row in rows(run) if row["state"] == "ill"]
    if sickness.error:
        named = [row for row in ill if row["check"] == "run" and row["says"].startswith(sickness.check)]
    else:
        named = [row for row in ill if row["check"] == sickness.check]
    begun = FROM - 1  # after that step, a reward that is called again is sick already
    early = [row["check"] for row in ill if row["since"] < begun and row["check"] != "run"]
    last = FROM + WITHIN
    return {
        "sickness": name,
        "check": sickness.check,
        "named_at": named[0]["step"] if named else None,
        "since": named[0]["since"] if named else None,
        "says": named[0]["says"] if named else "",
        "also": sorted({row["check"] for row in ill} - {sickness.check, "run"}),
        "early": early,
        "held": bool(named) and named[0]["step"] <= last and not early,
    }
