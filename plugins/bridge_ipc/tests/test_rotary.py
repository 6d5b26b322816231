"""The engine's table of angles against the trainer's own rotary module, for each kind of rotary positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StableLmConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from atropos_bridge_ipc import rotary
from atropos_core.errors import WeightsMismatch

LENGTH, HEAD = 512, 32
LAYER = "model.layers.0.self_attn.rotary_emb"
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    },
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


def model(kind: str) -> Any:
    family = StableLmConfig if kind == "partial" else LlamaConfig  # transformers' Llama turns whole heads, always
    config = family(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, rope_parameters=dict(KINDS[kind]),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def speeds(kind: str) -> tuple[list[float], float]:
    """Radians a position of each pair, and the scale of cosines and sines: from the formulas, in double precision."""
    rope = KINDS[kind]
    width = int(HEAD * rope.get("partial_rotary_factor", 1.0))
    plain = [rope["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]
    if kind == "linear":
        return [speed / rope["factor"] for speed in plain], 1.0
    if kind == "llama3":
        old, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        made = []
        for speed in plain:
            turns = old * speed / (2 * math.pi)
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
            made.append(speed * ((1 - smooth) / rope["factor"] + smooth))
        return made, 1.0
    if kind == "yarn":
        old = rope["original_max_position_embeddings"]

        def pair(turns: float) -> float:
            return width * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

        first, last = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), width - 1)
        kept = [1 - min(1.0, max(0.0, (i - first) / (last - first))) for i in range(width // 2)]
        made = [speed * (k + (1 - k) / rope["factor"]) for speed, k in zip(plain, kept, strict=True)]
        return made, 0.1 * math.log(rope["factor"]) + 1
    return plain, 1.0


def offered(kind: str, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    pairs, scale = speeds(kind)
    positions = rotary.sampled(LENGTH - 1)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(pairs, dtype=torch.float64)
    table = {name: (getattr(angles, name)() * scale).to(dtype).float() for name in ("cos", "sin")}
    return [
        {
            "layers": [LAYER, LAYER.replace("0", "1")], "kind": "Table", "rotary_dim": 2 * len(pairs),
            "eps": torch.finfo(dtype).eps, "positions": positions,
            **{name: values.contiguous().numpy().tobytes() for name, values in table.items()},
        }
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_positions_pass_in_the_engines_precision(kind: str, dtype: torch.dtype) -> None:
    assert KINDS[kind]["rope_type"] in {"default", *ROPE_INIT_FUNCTIONS}
    made = model(kind)
    rotary.check_fresh(made)
    rotary.check(made, offered(kind, dtype))


@pytest.mark.parametrize(("trainer", "engine"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_any_other_positions_are_named_with_both_values(trainer: str, engine: str) -> None:
    differ = r"differ: at position \d+, frequency \d+, (cos|sin) is \S+ in the trainer and \S+ in the engine"
    wanted = (
        r"turns \d+ dimensions of each head, the engine" if "partial" in (trainer, engine) else f"'{LAYER}' {differ}"
    )
    with pytest.raises(WeightsMismatch, match=wanted) as found:
        rotary.check(model(trainer), offered(engine))
    assert "'rope_theta'" in str(found.value)


def test_a_base_that_is_off_by_a_ten_thousandth_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "near", {"rope_type": "default", "rope_theta": 10001.0})
    with pytest.raises(WeightsMismatch, match="differ: at position"):
        rotary.check(model("default"), offered("near"))


def test_a_rotary_module_that_is_not_what_its_config_gives_is_named() -> None:
    made = model("llama3")
    made.model.rotary_emb.inv_freq.mul_(1.001)
    with pytest.raises(
        WeightsMismatch, match=r"rotary buffer 'model.rotary_emb.inv_freq' is .* its configuration gives"
    ):
        rotary.check_fresh(made)


def test_rotary_positions_at_one_end_alone_are_refused() -> None:
    with pytest.raises(WeightsMismatch, match="trainer's model has 1 rotary modules, and the engine's 0"):
        rotary.check(model("default"), [])


def test_the_first_and_the_last_positions_are_compared() -> None:
    assert rotary.sampled(511) == [0, 1, 2, 3, 127, 255, 510, 511]
    assert rotary.sampled(0) == [0]
