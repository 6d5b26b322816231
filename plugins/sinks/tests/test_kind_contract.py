"""The sinks keep the contract of their kind, and name the extra that installs what they need."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path

import pytest

from atropos_core.errors import FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.requirements import check_requires
from atropos_testing import sink_contract

test_csv = sink_contract("csv")
test_tensorboard = sink_contract("tensorboard")


def test_mlflow(tmp_path: Path) -> None:
    sink_contract("mlflow", options={"tracking_uri": f"file:{tmp_path}/mlruns"})()


def test_trackio(projects: Path) -> None:
    sink_contract("trackio")()


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_sink_whose_package_is_missing_names_the_extra(name: str) -> None:
    offer = load_plugins().registry.find("sink", name)
    assert offer.provider.requires == {name} and name in metadata("atropos-plugin-sinks").get_all("Provides-Extra", [])
    without = replace(offer, provider=replace(offer.provider, requires=frozenset({"not_installed_here"})))
    with pytest.raises(
        FitError, match=rf"'not_installed_here', which is not installed.\n.*atropos-plugin-sinks\[{name}\]'"
    ):
        check_requires(without)
