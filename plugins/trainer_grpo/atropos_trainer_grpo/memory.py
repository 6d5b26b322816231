"""Plan the trainer's memory from its options and the model's files, without loading anything or importing torch.

Activations are counted tensor by tensor, as autograd keeps them in transformers' Llama-like decoders (two RMSNorms, attention, a gated
MLP), for packed rows (packed_rows.py). benchmarks/plan.py compares the plan with measurements.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from atropos_core.models.model_size import BYTES, ModelSize, read
from atropos_core.plugins.model_provider import CONTEXT, CONTEXT_BYTES, UPDATE, MemoryUse, Workload, halves
from atropos_torch_models.allocation import LARGE
from atropos_trainer_grpo.chunks import in_one_pass, rows_at_once
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
from atropos_trainer_grpo.host_memory import in_pieces, page_locked
from atropos_trainer_grpo.layouts import PACKED, Layout, layout_of
from atropos_trainer_grpo.prefix_tree import pays_by_levels

LIBRARIES = 450_000_000  # a child with torch, transformers and peft: benchmarks/plan.py
OVERHEAD = 60_000_000  # what libraries allocate once they work
# On a CPU, of a heap that keeps what is freed (atropos_torch_models.allocation): between blocks in use some stay empty. Fitted to the
# peaks in benchmarks/results/plan.json, which without it were up to a fifth higher than planned. Several ranks share them.
GAPS, GAPS_SHARE = 110_000_000, 0.07  # bytes, and the share of the activations
BUFFERS = "buffers of libraries"
FP32 = 4
OWN_LOGITS = 5  # copies of a piece of the model's own logits that autograd keeps: raw, logprobs, probabilities and their products
MOMENT_BYTES = {  # with torchao's scales
    "adamw": 4,
    "adamw_8bit": 1 + 4 / 256,
    "adamw_4bit": 0.5 + 4 / 128,
    "adamw_fp8": 1 + 4 / 256,
}
UNPACKED = {"int8": 8, "nf4": 6}  # bytes an element, at most
SHARED = ("posix_shm", "cuda_ipc")
EXPERTS = {"gate_up_proj", "down_proj"}  # tensors of all experts of a layer, as transformers names them
Settings = Mapping[str, Sequence[Any]]


class Rows(NamedTuple):
    """Row counts of the largest micro-batch."""

    packed: int  # tokens that linear layers see
    queries: int  # padded rows of queries
    keys: int  # rows of keys: a shared beginning is repeated for each sequence that follows it, but not by levels
    scored: int  # tokens whose logits are taken
    mask: int  # elements of the attention masks, if beginnings are shared
    several: bool  # True if an update has several micro-batches
    cut: bool = False  # True if distributions are over the tokens that the sampler kept
    pairs: int = 0  # elements of the scores of attention, if a layer holds all of them
    own_logits: bool = False  # True if logits are the model's own


def parts_of(workload: Workload) -> int:
    """The number of shards of a model: the ranks of all machines."""
    return len(workload.context.devices) * workload.context.machines


def holds(options: GrpoOptions, workload: Workload) -> Iterable[MemoryUse]:
    """The memory on one of the trainer's machines."""
    context = workload.context
    yield MemoryUse("interpreter and libraries", LIBRARIES * len(context.devices))  # each rank is a process
    model = read(context.model)
    if model is None:
        return
    lora = (options.lora or LoraOptions()) if options.adapts([context.transport]) else None
    for device in context.devices:
        yield from _on(device, options, lora, model, _element(device, options, model), workload)
    if parts_of(workload) > 1:
        yield from _whole_models(options, lora, model, workload)
    if "copy" in (context.transport, *context.transports):
        copied = model.parameters * _element(context.devices[0], options, model)
        yield MemoryUse("copy that engines load", copied, settings={"bridge.copies": [False]})


def checkpoint_bytes(options: GrpoOptions, workload: Workload) -> int:
    """Weights, fp32 masters of 16-bit ones, and two moments (saving.py); 0 if the model's files do not tell its size."""
    context = workload.context
    model = read(context.model)
    if model is None:
        return 0
    if options.adapts([context.transport]):
        trained = adapter_parameters(model, options.lora or LoraOptions())
        weights = trained * FP32
    else:
        trained, element = model.parameters, _element(context.devices[0], options, model)
        weights = trained * (element if element == FP32 else element + FP32)
    return weights + int(2 * trained * MOMENT_BYTES[options.optimizer])


def _element(device: str, options: GrpoOptions, model: ModelSize) -> int:
    if options.dtype == "auto":
        return BYTES["float32"] if device == "cpu" else BYTES.get(model.dtype, 2)
    return BYTES.get(options.dtype, 2)


def _whole_models(
    options: GrpoOptions, lora: LoraOptions | None, model: ModelSize, workload: Workload
) -> Iterable[MemoryUse]:
    """Unsharded models of this machine's ranks, in host memory (sharding.py)."""
    context, ranks = workload.context, len(workload.context.devices)
    device = context.devices[0]
    element = _element(device, options, model)
    trained = adapter_parameters(model, lora) if lora else model.parameters
    weights = model.parameters * element + (trained * FP32 if lora else 0)
    fewer = {"trainer.devices": [list(context.devices[:number]) for number in halves(ranks, 1)]}
    if context.machine == 0:
        yield MemoryUse("whole model of rank 0", weights, settings=fewer)
    read_bytes = weights if lora else model.parameters * FP32  # 16-bit weights become fp32 before they are divided
    if options.kl is not None and lora is None:
        read_bytes += model.parameters * element
    divided = [one for one in _on(device, options, lora, model, element, workload) if not one.phase]
    then = sum(one.size_bytes for one in divided if one.what != BUFFERS) if device == "cpu" else 0  # not there yet
    yield MemoryUse(
        "models before they are divided", ranks * max(read_bytes - then, 0), phase="opening", settings=fewer
    )


def _on(
    device: str, options: GrpoOptions, lora: LoraOptions | None, model: ModelSize, element: int, workload: Workload
) -> Iterable[MemoryUse]:
    parts = parts_of(workload)
    masters = parts > 1 and lora is None  # ranks hold only fp32 masters, and gather their rounding
    weights = model.parameters * (FP32 if masters else element) // parts
    if lora is not None and lora.quantization is not None:
        weights = model.quantized_bytes(lora.quantization, element)
        yield MemoryUse("base before it is packed", model.parameters * element, "cpu", "opening")
    shared = "weights" if workload.context.transport in SHARED else ""
    adapter: Settings = {} if lora or not importlib.util.find_spec("peft") else {"bridge.use": ["lora"]}
    yield MemoryUse("parameters", weights, device, shared=shared, settings=adapter)
    if lora is None:
        trained, size = model.parameters // parts, element
        if options.kl is not None:
            reference = model.parameters * element // parts
            yield MemoryUse("reference model", reference, device, settings=adapter)  # its base is the reference
    else:
        trained, size = adapter_parameters(model, lora) // parts, FP32
        rank = {"trainer.lora.rank": halves(lora.rank, 1)}
        yield MemoryUse("adapter", trained * FP32, device, settings=rank)
        if adapts_experts(model, lora.targets):  # peft adds its product to the weights, and autograd keeps the sum
            elements = sum(out * into for out, into in model.experts().values())
            at_once = 2 if _checkpointed(options, model) == model.layers else model.layers
            less: Settings = {} if options.gradient_checkpointing else {"trainer.gradient_checkpointing": [True]}
            adapted = elements * element * at_once // model.layers
            yield MemoryUse("experts with their adapters", adapted, device, UPDATE, settings=less)
    offloads = options.optimizer_offloading
    at = "cpu" if offloads else device
    elsewhere: Settings = {} if offloads or device == "cpu" or parts > 1 else {"trainer.optimizer_offloading": [True]}
    if (size != FP32 or offloads) and not masters:
        sizes = adapter_sizes(model, lora) if lora else [math.prod(shape) for shape in model.tensors.values()]
        pinned = offloads and device != "cpu" and parts == 1
        held = sum(page_locked(FP32 * size) for size in sizes) if pinned else trained * FP32
        yield MemoryUse("fp32 masters", held, at, settings={**adapter, **elsewhere})
    moments = int(2 * trained * MOMENT_BYTES[options.optimizer])
    rounded = options.optimizer == "adamw" and parts == 1 and importlib.util.find_spec("torchao")
    fewer: Settings = {"trainer.optimizer": ["adamw_8bit"]} if rounded else {}
    yield MemoryUse("optimiser moments", moments, at, settings={**adapter, **fewer, **elsewhere})

    rows = rows_of(
        options,
        replace(workload, groups=-(-workload.groups // parts)),
        model,
        flashes=device == "cpu" or element < FP32,
        layout=layout_of(workload.context.model, options),
    )
    activations, gradients, work = _largest_moment(
        options, model, rows, element, device, trained, lora is not None, parts > 1
    )
    shorter: Settings = {"trainer.tokens_per_microbatch": halves(options.tokens_per_microbatch, 64)}
    again: Settings = {} if options.gradient_checkpointing else {"trainer.gradient_checkpointing": [True]}
    if options.gradient_checkpointing and options.checkpointed_layers is not None:
        again = {"trainer.checkpointed_layers": [model.layers]}
    if options.activation_offloading:
        inputs = _checkpointed(options, model) * in_pieces(rows.packed * model.hidden * element)
        yield MemoryUse("inputs of layers", inputs, "cpu", UPDATE, settings=shorter)
    if offloads:
        yield MemoryUse("gradients of masters", trained * FP32, "cpu", UPDATE, settings=adapter)
    yield MemoryUse("activations", activations, device, UPDATE, settings={**shorter, **again})
    yield MemoryUse("gradients", gradients, device, UPDATE, settings=adapter)
    chunks: Settings = {"trainer.logprob_chunk": halves(options.logprob_chunk, 64)}
    yield MemoryUse("logits and work", work, device, UPDATE, settings={**chunks, **shorter})
    if device == "cpu" and model.parameters >= LARGE:
        gaps = (GAPS + int(GAPS_SHARE * activations)) // parts
        yield MemoryUse("gaps between blocks", gaps, device, UPDATE, settings={**shorter, **again})
    if parts > 1:
        layers = sum(out * into for out, into in (model.linear() | model.experts()).values())
        gathered = model.parameters - layers + layers // model.layers  # parameters outside layers, and one layer
        yield MemoryUse("gathered parameters", gathered * element, device, UPDATE)
    yield MemoryUse(BUFFERS, OVERHEAD, device)
    if device != "cpu":
        yield MemoryUse(CONTEXT, CONTEXT_BYTES, device)


def _checkpointed(options: GrpoOptions, model: ModelSize) -> int:
    """The number of layers that are computed again."""
    return min(options.checkpointed_layers or model.layers, model.layers) if options.gradient_checkpointing else 0


def _largest_moment(
    options: GrpoOptions,
    model: ModelSize,
    rows: Rows,
    element: int,
    device: str,
    trained: int,
    adapted: bool,
    divided: bool,
) -> tuple[int, int, int]:
    """Activations, gradients and work memory, at the fullest of three moments of a backward pass: at the head, in the
    layer under it, in the first layer. Gradients grow as activations shrink, and those of earlier micro-batches stay."""
    layer = layer_bytes(model, rows, element, adapted)
    again = _checkpointed(options, model)
    inputs = 0 if options.activation_offloading else again * rows.packed * model.hidden * element
    ends = rows.packed * model.hidden * 3 * element + rows.scored * model.hidden * element
    kept = inputs + (model.layers - again) * layer + ends
    between = 2 * rows.packed * model.hidden * element  # a layer's input, and the gradient of its output
    anew = inputs + layer + between if again else 0  # the last checkpointed layer, while it is computed again
    head = 0 if adapted else model.vocabulary * model.hidden * FP32
    if options.optimizer_offloading:  # each gradient leaves at once
        head, trained = 0 if adapted else model.vocabulary * model.hidden * element, 0
    used_rows = (
        element == FP32 and device == "cpu" and not divided
    )  # the gradient of a tied embedding: model.only_used_rows
    before = trained * FP32 if rows.several else 0
    gradients = (
        max(before, head) if element == FP32 else before + head
    )  # in fp32 the head's gradient adds to the existing one
    rest = (
        options.distillation is not None and options.distillation.kind == "forward"
    )  # logits without the teacher's tokens
    once = in_one_pass(device, element > FP32, rest or rows.cut) and not rows.own_logits
    one_chunk = logit_rows(options, model, rows, device, one_pass=once) * model.vocabulary
    chunks = one_chunk * (
        element if once else (OWN_LOGITS if rows.own_logits else 4 if rest else 2) * FP32 + rows.cut
    )  # a mask of kept tokens: a byte each
    inside = rows.packed * 3 * model.intermediate * element  # gradients in an MLP whose activations still exist
    inside += _whole_weight(options, model)
    moments = [
        (kept, gradients, chunks),
        (max(kept, anew), gradients, inside),
        (layer, trained * FP32 + (0 if used_rows else head if model.tied else 0), inside),
    ]
    return max(moments, key=sum)


def _whole_weight(options: GrpoOptions, model: ModelSize) -> int:
    """Bytes of a quantized base weight while it is used: in float32, as it is unpacked and as it is stored; else 0."""
    kind = options.lora.quantization if options.lora else None
    largest = max((out * into for out, into in model.linear().values()), default=0)
    return largest * UNPACKED[kind] if kind else 0


def rows_of(
    options: GrpoOptions, workload: Workload, model: ModelSize, *, flashes: bool = True, layout: Layout = PACKED
) -> Rows:
    """Row counts if every sequence has its maximal length. `flashes`: attention by levels is possible."""
    reply = min(workload.max_tokens, model.longest)
    prompt = min(workload.prompt_tokens, max(model.longest - reply, 1))
    if layout.name == "rows":
        return _padded(options, workload, prompt, reply, layout)
    shares = options.share_prompts and workload.group_size > 1
    group = workload.group_size * reply + prompt * (1 if shares else workload.group_size)
    all_rows = -(-workload.groups // options.minibatches) * group
    packed = max(min(options.tokens_per_microbatch, all_rows), prompt + reply)
    sequences = packed / group * workload.group_size
    again = int(sequences * (prompt + reply) + (packed / group * prompt if shares else 0))
    segments = sequences + (packed / group if shares else 0)
    flash = options.attention == "flash" or (
        options.attention == "auto" and flashes and pays_by_levels(again, packed, int(segments))
    )
    return Rows(
        packed=packed,
        queries=packed,
        keys=packed if flash else again,
        scored=int(sequences * reply),
        mask=int(sequences * reply * (prompt + reply)) if shares and not flash else 0,
        several=all_rows > options.tokens_per_microbatch,
        cut=workload.truncated,
    )


def _padded(options: GrpoOptions, workload: Workload, prompt: int, reply: int, layout: Layout) -> Rows:
    """Row counts of the layout `rows`, whose padding is within `tokens_per_microbatch`."""
    length = prompt + reply
    in_all = -(-workload.groups // options.minibatches) * workload.group_size
    sequences = min(max(options.tokens_per_microbatch // length, 1), in_all)
    tokens = sequences * length
    return Rows(
        packed=tokens,
        queries=tokens,
        keys=tokens,
        scored=sequences * reply,
        mask=0,
        several=sequences < in_all,
        cut=workload.truncated,
        pairs=layout.eager_heads * sequences * length * length,
        own_logits=layout.own_logits,
    )


def layer_bytes(model: ModelSize, rows: Rows, element: int, adapted: bool) -> int:
    """Bytes that autograd keeps of one decoder layer. A frozen norm keeps no normed values."""
    hidden, wide, query, key = model.hidden, model.intermediate, model.query_width, model.key_width
    norm = FP32 + (0 if adapted else element)  # its input (in fp32), and the factor of its weight
    per_token = 2 * hidden * norm + 3 * wide * element + (query + key) * norm * model.norms_heads
    per_token += element * (2 * hidden + query + wide)  # inputs of q, k, v; of o; of gate and up; of down
    attention = (
        2 * query * rows.queries + 2 * key * rows.keys + rows.mask
    )  # queries and what comes out; keys and values
    scores = rows.pairs * (FP32 + element)  # before and after the softmax, which is in fp32
    return per_token * rows.packed + attention * element + scores


def logit_rows(options: GrpoOptions, model: ModelSize, rows: Rows, device: str, *, one_pass: bool = False) -> int:
    return min(rows.scored, rows_at_once(options.logprob_chunk, model.vocabulary, device, one_pass=one_pass))


def adapter_parameters(model: ModelSize, lora: LoraOptions) -> int:
    return sum(adapter_sizes(model, lora))


def adapter_sizes(model: ModelSize, lora: LoraOptions) -> list[int]:
    """Sizes of the two matrices of each adapted linear layer and expert. (For a tensor of several matrices of an expert they are fewer.)"""

    def adapted(name: str) -> bool:
        chosen = lora.targets == "all-linear" or name.removesuffix(".weight").rpartition(".")[2] in lora.targets
        inside = lora.layers is None or any(f".{layer}." in name for layer in lora.layers)
        return chosen and inside

    pairs = [(out, into) for name, (out, into) in model.linear().items() if adapted(name)]
    pairs += model.experts().values() if adapts_experts(model, lora.targets) else []
    return [lora.rank * side for pair in pairs for side in pair]


def adapts_experts(model: ModelSize, targets: str | Sequence[str]) -> bool:
    """Return True if an adapter with these targets has matrices for the model's experts."""
    return bool(model.experts()) and (targets == "all-linear" or bool(EXPERTS & set(targets)))
