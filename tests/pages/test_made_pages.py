"""docs/commands.md, docs/plugins.md and docs/models.md are what their scripts make of the code and of measurements."""

from __future__ import annotations

import json

from atropos_core.cli.overview import OTHERS
from atropos_core.plugins.manager import load_plugins
from atropos_engine_vllm.differing import INEXACT_IN_HF, LIMIT, OFF
from tests.conftest import REPOSITORY
from tools import make_commands_page, make_models_page, make_plugins_page


def test_the_page_of_commands_is_current():
    assert make_commands_page.PAGE.read_text() == make_commands_page.page(), "run `python -m tools.make_commands_page`"


def test_every_command_has_a_page():
    for _, command, _ in make_commands_page.commands():
        if command != "completion":
            assert make_commands_page.link(command), f"{command}: add it to PAGES of tools/make_commands_page.py"


def test_every_command_names_its_group():
    assert OTHERS not in {group for group, _, _ in make_commands_page.commands()}, "add it with rich_help_panel"


def test_the_page_of_plugins_is_current():
    assert make_plugins_page.PAGE.read_text() == make_plugins_page.page(), "run `python -m tools.make_plugins_page`"


def test_the_page_of_models_is_current():
    page = (REPOSITORY / make_models_page.PAGE).read_text()
    assert page == make_models_page.page(page), "run `python -m tools.make_models_page`"


def test_engine_vllm_refuses_the_families_that_were_measured_to_differ_with_their_numbers():
    found = json.loads((REPOSITORY / make_models_page.RESULTS).read_text())
    measured = {
        name: max(off["started"], off["reloaded"])
        for name, off in found["vllm"]["families"].items()
        if "failed" not in off
    }
    differ = {name: f"{off:.2g}" for name, off in measured.items() if not off <= LIMIT}
    assert differ == {name: f"{off:.2g}" for name, off in OFF.items()}
    assert set(found["vllm"]["families"]) == set(found["families"])
    page = (REPOSITORY / make_models_page.PAGE).read_text()
    rows = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in page.splitlines()) if len(cells) > 4}
    assert {name for name in OFF if "none" in rows[name][4]} == INEXACT_IN_HF


def test_the_page_of_models_says_what_the_slower_ways_cost_as_it_was_measured():
    page = (REPOSITORY / make_models_page.PAGE).read_text()
    found = json.loads((REPOSITORY / "benchmarks/results/layouts.json").read_text())["models"]
    assert len(found) == 3
    for name, paths in found.items():
        cells = (
            f"{paths[path]['tokens_per_s']:.0f}, {paths[path]['memory_mb']:,.0f} MB" if path in paths else "not exact"
            for path in ("packed", "rows", "slots", "cohort")
        )
        assert f"| `{name}` | {' | '.join(cells)} |" in page


def test_the_page_of_plugins_has_every_component_and_every_package():
    page = make_plugins_page.PAGE.read_text()
    registry = load_plugins().registry
    for kind in make_plugins_page.CHOSEN_BY:
        section = page.split(f"\n## {kind}\n")[1].split("\n## ")[0]
        assert all(f"| `{offer.provider.name}` |" in section for offer in registry.offers(kind)), kind
    for folder in (REPOSITORY / "plugins").glob("*/pyproject.toml"):
        assert f"](../plugins/{folder.parent.name}) |" in page.split("\n## Packages\n")[1]
