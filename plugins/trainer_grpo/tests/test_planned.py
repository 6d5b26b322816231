"""Options that the plan of a new or resumed run refuses, before a model is loaded."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from atropos_core.cli.options import configure
from atropos_core.cli.resume import refuse_fixed
from atropos_core.config.run_file import flatten
from atropos_core.errors import CheckpointError, ConfigError
from atropos_core.launch.memory_plan import workloads
from atropos_core.launch.model_checks import check_components
from atropos_core.launch.plan import Plan, make_plan


def planned(*changes: str, steps: int = 10, **flags: Any) -> Plan:
    loaded, model, plugins = configure(env=["gsm8k"], model="tiny", steps=steps, changes=changes, preset=False, **flags)
    return make_plan(loaded.config, model, plugins)


def check(plan: Plan, folder: Path) -> None:
    check_components(plan, list(workloads(plan, folder)))


def test_a_schedule_that_warm_up_leaves_no_step_is_refused_by_the_plan(tmp_path: Path) -> None:
    falling = ('trainer.schedule="linear"', "trainer.warmup_steps=5")
    check(planned(*falling, steps=6), tmp_path)
    with pytest.raises(ConfigError, match="warmup_steps = 5 is all of the run's 5 optimiser steps"):
        check(planned(*falling, steps=5), tmp_path)


CHANGES = {
    "trainer.lora.rank=8": r"trainer.lora.rank is 8, .* was saved with 16",
    "trainer.lora.alpha=64.0": r"trainer.lora.alpha is 64.0, .* was saved with 32.0",
    'trainer.lora.targets=["q_proj"]': r"trainer.lora.targets is \['q_proj'\], .* was saved with 'all-linear'",
    'trainer.optimizer="adamw_8bit"': "trainer.optimizer is 'adamw_8bit', .* was saved with 'adamw'",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_checkpoint_is_saved_for_is_kept_by_a_resumed_run(change: str, tmp_path: Path) -> None:
    saved = dict(flatten(planned("trainer.lora.rank=16", bridge="lora").resolved()))
    refuse_fixed(saved, planned("trainer.lora.rank=16", "trainer.learning_rate=1e-3", bridge="lora"), tmp_path)
    with pytest.raises(CheckpointError, match=CHANGES[change]) as refused:
        refuse_fixed(saved, planned("trainer.lora.dropout=0.0", change, bridge="lora"), tmp_path)
    _, command = str(refused.value.remedy).split("a new run: ")
    assert shlex.split(command) == ["atropos", "run", f"{tmp_path}/config.toml", "--set", change]


def test_settings_that_a_run_did_not_write_down_are_left_to_the_trainer(tmp_path: Path) -> None:
    refuse_fixed({}, planned("trainer.lora.rank=8", bridge="lora"), tmp_path)
