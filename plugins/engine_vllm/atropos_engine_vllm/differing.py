"""Families of models that vLLM on a CPU samples from another distribution than transformers computes, without an error.

Measured by benchmarks/models_vllm.py with vLLM 0.32 and small copies in float32, before and after new weights were loaded as a bridge
loads them. tests/pages holds this table to benchmarks/results/models.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from atropos_core.errors import FitError
from atropos_core.models.model_size import read
from atropos_core.plugins.provider import RunContext
from atropos_engine_vllm.command import announced_adapters, holds_adapters
from atropos_engine_vllm.config import VLLMOptions
from atropos_engine_vllm.model import read_config, text_config

LIMIT = 1e-3  # of the spread of the logits
OFF: Mapping[str, float] = {  # by model type: the largest difference of a logprob, in parts of the spread of the logits
    "apertus": 0.0018,
    "cohere2": 2.1,
    "ernie4_5_moe": 2.2,
    "gpt_oss": 1.9,  # only once new weights have been loaded
    "jetmoe": 2.4,
    "lfm2_moe": 1.0,
    "mamba2": 2.0,
    "zamba2": 0.049,
    "zaya": 2.9,
}

INEXACT_IN_HF = frozenset({"zamba2"})  # of these, the models that engine hf refuses


def refuse_differing(directory: Path, device: str) -> None:
    """Raises FitError for a model of such a family on a CPU. On a GPU nothing was measured."""
    if device != "cpu" or not (directory / "config.json").is_file():
        return
    config = read_config(directory)
    for kind in (str(config.get("model_type")), str(text_config(config).get("model_type"))):
        if kind in OFF:
            raise FitError(
                f"engine 'vllm' does not sample {kind!r} models on a CPU as transformers computes them: with vLLM 0.32, logprobs of a "
                f"small copy differ by {OFF[kind]:.2g} of the spread of the logits, and at most {LIMIT:g} is allowed.",
                remedy="Use a model of another type: engine 'hf' does not decode this one exactly either. A GPU was not measured."
                if kind in INEXACT_IN_HF
                else "Use `--engine hf`, which compares its own decoding with transformers.",
            )


def refuse_adapted_experts(options: VLLMOptions, context: RunContext) -> None:
    """Raises FitError if adapters of a mixture would come that vLLM would not run, or the trainer's adapter is of experts: in peft's
    form, vLLM would leave these out."""
    if not holds_adapters(context) or (size := read(context.model)) is None or not size.experts():
        return
    if options.url is None and context.devices[0] == "cpu":
        raise FitError(
            "engine 'vllm' does not run adapters of a mixture of experts on a CPU: vLLM has the kernels only for GPUs. The model in"
            f" {context.model} is a mixture.",
            remedy="Use `--engine hf`, or a GPU.",
        )
    if {"all-linear", "gate_up_proj", "down_proj"} & set(announced_adapters(context).get("targets", ())):
        linear = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in size.linear()})
        raise FitError(
            f"engine 'vllm' does not take adapters of experts, and trainer.lora.targets chooses those of the model in {context.model}.",
            remedy=f"--set trainer.lora.targets='{json.dumps(linear)}' adapts the other layers. Or use `--engine hf`.",
        )
