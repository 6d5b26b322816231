"""docs/coming-from/trl.md against the GRPOConfig of the installed TRL: every option is in the table or in the list of those without
counterpart, and the defaults that the page states are TRL's."""

from __future__ import annotations

import ast
import re

import pytest

from tests.pages.their_names import REPOSITORY, rows
from tests.trl.installed import folder

# TRL's defaults that the page states, or takes to be the same as ours.
DEFAULTS = {
    "learning_rate": 1e-6,
    "epsilon": 0.2,
    "epsilon_high": None,  # as epsilon
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "loss_type": "dapo",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "use_bias_correction_kl": True,
}

INSTALLED = folder()
pytestmark = pytest.mark.skipif(INSTALLED is None, reason="TRL_PYTHON names no Python with TRL")


def defaults() -> dict[str, ast.expr | None]:
    """The fields that GRPOConfig itself declares, with the expression of their default; nothing of TRL is imported."""
    assert INSTALLED is not None
    module = ast.parse((INSTALLED / "trainer/grpo_config.py").read_text())
    [config] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig"]
    found: dict[str, ast.expr | None] = {}
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = node.value
            if isinstance(value, ast.Call):  # field(default=..., metadata=...)
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            found[node.target.id] = value
    return found


def without_counterpart() -> set[str]:
    """The options in the list at the end of the page. What else it names is ours, and stands in brackets."""
    text = (REPOSITORY / "docs/coming-from/trl.md").read_text()
    _, heading, listed = text.partition("\nOptions of `GRPOConfig` without counterpart:\n")
    assert heading, "the list is under this line"
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", listed)))


def test_every_option_is_in_the_table_or_in_the_list_of_those_without_counterpart():
    options = set(defaults())
    assert len(options) > 50
    table, listed = {name for row in rows("trl") for name in row.theirs}, without_counterpart()
    assert options - table - listed == set(), "named nowhere on docs/coming-from/trl.md"
    assert options & table & listed == set(), "both in the table and in the list"


def test_the_list_names_only_what_trl_has():
    assert without_counterpart() - set(defaults()) == set()


def test_the_defaults_that_the_page_states_are_those_of_trl():
    found = defaults()
    there = {name: ast.literal_eval(value) for name in DEFAULTS if (value := found[name]) is not None}
    assert there == DEFAULTS
