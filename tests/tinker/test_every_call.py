"""Every public call of the official client, and its numbers next to transformers and peft."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.tinker.server import TinkerServer

TOKENS = [5, 9, 11, 7, 30, 2, 8]
CLOSE = 1e-4


@pytest.fixture(scope="module")
def found(server: TinkerServer, tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The values that the script found."""
    out = tmp_path_factory.mktemp("client") / "found.json"
    value: dict[str, Any] = server.run("every_call.py", tiny, out=out)
    return value


def reference(model: str, tokens: Sequence[int], adapter: Path | None = None) -> list[float]:
    """Logprobs of all tokens but the first by transformers, with peft's adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if adapter is not None:
            loaded = PeftModel.from_pretrained(loaded, str(adapter))
        logits = loaded(torch.tensor([list(tokens)])).logits[0, :-1]
        ids = torch.tensor(list(tokens[1:]))
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(ids)), ids]
    return [float(one) for one in logprobs]


def close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and bool(np.abs(np.array(one) - np.array(other)).max() < CLOSE)


def test_a_new_adapter_has_the_logprobs_of_the_base_model(found: dict[str, Any], tiny: str) -> None:
    expected = reference(tiny, TOKENS)
    assert close(found["base_logprobs"], expected)
    assert found["computed_base"][0] is None and close(found["computed_base"][1:], expected)
    assert abs(found["base_loss"] + sum(expected)) < CLOSE


def test_a_trained_adapter_has_the_logprobs_of_its_files_in_peft(
    found: dict[str, Any], server: TinkerServer, tiny: str
) -> None:
    """The head too: it has LoRA weights by default, and a server that dropped them would differ here."""
    expected = reference(tiny, TOKENS, server.adapter(found["for_sampler"]))
    assert not close(expected, found["base_logprobs"])
    for name in ("trained_logprobs", "loaded_logprobs"):
        assert close(found[name], expected), name
    assert close(found["computed"][1:], expected)
    assert found["computed_last"][:-2] == [None] * 5 and close(found["computed_last"][-2:], expected[-2:])
    names = load_file(server.adapter(found["for_sampler"]) / "adapter_model.safetensors")
    assert any("lm_head" in name for name in names)


def test_losses_are_sums_by_their_formulas(found: dict[str, Any]) -> None:
    """On the first step the ratio is 1, so that most of them are known."""
    logprobs, advantages = np.array(found["base_logprobs"]), np.array([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])
    expected = {
        "cross_entropy": -logprobs.sum(),
        "importance_sampling": -advantages.sum(),
        "ppo": -advantages.sum(),
        "cispo": -(advantages * logprobs).sum(),
        "dro": -(advantages * logprobs).sum(),
    }
    for name, value in expected.items():
        assert abs(found["losses"][name] - value) < CLOSE, name
    assert abs(found["custom"] - (logprobs**2).sum()) < CLOSE
    assert abs(found["traced"] + logprobs.sum()) < CLOSE
    assert found["loss_falls"] == sorted(found["loss_falls"], reverse=True) and len(set(found["loss_falls"])) == 3


def test_targets_of_two_dimensions_are_scored_at_each_position(found: dict[str, Any], tiny: str) -> None:
    expected = [[reference(tiny, [5, target])[0] for target in (1, 2, 3)]]
    expected.append([reference(tiny, [5, 9, target])[1] for target in (4, 5, 6)])
    assert np.abs(np.array(found["two_dimensional"]) - np.array(expected)).max() < CLOSE
    assert found["many"] == [2, 3, 4, 5] * 10


def test_checkpoints_are_loaded_with_and_without_the_optimizer(found: dict[str, Any]) -> None:
    assert found["ends"]["resumed"] == found["ends"]["training"]
    assert found["ends"]["weights_only"] != found["ends"]["training"]
    assert found["saved"] == found["overwritten"]


def test_samples_have_the_logprobs_of_the_adapter_that_they_are_of(
    found: dict[str, Any], server: TinkerServer, tiny: str
) -> None:
    prompt, adapter = TOKENS[:4], server.adapter(found["for_sampler"])
    assert len(found["samples"]) == 3
    for tokens, logprobs, reason, _ in found["samples"]:
        assert close(logprobs, reference(tiny, [*prompt, *tokens], adapter)[len(prompt) - 1 :])
        assert reason == "stop" or len(tokens) == 6
    assert len({one[3] for one in found["samples"]}) == 3
    tokens = [one[0] for one in found["samples"]]
    assert found["again"] == found["clone"] == found["pickled"] == tokens
    expected = reference(tiny, prompt, adapter)
    assert found["prompt_logprobs"][0] is None and close(found["prompt_logprobs"][1:], expected)
    assert found["topk_prompt"][0] is None
    assert all(len(one) == 2 and one[0][1] >= one[1][1] for one in found["topk_prompt"][1:])
    assert max(first[0][1] - own for first, own in zip(found["topk_prompt"][1:], expected, strict=True)) >= -CLOSE
    assert len(found["topk_sample"]) == len(found["samples"][0][0])


def test_a_sampling_client_of_the_trained_weights_is_a_snapshot(found: dict[str, Any]) -> None:
    assert close(found["snapshot"][1:], found["ends"]["weights_only"])


def test_an_empty_list_of_stops_goes_past_the_models_own_ends(found: dict[str, Any]) -> None:
    assert found["past_ends"] == [8]


def test_stops_of_a_request_are_in_addition_to_the_models_own_ends(found: dict[str, Any]) -> None:
    tokens, reason = found["own_ends"]["none"]
    assert reason == "stop" and 1 < len(tokens) < 40
    assert found["own_ends"]["an id"] == found["own_ends"]["a text"] == [tokens, reason]


def test_lists_name_what_there_is(found: dict[str, Any], tiny: str) -> None:
    run = found["run_by_path"]
    assert found["models"] == [tiny] and found["info"] == [tiny, True, 4, True]
    assert found["encoded"] == found["sampler_tokenizer"]
    assert [run, 4, {"run": "first"}] in found["runs"] and len(found["runs"]) == 3
    assert found["run"] == found["saved"] and found["session_listed"] and len(found["session"]) == 3
    assert found["checkpoints"] == sorted([found["saved"], found["for_sampler"]]) and found["user_checkpoints"] == 2
    assert found["after_delete"] == [found["for_sampler"]]
    assert found["weights_info"] == [tiny, 4, True]
    assert found["base_model"] == [tiny, found["for_sampler"]]
    assert found["expires"].startswith("20") and found["closed"]


REFUSED = {
    "publish": "BadRequestError.*cannot be published",
    "deleted": "NotFoundError.*no checkpoint",
    "base_model": "BadRequestError.*'other/model' is not served here",
    "loss": "RequestFailedError.*stable_reinforce",
    "image": "RequestFailedError.*sequence 0 has an image",
    "step_after_failure": "RequestFailedError.*gradient is not whole",
    "token": "RequestFailedError.*token ids from 0 to",
    "alternatives": "RequestFailedError.*prompt_alt_tokens_k",
    "external": "RequestFailedError.*save_weights_external",
    "inflight": "RequestFailedError.*'inflight'",
    "copy": "NotFoundError.*copying checkpoints",
}


def test_what_is_not_supported_is_refused_by_name(found: dict[str, Any]) -> None:
    assert set(found["refused"]) == set(REFUSED)
    for name, pattern in REFUSED.items():
        assert re.search(pattern, str(found["refused"][name])), name
    assert found["alive_after_refusals"]
