"""Sizes that a run leaves open: the quickest that fit, on any machine on which some do. Those that are set stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atropos_core.cli.options import configure
from atropos_core.config.run_file import FLAG, Layer, load, nest, parse_flag
from atropos_core.errors import FitError
from atropos_core.launch.machine_memory import available_bytes, host_memory
from atropos_core.launch.memory_plan import plan_memory
from atropos_core.launch.memory_remedies import check_memory
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.launch.sizes import RESERVE, plan_run
from atropos_core.plugins.manager import load_plugins

GIB = 1 << 30
LORA = "bridge.use=lora"
CARD = ('engine.devices=["cuda:0"]', 'trainer.devices=["cuda:0"]')


def planned(model: Path | str, available: dict[str, int], *flags: str, **settings: Any) -> Plan:
    plugins = load_plugins()
    layers = [
        Layer("run.toml", {"model": str(model), "environment": {"gsm8k": {}}, **settings}),
        Layer(FLAG, nest(map(parse_flag, flags))),
    ]
    return plan_run(load(layers), plugins.resolve_model(str(model)), plugins, available=available)


def changed(plan: Plan) -> dict[str, Any]:
    return plan.sizes.changed


def needed(plan: Plan, available: dict[str, int]) -> dict[str, int]:
    return plan_memory(plan, Path("runs"), available).needed()


@pytest.mark.parametrize("flags", [(), (LORA,)])
@pytest.mark.parametrize("gib", [24, 16, 8, 6, 5])
def test_a_real_model_fits_with_the_defaults_and_a_reserve_stays_free(smollm, gib, flags):
    available = {"cpu": gib * GIB}
    plan = planned(smollm, available, *flags)
    assert plan.sizes.fit
    assert needed(plan, available)["cpu"] <= (1 - RESERVE) * gib * GIB
    check_memory(plan, Path("runs"), plan_memory(plan, Path("runs"), available))
    saved, options = plan.config.trainer.options, plan.single["trainer"].options
    assert saved.get("tokens_per_microbatch", 16384) == options.tokens_per_microbatch


def test_more_memory_gives_sizes_that_are_not_slower(smollm):
    def chosen(gib: int) -> tuple[bool, int]:
        options = planned(smollm, {"cpu": gib * GIB}).single["trainer"].options
        return not options.gradient_checkpointing, options.tokens_per_microbatch

    each = [chosen(gib) for gib in (4, 5, 6, 8, 10, 12, 16, 24, 48)]
    assert each == sorted(each) and each[0] != each[-1]
    assert each[-1] == (True, 16384)


def test_a_small_model_has_the_defaults(smollm):
    assert changed(planned("tiny", {"cpu": 8 * GIB})) == {}
    assert changed(planned(smollm, {"cpu": 64 * GIB})) == {}, "what fits anyway is not made smaller"


def test_values_that_are_set_stay_and_the_others_make_room(smollm):
    flags = ("trainer.tokens_per_microbatch=16384", "engine.kv_cache_gb=3.0")
    plan = planned(smollm, {"cpu": 9 * GIB}, *flags)
    assert changed(plan) == {"trainer.gradient_checkpointing": True}
    assert plan.engines[0].options.kv_cache_gb == 3.0
    plan = planned(smollm, {"cpu": 9 * GIB}, "trainer.gradient_checkpointing=false")
    assert not plan.single["trainer"].options.gradient_checkpointing
    assert "trainer.gradient_checkpointing" not in changed(plan)


def test_values_that_are_set_and_cannot_fit_are_refused_and_not_changed(smollm):
    available = {"cpu": 8 * GIB}
    flags = ("trainer.tokens_per_microbatch=16384", "trainer.gradient_checkpointing=false")
    plan = planned(smollm, available, *flags)
    with pytest.raises(FitError, match="trainer.tokens_per_microbatch=|trainer.gradient_checkpointing=true"):
        check_memory(plan, Path("runs"), plan_memory(plan, Path("runs"), available))
    assert plan.single["trainer"].options.tokens_per_microbatch == 16384


def test_if_no_setting_fits_the_error_has_the_least_that_is_needed_and_what_to_change(smollm):
    available = {"cpu": 2 * GIB}
    plan = planned(smollm, available)
    assert not plan.sizes.fit
    with pytest.raises(FitError) as refused:
        check_memory(plan, Path("runs"), plan_memory(plan, Path("runs"), available))
    text = str(refused.value)
    assert "this run needs about 4." in text and "which has 2.15 GB to give" in text
    assert "with the smallest sizes (engine.kv_cache_gb = " in text and "trainer.tokens_per_microbatch = 768" in text


def test_each_reason_is_what_the_usual_value_would_need(smollm):
    available = {"cpu": 8 * GIB}
    plan = planned(smollm, available)
    chosen = changed(plan)
    assert chosen
    for path, reason in plan.sizes.reasons.items():
        others = [f"{name}={json.dumps(value)}" for name, value in chosen.items() if name != path]
        plugins = load_plugins()
        layers = [
            Layer("run.toml", {"model": str(smollm), "environment": {"gsm8k": {}}}),
            Layer(FLAG, nest(map(parse_flag, others))),
        ]
        without = make_plan(load(layers).config, plugins.resolve_model(str(smollm)), plugins)
        assert f"needs {needed(without, available)['cpu'] / 1e9:.2f} GB on cpu" in reason


def test_a_deterministic_run_counts_on_memory_that_others_use_as_well():
    total, free = host_memory()
    assert available_bytes(busy=False)["cpu"] == total > free


def test_replicas_share_the_sizes_except_those_that_their_own_table_sets(smollm):
    engine = {"replica": {"second": {"kv_cache_gb": 0.5}, "third": {}}}
    plan = planned(smollm, {"cpu": 16 * GIB}, engine=engine, bridge={"use": "checkpoint"})
    first, second, third = (one.options.kv_cache_gb for one in plan.engines)
    assert first == third != second == 0.5
    again = load([Layer("config.toml", plan.resolved(), whole=True)])
    made = make_plan(again.config, plan.model, load_plugins())
    assert [one.options.kv_cache_gb for one in made.engines] == [first, second, third], "as the run's file keeps them"


def test_on_a_gpu_room_for_keys_and_values_grows_with_the_rollouts(smollm):
    plan = planned(smollm, {"cuda:0": 80 * GIB, "cpu": 64 * GIB}, *CARD, "sampling.max_tokens=2048")
    assert plan.engines[0].options.kv_cache_gb > 8


def test_machines_of_a_launcher_are_not_planned_for(smollm):
    plan = planned(smollm, {"cpu": GIB}, "launcher.use=kubernetes", "launcher.image=x", "bridge.use=checkpoint")
    assert not plan.sizes.values and plan.single["trainer"].options.tokens_per_microbatch == 16384


def shown(model: Path, *words: str, limit: int | None = None) -> Any:
    limited = f"ulimit -v {limit // 1024} && " if limit else ""
    command = f'{limited}exec {sys.executable} -m atropos_core "$@"'
    return subprocess.run(
        ["bash", "-c", command, "_", *words, "--model", str(model), "--env", "gsm8k"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
        check=False,
    )


def test_config_show_names_the_plan_as_the_origin_within_the_limit_of_the_shell(smollm):
    ended = shown(smollm, "config", "show", "--json", limit=8 * GIB)
    assert ended.returncode == 0, ended.stderr
    rows = {row["path"]: row for row in json.loads(ended.stdout)}
    by_plan = {path: row["value"] for path, row in rows.items() if row["from"] == "plan"}
    loaded, model, plugins = configure(model=str(smollm), env=["gsm8k"])
    assert by_plan == changed(plan_run(loaded, model, plugins, available={"cpu": 8 * GIB})) != {}
    assert rows["engine.prefill_tokens"]["from"] == "default"
    shown_set = shown(smollm, "config", "show", "--json", "--set", "engine.kv_cache_gb=1", limit=8 * GIB)
    assert {row["path"]: row["from"] for row in json.loads(shown_set.stdout)}["engine.kv_cache_gb"] == "flag"
