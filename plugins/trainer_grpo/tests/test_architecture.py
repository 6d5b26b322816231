"""Packed sequences give what single sequences give, for what the attention and the logits of each family have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atropos_core.errors import FitError
from atropos_torch_models.small_model import small_model
from atropos_trainer_grpo.architecture import LogitForm, architecture_of
from atropos_trainer_grpo.attention import NAME, attention_of, register, window_of
from atropos_trainer_grpo.model import score
from atropos_trainer_grpo.packed_rows import Bucket, pack
from tests.models.families import config_of

LENGTHS = (90, 70, 37, 22)  # of windows of 16
ASKS: dict[str, tuple[LogitForm, set[str]]] = {
    "qwen3": (LogitForm(), set()),
    "granite": (LogitForm(scale=1 / 8), set()),  # divides
    "hyperclovax": (LogitForm(scale=8), set()),  # multiplies by a setting of the same name
    "cohere2": (LogitForm(scale=0.0625), {"window"}),
    "minicpm3": (LogitForm(scale=256 / 2560), {"value width"}),
    "nanochat": (LogitForm(cap=15), set()),
    "mistral": (LogitForm(), {"window"}),
    "gemma2": (LogitForm(cap=30), {"window", "softcap"}),
    "gemma3_text": (LogitForm(), {"window"}),
    "gemma4_text": (LogitForm(cap=30), {"window"}),  # layers with heads of two widths
    "gpt_oss": (LogitForm(), {"window", "sinks"}),
    "mimo_v2_flash": (LogitForm(), {"window", "sinks", "value width"}),
    "deepseek_v3": (LogitForm(), {"value width"}),
}


def sequences() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    rows = [random.integers(3, 640, length).astype(np.int32) for length in LENGTHS]
    rows[1][:40], rows[2][:20] = rows[0][:40], rows[0][:20]
    return rows


def gradient(values: torch.Tensor, model: Any) -> torch.Tensor:
    weights = torch.linspace(-1, 1, len(values))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True)
    return torch.cat([part.flatten() for part in parts if part is not None])


def single(model: Any) -> torch.Tensor:
    made = []
    for row in sequences():
        ids = torch.from_numpy(row.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / 0.7
        made.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(made)


def packed(model: Any, *, share: bool) -> torch.Tensor:
    register()
    model.set_attn_implementation(NAME)
    tokens, lengths = np.concatenate(sequences()), np.array(LENGTHS)
    packing = pack(tokens, lengths, share=share)
    rows = np.setdiff1d(np.arange(len(tokens)), np.cumsum(lengths) - lengths)
    targets = torch.from_numpy(tokens[rows].astype(np.int64))
    return score(model, packing, packing.at(rows - 1), targets, torch.full((len(rows),), 0.7), 64).logprobs


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("share", [False, True])
def test_a_packed_tree_is_exact_with_windows_sinks_caps_scales_and_narrow_values(name: str, share: bool) -> None:
    model: Any = small_model(config_of(name))
    expected = single(model)
    slope = gradient(expected, model)
    made = packed(model, share=share)
    torch.testing.assert_close(made, expected, atol=1e-5 * max(1.0, float(expected.std())), rtol=0)
    assert (gradient(made, model) - slope).norm() < 1e-5 * slope.norm()


@pytest.mark.parametrize(("name", "asks"), ASKS.items(), ids=list(ASKS))
def test_what_a_family_asks_for_is_measured(name: str, asks: tuple[LogitForm, set[str]]) -> None:
    found = architecture_of(config_of(name))
    assert found.logits is not None
    assert (found.logits.scale, found.logits.cap) == (pytest.approx(asks[0].scale), asks[0].cap)
    assert found.attention == asks[1]


def test_a_configuration_is_measured_as_it_is_now() -> None:
    config = config_of("granite")
    for scale in (8.0, 4.0):
        config.logits_scaling = scale
        assert architecture_of(config).logits == LogitForm(scale=1 / scale)


def test_only_plain_attention_goes_by_levels() -> None:
    assert attention_of("auto", config_of("mistral"), "cpu") == "auto", "for sequences within its window"
    assert window_of(config_of("mistral")) == 4096 and window_of(config_of("qwen3")) == float("inf")
    assert attention_of("auto", config_of("gpt_oss"), "cpu") == "padded"
    with pytest.raises(FitError, match="'gpt_oss' model has attention with sinks"):
        attention_of("flash", config_of("gpt_oss"), "cpu")


@pytest.mark.parametrize("fault", ["window", "sinks", "softcap", "cap"])
def test_planted_faults_are_far_from_exact(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"window": "mistral", "sinks": "gpt_oss", "softcap": "gemma2", "cap": "nanochat"}[fault]
    config = config_of(name)
    if fault in ("softcap", "cap"):
        config.attn_logit_softcapping, config.final_logit_softcapping = 1.0, 1.0
    model: Any = small_model(config)
    expected = single(model)
    if fault == "window":
        seen = Bucket.seen
        monkeypatch.setattr(Bucket, "seen", lambda self, window, device: seen(self, window and window + 1, device))
    elif fault == "cap":
        monkeypatch.setattr("atropos_trainer_grpo.model.logit_form", lambda _: LogitForm())
    else:
        from atropos_trainer_grpo import attention

        attend = attention.attend
        changed = {"sinks": (7, None), "softcap": (6, None)}[fault]
        monkeypatch.setattr(
            attention,
            "attend",
            lambda *given: attend(*(changed[1] if at == changed[0] else one for at, one in enumerate(given))),
        )
    made = packed(model, share=True)
    assert (made - expected).abs().max() > 0.01 * expected.std()
