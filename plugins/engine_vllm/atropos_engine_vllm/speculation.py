"""Speculation without a draft model: vLLM proposes tokens that followed the same words earlier in the request, and checks them with the
model itself. What it keeps is distributed as without proposals."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from atropos_core.errors import ConfigError, DataError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Metrics, Sampling
from atropos_engine_vllm.config import VLLMOptions
from atropos_engine_vllm.model import keeps_state, read_config

FLAG = "--speculative-config"
VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the runner in which it was measured
NO_MIN_P = "vLLM does not cut by min_p while it speculates"
_COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total\{.*\} (\S+)$", re.MULTILINE)


def flags(options: VLLMOptions) -> list[str]:
    """The arguments of `vllm serve`; none without `speculation`."""
    if options.speculation is None:
        return []
    settings = {
        "method": options.speculation,
        "num_speculative_tokens": options.speculative_tokens,
        "prompt_lookup_min": options.prompt_lookup_min,
        "prompt_lookup_max": options.prompt_lookup_max,
    }
    return [FLAG, json.dumps(settings)]


def check_speculation(options: VLLMOptions, context: RunContext, min_p: float = 0.0) -> None:
    """Raise ConfigError or FitError for what vLLM does not do, or does wrongly, while it speculates. `min_p`: the highest that the run
    samples with."""
    if options.speculation is None:
        return
    label = context.label or "engine"
    asked = f'{label}.speculation = "{options.speculation}"'
    if min_p:
        raise ConfigError(
            f"{asked} does not work with min_p = {min_p:g} of sampling or evaluation: {NO_MIN_P}.",
            remedy=f"Remove {label}.speculation, or use sampling.top_p or top_k instead of min_p.",
        )
    if context.announced.get("router_replay"):
        raise ConfigError(
            f"{asked} does not work with trainer.router_replay = true: vLLM records experts in its second model runner, and speculates here"
            " in its first one.",
            remedy=f"Remove {label}.speculation, or --set trainer.router_replay=false.",
        )
    if context.devices[0] == "cpu" and options.enforce_eager is False:
        raise ConfigError(
            f"{asked} does not work with {label}.enforce_eager = false on a CPU: the server computes wrong probabilities until the engine"
            " has repaired it, and a compiled server samples before that.",
            remedy=f"Leave {label}.enforce_eager out: eager is the default on a CPU.",
        )
    if (context.model / "config.json").is_file():
        config = read_config(context.model)
        if keeps_state(config):
            raise FitError(
                f"{asked} does not work with {config.get('model_type')!r} models: their layers keep a state, and what a rejected token"
                " changed in it was not verified to be undone.",
                remedy=f"Remove {label}.speculation.",
            )


def has_numba() -> bool:
    return find_spec("numba") is not None


def check_numba(installed: bool) -> None:
    """Raise FitError if vLLM could not propose tokens here."""
    if not installed:
        raise FitError(
            'engine.speculation = "ngram" needs the package numba, with which vLLM looks for earlier words. It is not installed here.',
            remedy="pip install numba==0.65.0 (in a checkout: make vllm), or remove engine.speculation.",
        )


def check_served(speculative: Mapping[str, Any] | None, url: str, start: str) -> bool:
    """Return True if a running server speculates, by its own description. Raise FitError if it does so with a draft model."""
    if speculative is None:
        return False
    if (method := speculative.get("method")) != "ngram":
        raise FitError(
            f"the vLLM server at {url} speculates by {method!r}. Only 'ngram' is verified here: weights of a draft model go stale at the"
            " first update.",
            remedy=start,
        )
    return True


def check_request(sampling: Sampling) -> None:
    """Raise DataError for a request that a server refuses while it speculates."""
    if sampling.min_p:
        raise DataError(f"a request has min_p = {sampling.min_p:g}, but {NO_MIN_P}.", remedy="Use top_p or top_k.")


@dataclass
class DraftCounts:
    """The server's counts of proposed and accepted tokens, as of the last call."""

    last: dict[str, float] = field(default_factory=dict)

    def since_last(self, page: str) -> Metrics:
        """Return the metrics of what happened since the last call, from the server's page of metrics.

        `acceptance_length` is the mean number of tokens that a check of proposed tokens yields: those accepted, and the one that the
        model samples after them."""
        now = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0.0)
        for name, value in _COUNTER.findall(page):
            now[name] += float(value)
        drafts, proposed, accepted = (value - self.last.get(name, 0.0) for name, value in now.items())
        self.last = now
        metrics = {"drafted_tokens": proposed}
        if proposed > 0:
            metrics |= {"draft_acceptance": accepted / proposed, "acceptance_length": 1 + accepted / drafts}
        return metrics
