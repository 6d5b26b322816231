"""The contracts of rewards, transforms, curricula and bridges: planted bugs are found, built-in components are not accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_core.builtin.local import LocalBridge
from atropos_core.errors import ConfigError, FitError, UnknownComponent
from atropos_core.interfaces import Finding
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_core.plugins.options import NoOptions
from atropos_core.plugins.references import load_reference
from atropos_testing import (
    ContractBroken,
    bridge_contract,
    check,
    curriculum_contract,
    engine_contract,
    launcher_contract,
    reward_contract,
    sink_contract,
    trainer_contract,
    transform_contract,
)
from atropos_testing.launchers import LauncherContract

FILE = Path(__file__).parent / "broken_components.py"
PARTS_FILE = Path(__file__).parent / "broken_parts.py"
BUGS: dict[str, dict[Callable[..., Any], set[str]]] = {
    "reward": load_reference(f"{FILE}:REWARDS"),
    "transform": load_reference(f"{FILE}:TRANSFORMS"),
    "curriculum": load_reference(f"{FILE}:CURRICULA"),
}
BRIDGES: dict[Callable[..., Any], set[str]] = load_reference(f"{FILE}:BRIDGES")
in_process = load_reference(f"{FILE}:in_process")

test_environment_reward = reward_contract("environment")
test_exact_reward = reward_contract("exact")
test_numeric_reward = reward_contract("numeric")
test_format_reward = reward_contract("format")
test_length_reward = reward_contract("length", options={"free_tokens": 4, "limit_tokens": 30})
test_reward_that_must_be_opened = reward_contract(load_reference(f"{FILE}:NeedsOpening"))
test_group_advantage = transform_contract("group_advantage")
test_group_advantage_without_division = transform_contract("group_advantage", options={"divide_by_std": False})
test_drop_flat = transform_contract("drop_flat")
test_shuffled = curriculum_contract("shuffled")
test_sequential = curriculum_contract("sequential")
test_local_bridge = bridge_contract("local")
test_console_sink = sink_contract("console")
test_jsonl_sink = sink_contract("jsonl")
test_local_launcher = launcher_contract("local")
test_toy_engine = engine_contract("toy")
test_toy_trainer = trainer_contract("toy")


def broken(findings: list[Finding]) -> set[str]:
    return {finding.subject for finding in findings if finding.ok is False}


@pytest.mark.parametrize(
    ("kind", "component"),
    [(kind, component) for kind, bugs in BUGS.items() for component in bugs],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_planted_bug_is_found_by_the_check_that_names_it(kind: str, component: Callable[..., Any]) -> None:
    found = check(kind, component)
    assert BUGS[kind][component] <= broken(found), found


PARTS: dict[str, dict[Callable[..., Any], set[str]]] = {
    "sink": load_reference(f"{PARTS_FILE}:SINKS"),
    "teacher": load_reference(f"{PARTS_FILE}:TEACHERS"),
    "engine": load_reference(f"{PARTS_FILE}:ENGINES"),
    "trainer": load_reference(f"{PARTS_FILE}:TRAINERS"),
    "adapter": load_reference(f"{PARTS_FILE}:ADAPTERS"),
}


@pytest.mark.parametrize(
    ("kind", "component"),
    [(kind, component) for kind, bugs in PARTS.items() for component in bugs],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_planted_bug_breaks_the_checks_that_name_it_and_no_others(kind: str, component: Callable[..., Any]) -> None:
    """And the component that it was planted in breaks none."""
    assert broken(check(kind, component)) == PARTS[kind][component]


LAUNCHERS: dict[Callable[..., Any], str] = load_reference(f"{PARTS_FILE}:LAUNCHERS")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda one: one.__name__)
def test_a_planted_bug_in_a_launcher_breaks_the_check_that_names_it(launcher: Callable[..., Any]) -> None:
    """The others, which `test_local_launcher` runs, are left out: each starts processes."""
    others = [stage for stage in LauncherContract.stages if stage != LAUNCHERS[launcher]]
    assert broken(check("launcher", launcher, skip=others)) == {LAUNCHERS[launcher]}


def test_a_sink_that_blocks_the_event_loop_is_named() -> None:
    assert "event loop" in broken(check("sink", load_reference(f"{PARTS_FILE}:BLOCKING")))


@pytest.mark.parametrize("bridge", BRIDGES, ids=lambda one: one.__name__)
def test_a_planted_bug_in_a_bridge_is_found_by_the_check_that_names_it(bridge: Callable[..., Any]) -> None:
    assert broken(check("bridge", in_process(bridge))) == BRIDGES[bridge]


def fits_nothing() -> BridgeProvider:
    return BridgeProvider("Far", "", NoOptions, lambda o, c: LocalBridge(), transports=lambda o: frozenset({"pigeon"}))


def test_a_bridge_that_joins_nothing_installed_is_left_unplayed_aloud() -> None:
    [last] = [found for found in check("bridge", fits_nothing()) if found.subject == "connects"]
    assert last.ok is None and "no installed engine and trainer share pigeon" in last.detail


def test_a_bridge_that_was_not_run_does_not_pass_its_contract() -> None:
    assert broken(check("bridge", in_process(LocalBridge), engine="hf")) == {"connects"}, "between what was named"
    with pytest.raises(ContractBroken, match="connects: not run: no installed engine and trainer share pigeon"):
        bridge_contract(fits_nothing())()


def test_a_bridge_whose_ends_cannot_be_built_does_not_pass_its_contract() -> None:
    with pytest.raises(ContractBroken, match="connects: not run: FitError: no room"):
        bridge_contract(in_process(NoRoom))()


class NoRoom(LocalBridge):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        NoRoom.made += 1
        if NoRoom.made > 1:  # the first is built for its agents
            raise FitError("no room")


def test_options_of_a_component_are_validated_by_name() -> None:
    with pytest.raises(ConfigError, match=r"reward length: unknown key 'limit_token'.*Did you mean 'limit_tokens'"):
        check("reward", "length", {"limit_token": 3})


def test_a_kind_without_contract_is_refused() -> None:
    with pytest.raises(ConfigError, match="no contract for 'model'"):
        check("model", "tiny")


def test_an_unknown_component_suggests_the_near_miss() -> None:
    with pytest.raises(UnknownComponent, match="Did you mean 'numeric'"):
        check("reward", "numerik")
