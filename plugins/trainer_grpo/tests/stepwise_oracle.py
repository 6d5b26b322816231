"""One adapter in float64, by transformers, peft and torch only: what a stepwise trainer must compute; and calls to compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from atropos_core.stepwise import AdamSettings, StepwiseTrainer, TargetSequence
from plugins.trainer_grpo.tests.conftest import VOCABULARY, doubled


def clip(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


# Of one sequence: logprobs with gradient, values, and the settings of the call.
LOSSES: Mapping[str, Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]] = {
    "cross_entropy": lambda lp, v, s: -(v["weights"] * lp).sum(),
    "importance_sampling": lambda lp, v, s: -((lp - v["logprobs"]).exp() * v["advantages"]).sum(),
    "ppo": lambda lp, v, s: (
        -torch.min(
            (lp - v["logprobs"]).exp() * v["advantages"],
            clip((lp - v["logprobs"]).exp(), s["clip_low_threshold"], s["clip_high_threshold"]) * v["advantages"],
        ).sum()
    ),
    "cispo": lambda lp, v, s: (
        -(
            clip((lp - v["logprobs"]).exp(), s["clip_low_threshold"], s["clip_high_threshold"]).detach()
            * lp
            * v["advantages"]
        ).sum()
    ),
    "dro": lambda lp, v, s: -(lp * v["advantages"] - 0.5 * s["beta"] * (lp - v["logprobs"]) ** 2).sum(),
    "gspo": lambda lp, v, s: (
        -torch.min(
            gspo_ratio(lp, v) * v["advantages"],
            clip(gspo_ratio(lp, v), s["clip_low_threshold"], s["clip_high_threshold"]) * v["advantages"],
        ).sum()
    ),
}


def gspo_ratio(lp: Tensor, v: Mapping[str, Tensor]) -> Tensor:
    marked = v["sequence_ratio_mask"] != 0
    log_ratio = (lp.detach() - v["logprobs"])[marked].mean()
    return torch.exp(log_ratio + lp - lp.detach())


class Oracle:
    """The adapter saved in `directory` on the model in `base`."""

    def __init__(self, base: Path, directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        self.model = PeftModel.from_pretrained(model, str(directory), is_trainable=True)
        if hasattr(
            next(one for one in self.model.modules() if type(one).__name__.endswith("RMSNorm")), "variance_epsilon"
        ):
            doubled(self.model)
        self.model.double().eval()  # norms of other models compute in float32
        self._adam = torch.optim.AdamW([one for one in self.model.parameters() if one.requires_grad])

    def logprobs(self, sequence: TargetSequence) -> Tensor:
        logs = self.model(torch.from_numpy(sequence.tokens).long()[None]).logits[0].log_softmax(-1)
        targets = torch.from_numpy(sequence.targets)
        return logs.gather(1, targets) if targets.ndim == 2 else logs.gather(1, targets[:, None])[:, 0]

    def backward(self, sequences: Sequence[TargetSequence], loss: str, settings: Mapping[str, float]) -> float:
        total = 0.0
        for sequence in sequences:
            values = {name: torch.from_numpy(np.asarray(one, np.float64)) for name, one in sequence.values.items()}
            one = LOSSES[loss](self.logprobs(sequence), values, settings)
            one.backward()
            total += float(one)
        return total

    def step(self, adam: AdamSettings) -> None:
        if adam.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), adam.max_grad_norm)
        self._adam.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self._adam.step()
        self._adam.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """The adapter's tensors by the names that peft saves them by."""
        return {
            name.replace(".default.", "."): one.detach()
            for name, one in self.model.named_parameters()
            if one.requires_grad
        }


def sequences_of(
    loss: str, seed: int = 0, count: int = 5, targets: int = 0, vocabulary: int = VOCABULARY
) -> list[TargetSequence]:
    """Sequences that begin alike, with targets that are not their next tokens. RL targets have logprobs near those of the policy."""
    random = np.random.default_rng(seed)
    prompt = random.integers(2, vocabulary, 18)
    made = []
    for number in range(count):
        tokens = np.concatenate([prompt[: 18 - 2 * (number == 1)], random.integers(2, vocabulary, 3 + 4 * number)])
        shape = (len(tokens), targets) if targets else (len(tokens),)
        if loss == "cross_entropy":
            values = {"weights": random.normal(size=shape).astype(np.float32)}
        else:
            values = {
                "logprobs": random.normal(-3.0, 1.0, shape).astype(np.float32),
                "advantages": random.normal(size=shape).astype(np.float32),
            }
        if loss == "gspo":
            values["sequence_ratio_mask"] = (np.arange(len(tokens)) >= 16).astype(np.float32)
        made.append(TargetSequence(tokens.astype(np.int32), random.integers(0, vocabulary, shape), values))
    return made


async def disturb(trainer: StepwiseTrainer, name: str, directory: Path, seed: int = 5) -> Path:
    """Give the adapter a B that is not zero, so that A has a gradient too. Returns the directory that it was saved in."""
    directory.mkdir()
    await trainer.save_adapter(directory, name, False)
    file = directory / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    changed = {
        key: torch.randn(tensor.shape, generator=generator) * 0.05 if "lora_B" in key else tensor
        for key, tensor in load_file(file).items()
    }
    save_file(changed, file, metadata={"format": "pt"})
    await trainer.restore_adapter(directory, name, False)
    return directory


async def weights_of(trainer: StepwiseTrainer, name: str, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    await trainer.save_adapter(directory, name, False)
    return load_file(directory / "adapter_model.safetensors")
