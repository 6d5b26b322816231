"""Losses and gradients by TRL's own code. Runs in .venv-trl; benchmarks/losses.py starts it.

    .venv-trl/bin/python benchmarks/trl_losses.py CASES.npz RESULTS.npz

`_compute_loss` of TRL's trainers is called as it is, on per-token logprobs in float64 in place of a model's.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

ALONE = SimpleNamespace(
    num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
)  # fmt: skip

SOFT = {  # the defaults of TRL's GRPOConfig
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}  # fmt: skip


def trainer(settings: dict[str, Any], logprobs: torch.Tensor, entropies: torch.Tensor) -> SimpleNamespace:
    """What `_compute_loss` reads of its trainer."""
    return SimpleNamespace(
        accelerator=ALONE,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("bias_correction", False),  # TRL 1.16 has it on by default
            steps_per_generation=1,
            **{name: settings.get(name, default) for name, default in SOFT.items()},
        ),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("level", "token"),
        beta=settings.get("beta", 0.0),
        loss_type=settings.get("loss_type"),
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        use_vllm=False,
        max_completion_length=settings.get("max_completion_length"),
        _entropy_bonus_enabled=bool(settings.get("entropy")),
        use_adaptive_entropy=False,
        entropy_coef=settings.get("entropy", 0.0),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *given, **named: (logprobs, entropies, None),
    )


def main() -> None:
    cases, results = np.load(sys.argv[1]), {}
    for number, settings in enumerate(json.loads(str(cases["settings"]))):
        columns = {
            name: torch.from_numpy(cases[f"{number}/{name}"])
            for name in ("new", "old", "advantages", "mask", "reference", "entropies")
        }
        new = columns["new"].requires_grad_()
        mask = columns["mask"]
        nothing = torch.zeros((len(mask), 1), dtype=torch.int64)
        inputs = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": mask.long(), "completion_mask": mask,
            "advantages": columns["advantages"], "old_per_token_logps": columns["old"],
            "old_logps": (columns["old"] * mask).sum(1), "ref_per_token_logps": columns["reference"],
            "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        which = RLOOTrainer if settings["trainer"] == "rloo" else GRPOTrainer
        loss = which._compute_loss(trainer(settings, new, columns["entropies"]), None, inputs)
        loss.backward()
        results[f"{number}/loss"], results[f"{number}/gradient"] = loss.detach().numpy(), new.grad.numpy()
    np.savez(sys.argv[2], **results)


if __name__ == "__main__":
    main()
