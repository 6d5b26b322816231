"""Moments in fewer bits, by torchao: near AdamW, smaller, exact over a checkpoint, and never taken for another's."""

import copy
import io
import shutil
from pathlib import Path

import pytest
import torch

from atropos_core.errors import CheckpointError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.memory import MOMENT_BYTES
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.plugin import build

KINDS = ("adamw_8bit", "adamw_4bit", "adamw_fp8")
SHAPE = (64, 128)  # below 4,096 elements torchao keeps fp32

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torchao compiles its step: needs a C++ compiler")


@pytest.fixture(autouse=True)
def compiled_once(request):
    """torchao compiles its step for each kind and dtype, five seconds of a core for each. With 8 bits, as most would have it, it is
    compiled here too; the others compute the same uncompiled."""
    names = getattr(request.node, "callspec", None)
    if names is None or (names.params.get("kind") == "adamw_8bit" and names.params.get("dtype") != torch.bfloat16):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def parameter(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Parameter(torch.randn(SHAPE).to(dtype))


def updated(trained, optimizer, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        (trained.float() * (torch.randn(SHAPE) + 0.5)).sum().backward()
        optimizer.step(optimizer.gradient_norm())


def options(kind, **more):
    return GrpoOptions(optimizer=kind, learning_rate=1e-3, max_grad_norm=1e9, **more)


@pytest.mark.parametrize(("kind", "off"), [("adamw_8bit", 0.015), ("adamw_4bit", 0.2), ("adamw_fp8", 0.04)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_updates_are_those_of_adamw_but_for_the_moments_rounding(kind, off, dtype):
    start, ours, exact = parameter(dtype), parameter(dtype), parameter(dtype)
    address = ours.data_ptr()
    few = Optimizer([("p", ours)], options(kind, weight_decay=0.1))
    many = Optimizer([("p", exact)], options("adamw", weight_decay=0.1))
    updated(ours, few, range(20))
    updated(exact, many, range(20))
    whole, between = (exact - start).float().abs().mean(), (ours - exact).float().abs().mean()
    assert 0 < between < off * whole, "a rounding, and no more than that"
    assert ours.data_ptr() == address
    if dtype == torch.bfloat16:
        [master] = few.state()["masters"]
        assert torch.equal(ours, master.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_its_moments_take_the_bytes_that_the_plan_says(kind):
    trained = parameter()
    optimizer = Optimizer([("p", trained)], options(kind))
    updated(trained, optimizer, range(1))
    moments = optimizer.state()["moments"][0]
    parts = [
        getattr(moment, name)
        for moment in (moments["exp_avg"], moments["exp_avg_sq"])
        for name in ("codes", "scale")  # and a table of 16 or 256 values for each, whatever the size
    ]
    held_bytes = sum(part.numel() * part.element_size() for part in parts)
    assert held_bytes == 2 * MOMENT_BYTES[kind] * trained.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_a_checkpoint_bit_for_bit(kind):
    straight, first = parameter(), parameter()
    whole, before = Optimizer([("p", straight)], options(kind)), Optimizer([("p", first)], options(kind))
    updated(straight, whole, range(8))
    updated(first, before, range(5))
    file = io.BytesIO()
    torch.save(before.state(), file)
    file.seek(0)
    resumed = torch.nn.Parameter(first.detach().clone())
    after = Optimizer([("p", resumed)], options(kind))
    after.load(torch.load(file, weights_only=True))
    updated(resumed, after, range(5, 8))
    assert torch.equal(resumed, straight)


def test_a_learning_rate_that_falls_is_followed():
    trained, before = parameter(), parameter()
    optimizer = Optimizer([("p", trained)], options("adamw_8bit", schedule="linear"), 3)
    updated(trained, optimizer, range(3))
    before = trained.detach().clone()
    updated(trained, optimizer, range(3, 5))  # behind the end of the schedule the rate is 0
    assert torch.equal(trained, before)


def test_moments_of_another_format_are_refused_with_the_option_that_takes_them():
    trained = parameter()
    optimizer = Optimizer([("p", trained)], options("adamw"))
    updated(trained, optimizer, range(1))
    other = Optimizer([("p", trained)], options("adamw_8bit"))
    with pytest.raises(CheckpointError, match="trainer.optimizer=adamw") as refused:
        other.refuse_other(optimizer.state())
    assert '"adamw_8bit"' in str(refused.value)
    old = {name: value for name, value in copy.copy(optimizer.state()).items() if name != "optimizer"}
    optimizer.refuse_other(old)  # of before there was a choice


@pytest.mark.parametrize(
    ("given", "devices", "message"),
    [
        ({"optimizer": "adamw_8bit"}, ("cpu", "cpu"), "on one device"),
        ({"kernels": "liger"}, ("cpu",), "needs a CUDA device"),
        (
            {"gradient_checkpointing": True, "activation_offloading": True},
            ("cpu",),
            "activation_offloading = true needs a CUDA device",
        ),
        ({"optimizer_offloading": True}, ("cpu",), "optimizer_offloading = true needs a CUDA device"),
        ({"optimizer_offloading": True}, ("cuda:0", "cuda:1"), "only on one device, and this trainer has 2"),
    ],
)
def test_what_the_run_cannot_have_is_refused_before_it_begins(given, devices, message, tmp_path: Path):
    with pytest.raises(FitError, match=message):
        build(GrpoOptions(**given), RunContext(tmp_path, tmp_path, transport="checkpoint", devices=devices))


@pytest.mark.parametrize(
    ("given", "extra"), [({"optimizer": "adamw_8bit"}, "torchao"), ({"kernels": "liger"}, "liger")]
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(given, extra, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    context = RunContext(tmp_path, tmp_path, transport="checkpoint", devices=("cuda:0",))
    with pytest.raises(FitError, match=rf"trainer-grpo\[{extra}\]"):
        build(GrpoOptions(**given), context)
