"""Remedies of a run that does not fit: each was planned, and leads to the sum that is printed with it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from atropos_core.config.run_file import FLAG, Layer, load, nest, parse_flag
from atropos_core.errors import FitError
from atropos_core.launch.memory_plan import gb, plan_memory
from atropos_core.launch.memory_remedies import check_memory
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.plugins.manager import load_plugins

REMEDY = re.compile(r"((?:--set \S+ ?)+)\(([0-9.]+ GB)")


def planned(model: Path, *flags: str, **settings: Any) -> Plan:
    plugins = load_plugins()
    run = {"model": str(model), "environment": {"gsm8k": {}}, **settings}
    layers = [Layer("run.toml", run), Layer(FLAG, nest(map(parse_flag, flags)))]
    return make_plan(load(layers).config, plugins.resolve_model(str(model)), plugins)


def refused(model: Path, available: dict[str, int], **settings: Any) -> tuple[str, dict[str, str]]:
    """The error of a run on such a machine, and its remedies with their sums."""
    plan = planned(model, **settings)
    with pytest.raises(FitError) as caught:
        check_memory(plan, Path("runs"), plan_memory(plan, Path("runs"), available))
    text = str(caught.value)
    return text, {flags.strip(): said for flags, said in REMEDY.findall(text)}


def sums(
    model: Path, available: dict[str, int], remedies: dict[str, str], **settings: Any
) -> dict[str, dict[str, int]]:
    """By device, of every remedy as it is typed. Fails if a sum is not the one that is printed."""
    found = {}
    for flags, said in remedies.items():
        words = [word for word in shlex.split(flags) if word != "--set"]
        needed = plan_memory(planned(model, *words, **settings), Path("runs"), available).needed()
        device = next(iter(available))
        assert gb(needed[device]) == said, flags
        found[flags] = needed
    return found


def test_every_remedy_that_is_printed_fits_with_the_sum_that_is_printed(smollm):
    available = {"cpu": 23_710_000_000}
    text, remedies = refused(smollm, available)
    needed = plan_memory(planned(smollm), Path("runs"), available).needed()["cpu"]
    assert needed > available["cpu"] and f"needs about {gb(needed)} on cpu" in text
    assert "which has 23.71 GB to give. Largest: trainer: activations" in text
    assert "Any of these fits" in text and f"`atropos plan --model {smollm}`" in text
    assert {"--set trainer.tokens_per_microbatch=8192", "--set trainer.gradient_checkpointing=true"} <= remedies.keys()
    for needed in sums(smollm, available, remedies).values():
        assert needed["cpu"] <= available["cpu"]


def test_a_combination_that_fits_is_given_if_no_single_change_is_enough(smollm):
    available = {"cpu": 4_000_000_000}
    text, remedies = refused(smollm, available)
    assert "These together fit: --set" in text and "None is enough without the others" in text
    together, *alone = sums(smollm, available, remedies).values()
    before = plan_memory(planned(smollm), Path("runs"), available).needed()
    assert together["cpu"] <= available["cpu"]
    assert alone and all(available["cpu"] < one["cpu"] < before["cpu"] for one in alone)
    words = [word for word in shlex.split(next(iter(remedies))) if word != "--set"]
    for left_out in words:
        needed = plan_memory(
            planned(smollm, *(one for one in words if one != left_out)), Path("runs"), available
        ).needed()
        assert needed["cpu"] > available["cpu"], f"{left_out} is not needed"


def test_what_nothing_makes_fit_says_so(smollm):
    text, _ = refused(smollm, {"cpu": int(1e9)})
    assert "Even these together are not enough: --set" in text and "Use a smaller model" in text


def test_what_changes_nothing_is_left_out(smollm):
    """A micro-batch that holds one sequence already, and checkpointing that the run has."""
    small = {"trainer": {"tokens_per_microbatch": 64, "gradient_checkpointing": True}}
    text, remedies = refused(smollm, {"cpu": int(3e9)}, **small)
    assert remedies and "tokens_per_microbatch" not in text and "gradient_checkpointing" not in text
    sums(smollm, {"cpu": int(3e9)}, remedies, **small)


def test_a_change_that_only_moves_the_need_to_another_device_is_no_remedy(smollm):
    gpu = {"engine": {"devices": ["cuda:0"]}, "trainer": {"devices": ["cuda:0"]}}
    available = {"cuda:0": int(6e9), "cpu": int(2e9)}
    text, remedies = refused(smollm, available, **gpu)
    for flags, needed in sums(smollm, available, remedies, **gpu).items():
        for device, size in needed.items():
            assert size <= available[device] or gb(size) in text, flags
