"""Every option of SkyRL's generator, engines, environments and data is read by somebody here, or refused by name."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.entrypoint import check
from atropos_core.errors import ConfigError
from tests.skyrl.parts import config

READ = {  # by SkyRL's trainer, or by our generator
    "generator.n_samples_per_prompt", "generator.eval_n_samples_per_prompt", "generator.step_wise_trajectories",
    "generator.merge_stepwise_output", "generator.vision_language_generator",  # which check() refuses in words of its own
    "data.dataloader.num_workers", "data.dataloader.persistent_workers",
    "trainer.fully_async.enabled", "trainer.fully_async.max_staleness_steps", "trainer.fully_async.sample_full_batch",
    "trainer.fully_async.num_parallel_generation_workers", "trainer.fully_async.simulate_training_step_seconds",
    "trainer.fully_async.simulate_weight_sync_seconds",  # with simulate_training alone, which is refused
}  # fmt: skip
READ_PREFIXES = ("generator.sampling_params.", "generator.eval_sampling_params.")
READ_HERE = {"generator.use_cache_salt", "trainer.fully_async.clear_kv_cache_on_weight_sync"}
ENGINES = "generator.inference_engine."
READ_ELSEWHERE = {f"{ENGINES}backend", f"{ENGINES}enable_ray_prometheus_stats"}


def leaves(holder, path):
    for field in dataclasses.fields(holder):
        value, name = getattr(holder, field.name), f"{path}.{field.name}"
        yield from leaves(value, name) if dataclasses.is_dataclass(value) else [(holder, field.name, name, value)]


def another(value):
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case dict():
            return {"key": "value"}
        case list():
            return [*value, "more"]
    return f"{value}-other"


def sections(cfg):
    yield cfg.generator, "generator"
    yield cfg.environment, "environment"
    yield cfg.data, "data"
    yield cfg.trainer.fully_async, "trainer.fully_async"


@pytest.mark.parametrize("source", ["here", "rings"])
def test_every_option_is_read_or_refused_by_name(tmp_path, source):
    folder = {"rings": tmp_path} if source == "rings" else {}
    options = SkyRLOptions.model_validate({"source": source, "run": tmp_path / "run.toml", **folder})
    cfg = config(tmp_path)
    check(cfg, options)
    seen = 0
    for holder, field, name, value in [one for part in sections(cfg) for one in leaves(*part)]:
        read = name in READ or name.startswith(READ_PREFIXES)
        read |= source == "here" and (name in READ_HERE or name.startswith(ENGINES))
        read |= source == "rings" and name in READ_ELSEWHERE
        if read and name != f"{ENGINES}enable_return_routed_experts":
            continue
        seen += 1
        setattr(holder, field, another(value))
        with pytest.raises(ConfigError, match=rf"{name}=(.|\n)* has no effect: "):
            check(cfg, options)
        setattr(holder, field, value)
    check(cfg, options)
    assert seen > (20 if source == "here" else 50)


@pytest.mark.parametrize(
    "change", [{f"{ENGINES}external_proxy_url": "http://127.0.0.1:9"}, {f"{ENGINES}run_engines_locally": False}]
)
def test_engines_of_skyrls_that_run_elsewhere_are_used_with_its_own_and_refused_without(tmp_path, change):
    cfg = config(tmp_path, **change)
    check(cfg, SkyRLOptions(run=tmp_path / "run.toml"))
    for source in ({"source": "rings", "rings": tmp_path}, {"source": "api", "url": "http://127.0.0.1:8000"}):
        with pytest.raises(ConfigError, match=rf"{next(iter(change))}=(.|\n)*SkyRL starts no engine"):
            check(cfg, SkyRLOptions.model_validate(source | {"run": tmp_path / "run.toml"}))
