"""The engine and the bridge of a run with trainer `tinker`."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core.cli.options import configure


def test_engine_and_bridge_come_with_the_trainer() -> None:
    loaded, *_ = configure(trainer="tinker", model="tiny")
    assert (loaded.config.engine.use, loaded.config.bridge.use) == ("tinker", "tinker")
    origins = {path: origin for path, _, origin in loaded.rows()}
    assert origins["engine.use"] == origins["bridge.use"] == "trainer 'tinker'"
    loaded, *_ = configure(model="tiny")
    assert (loaded.config.engine.use, loaded.config.bridge.use) == ("hf", "ipc")


@pytest.mark.parametrize("how", ["flag", "--set", "file"])
def test_an_engine_that_the_user_names_stays(tmp_path: Path, how: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[trainer]\nuse = "tinker"\n' + ('[engine]\nuse = "hf"\n' if how == "file" else ""))
    loaded, *_ = configure(
        file, model="tiny", engine="hf" if how == "flag" else None, changes=["engine.use=hf"] if how == "--set" else ()
    )
    assert (loaded.config.engine.use, loaded.config.bridge.use) == ("hf", "tinker")


def test_a_saved_run_keeps_what_it_used(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'model = "tiny"\n[trainer]\nuse = "tinker"\n[engine]\nuse = "hf"\n[bridge]\nuse = "local"\n'
    )
    loaded, *_ = configure(saved=tmp_path)
    assert (loaded.config.engine.use, loaded.config.bridge.use) == ("hf", "local")
