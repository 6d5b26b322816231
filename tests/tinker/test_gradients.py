"""One optimizer step of each loss, sent by the official client, next to torch's AdamW in float64."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.tinker.server import TinkerServer

CLOSE = 1e-5


@pytest.fixture(scope="module")
def found(server: TinkerServer, tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    value: dict[str, Any] = server.run("gradients.py", tiny, out=tmp_path_factory.mktemp("client") / "found.json")
    return value


def loss_of(name: str, lp: Any, old: Any, advantages: Any, weights: Any) -> Any:
    """The losses of Tinker's documentation, as sums over tokens."""
    import torch

    ratio = torch.exp(lp - old)
    clipped = ratio.clamp(0.8, 1.2)
    return {
        "cross_entropy": -(weights * lp),
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": -(clipped.detach() * lp * advantages),
        "dro": -(lp * advantages - 0.5 * 0.1 * (lp - old) ** 2),
        "custom": 0.1 * lp**2,
    }[name].sum()


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "custom"])
def test_the_step_of_a_loss_is_that_of_torch(found: dict[str, Any], server: TinkerServer, tiny: str, name: str) -> None:
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(server.adapter(found["start"])), is_trainable=True).double().eval()
    adam = found["adam"]
    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad],
        lr=adam["learning_rate"], betas=(adam["beta1"], adam["beta2"]), eps=adam["eps"], weight_decay=adam["weight_decay"],
    )  # fmt: skip
    columns = zip(found["sequences"], found["old"], found["advantages"], found["weights"], strict=True)
    for tokens, *numbers in columns:
        targets = torch.tensor(tokens[1:])
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
        lp = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
        loss_of(name, lp, *(torch.tensor(one, dtype=torch.float64) for one in numbers)).backward()
    before = {key: one.clone() for key, one in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
    optimizer.step()
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    after = load_file(server.adapter(found["after"][name]) / "adapter_model.safetensors")
    assert expected.keys() == after.keys()
    moved = max(float((expected[key] - before[key]).abs().max()) for key in expected)
    assert moved > 0.01
    for key, tensor in after.items():
        assert abs(tensor - expected[key].detach().numpy()).max() < CLOSE * max(1.0, moved), key
