"""Decoder layers compiled by torch.compile: the same gradients, few compilations, no more memory, and what is refused."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from atropos_core.errors import ConfigError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_trainer_grpo import lora
from atropos_trainer_grpo.compiled_layers import compile_layers
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
from atropos_trainer_grpo.layouts import Layout
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.model import open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.plugin import build
from atropos_trainer_grpo.update import Update

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

LENGTHS = 6  # batches of different lengths, after the first
# In float32, of the gradient's norm: compiled code sums in another order.
BOUND = 1e-5


@pytest.fixture(autouse=True)
def none_compiled_before():
    torch._dynamo.reset()
    counters.clear()


def opened(directory, *, compiled, layout="packed", adapter=False, **options):
    """A model and its options, as the trainer opens them."""
    chosen = GrpoOptions(layout=layout, **options)
    base = open_model(
        directory, dtype="float32", device="cpu", with_weights=True, attention=chosen.attention, layout=Layout(layout)
    )
    model = base
    if adapter:
        torch.manual_seed(3)
        model = lora.attach(base, LoraOptions(rank=4), directory)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    if chosen.gradient_checkpointing:
        from atropos_trainer_grpo import activation_checkpointing

        activation_checkpointing.enable(base, chosen)
        model.train()
    if compiled:
        compile_layers(base)
    return model, chosen


def gradient(model, options, batch):
    optimizer = Optimizer(model.named_parameters(), options)
    update = Update(model, optimizer, options, LOSSES["grpo"], batch, "cpu", 0)
    (whole,) = update.minibatches()
    update.backward(whole)
    flat = torch.cat([tensor.grad.flatten() for tensor in optimizer.holders() if tensor.grad is not None])
    optimizer.close()
    return flat


def compilations():
    return counters["stats"]["unique_graphs"]


WAYS = {
    "padded": {"attention": "padded"},
    "by levels, checkpointed": {"attention": "flash", "gradient_checkpointing": True},
    "rows, some checkpointed": {"layout": "rows", "gradient_checkpointing": True, "checkpointed_layers": 1},
    "adapter, checkpointed": {"adapter": True, "attention": "padded", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_are_those_of_plain_layers_and_a_new_length_rarely_compiles_again(way, model_of, make_branches):
    plain, compiled = (opened(model_of(), compiled=compiled, **way) for compiled in (False, True))
    made = []
    for seed in range(1 + LENGTHS):
        batch = make_branches(seed, groups=2 + seed % 3, size=7 + seed)
        expected, found = gradient(*plain, batch), gradient(*compiled, batch)
        assert (found - expected).norm() <= BOUND * expected.norm()
        made.append(compilations())
    assert made[0] > 0, "nothing was compiled"
    # torch may compile once more for a range of lengths, since its code for a CPU depends on the range; never for each length.
    assert made[-1] - made[0] <= 4
    assert made[-1] == made[3], "the last lengths compiled again"


def test_one_compilation_serves_all_layers(model_of, make_branches):
    model, options = opened(model_of(), compiled=True)
    gradient(model, options, make_branches(0))
    # By two layers: before attention, up to its output, and the rest. A third layer would add none.
    assert compilations() == 4


def test_layers_compute_with_weights_that_were_replaced_and_written_after_they_were_compiled(model_of, make_branches):
    model, options = opened(model_of(), compiled=True)
    plain, _ = opened(model_of(), compiled=False)
    batch = make_branches(0)
    first = gradient(model, options, batch)
    for module in model.modules():  # new storage, as a bridge maps it
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
    model.tie_weights()
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.8)  # in place, as the optimiser writes
        for other in plain.parameters():
            other.mul_(0.8)
    replaced = gradient(plain, options, batch)
    assert (replaced - first).norm() > 0.05 * first.norm()
    assert (gradient(model, options, batch) - replaced).norm() <= BOUND * replaced.norm()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layers_keep_no_more_for_the_backward_pass_than_the_memory_plan_counts(model_of, checkpointed):
    """The plan counts what plain layers keep."""
    kept = {}
    for compiled in (False, True):
        model, _ = opened(model_of(), compiled=compiled, layout="rows", gradient_checkpointing=checkpointed)
        storages: dict[int, int] = {}

        def keep(tensor, storages=storages):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens = torch.randint(2, 30, (4, 50), generator=torch.Generator().manual_seed(0))
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            made = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        kept[compiled] = sum(size for address, size in storages.items() if address not in weights)
        del made
    assert kept[True] <= 1.02 * kept[False], kept


async def test_a_trainer_with_compiled_layers_takes_the_steps_of_one_without(open_trainer, make_batch, gate):
    weights = {}
    for compiled in (False, True):
        trainer = await open_trainer(compile_layers=compiled, gradient_checkpointing=True, learning_rate=1e-3)
        for seed in range(3):
            await trainer.step(make_batch(seed), gate)
        weights[compiled] = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
        assert (compilations() > 0) == compiled
    start = torch.cat([p.flatten() for p in (await open_trainer()).model.parameters()])
    moved = (weights[False] - start).norm()
    assert (weights[True] - weights[False]).norm() < 0.01 * moved


@pytest.mark.parametrize(
    ("options", "run", "named"),
    [
        ({}, {"deterministic": True}, "with deterministic = true"),
        ({}, {"devices": ("cpu", "cpu")}, "one device"),
        ({"lora": LoraOptions(quantization="int8")}, {}, "trainer.lora.quantization"),
        ({"lora": LoraOptions(dropout=0.1)}, {}, "trainer.lora.dropout"),
        ({"router_replay": True}, {}, "trainer.router_replay"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_go_with_compiled_layers_is_refused_by_name(options, run, named, model_of, tmp_path):
    context = RunContext(tmp_path, model_of(), transport="checkpoint", threads=1, **run)
    with pytest.raises(FitError, match=f"compile_layers = true .*{named}") as refused:
        build(GrpoOptions(compile_layers=True, **options), context)
    assert refused.value.remedy == "Set trainer.compile_layers = false."


def test_a_machine_without_a_compiler_is_refused_at_the_start(model_of, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(FitError, match=r"needs a C\+\+ compiler, and this machine has none"):
        build(GrpoOptions(compile_layers=True), RunContext(tmp_path, model_of(), transport="checkpoint"))


async def test_adapters_of_clients_are_refused(open_stepwise, model_of):
    from atropos_core.stepwise import AdapterSettings

    trainer = await open_stepwise(model_of(), compile_layers=True)
    with pytest.raises(ConfigError, match="not possible with adapters of clients"):
        await trainer.create_adapter("theirs", AdapterSettings(4, 8.0, 0))
