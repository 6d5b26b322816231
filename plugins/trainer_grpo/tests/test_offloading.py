"""Neither offloading to host memory nor computing layers again changes a weight. `make gpu` measures on a GPU how much device memory
this saves. The copies are the same between any two devices."""

import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atropos_core.errors import FitError
from atropos_core.models.model_size import read
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_trainer_grpo import activation_checkpointing
from atropos_trainer_grpo.activation_checkpointing import checkpoint_in_host_memory
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
from atropos_trainer_grpo.host_memory import PIECE, in_pieces, page_locked
from atropos_trainer_grpo.memory import holds
from atropos_trainer_grpo.model import score
from atropos_trainer_grpo.packed_rows import pack
from plugins.trainer_grpo.tests.test_memory import workload

ONE = torch.ones(1, dtype=torch.int64)
OFFLOADING = {"gradient_checkpointing": True, "activation_offloading": True}


async def weights_after(trainer, make_batch, gate, steps=3):
    for seed in range(steps):
        await trainer.step(make_batch(seed=seed, version=seed + 1), gate)
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(
    "more", [{}, {"lora": {"rank": 2}}, {"tokens_per_microbatch": 30}, {"dtype": "bfloat16"}], ids=str
)
async def test_layer_inputs_that_wait_in_host_memory_change_no_weight(open_trainer, make_batch, gate, more):
    frugal = await open_trainer(gradient_checkpointing=True, **more)
    offloading = await open_trainer(**OFFLOADING, **more)
    assert equal(await weights_after(offloading, make_batch, gate), await weights_after(frugal, make_batch, gate))


def test_a_layers_input_is_let_go_on_the_device_until_the_backward_pass():
    weight = torch.randn(8, 8, requires_grad=True)
    start = torch.randn(4, 8, requires_grad=True)

    def layer(values):
        return torch.tanh(values @ weight)

    middle = start * 2
    storage = weakref.ref(middle)
    out = checkpoint_in_host_memory(layer, middle).square().sum()
    del middle
    assert storage() is None, "neither the graph nor what is saved for the backward pass has it"
    out.backward()
    offloaded = (start.grad.clone(), weight.grad.clone())
    start.grad = weight.grad = None
    layer(start * 2).square().sum().backward()
    assert equal(offloaded, (start.grad, weight.grad))


class Copies(TorchDispatchMode):
    """Shapes that were copied."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) == "aten.copy_.default":
            self.seen.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


async def test_every_layer_that_is_computed_again_is_copied_and_no_other(open_trainer):
    for layers, options in ((2, {}), (1, {"checkpointed_layers": 1}), (0, {"activation_offloading": False})):
        trainer = await open_trainer(**{**OFFLOADING, **options})
        hidden = trainer.model.config.hidden_size
        with Copies() as copies:
            packing = pack(np.arange(2, 12, dtype=np.int32), np.array([10]), "cpu")
            score(trainer.model, packing, ONE, ONE, torch.ones(1), 1).logprobs.sum().backward()
        assert copies.seen.count((10 * hidden,)) == 2 * layers, "there and back"


@pytest.mark.parametrize("layers", [1, 2, 9, None])
async def test_the_first_layers_alone_are_computed_again(open_trainer, make_batch, gate, layers):
    trainer = await open_trainer(gradient_checkpointing=True, checkpointed_layers=layers)
    runs = [0, 0]
    for number, layer in enumerate(trainer.model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    changed = await weights_after(trainer, make_batch, gate, steps=1)
    passes = runs[1] if layers == 1 else runs[1] // 2
    assert runs == [2 * passes, passes if layers == 1 else 2 * passes] and passes > 0
    plain = await open_trainer()
    for one, other in zip(changed, await weights_after(plain, make_batch, gate, steps=1), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "more",
    [{}, {"dtype": "bfloat16"}, {"lora": {"rank": 2}}, {"tokens_per_microbatch": 30}, {"minibatches": 2}],
    ids=str,
)
async def test_moments_and_masters_in_host_memory_change_no_weight(open_trainer, model_of, make_batch, gate, more):
    more = {"learning_rate": 1e-2, **more}
    # On a CPU, a tied embedding's gradient has only the looked-up rows, and is added to the head's in another order.
    model = model_of(tied="tokens_per_microbatch" not in more)
    beside, apart = await open_trainer(model, **more), await open_trainer(model, optimizer_offloading=True, **more)
    assert equal(await weights_after(apart, make_batch, gate), await weights_after(beside, make_batch, gate))
    optimizer = apart._optimizer
    for parameter, master in zip(optimizer.parameters, optimizer._masters, strict=True):
        assert master.dtype == torch.float32 and master.data_ptr() != parameter.data_ptr()
        assert parameter.grad is None and master.grad is None
        assert torch.equal(master.to(parameter.dtype), parameter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", [True, False])
async def test_a_checkpoint_is_taken_up_with_moments_here_or_there(
    open_trainer, make_batch, gate, tmp_path, dtype, first
):
    straight = await open_trainer(dtype=dtype, learning_rate=1e-2, optimizer_offloading=first)
    await weights_after(straight, make_batch, gate, steps=2)
    await straight.save(tmp_path)
    resumed = await open_trainer(dtype=dtype, learning_rate=1e-2, optimizer_offloading=not first)
    await resumed.restore(tmp_path)
    assert equal(
        await weights_after(resumed, make_batch, gate, steps=2),
        await weights_after(straight, make_batch, gate, steps=2),
    )


async def test_weights_that_a_bridge_moves_keep_their_exact_masters(open_trainer, make_batch, gate):
    trainers = [
        await open_trainer(dtype="bfloat16", learning_rate=1e-3, optimizer_offloading=there) for there in (True, False)
    ]
    left = []
    for trainer in trainers:
        await weights_after(trainer, make_batch, gate, steps=2)
        for parameter in trainer.model.parameters():
            parameter.data = parameter.detach().clone()
        trainer.weights_moved()
        left.append(await weights_after(trainer, make_batch, gate, steps=2))
    assert equal(*left)


async def test_a_gradient_that_no_optimiser_can_bear_leaves_nothing(open_trainer, make_batch, gate):
    """Norms are computed on the gradients' device. With offloading that is host memory, although the loss is elsewhere."""
    trainer = await open_trainer(optimizer_offloading=True, max_grad_norm=1e-3, learning_rate=1e-2)
    other = await open_trainer(max_grad_norm=1e-3, learning_rate=1e-2)
    assert equal(await weights_after(trainer, make_batch, gate), await weights_after(other, make_batch, gate))
    assert trainer._optimizer.gradient_norm().item() == 0.0


def planned_bytes(model, device="cuda:0", **options):
    found = {}
    work = Workload(RunContext(model, model, transport="checkpoint", devices=(device,)), 8, 4, 100, 0, 8)
    for one in holds(GrpoOptions(dtype="bfloat16", **options), work):
        found[one.what, one.device] = found.get((one.what, one.device), 0) + one.size_bytes
    return found


def test_the_plan_moves_what_is_offloaded(model_of):
    directory = model_of(dtype=torch.bfloat16)
    plain, apart = planned_bytes(directory), planned_bytes(directory, optimizer_offloading=True)
    for what in ("fp32 masters", "optimiser moments"):
        assert (what, "cuda:0") not in apart
    assert apart["optimiser moments", "cpu"] == plain["optimiser moments", "cuda:0"]
    sizes = [4 * math.prod(shape) for shape in read(directory).tensors.values()]
    assert plain["fp32 masters", "cuda:0"] == sum(sizes)
    assert apart["fp32 masters", "cpu"] == sum(2 ** math.ceil(math.log2(size)) for size in sizes), "page-locked"
    assert apart["gradients of masters", "cpu"] == plain["fp32 masters", "cuda:0"]
    assert apart["gradients", "cuda:0"] < plain["gradients", "cuda:0"]
    frugal = planned_bytes(directory, gradient_checkpointing=True, tokens_per_microbatch=10_000)
    offloading = planned_bytes(directory, **OFFLOADING, tokens_per_microbatch=10_000)
    inputs = offloading["inputs of layers", "cpu"]
    kept = frugal["activations", "cuda:0"] - offloading["activations", "cuda:0"]
    assert inputs > 0 and (kept == 0 or kept <= inputs <= kept + 2 * PIECE), (
        "in both layers the last piece is rounded up"
    )


@pytest.mark.parametrize(
    ("size", "takes"),
    [(0, 0), (1, 1), (3, 4), (4096, 4096), (4097, 8192), (PIECE, PIECE), (3 * PIECE + 5, 3 * PIECE + 8)],
)
def test_page_locked_memory_is_taken_by_powers_of_two_and_large_tensors_in_pieces(size, takes):
    assert in_pieces(size) == takes
    assert page_locked(size) == (2 ** math.ceil(math.log2(size)) if size else 0)


async def test_layer_inputs_in_many_pieces_change_no_weight(open_trainer, make_batch, gate, monkeypatch):
    plain = await open_trainer(gradient_checkpointing=True)
    monkeypatch.setattr(activation_checkpointing, "PIECE", 200)  # bytes: fifty numbers, and fewer in the last piece
    apart = await open_trainer(**OFFLOADING)
    assert equal(await weights_after(apart, make_batch, gate), await weights_after(plain, make_batch, gate))


def test_the_plan_knows_how_many_layers_are_computed_again(model_of):
    directory, activations = model_of(), {}
    for layers in (1, 2, None, 5):
        options = GrpoOptions(gradient_checkpointing=True, checkpointed_layers=layers)
        work = workload(directory, groups=64, reply=100)
        activations[layers] = sum(one.size_bytes for one in holds(options, work) if one.what == "activations")
    work = workload(directory, groups=64, reply=100)
    none = sum(one.size_bytes for one in holds(GrpoOptions(), work) if one.what == "activations")
    assert activations[2] == activations[None] == activations[5] < none
    assert activations[1] < none


def test_adapters_have_small_moments_wherever_they_are(model_of):
    directory = model_of(dtype=torch.bfloat16)
    found = planned_bytes(directory, optimizer_offloading=True, lora=LoraOptions(rank=2))
    assert found["adapter", "cuda:0"] <= found["fp32 masters", "cpu"] < 2 * found["adapter", "cuda:0"]


async def test_a_device_that_is_not_there_is_refused_with_what_to_set(open_trainer):
    with pytest.raises(FitError, match=r"(?s)trainer 'grpo' is to run on 'nope'.*Set trainer.devices"):
        await open_trainer(run={"devices": ("nope",)})


def test_numbers_of_layers_that_are_none_are_refused():
    for wrong in (0, -1, 1.5, np.nan):
        with pytest.raises(ValueError, match="checkpointed_layers"):
            GrpoOptions(gradient_checkpointing=True, checkpointed_layers=wrong)
