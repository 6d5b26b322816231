"""An option that would have no effect next to another is refused with the reason; every other change of an option changes the work."""

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from atropos_core.errors import ConfigError
from atropos_core.types import Ragged, offsets_of
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.update import Update

RECOMPUTE = {"old_logprobs": "recompute", "minibatches": 2}
ALONE = {"alone": True}


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"correction": {"kind": "tis", "low": 0.5}, **RECOMPUTE}, "low has no effect"),
        ({"correction": {"kind": "sequence_tis", "low": 0.5}, **RECOMPUTE}, "low has no effect"),
        ({"correction": {"kind": "mis", "low": 3, "high": 2}, **RECOMPUTE}, "low = 3 is not below high = 2"),
        ({"correction": {"kind": "icepop", "high": 0.4}, **RECOMPUTE}, "low = 0.5 is not below high = 0.4"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip has no effect"),
        ({"loss": "reinforce", "dual_clip": 3.0}, "dual_clip has no effect"),
        ({"loss": "reinforce", "clip_low": 0.1}, "clip_low has no effect"),
        ({"loss": "reinforce", "clip_high": 0.1}, "clip_high has no effect"),
        ({"old_logprobs": "recompute", "clip_low": 0.1}, "clip_low has no effect"),
        ({"old_logprobs": "recompute", "clip_high": 0.1}, "clip_high has no effect"),
        ({"old_logprobs": "recompute", "dual_clip": 3.0}, "dual_clip has no effect"),
        ({"loss": "sapo", "clip_low": 0.1}, "clip_low has no effect"),
        ({"loss": "vespo", "clip_high": 0.1}, "clip_high has no effect"),
        ({"loss": "kpop", "dual_clip": 3.0}, "dual_clip has no effect"),
        ({"loss": "gmpo", "dual_clip": 3.0}, "dual_clip has no effect"),
        ({"loss": "dppo", "clip_low": 0.1}, "clip_low has no effect"),
        ({"loss": "kpop", "dppo": {}}, "dppo has no effect"),
        ({"sapo": {}}, "sapo has no effect"),
        ({"loss": "sapo", "vespo": {}}, "vespo has no effect"),
        ({"loss": "sapo", "kpop": {}}, "kpop has no effect"),
        ({"loss": "sapo", "sapo": {}, "old_logprobs": "recompute"}, "sapo has no effect"),
        ({"correction": {"kind": "kpop", "low": 0.5}, **RECOMPUTE}, "low has no effect"),
        ({"missing_logprobs": "refuse", **RECOMPUTE}, "missing_logprobs has no effect"),
        ({"schedule_floor": 0.1}, "schedule_floor has no effect"),
        ({"whiten_advantages": True, "distillation": ALONE}, "whiten_advantages has no effect"),
        ({"whiten_advantages": True, "distillation": {**ALONE, "kind": "reverse"}}, "whiten_advantages has no effect"),
        ({"kl": {"estimator": "k1", "place": "reward"}, "distillation": ALONE}, 'kl.place = "reward" has no effect'),
        ({"clip_high": 0.3, "distillation": ALONE}, "clip_high has no effect"),
        ({"correction": {"kind": "mis"}, "distillation": ALONE, **RECOMPUTE}, "correction has no effect"),
        ({"loss_length": 9}, "loss_length has no effect"),
        ({"layout": "rows", "attention": "padded"}, "attention has no effect"),
        ({"layout": "rows", "share_prompts": False}, "share_prompts has no effect"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"max_grad_norm": float("inf")}, "finite"),
    ],
    ids=str,
)
def test_an_option_that_would_do_nothing_is_refused_by_name(options, idle):
    with pytest.raises(ValidationError, match=idle):
        GrpoOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "luspo", "clip_low": 0.1}, {"loss": "sapo", "sapo": {"temperature_neg": 2.0}, **RECOMPUTE},
        {"loss": "cispo", "clip_low": 0.1}, {"loss": "gspo", "dual_clip": 3.0}, {"loss": "gmpo", "clip_low": 0.1},
        {"loss": "dppo", "dppo": {"divergence": "kl", "threshold_pos": 0.1}}, {"clip_low": 0.1, **RECOMPUTE},
        {"old_logprobs": "recompute", "clip_low": 0.1, "lora": {"dropout": 0.1}},
        {"distillation": {**ALONE, "kind": "reverse"}, "clip_high": 0.3},
        {"correction": {"kind": "geometric_mis", "low": 0.9}, **RECOMPUTE},
    ],
    ids=str,
)  # fmt: skip
def test_what_has_an_effect_is_taken(options):
    GrpoOptions(**options)


@pytest.mark.parametrize(
    "option", [{"clip_low": 0.1}, {"clip_high": 0.1}, {"dual_clip": 3.0}, {"loss_length": 9}], ids=str
)
async def test_a_strangers_loss_that_does_not_look_at_a_bound_refuses_it(open_trainer, tmp_path, monkeypatch, option):
    (tmp_path / "deaf.py").write_text(
        "from atropos_trainer_grpo.losses import Surrogate, register\n\n@register()\ndef mine(rows, clip):\n"
        "    ratio = rows.ratio()\n    return Surrogate(-ratio * rows.advantages, ratio.detach())\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(option))} has no effect"):
        await open_trainer(loss="./deaf.py:mine", **option)


# -- every option, changed

SOME = {"minibatches": 2, "epochs": 2}
REVERSE = {"distillation": {"kind": "reverse"}}
FORWARD = {"distillation": {"kind": "forward"}}
KL = {"kl": {"coefficient": 0.1}}
RHO = {**RECOMPUTE, "correction": {"kind": "mis"}}
LORA = {"lora": {"rank": 2}}
MANY = {"schedule": "linear"}
SAPO, VESPO, KPOP, DPPO = ({**SOME, "loss": name} for name in ("sapo", "vespo", "kpop", "dppo"))
# option -> what it is changed in, and to what. The work is two batches: weights and what the steps report.
CHANGED: dict[str, tuple[dict, dict]] = {
    "loss": ({}, {"loss": "dapo"}),
    "average": ({}, {"average": "sum"}),
    "clip_low": (SOME, {**SOME, "clip_low": 0.01}),
    "clip_high": (SOME, {**SOME, "clip_high": 0.01}),
    "dual_clip": (SOME, {**SOME, "dual_clip": 1.01}),
    "loss_length": ({"loss": "dr_grpo", "loss_length": 9}, {"loss": "dr_grpo", "loss_length": 99}),
    "sapo.temperature_pos": (SAPO, {**SAPO, "sapo": {"temperature_pos": 3.0}}),
    "sapo.temperature_neg": (SAPO, {**SAPO, "sapo": {"temperature_neg": 3.0}}),
    "vespo.k_pos": (VESPO, {**VESPO, "vespo": {"k_pos": 0.1}}),
    "vespo.lambda_pos": (VESPO, {**VESPO, "vespo": {"lambda_pos": 0.1}}),
    "vespo.k_neg": (VESPO, {**VESPO, "vespo": {"k_neg": 0.1}}),
    "vespo.lambda_neg": (VESPO, {**VESPO, "vespo": {"lambda_neg": 0.1}}),
    "kpop.threshold": (KPOP, {**KPOP, "kpop": {"threshold": 1e-3}}),
    "dppo.divergence": (DPPO, {**DPPO, "dppo": {"divergence": "kl"}}),
    "dppo.threshold_pos": (DPPO, {**DPPO, "dppo": {"threshold_pos": 1e-6}}),
    "dppo.threshold_neg": (DPPO, {**DPPO, "dppo": {"threshold_neg": 1e-6}}),
    "old_logprobs": (SOME, {**SOME, "old_logprobs": "recompute"}),
    "correction.kind": (RHO, {**RHO, "correction": {"kind": "icepop"}}),
    "correction.low": (RHO, {**RHO, "correction": {"kind": "mis", "low": 0.9}}),
    "correction.high": (RHO, {**RHO, "correction": {"kind": "mis", "high": 1.1}}),
    "kl.coefficient": (KL, {"kl": {"coefficient": 0.9}}),
    "kl.estimator": (KL, {"kl": {"coefficient": 0.1, "estimator": "k2"}}),
    "kl.place": (KL, {"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}),
    "distillation.kind": (FORWARD, REVERSE),
    "distillation.coefficient": (FORWARD, {"distillation": {"coefficient": 0.7}}),
    "distillation.alone": (FORWARD, {"distillation": {"alone": True}}),
    "entropy_coefficient": ({}, {"entropy_coefficient": 0.5}),
    "whiten_advantages": ({}, {"whiten_advantages": True}),
    "epochs": ({}, {"epochs": 2}),
    "minibatches": ({}, {"minibatches": 2}),
    "learning_rate": ({}, {"learning_rate": 1e-3}),
    "betas": ({}, {"betas": (0.1, 0.2)}),
    "eps": ({}, {"eps": 1.0}),
    "weight_decay": ({}, {"weight_decay": 0.5}),
    "max_grad_norm": ({"eps": 1.0}, {"eps": 1.0, "max_grad_norm": 1e-3}),
    "warmup_steps": ({}, {"warmup_steps": 5}),
    "schedule": ({}, {"schedule": "cosine"}),
    "schedule_floor": (MANY, {**MANY, "schedule_floor": 0.9}),
    "learning_rates.pattern": (
        {"learning_rates": [{"pattern": "q_proj", "factor": 0.5}]}, {"learning_rates": [{"pattern": "k_proj", "factor": 0.5}]}
    ),
    "learning_rates.factor": ({}, {"learning_rates": [{"pattern": "q_proj", "factor": 0.5}]}),
    "learning_rates.learning_rate": ({}, {"learning_rates": [{"pattern": "q_proj", "learning_rate": 0.5}]}),
    "dtype": ({}, {"dtype": "bfloat16"}),
    "lora.rank": (LORA, {"lora": {"rank": 3}}),
    "lora.alpha": (LORA, {"lora": {"rank": 2, "alpha": 3.0}}),
    "lora.dropout": (LORA, {"lora": {"rank": 2, "dropout": 0.5}}),
    "lora.targets": (LORA, {"lora": {"rank": 2, "targets": ["q_proj"]}}),
    "lora.layers": (LORA, {"lora": {"rank": 2, "layers": [0]}}),
    "lora.learning_rate": (LORA, {"lora": {"rank": 2, "learning_rate": 1e-5}}),
}  # fmt: skip
# The tests of options that affect memory, speed or what is refused.
ELSEWHERE = {
    "router_replay": "test_router_replay.py::test_logprobs_and_gradient_are_those_of_the_recorded_experts",
    "missing_logprobs": "test_update.py::test_missing_logprobs_are_recomputed_or_refused",
    "kernels": "test_torchao.py::test_what_the_run_cannot_have_is_refused_before_it_begins",
    "compile_layers": "test_compiled_layers.py::test_a_trainer_with_compiled_layers_takes_the_steps_of_one_without",
    "attention": "test_prefix_tree.py::test_flash_attention_gives_the_gradient_of_the_padded_layout",
    "lora.quantization": "test_quantization.py::test_several_devices_and_a_missing_package_are_refused",
    "checkpointed_layers": "test_offloading.py::test_the_first_layers_alone_are_computed_again",
    "activation_offloading": "test_offloading.py::test_every_layer_that_is_computed_again_is_copied_and_no_other",
    "optimizer_offloading": "test_offloading.py::test_moments_and_masters_in_host_memory_change_no_weight",
    "optimizer": "test_torchao.py::test_moments_of_another_format_are_refused_with_the_option_that_takes_them",
}
# Of memory and speed, and they leave the weights as they are: what is computed is not the same operations.
COMPUTED = {
    "tokens_per_microbatch": {"tokens_per_microbatch": 30},
    "logprob_chunk": {"logprob_chunk": 5},
    "layout": {"layout": "rows"},
    "share_prompts": {"share_prompts": False},
    "gradient_checkpointing": {"gradient_checkpointing": True},
}


class Counting(TorchDispatchMode):
    """Count each computed operation, with the shape of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        shape = next((tuple(one.shape) for one in args if isinstance(one, torch.Tensor)), ())
        self.seen[str(function), shape] += 1
        return function(*args, **(kwargs or {}))


async def counted(open_trainer, batch, options):
    trainer = await open_trainer(**options)
    update = Update(trainer.model, trainer._optimizer, trainer._options, LOSSES["grpo"], batch, "cpu", 0)
    [chosen] = update.minibatches()
    with Counting() as counting:
        update.backward(chosen)
    return counting.seen


@pytest.mark.parametrize("option", list(COMPUTED))
async def test_changing_an_option_of_memory_changes_what_is_computed(open_trainer, make_batch, option):
    batch = make_batch()
    assert await counted(open_trainer, batch, {}) != await counted(open_trainer, batch, COMPUTED[option])


def leaves(model: type, prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner = [one for one in flat(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        found += leaves(inner[0], f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return found


def flat(annotation: object) -> list[object]:
    return [annotation, *(one for part in get_args(annotation) for one in flat(part))]


def test_there_is_an_entry_for_every_option():
    assert sorted([*CHANGED, *COMPUTED, *ELSEWHERE]) == sorted(leaves(GrpoOptions)), (
        "say how the new option's effect is seen"
    )


@pytest.mark.parametrize("option", list(ELSEWHERE))
def test_the_test_that_an_entry_names_is_there_and_uses_the_option(option):
    file, _, name = ELSEWHERE[option].partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())
    [found] = [one for one in ast.walk(tree) if getattr(one, "name", None) == name]
    assert option in ast.unparse(found)


@pytest.fixture
def work(open_trainer, make_batch, gate):
    """Train on two batches under given options and return the results."""
    cache: dict[str, tuple] = {}

    async def made(options: dict) -> tuple:
        if str(options) not in cache:
            trainer = await open_trainer(steps=4, **options)
            metrics = []
            for version in (1, 2):
                batch = make_batch(seed=version, version=version)
                spoken = batch.sampled.astype(np.int64)
                ids, logprobs = batch.tokens[batch.sampled], np.full(int(spoken.sum()), -0.5, np.float32)
                ragged = {
                    "teacher_token_ids": Ragged(offsets_of(spoken), ids),
                    "teacher_logprobs": Ragged(offsets_of(spoken), logprobs),
                }
                step = await trainer.step(replace(batch, ragged=ragged), gate)
                metrics.append({name: value for name, value in step.items() if not name.startswith("time/")})
            flat = torch.cat([parameter.detach().flatten().float() for parameter in trainer.model.parameters()])
            cache[str(options)] = (flat, metrics)
        return cache[str(options)]

    return made


@pytest.mark.parametrize("option", list(CHANGED))
async def test_changing_an_option_changes_the_weights(work, option):
    before, after = CHANGED[option]
    one, other = await work(before), await work(after)
    assert len(one[0]) != len(other[0]) or not torch.equal(one[0], other[0])


async def test_the_same_options_leave_the_same_weights(open_trainer, make_batch, gate, work):
    weights = await work({})
    trainer = await open_trainer(steps=4)
    for version in (1, 2):
        await trainer.step(make_batch(seed=version, version=version), gate)
    assert torch.equal(
        weights[0], torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    )
