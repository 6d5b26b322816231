"""What trainer, engine and bridge `tinker` refuse before they speak to a server."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import GenerationConfig

from atropos_core.errors import ConfigError, DataError, FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.plugins.requirements import check_requires
from atropos_tinker_client.config import TinkerTrainerOptions
from atropos_tinker_client.plugin import check_engine, check_trainer
from atropos_tinker_client.stop_ids import stop_ids
from atropos_tinker_client.trainer import check_batch
from atropos_torch_models.stop_ids import stop_ids as by_torch_models
from plugins.tinker_client.tests.test_losses import make_batch

OPTIONS: Any = TinkerTrainerOptions()


def workload(**changes: Any) -> Workload:
    return Workload(RunContext(Path(), Path()), groups=1, group_size=2, max_tokens=8, concurrent_rollouts=2, **changes)


@pytest.mark.parametrize(("key", "said"), [(None, "is not set"), ("sk-1234", "does not begin with tml-")])
def test_a_run_without_a_key_says_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, key: str | None, said: str
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("TINKER_API_KEY", key)
    for check in (check_trainer, check_engine):
        with pytest.raises(ConfigError, match=f"TINKER_API_KEY, which {said}") as refused:
            check(OPTIONS, workload())
        assert "TINKER_BASE_URL" in str(refused.value.remedy) and "1234" not in str(refused.value)


def test_only_samples_of_the_whole_distribution_at_temperature_1_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    check_trainer(OPTIONS, workload())
    for changes in ({"temperature": 0.7}, {"truncated": True}):
        with pytest.raises(ConfigError, match="sampled from the whole distribution at temperature 1"):
            check_trainer(OPTIONS, workload(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": np.full(5, 0.7, np.float32)}, "at temperature 0.7"),
        ({"truncated": np.ones(5, np.bool_)}, "with top_p, top_k or min_p"),
        ({"advantages": np.full(31, np.nan, np.float32)}, "not a finite number"),
    ],
)
def test_a_batch_that_the_server_would_train_wrongly_is_refused(changes: dict[str, Any], said: str) -> None:
    batch, _ = make_batch()
    check_batch(batch)
    with pytest.raises(DataError, match=said):
        check_batch(replace(batch, **changes))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "dr_grpo"}, "set loss_length"),
        ({"loss_length": 8}, "loss_length has no effect"),
        ({"loss": "reinforce", "clip_low": 0.1}, "which has no such bound"),
        ({"train_attention": False, "train_mlp": False, "train_head": False}, "nothing would be trained"),
    ],
)
def test_options_without_effect_or_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TinkerTrainerOptions(**options)


@pytest.mark.parametrize("kind", ["trainer", "engine"])
def test_without_the_client_package_the_error_says_what_to_install(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tinker" else find(name))
    with pytest.raises(FitError, match="needs the module 'tinker', which is not installed") as refused:
        check_requires(load_plugins().registry.find(kind, "tinker"))
    assert refused.value.remedy == "pip install 'atropos-plugin-tinker-client[sdk]'"


def test_the_tokens_that_end_a_reply_are_those_of_engine_hf() -> None:
    model = load_plugins().resolve_model("tiny", download=False).directory
    assert set(stop_ids(model)) == by_torch_models(model, GenerationConfig.from_pretrained(model).eos_token_id)
