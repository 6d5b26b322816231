"""Check if a vLLM server that the user started can be the engine of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import MOST_KEPT, MOST_TIES
from atropos_engine_vllm.api import Api, Refused
from atropos_engine_vllm.command import (
    EXTENSION,
    WHOLE_PROMPTS,
    announced_adapters,
    holds_adapters,
    named_adapters,
    possible_rank,
)
from atropos_engine_vllm.generate import PATH
from atropos_engine_vllm.model import read_config, text_config
from atropos_engine_vllm.router_replay import ASKED, FLAG, VARIABLES, records_experts
from atropos_engine_vllm.speculation import check_served
from atropos_engine_vllm.versions import SUPPORTED, check_supported

_SLOW_S = 120.0  # /server_info inspects the whole machine
_NEEDED = ("/pause", "/resume", "/update_weight_version", "/collective_rpc", "/server_info", PATH)
SHAPE = (  # vLLM may silently load weights of another shape
    "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
NAMED_RANK = 32  # of a Tinker client by default
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass(frozen=True)
class Attached:
    """The server's description of itself."""

    served: str
    dtype: str
    lora_slots: int  # adapters at once; 0: none
    lora_rank: int  # the highest; 0: none
    speculates: bool


async def check_attached(api: Api, context: RunContext, config: Mapping[str, Any]) -> Attached:
    """Raise FitError unless the server has a supported version and the routes, reports the logprobs that training
    needs, and serves this model."""
    try:
        number = str((await api.get("/version"))["version"])
    except (DataError, Refused, TypeError, KeyError) as error:
        raise FitError(
            f"{api.url} is not a vLLM server, or needs another key: {error}",
            remedy="The key of a server is read from the environment variable VLLM_API_KEY.",
        ) from error
    check_supported(number, f"the server at {api.url} is {number}", f"Start a server of vLLM {SUPPORTED} there.")
    start = _how_to_start(context)
    needed = (*_NEEDED, *(_ADAPTERS if holds_adapters(context) else ()))
    routes = set((await api.get("/openapi.json"))["paths"])
    if missing := [route for route in needed if route not in routes]:
        raise FitError(f"the vLLM server at {api.url} does not offer {', '.join(missing)}.", remedy=start)
    info = (await api.get("/server_info?config_format=json", deadline_s=_SLOW_S))["vllm_config"]
    if info["parallel_config"]["worker_extension_cls"] != EXTENSION:
        raise FitError(
            f"the vLLM server at {api.url} was started without {EXTENSION}, which loads the weights of a run.",
            remedy=start,
        )
    served = info["model_config"]
    if served["logprobs_mode"] != "processed_logprobs":
        raise FitError(
            f"the vLLM server at {api.url} reports {served['logprobs_mode']}, which do not belong to the distribution that it"
            " samples from.",
            remedy=start,
        )
    if info["device_config"]["device"] == "cpu" and info["scheduler_config"]["enable_chunked_prefill"]:
        raise FitError(
            f"the vLLM server at {api.url} computes prompts in parts, which ends it on a CPU when a seeded request"
            " is resumed.",
            remedy=start,
        )
    if records_experts(context) and not info.get("aux_output_config", {}).get("enable_return_routed_experts"):
        raise FitError(f"{ASKED}, and the vLLM server at {api.url} does not record them.", remedy=start)
    speculates = check_served(info.get("speculative_config"), api.url, start)
    models = (await api.get("/v1/models"))["data"]
    base = next(card for card in models if not card.get("parent"))
    _check_same_model(api.url, Path(base["root"]), config)
    slots = most_rank = 0
    if holds_adapters(context):
        lora, rank = info["lora_config"], announced_adapters(context).get("rank", 1)
        if lora is None or lora["max_loras"] < 2 or lora["max_lora_rank"] < rank:
            raise FitError(
                f"the vLLM server at {api.url} does not hold two adapters of rank {rank} at once.", remedy=start
            )
        slots, most_rank = lora["max_cpu_loras"] or lora["max_loras"], lora["max_lora_rank"]
    if named_adapters(context) and info["device_config"]["device"] == "cpu" and not served["enforce_eager"]:
        raise FitError(
            f"the vLLM server at {api.url} is compiled: on a CPU it computes rows without an adapter with the adapter of others.",
            remedy=start,
        )
    return Attached(
        served=base["id"],
        dtype=str(served["dtype"]).removeprefix("torch."),
        lora_slots=slots,
        lora_rank=most_rank,
        speculates=speculates,
    )


def _check_same_model(url: str, root: Path, config: Mapping[str, Any]) -> None:
    """Compare the files of both models, if the server's are on this machine: its API only tells their path."""
    if not (root / "config.json").is_file():
        return
    theirs, ours = text_config(read_config(root)), text_config(dict(config))
    for key in SHAPE:
        if key in theirs and key in ours and theirs[key] != ours[key]:
            raise FitError(
                f"the vLLM server at {url} serves {root} with {key} = {theirs[key]}, but this run's model has {ours[key]}.",
                remedy="Attach to a server with the model that the run trains.",
            )


def _how_to_start(context: RunContext) -> str:
    variables = ["VLLM_SERVER_DEV_MODE=1"]
    flags = ["--enable-scale-out", "--logprobs-mode processed_logprobs", f"--worker-extension-cls {EXTENSION}"]
    flags += [f"--max-logprobs {MOST_KEPT + MOST_TIES}"]
    if context.devices[0] == "cpu":
        flags += [WHOLE_PROMPTS]
    if holds_adapters(context):
        rank = announced_adapters(context).get("rank", NAMED_RANK)
        variables += ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"]
        flags += ["--enable-lora", "--max-loras 2", f"--max-lora-rank {possible_rank(rank)}"]
    if named_adapters(context):
        flags += [f"--max-cpu-loras {4 * named_adapters(context)}"]
        flags += ["--enforce-eager"] if context.devices[0] == "cpu" else []
    if records_experts(context):
        variables += [f"{name}={value}" for name, value in VARIABLES.items()]
        flags += [FLAG]
    return f"Start it with {' '.join(variables)} in its environment, and with {' '.join(flags)}."
