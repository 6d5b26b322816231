"""The provider of the trainer `grpo`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.errors import ConfigError, FitError
from atropos_core.plugins.model_provider import TrainerProvider
from atropos_core.plugins.provider import Provider, RunContext
from atropos_trainer_grpo.optional_packages import require

if TYPE_CHECKING:
    from pathlib import Path

    from atropos_core.interfaces import Loss, Trainer, Transport
    from atropos_core.plugins.model_provider import MemoryUse, SizeChoice, Workload
    from atropos_core.plugins.options import NoOptions
    from atropos_trainer_grpo.config import GrpoOptions

LOSSES = {
    "grpo": "clipped ratios; mean over each sequence, then over sequences",
    "dr_grpo": "clipped ratios; token sum over a constant length",
    "dapo": "clipped ratios with more room upwards; mean over all tokens",
    "gspo": "clipped ratios of whole sequences",
    "cispo": "clipped ratios as weights: no token loses its gradient",
    "reinforce": "the policy gradient itself, without a ratio",
    "sapo": "ratios through a soft gate instead of a clip",
    "vespo": "the policy gradient, weighted by a soft kernel of the whole sequence's ratio",
    "luspo": "clipped ratios of whole sequences, weighted by their length",
    "kpop": "ratios, without the tokens about whose probability the two policies disagree",
    "gmpo": "the geometric mean of a sequence's ratios, each clipped before the mean",
    "dppo": "ratios, without the tokens that have moved too far from the policy that sampled them",
}


def build(options: GrpoOptions, context: RunContext) -> Trainer:
    if options.adapts([context.transport]):
        require("peft", "a LoRA adapter")
    if options.lora is not None and options.lora.quantization is not None:
        _check_quantized_base(options.lora.quantization, context)
    if options.optimizer != "adamw":
        _check_torchao(options, context)
    if options.kernels == "liger":
        _check_liger(context)
    if options.compile_layers:
        _check_compiled(options, context)
    for name in ("activation_offloading", "optimizer_offloading"):
        if getattr(options, name):
            _refuse_another_device(f"trainer.{name} = true", f"trainer.{name} = false", context)
    if options.optimizer_offloading and (devices := len(context.devices) * context.machines) > 1:
        raise FitError(
            f"trainer.optimizer_offloading = true works only on one device, and this trainer has {devices}.",
            remedy="Leave it out: ranks already shard masters and moments.",
        )
    if len(context.devices) * context.machines > 1:
        from atropos_trainer_grpo.ranks import RankedTrainer

        return RankedTrainer(options, context)
    from atropos_trainer_grpo.stepwise.trainer import StepwiseGrpoTrainer

    return StepwiseGrpoTrainer(options, context)


def _check_torchao(options: GrpoOptions, context: RunContext) -> None:
    option = f'trainer.optimizer = "{options.optimizer}"'
    require("torchao", option)
    if (devices := len(context.devices) * context.machines) > 1:
        raise FitError(
            f"{option} works only on one device, and this trainer has {devices}.",
            remedy='Set trainer.optimizer = "adamw": ranks already shard fp32 moments.',
        )


def _check_quantized_base(kind: str, context: RunContext) -> None:
    option = f'trainer.lora.quantization = "{kind}"'
    if kind == "nf4":
        require("bitsandbytes", option)
    if (devices := len(context.devices) * context.machines) > 1:
        raise FitError(
            f"{option} works only on one device, and this trainer has {devices}.",
            remedy="Set trainer.devices to one device, or leave the option out: ranks already shard the base.",
        )


def _refuse_another_device(option: str, instead: str, context: RunContext) -> None:
    if other := [device for device in context.devices if not device.startswith("cuda")]:
        raise FitError(
            f"{option} needs a CUDA device, and the trainer is on {other[0]!r}.",
            remedy=f'Set trainer.devices = ["cuda:0"], or {instead}.',
        )


def _check_liger(context: RunContext) -> None:
    option = 'trainer.kernels = "liger"'
    _refuse_another_device(option, 'trainer.kernels = "torch"', context)
    require("liger_kernel", option)


def _check_compiled(options: GrpoOptions, context: RunContext) -> None:
    """Raises FitError if compiled layers do not fit the other options, or if this machine cannot compile them."""
    from atropos_trainer_grpo.compiled_layers import refuse_without_compiler

    lora = options.lora
    refused = {
        "works only on one device": len(context.devices) * context.machines > 1,
        "is not possible with deterministic = true, because compiled code depends on the sizes of the first batch": (
            context.deterministic
        ),
        "is not possible with trainer.lora.quantization": lora is not None and lora.quantization is not None,
        "is not possible with trainer.lora.dropout": lora is not None and lora.dropout > 0,
        "is not possible with trainer.router_replay": options.router_replay,
        "is not possible with trainer.activation_offloading": options.activation_offloading,
    }
    if found := [why for why, is_so in refused.items() if is_so]:
        raise FitError(f"trainer.compile_layers = true {found[0]}.", remedy="Set trainer.compile_layers = false.")
    refuse_without_compiler(context.devices[0])


def notes(options: GrpoOptions, transports: Sequence[Transport]) -> Mapping[str, str]:
    """The learning rate of an adapter, if it follows from `trainer.learning_rate`."""
    from atropos_trainer_grpo.config import LORA_RATE

    is_set = options.lora is not None and options.lora.learning_rate is not None
    if is_set or not options.adapts(transports):
        return {}
    rate = options.with_lora().learning_rate
    source = "trainer.learning_rate" if options.changed("learning_rate") else "the default for full training"
    return {
        "learning rate": f"{rate:g}, {LORA_RATE:g} times {source}, since LoRA trains an adapter; "
        "trainer.lora.learning_rate sets another"
    }


def suits(options: GrpoOptions, width: int, steps: int) -> Mapping[str, Any]:
    from atropos_trainer_grpo.rules import suits

    return suits(options, width, steps)


def supervised_rate(options: GrpoOptions, transports: Sequence[Transport]) -> float:
    from atropos_trainer_grpo.config import LORA_RATE, SUPERVISED_RATE

    if options.kl is not None:
        raise ConfigError(
            "trainer.kl keeps the policy near the model that the run began with, which is the one before the warm start of [warmup].",
            remedy="Run only the warm start, with training.steps = 0, `atropos export` its policy, and start the run with trainer.kl "
            "from that.",
        )
    return SUPERVISED_RATE * (LORA_RATE if options.adapts(transports) else 1.0)


def holds(options: GrpoOptions, workload: Workload) -> Iterable[MemoryUse]:
    from atropos_trainer_grpo.memory import holds

    return holds(options, workload)


def sizes(options: GrpoOptions, workload: Workload, free: Collection[str]) -> Sequence[SizeChoice]:
    from atropos_trainer_grpo.sizes import sizes

    return sizes(options, workload, free)


def check(options: GrpoOptions, workload: Workload) -> None:
    from atropos_core.models.model_size import read
    from atropos_trainer_grpo.layouts import check_replay, layout_of
    from atropos_trainer_grpo.learning_rates import updates_in_all

    updates_in_all(options, workload.context.steps)
    if workload.truncated:
        _refuse_truncation(options)
    directory = workload.context.model
    layout_of(directory, options)
    if options.router_replay:
        check_replay(directory)
    model = read(directory)
    if options.compile_layers and model is not None and model.experts():
        raise FitError(
            "trainer.compile_layers = true is not possible for a mixture of experts: how many tokens an expert gets differs in each step.",
            remedy="Set trainer.compile_layers = false.",
        )
    if model is None or options.lora is None or options.lora.targets == "all-linear":
        return
    known = {name.removesuffix(".weight").rpartition(".")[2] for name in model.linear()}
    if model.experts():
        from atropos_trainer_grpo.memory import EXPERTS

        known |= EXPERTS
    if unknown := [target for target in options.lora.targets if target not in known]:
        raise FitError(
            f"trainer.lora.targets names {unknown[0]!r}, but the model in {directory} has no linear layer of that name.",
            remedy=f'Choose from: {", ".join(sorted(known))}. Or leave it out: "all-linear" adapts all of them.',
        )


def path(options: GrpoOptions, workload: Workload) -> str:
    from atropos_trainer_grpo.layouts import path

    return path(options, workload)


def _refuse_truncation(options: GrpoOptions) -> None:
    """Raises ConfigError for distillation: a teacher's logprobs are of its whole distribution, and only of its likeliest tokens."""
    if options.distillation is not None:
        raise ConfigError(
            "trainer.distillation compares the policy with a teacher over the whole vocabulary, but sampling.top_p, top_k or min_p "
            "leaves tokens out: the comparison would be biased.",
            remedy="Sample with top_p = 1, top_k = 0 and min_p = 0, or remove [trainer.distillation].",
        )


def dtype(options: GrpoOptions, workload: Workload) -> str:
    from atropos_torch_models.model_directory import loaded_dtype

    return loaded_dtype(workload.context.model, options.dtype, workload.context.devices[0])


def saves(options: GrpoOptions, workload: Workload) -> int:
    from atropos_trainer_grpo.memory import checkpoint_bytes

    return checkpoint_bytes(options, workload)


def transports(options: GrpoOptions) -> frozenset[Transport]:
    """With lora options, only adapters. Otherwise the bridge decides: by memory (of the run's devices), copy or checkpoint it
    trains the whole model, by adapters an adapter with the default options."""
    if options.lora is not None:
        return frozenset({"adapter"})
    return frozenset({"posix_shm", "cuda_ipc", "copy", "broadcast", "checkpoint", "adapter"})


def announces(options: GrpoOptions) -> Mapping[str, Any]:
    """Adapters for which an engine must make room, if the run's transport is adapters; how a teacher is used, if at all; and whether
    experts are replayed, which engines then record."""
    from atropos_trainer_grpo.config import LoraOptions

    lora = options.lora or LoraOptions()
    targets = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    return {
        "lora": {"rank": lora.rank, "alpha": lora.alpha, "targets": targets},
        "distillation": options.distillation.kind if options.distillation else None,
        **({"router_replay": True} if options.router_replay else {}),  # engines record the experts
    }


def merge(adapter: Path, directory: Path) -> None:
    require("peft", "merging an adapter")
    from atropos_trainer_grpo import lora

    lora.merge(adapter, directory)


def _built(name: str) -> Callable[[NoOptions, RunContext], Loss]:
    def build_loss(options: NoOptions, context: RunContext) -> Loss:
        from atropos_trainer_grpo.losses import LOSSES

        return LOSSES[name]

    return build_loss


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_trainer_grpo import plan_command, quantize_command

    plan_command.add(app)
    quantize_command.add(app)


@hookimpl
def atropos_losses() -> Iterable[Provider[Loss]]:
    for name, summary in LOSSES.items():
        yield Provider(name, summary, None, _built(name), requires=frozenset({"torch"}))


@hookimpl
def atropos_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        name="grpo",
        summary="policy gradients (loss = ...) on packed sequences; AdamW with fp32 masters; whole models or LoRA",
        config="atropos_trainer_grpo.config:GrpoOptions",
        build=build,
        transports=transports,
        holds=holds,
        check=check,
        sizes=sizes,
        dtype=dtype,
        path=path,
        saves=saves,
        announces=announces,
        suits=suits,
        notes=notes,
        supervised_rate=supervised_rate,
        merge=merge,
        fixed=("lora.rank", "lora.alpha", "lora.targets", "lora.layers", "optimizer"),
        several_devices=True,
        several_machines=True,
        requires=frozenset({"torch", "transformers", "safetensors"}),
        runs_in="process",
    )
