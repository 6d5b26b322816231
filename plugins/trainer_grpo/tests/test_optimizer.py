"""AdamW in place, and fp32 masters behind 16-bit parameters."""

import copy

import pytest
import torch

from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.optimizer import Optimizer


def named(trained):
    return [(f"p{place}", parameter) for place, parameter in enumerate(trained)]


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 5), (7,))]


def give_gradients(targets, seed, scale=1.0):
    torch.manual_seed(seed)
    loss = sum((target.float() * torch.randn(target.shape) * scale).sum() for target in targets)
    loss.backward()


def test_steps_equal_those_of_torch_with_its_own_clipping():
    ours, theirs = parameters(), parameters()
    options = GrpoOptions(learning_rate=0.1, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=0.5)
    optimizer = Optimizer(named(ours), options)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]  # a vector
    adam = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))
    for seed in range(4):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        assert float(optimizer.gradient_norm()) == pytest.approx(float(norm))
        optimizer.step(optimizer.gradient_norm())
        adam.step()
        adam.zero_grad()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_sixteen_bit_parameters_follow_fp32_masters_that_see_small_updates():
    rough, fine = (
        parameters(torch.bfloat16),
        [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)],
    )
    options = GrpoOptions(learning_rate=1e-4, max_grad_norm=1e9)  # below half a unit in the last place of bfloat16 at 1
    start = copy.deepcopy(rough)
    addresses = [parameter.data_ptr() for parameter in rough]
    optimizers = [Optimizer(named(rough), options), Optimizer(named(fine), options)]
    for seed in range(30):
        for optimizer, trained in zip(optimizers, (rough, fine), strict=True):
            for micro in range(3):  # micro-batches add up in fp32
                torch.manual_seed(seed * 10 + micro)
                noise = [torch.randint(1, 9, p.shape) / 8 for p in trained]  # exact in bfloat16
                sum((p.float() * n).sum() for p, n in zip(trained, noise, strict=True)).backward()
            optimizer.step(optimizer.gradient_norm())
    assert [parameter.data_ptr() for parameter in rough] == addresses
    for low, high, begun in zip(rough, fine, start, strict=True):
        assert torch.equal(low, high.detach().to(torch.bfloat16))
        assert not torch.equal(low, begun)


def test_moving_to_other_storage_keeps_moments_and_masters():
    trained = parameters(torch.bfloat16)
    options = GrpoOptions(learning_rate=1e-3)
    before = Optimizer(named(trained), options)
    moved = [torch.nn.Parameter(p.detach().clone()) for p in trained]
    stayed = [torch.nn.Parameter(p.detach().clone()) for p in trained]
    reference = Optimizer(named(stayed), options)
    for optimizer, targets in ((before, trained), (reference, stayed)):
        give_gradients(targets, 0)
        optimizer.step(optimizer.gradient_norm())
    with torch.no_grad():
        for new, old in zip(moved, trained, strict=True):
            new.copy_(old)
    after = Optimizer(named(moved), options)
    before.close()
    after.take_over(before)
    for optimizer, targets in ((after, moved), (reference, stayed)):
        for seed in range(1, 6):
            give_gradients(targets, seed)
            optimizer.step(optimizer.gradient_norm())
    assert all(torch.equal(one, other) for one, other in zip(moved, stayed, strict=True))
    give_gradients(trained, 0)
    assert all(parameter.grad is not None for parameter in trained)  # the old one has let go


def test_gradients_too_small_to_add_up_in_sixteen_bits_add_up_in_fp32():
    trained = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = Optimizer([("held", trained)], GrpoOptions(max_grad_norm=1e9))
    (trained.float() * 1.0).sum().backward()
    for _ in range(256):  # 2^-10 is below half a unit in the last place of bfloat16 at 1
        (trained.float() * 2.0**-10).sum().backward()
    assert float(optimizer.gradient_norm()) == pytest.approx(1.25 * 8**0.5, rel=1e-6)


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_updates_far_below_the_rounding_of_a_parameter_are_not_lost(rate):
    """At 1, bfloat16 moves by 2^-8 downwards: thousands of updates of an RL learning rate make one such step."""
    trained = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    naive = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = Optimizer([("held", trained)], GrpoOptions(learning_rate=rate, max_grad_norm=1e9))
    adam = torch.optim.AdamW([naive], lr=rate, weight_decay=0.0)
    updates = round(2.0**-8 / rate) + 10
    for _ in range(updates):
        for parameter in (trained, naive):
            parameter.float().sum().backward()
        optimizer.step(optimizer.gradient_norm())
        adam.step()
        adam.zero_grad()
    assert torch.equal(naive, torch.ones_like(naive)), "without masters nothing happens at all"
    [master] = optimizer.state()["masters"]
    torch.testing.assert_close(master, torch.full((16,), 1 - updates * rate), atol=updates * 6e-8, rtol=0)
    assert torch.equal(trained, master.to(torch.bfloat16))
    assert bool((trained < 1).all())


def test_what_the_masters_know_beyond_the_parameters_survives_a_save():
    options = GrpoOptions(learning_rate=1e-6, max_grad_norm=1e9)
    whole, before = (
        torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
    )
    straight, first = Optimizer([("p", whole)], options), Optimizer([("p", before)], options)
    for optimizer, trained, updates in ((straight, whole, 60), (first, before, 40)):
        for _ in range(updates):
            trained.float().sum().backward()
            optimizer.step(optimizer.gradient_norm())
    after = torch.nn.Parameter(before.detach().clone())
    second = Optimizer([("p", after)], options)
    second.load(copy.deepcopy(first.state()))
    for _ in range(20):
        after.float().sum().backward()
        second.step(second.gradient_norm())
    assert torch.equal(second.state()["masters"][0], straight.state()["masters"][0])
