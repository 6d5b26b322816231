"""The chunked log-softmax against torch's own."""

import pytest
import torch

from atropos_trainer_grpo.architecture import LogitForm
from atropos_trainer_grpo.chunks import in_one_pass, rows_at_once
from atropos_trainer_grpo.logprobs import token_logprobs


def case(dtype, bias=True, rows=13):
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11, bias=bias, dtype=dtype)
    hidden = torch.randn(rows, 6, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(0, 11, (rows,)), torch.linspace(0.5, 1.5, rows)


@pytest.mark.parametrize("chunk", [100, 13, 4])
def test_gradients_pass_gradcheck_in_float64(chunk):
    head, hidden, targets, temperature = case(torch.float64)

    def compute(hidden, weight, bias):
        module = torch.nn.Linear(6, 11, dtype=torch.float64)
        del module.weight, module.bias
        module.weight, module.bias = weight, bias
        scored = token_logprobs(hidden, module, targets, temperature, chunk)
        return scored.logprobs, scored.entropy

    weight, bias = head.weight.detach().requires_grad_(), head.bias.detach().requires_grad_()
    assert torch.autograd.gradcheck(compute, (hidden, weight, bias)), "of logprobs, and of entropies"


def test_logprobs_and_entropy_are_those_of_the_tempered_softmax():
    head, hidden, targets, temperature = case(torch.float64, bias=False)
    scored = token_logprobs(hidden, head, targets, temperature, 5)
    distribution = torch.distributions.Categorical(logits=head(hidden) / temperature[:, None])
    torch.testing.assert_close(scored.logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(scored.entropy, distribution.entropy())


FORMS = [LogitForm(scale=0.125), LogitForm(cap=0.7), LogitForm(scale=3.0, cap=1.5)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("chunk", [100, 4])
@pytest.mark.parametrize("tempered", [False, True])
def test_scaled_and_capped_logits_are_those_of_the_formula_with_their_gradients(form, chunk, tempered):
    found, others = [], torch.randint(0, 11, (13, 3))
    for ours in (True, False):
        head, hidden, targets, temperature = case(torch.float64)
        temperature = temperature.double() if tempered else None
        if ours:
            scored = token_logprobs(hidden, head, targets, temperature, chunk, others, form=form)
            values = (scored.logprobs, scored.entropy, scored.others, scored.outside)
        else:
            raw = head(hidden) * form.scale
            logits = raw if form.cap is None else form.cap * torch.tanh(raw / form.cap)
            logs = torch.log_softmax(logits if temperature is None else logits / temperature[:, None], -1)
            values = (
                logs.gather(1, targets[:, None])[:, 0],
                -(logs.exp() * logs).sum(-1),
                logs.gather(1, others),
                logs.scatter(1, others, -torch.inf).logsumexp(1),
            )
        sum((value * torch.linspace(-1, 1, value.numel()).view_as(value)).sum() for value in values).backward()
        found.append([*(value.detach() for value in values), hidden.grad, head.weight.grad, head.bias.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_form_passes_gradcheck_in_float64(form):
    head, hidden, targets, temperature = case(torch.float64)

    def compute(hidden):
        scored = token_logprobs(hidden, head, targets, temperature.double(), 4, form=form)
        return scored.logprobs, scored.entropy

    assert torch.autograd.gradcheck(compute, (hidden,))


@pytest.mark.parametrize("chunk", [100, 4])
def test_no_temperature_is_a_temperature_of_one_bit_for_bit(chunk):
    others, found = torch.randint(0, 11, (13, 3)), []
    for temperature in (None, torch.ones(13)):
        head, hidden, targets, _ = case(torch.float32)
        scored = token_logprobs(hidden, head, targets, temperature, chunk, others)
        (scored.logprobs.sum() + scored.entropy.sum() + scored.others.sum() + scored.outside.sum()).backward()
        found.append(
            [*(part.detach() for part in scored if part is not None), hidden.grad, head.weight.grad, head.bias.grad]
        )
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_sixteen_bit_models_get_their_log_softmax_in_fp32():
    head, hidden, targets, temperature = case(torch.bfloat16, bias=False)
    scored = token_logprobs(hidden, head, targets, temperature, 100)
    assert scored.logprobs.dtype == torch.float32
    expected = torch.log_softmax(head(hidden).float() / temperature[:, None], -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scored.logprobs, expected)
    scored.logprobs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_no_rows_are_a_loss_of_nothing_that_can_be_differentiated():
    head, hidden, *_ = case(torch.float32, rows=0)
    scored = token_logprobs(hidden, head, torch.zeros(0, dtype=torch.long), torch.zeros(0), 4)
    scored.logprobs.sum().backward()
    assert scored.logprobs.shape == (0,)


def test_a_large_vocabulary_has_fewer_rows_of_logits_at_once():
    assert rows_at_once(8192, 598, "cpu") == 8192
    assert rows_at_once(8192, 32_000, "cpu") == 524
    assert rows_at_once(8192, 152_000, "cuda") == 883
    assert rows_at_once(8192, 152_000, "cuda", one_pass=True) == 1766
    assert rows_at_once(8192, 10_000_000, "cpu") == 64
    assert rows_at_once(5, 10_000_000, "cpu") == 5


def test_triton_kernels_score_on_a_gpu_where_only_targets_are_wanted():
    assert in_one_pass("cuda", double=False, more=False)
    assert not in_one_pass("cpu", double=False, more=False)
    assert not in_one_pass("cuda", double=True, more=False)
    assert not in_one_pass("cuda", double=False, more=True)


@pytest.mark.parametrize("chunk", [13, 4])
def test_gradients_are_as_exact_where_distributions_are_sharp(chunk):
    head, hidden, targets, temperature = case(torch.float32)
    hidden = (30 * hidden.detach()).requires_grad_()

    def gradients(hidden, weight, bias):
        logs = torch.log_softmax((hidden @ weight.T + bias) / temperature.to(hidden.dtype)[:, None], -1)
        value = logs.gather(1, targets[:, None]).sum() - (logs.exp() * logs).sum()
        return torch.autograd.grad(value, (hidden, weight))

    exact = gradients(*(tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight, head.bias)))
    scored = token_logprobs(hidden, head, targets, temperature, chunk)
    found = torch.autograd.grad(scored.logprobs.sum() + scored.entropy.sum(), (hidden, head.weight))
    for one, other in zip(found, exact, strict=True):
        assert (one - other).abs().max() < 1e-6 * other.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_that_is_there_is_added_to_where_it_lies(tied):
    head, hidden, targets, temperature = case(torch.float64)

    def backward():
        value = token_logprobs(hidden, head, targets, temperature, 5).logprobs.sum()
        if tied:  # the weight has another use, whose gradient comes the usual way
            value = value + torch.nn.functional.embedding(targets, head.weight).square().sum()
        value.backward()
        return head.weight.grad

    once = backward().clone()
    first = backward()
    assert backward() is first
    torch.testing.assert_close(first, 3 * once)
