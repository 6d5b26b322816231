"""The estimators of KL against the divergence itself, which a policy of three tokens lets one enumerate."""

import numpy as np
import pytest
import torch

from atropos_trainer_grpo.kl_estimators import divergence

LOGITS = torch.tensor([0.3, -1.1, 0.9], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.4, 0.8, 0.1], dtype=torch.float64), 0)


def expected_gradient(estimator):
    """E over tokens of the policy of d estimator / d logits: what many samples converge to."""
    total = torch.zeros(3, dtype=torch.float64)
    probabilities = LOGITS.softmax(0)
    for token in range(3):
        logits = LOGITS.clone().requires_grad_()
        value = divergence(estimator, logits.log_softmax(0)[token], REFERENCE[token])
        total += probabilities[token] * torch.autograd.grad(value, logits)[0]
    return total


def exact_gradient(way):
    logits = LOGITS.clone().requires_grad_()
    logs = logits.log_softmax(0)
    to_reference = (logs.exp() * (logs - REFERENCE)).sum()
    from_reference = (REFERENCE.exp() * (REFERENCE - logs)).sum()
    return torch.autograd.grad(to_reference if way == "policy||reference" else from_reference, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_k1_and_k3_over_the_policys_tokens_is_the_divergence(estimator):
    logs = LOGITS.log_softmax(0)
    mean = (logs.exp() * divergence(estimator, logs, REFERENCE)).sum()
    assert float(mean) == pytest.approx(float((logs.exp() * (logs - REFERENCE)).sum()), abs=1e-12)


def test_as_a_loss_k1_has_no_gradient_on_average():
    assert expected_gradient("k1").abs().max() < 1e-12


def test_as_a_loss_k2_has_the_gradient_of_kl_from_policy_to_reference():
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient("policy||reference"), rtol=0, atol=1e-12)


def test_as_a_loss_k3_has_the_gradient_of_kl_from_reference_to_policy():
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient("reference||policy"), rtol=0, atol=1e-12)
    assert (expected_gradient("k3") - exact_gradient("policy||reference")).abs().max() > 0.05


@pytest.mark.parametrize("sampled_from", ["the policy", "an older one"])
def test_as_a_loss_k3_ratio_has_the_gradient_of_kl_from_policy_to_reference_whoever_sampled(sampled_from):
    old = LOGITS if sampled_from == "the policy" else torch.tensor([0.9, 0.2, -0.3], dtype=torch.float64)
    old = old.log_softmax(0)
    total = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        logits = LOGITS.clone().requires_grad_()
        value = divergence("k3_ratio", logits.log_softmax(0)[token], REFERENCE[token], old[token])
        total += old[token].exp() * torch.autograd.grad(value, logits)[0]
    torch.testing.assert_close(total, exact_gradient("policy||reference"), rtol=0, atol=1e-12)


def test_k3_ratio_is_trls_k3_with_its_bias_correction():
    """As GRPOTrainer._compute_loss of TRL 1.16 writes it, in float64."""
    generator = torch.Generator().manual_seed(0)
    new, old, reference = (-3 * torch.rand(200, generator=generator, dtype=torch.float64) for _ in range(3))
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    divergence("k3_ratio", ours, reference, old).sum().backward()
    kl = (torch.exp(reference - theirs) - (reference - theirs) - 1) * torch.exp(theirs - old)
    kl.sum().backward()
    torch.testing.assert_close(divergence("k3_ratio", new, reference, old), kl.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    one = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    divergence("k3_ratio", one, one.detach() - 0.5, one.detach()).backward()
    assert float(one.grad) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: np.exp(-d) + d - 1)],
)
def test_values_and_slopes_are_schulmans(estimator, formula):
    d = np.linspace(-3, 3, 41)
    logprobs = torch.tensor(d - 2.0, requires_grad=True)
    made = divergence(estimator, logprobs, torch.full((41,), -2.0, dtype=torch.float64))
    np.testing.assert_allclose(made.detach().numpy(), formula(d), rtol=1e-12, atol=1e-12)
    made.sum().backward()
    slope = (formula(d + 1e-6) - formula(d - 1e-6)) / 2e-6
    np.testing.assert_allclose(logprobs.grad.numpy(), slope, atol=1e-6)
