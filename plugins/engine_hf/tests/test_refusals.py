"""The engine refuses models that it cannot run when it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
    T5Config,
)

from atropos_core.errors import ConfigError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.decoder import Decoder
from atropos_engine_hf.loading import load_model, refuse_unsupported
from atropos_torch_models.model_directory import sliding_window


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (T5Config(), "'t5' models: it is an encoder and a decoder"),
        (MistralConfig(sliding_window=16), "'mistral' models: not every layer is full attention"),
        (AutoConfig.for_model("qwen3_next", num_hidden_layers=4), "'qwen3_next' models: not every layer"),
    ],
)
async def test_models_without_a_plain_cache_are_refused_before_loading(
    open_engine: Any, tmp_path: Path, config: Any, why: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(FitError, match=why):
        await open_engine(tmp_path)


async def test_a_model_that_ignores_the_cache_is_found_out_by_decoding(
    open_engine: Any, make_model: Any, tmp_path: Path
) -> None:
    from transformers import MambaForCausalLM

    directory = make_model(tmp_path / "mamba")
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(directory)
    with pytest.raises(FitError, match="mamba"):
        await open_engine(directory)


def test_a_model_that_decodes_otherwise_than_it_reads_is_found_out_by_its_logits(tiny: Path) -> None:
    model = load_model(tiny, "float32", "cpu")
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, position_ids if position_ids.shape[1] > 1 else 0 * position_ids)
    with pytest.raises(FitError, match="differ from a plain forward pass"):
        Decoder(model).check()


async def test_a_folder_without_a_model_is_a_config_error(open_engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read a model"):
        await open_engine(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
async def test_a_missing_cuda_device_is_a_fit_error(open_engine: Any, tiny: Path) -> None:
    with pytest.raises(FitError, match="finds no CUDA device"):
        await open_engine(tiny, "cuda:0")


async def test_a_device_that_torch_does_not_have_is_a_fit_error(open_engine: Any, tiny: Path) -> None:
    for device in ("nope", "cpu:x", "meta:7x"):
        with pytest.raises(FitError, match=rf"engine 'hf' is to run on '{device}', which torch does not have: .*\n?"):
            await open_engine(tiny, device)


async def test_the_model_info_says_what_was_loaded(tiny: Path, tmp_path: Path) -> None:
    from atropos_core.rollouts.tokenizer import fingerprint
    from atropos_engine_hf.engine import HFEngine

    engine = HFEngine(HFOptions(dtype="bfloat16"), RunContext(directory=tmp_path, model=tiny, threads=1))
    info = await engine.open()
    await engine.close()
    assert (info.architecture, info.vocabulary, info.dtype, info.device) == ("Qwen3ForCausalLM", 64, "bfloat16", "cpu")
    assert info.tokenizer == fingerprint(tiny) and info.threads == 1
    assert info.parameters == sum(parameter.numel() for parameter in load_model(tiny, "auto", "cpu").parameters())


def described(**changes: Any) -> list[PretrainedConfig]:
    return [
        kind(**changes) for kind in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Phi3Config, Starcoder2Config)
    ]


@pytest.mark.parametrize(
    "config",
    [
        *described(),
        *described(sliding_window=16),
        *described(sliding_window=16, use_sliding_window=True),
        *described(sliding_window=16, use_sliding_window=True, max_window_layers=0),
    ],
    ids=lambda config: f"{config.model_type}-{config.sliding_window if hasattr(config, 'sliding_window') else None}",
)
def test_a_window_is_read_from_config_json_as_transformers_reads_it(config, tmp_path):
    config.save_pretrained(tmp_path)
    try:
        refuse_unsupported(AutoConfig.from_pretrained(tmp_path))
        assert sliding_window(tmp_path) is None
    except FitError:
        assert sliding_window(tmp_path) is not None
