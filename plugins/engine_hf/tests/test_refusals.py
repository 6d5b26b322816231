"""The engine refuses models that it cannot run when it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, RecurrentGemmaConfig, T5Config

from atropos_core.errors import ConfigError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.decode_path import SLOTS, DecodePath
from atropos_engine_hf.loading import load_model
from atropos_engine_hf.probe import open_decoder


async def test_an_encoder_and_decoder_is_refused_before_loading(open_engine: Any, tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(FitError, match="'t5' models: it is an encoder and a decoder"):
        await open_engine(tmp_path)


async def test_a_model_that_no_decoder_runs_exactly_is_refused_with_the_numbers(
    open_engine: Any, tmp_path: Path
) -> None:
    RecurrentGemmaConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    with pytest.raises(FitError) as refused:
        await open_engine(tmp_path)
    said = str(refused.value)
    assert "'recurrent_gemma' models" in said and "vllm" not in said
    assert "slots: " in said and "cohort: " in said


async def test_a_decoder_that_is_not_exact_is_refused_with_its_number_and_the_one_that_is(
    open_engine: Any, tmp_path: Path
) -> None:
    MistralConfig(sliding_window=4096).save_pretrained(tmp_path)
    with pytest.raises(
        FitError,
        match=r"engine.decode = 'slots' is not exact for 'mistral'(.|\n)*slots: \d(.|\n)*takes 'cohort' \(\de-0",
    ):
        await open_engine(tmp_path, decode="slots")


def test_a_model_that_decodes_otherwise_than_it_reads_is_found_out_by_its_logits(tiny: Path) -> None:
    model = load_model(tiny, "float32", "cpu")
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, position_ids if position_ids.shape[1] > 1 else 0 * position_ids)
    with pytest.raises(FitError, match="differ from a plain forward pass by .* and at most 0.001 is allowed"):
        open_decoder(model, DecodePath(SLOTS, ""))


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
