"""What the trainer will hold, from its options and the model's files: nothing is loaded, and torch is not imported.

Activations are counted tensor by tensor, as autograd keeps them in the decoders that transformers writes like Llama's
(two RMSNorms, attention, a gated MLP), for packed rows (packing.py); benchmarks/plan.py compares with what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from atropos_core.memory import Holding, Workload
from atropos_core.model_files import BYTES, ModelSize, read
from atropos_trainer_grpo.chunks import rows_at_once
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions

LIBRARIES = 450_000_000  # a child with torch, transformers and peft: benchmarks/plan.py
OVERHEAD = 60_000_000  # what libraries allocate once they work
FP32 = 4
MOMENT_BYTES = {  # with torchao's scales
    "adamw": 4,
    "adamw_8bit": 1 + 4 / 256,
    "adamw_4bit": 0.5 + 4 / 128,
    "adamw_fp8": 1 + 4 / 256,
}
SHARED = ("posix_shm", "cuda_ipc")


class Rows(NamedTuple):
    """Of the largest micro-batch."""

    packed: int  # tokens that linear layers see
    queries: int  # rows of padded queries, and of keys: beginnings are there once for each sequence that follows them
    keys: int
    scored: int  # tokens whose logits are taken
    mask: int  # elements of the attention masks, where beginnings are shared
    several: bool  # whether an update has more than one micro-batch


def holds(options: GrpoOptions, workload: Workload) -> Iterable[Holding]:
    context = workload.context
    yield Holding("interpreter and libraries", LIBRARIES)
    model = read(context.model)
    if model is None:
        return
    adapts = options.lora is not None or context.transport == "adapter"
    lora = (options.lora or LoraOptions()) if adapts else None
    wanted = model.dtype if options.dtype == "auto" else options.dtype
    for device in context.devices:
        on_cpu = device == "cpu"
        element = BYTES["float32"] if on_cpu and options.dtype == "auto" else BYTES.get(wanted, 2)
        parts = len(context.devices)
        yield from _on(device, options, lora, model, element, workload, parts)


def _on(
    device: str, options: GrpoOptions, lora: LoraOptions | None, model: ModelSize, element: int, workload: Workload,
    parts: int,
) -> Iterable[Holding]:  # fmt: skip
    weights = model.parameters * element // parts
    shared = "weights" if workload.context.transport in SHARED else ""
    smaller = "train an adapter: --bridge lora"
    yield Holding("parameters", weights, device, shared=shared, change="" if lora else smaller)
    if lora is None:
        trained, size = model.parameters // parts, element
        if options.kl is not None:
            yield Holding("reference model", weights, device, change="train an adapter: its base is the reference")
    else:
        trained, size = adapter_parameters(model, lora) // parts, FP32
        yield Holding("adapter", trained * FP32, device, change="lower trainer.lora.rank")
    if size != FP32:
        yield Holding("fp32 masters", trained * FP32, device, change=smaller)
    moments = int(2 * trained * MOMENT_BYTES[options.optimizer])
    yield Holding("optimiser moments", moments, device, change="" if lora else f"{smaller}, or set trainer.optimizer")

    rows = rows_of(options, workload, model)
    activations, gradients, work = _largest_moment(options, model, rows, element, device, trained, lora is not None)
    change = "lower trainer.tokens_per_microbatch, or set trainer.gradient_checkpointing=true"
    yield Holding("activations", activations, device, "update", change=change)
    yield Holding("gradients", gradients, device, "update", change="" if lora else smaller)
    yield Holding("logits and work", work, device, "update", change="lower trainer.logprob_chunk")
    yield Holding("buffers of libraries", OVERHEAD, device)


def _largest_moment(
    options: GrpoOptions, model: ModelSize, rows: Rows, element: int, device: str, trained: int, adapted: bool
) -> tuple[int, int, int]:
    """Activations, gradients and what is worked on, at the fullest of three moments of a backward pass: at the head, in
    the layer under it, in the first layer. Gradients grow as activations go, and those of earlier micro-batches stay."""
    layer = layer_bytes(model, rows, element, adapted)
    each = rows.packed * model.hidden * element if options.gradient_checkpointing else layer
    again = layer if options.gradient_checkpointing else 0
    kept = model.layers * each + rows.packed * model.hidden * 3 * element + rows.scored * model.hidden * element
    head = 0 if adapted else model.vocabulary * model.hidden * FP32
    before = trained * FP32 if rows.several else 0
    gradients = (
        max(before, head) if element == FP32 else before + head
    )  # in fp32 the head adds to the one that is there
    chunks = 2 * logit_rows(options, model, rows, device) * model.vocabulary * FP32
    inside = rows.packed * 3 * model.intermediate * element  # gradients in an MLP whose activations are still there
    moments = [
        (kept, gradients, chunks),
        (kept + again, gradients, inside),
        (layer, trained * FP32 + (head if model.tied else 0), inside),
    ]
    return max(moments, key=sum)


def rows_of(options: GrpoOptions, workload: Workload, model: ModelSize) -> Rows:
    """If every sequence were as long as it may be."""
    reply = min(workload.max_tokens, model.longest)
    prompt = min(workload.prompt_tokens, max(model.longest - reply, 1))
    shares = options.share_prompts and workload.group_size > 1
    group = workload.group_size * reply + prompt * (1 if shares else workload.group_size)
    all_rows = -(-workload.groups // options.minibatches) * group
    packed = max(min(options.tokens_per_microbatch, all_rows), prompt + reply)
    sequences = packed / group * workload.group_size
    keys = int(sequences * (prompt + reply) + (packed / group * prompt if shares else 0))
    return Rows(
        packed=packed,
        queries=packed,
        keys=keys,
        scored=int(sequences * reply),
        mask=int(sequences * reply * (prompt + reply)) if shares else 0,
        several=all_rows > options.tokens_per_microbatch,
    )


def layer_bytes(model: ModelSize, rows: Rows, element: int, adapted: bool) -> int:
    """What autograd keeps of one decoder layer. A frozen norm keeps no normed values; an adapter in fp32 beside 16-bit
    weights keeps its own fp32 copy of every input."""
    hidden, wide, query, key = model.hidden, model.intermediate, model.query_width, model.key_width
    norm = FP32 + (0 if adapted else element)  # of its input (in fp32), and what its weight is multiplied with
    per_token = 2 * hidden * norm + 3 * wide * element + (query + key) * norm * model.norms_heads
    inputs = [hidden, query, hidden, wide]  # of q, k, v; of o; of gate and up; of down
    if adapted and element != FP32:
        per_token += FP32 * sum(times * width for times, width in zip((3, 1, 2, 1), inputs, strict=True))
    else:
        per_token += element * sum(inputs)
    attention = (
        2 * query * rows.queries + 2 * key * rows.keys + rows.mask
    )  # queries and what comes out; keys and values
    return per_token * rows.packed + attention * element


def logit_rows(options: GrpoOptions, model: ModelSize, rows: Rows, device: str) -> int:
    return min(rows.scored, rows_at_once(options.logprob_chunk, model.vocabulary, device))


def adapter_parameters(model: ModelSize, lora: LoraOptions) -> int:
    """Two matrices beside each linear layer that is adapted."""

    def adapted(name: str) -> bool:
        chosen = lora.targets == "all-linear" or name.removesuffix(".weight").rpartition(".")[2] in lora.targets
        inside = lora.layers is None or any(f".{layer}." in name for layer in lora.layers)
        return chosen and inside

    return sum(lora.rank * (out + into) for name, (out, into) in model.linear().items() if adapted(name))
