"""SkyRL options that have no effect with Atropos: only SkyRL's own generator, data set, environments or engines read them.

A user who sets one expects an effect, so it is refused by name. Defaults are allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

ALWAYS = {
    "generator.batched": "each rollout is a separate request",
    "generator.max_turns": "the environment ends its episodes: set it in the environment's options in the run file",
    "generator.max_input_length": "the environment bounds its prompts",
    "generator.chat_template": "prompts are rendered with the template in the model's directory",
    "generator.chat_template_kwargs": "prompts are rendered with the template in the model's directory",
    "generator.use_conversation_multi_turn": "the environment decides what comes between two replies",
    "generator.append_eos_token_after_stop_str_in_multi_turn": "tokens are trained as they were sampled",
    "generator.zero_reward_on_non_stop": "rewards come from the run file: score Episode.finish there",
    "generator.apply_overlong_filtering": "masks come from the environment",
    "generator.inference_engine.enable_return_routed_experts": "rows carry no routes of experts",
    "trainer.max_prompt_length": "the environment bounds its prompts",
    "environment": "environments come from the run file",
    "data.train_data": "tasks come from the run file's environments",
    "data.val_data": "tasks come from the run file's environments",
    "trainer.fully_async.simulate_training": "it trains nothing, and needs another trainer than this entry point's",
}
ELSEWHERE = {
    "generator.inference_engine": "SkyRL starts no engine: set options on `atropos engine`, and list its address in atropos.engines",
    "generator.use_cache_salt": "only SkyRL's own engines know it",
    "trainer.fully_async.clear_kv_cache_on_weight_sync": "Atropos engines always drop results of older weights",
}
READ_WITHOUT_ENGINES = ("backend", "enable_ray_prometheus_stats")  # of generator.inference_engine, by the trainer


def changed(cfg: Any, defaults: Any, elsewhere: bool) -> list[str]:
    """Return a line for each option of `cfg` that differs from `defaults` and has no effect. `elsewhere`: SkyRL runs no engine."""
    found = []
    for path, cause in (ALWAYS | (ELSEWHERE if elsewhere else {})).items():
        section, _, name = path.rpartition(".")
        holder, usual = (_at(one, section) for one in (cfg, defaults))
        if not hasattr(holder, name):
            continue  # this SkyRL does not have it
        for under, value in _differences(path, getattr(holder, name), getattr(usual, name)):
            if under == "generator.max_input_length" and value == cfg.trainer.max_prompt_length:
                continue  # which it follows
            if under.removeprefix("generator.inference_engine.").split(".")[0] in READ_WITHOUT_ENGINES:
                continue
            found.append(f"{under}={value} has no effect: {cause}")
    return found


def _at(one: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        one = getattr(one, name)
    return one


def _differences(path: str, given: Any, usual: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(given) and type(given) is type(usual):
        for field in dataclasses.fields(given):
            yield from _differences(f"{path}.{field.name}", getattr(given, field.name), getattr(usual, field.name))
    elif given != usual:
        yield path, given
