"""A teacher's columns as a loss: against float64, against whole distributions, and in a student that learns."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import DataError
from atropos_core.types import Ragged, offsets_of
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.distillation import forward_kl
from atropos_trainer_grpo.logprobs import token_logprobs
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.model import open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.update import Update

VOCABULARY = 37
ALONE = {"alone": True}
REVERSE = {"kind": "reverse", "alone": True}


def dense(student, teacher, k):
    """KL over the teacher's k likeliest tokens and one bucket for the rest, from whole distributions."""
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    ids = p.topk(k).indices
    inside_p, inside_q = p.gather(-1, ids), q.gather(-1, ids)
    rest_p, rest_q = (whole.scatter(-1, ids, 0.0).sum(-1) for whole in (p, q))
    return (inside_p * (inside_p / inside_q).log()).sum(-1) + torch.xlogy(rest_p, rest_p / rest_q), ids


# -- the formula


def outside_of(logs, ids):
    return logs.scatter(-1, ids, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_forward_kl_and_its_gradient_are_those_of_the_whole_distributions(k):
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(50, 11, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    expected, ids = dense(student, teacher, k)
    logs = student.log_softmax(-1)
    found = forward_kl(
        logs.gather(-1, ids), outside_of(logs, ids), teacher.log_softmax(-1).gather(-1, ids),
        torch.ones_like(ids, dtype=torch.bool),
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), student, retain_graph=True)
    (got,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(got, wanted)


def test_over_all_tokens_it_is_the_divergence_itself():
    torch.manual_seed(1)
    student, teacher = torch.randn(20, 7).log_softmax(-1), torch.randn(20, 7).log_softmax(-1)
    whole = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(
        forward_kl(student, torch.full((20,), -torch.inf), teacher, torch.ones(20, 7, dtype=torch.bool)),
        whole,
        atol=1e-5,
        rtol=0,
    )


def test_a_student_with_one_percent_of_its_mass_there_is_far_away_though_it_agrees_on_the_proportions():
    teacher = torch.tensor([[0.6, 0.3, 0.09]]).log()
    student = torch.tensor([[0.6, 0.3, 0.09]]).mul(0.01 / 0.99).log()
    apart = forward_kl(student, torch.tensor([0.99 + 0.0001]).log(), teacher, torch.ones(1, 3, dtype=torch.bool))
    assert float(apart) == pytest.approx(0.99 * np.log(99) + 0.01 * np.log(0.01 / 0.99), rel=1e-4)
    renormalised = torch.nn.functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True)
    assert abs(float(renormalised)) < 1e-6, "which is what renormalising over k would have given"


def test_entries_that_are_not_there_change_nothing_and_have_no_gradient():
    torch.manual_seed(2)
    student, teacher = torch.randn(9, 6).log_softmax(-1)[:, :3], torch.randn(9, 6).log_softmax(-1)[:, :3]
    rest = torch.full((9,), -1.0)
    padded = torch.cat([student, torch.full((9, 2), -3.0)], 1).requires_grad_()
    there = torch.tensor([True] * 3 + [False] * 2).expand(9, 5)
    found = forward_kl(padded, rest, torch.cat([teacher, torch.zeros(9, 2)], 1), there)
    torch.testing.assert_close(found, forward_kl(student, rest, teacher, torch.ones(9, 3, dtype=torch.bool)))
    (gradient,) = torch.autograd.grad(found.sum(), padded)
    assert not gradient[:, 3:].any() and gradient[:, :3].any() and gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("least", [1e-2, 1e-5, 1e-7, 1e-9, 1e-20, 1e-37, 1e-43])
def test_the_whole_gradient_reaches_what_the_policy_has_all_but_ruled_out(least, dtype):
    """A vocabulary of six tokens, of which the teacher names two and leaves 0.3 to the rest; the policy leaves it `least`. By
    the formula the rest's logits are pulled by q_rest - p_rest in all, each by its share of the rest."""
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = torch.cat([torch.tensor([0.6, 0.4], dtype=torch.float64) * (1 - least), shares * least])
    weight = q.log().to(dtype)[:, None].requires_grad_()  # a head whose logits these are
    head = torch.nn.Linear(1, 6, bias=False, dtype=dtype)
    del head.weight
    head.weight = weight
    ids, teacher = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.2]], dtype=dtype).log()
    scored = token_logprobs(torch.ones(1, 1, dtype=dtype), head, ids[:, 0], torch.ones(1), 8, ids)
    found = forward_kl(scored.others, scored.outside, teacher, torch.ones(1, 2, dtype=torch.bool))
    found.sum().backward()
    expected = torch.cat([q[:2] - torch.tensor([0.5, 0.2]), (least - 0.3) * shares])
    torch.testing.assert_close(weight.grad[:, 0].double(), expected, atol=1e-6, rtol=1e-5)
    divergence = 0.5 * np.log(0.5 / 0.6) + 0.2 * np.log(0.2 / 0.4) - 0.7 * np.log1p(-least) + 0.3 * np.log(0.3 / least)
    assert found.item() == pytest.approx(divergence, rel=1e-5)


def test_it_is_finite_where_either_leaves_nothing_to_the_rest():
    one = torch.ones(1, 1, dtype=torch.bool)
    nothing, little = (torch.tensor([0.0]), torch.tensor([-torch.inf])), (torch.tensor([-1e-9]), torch.tensor([-20.7]))
    for (inside, outside), named in product((nothing, little), (1.0, 0.999999, 0.3)):
        student = inside[None].clone().requires_grad_()
        found = forward_kl(student, outside, torch.tensor([[named]]).log(), one)
        assert found.isfinite().all()
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("chunk", [100, 13, 4])
def test_logprobs_of_further_tokens_pass_gradcheck(chunk):
    torch.manual_seed(0)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    targets, others, temperature = (
        torch.randint(0, 11, (13,)),
        torch.randint(0, 11, (13, 3)),
        torch.linspace(0.5, 1.5, 13),
    )

    def compute(hidden, weight):
        head = torch.nn.Linear(6, 11, bias=False, dtype=torch.float64)
        del head.weight
        head.weight = weight
        scored = token_logprobs(hidden, head, targets, temperature, chunk, others)
        assert scored.mass is None, "nothing was cut"
        return scored[:4]

    assert torch.autograd.gradcheck(compute, (hidden, weight)), "of logprobs, entropies, further logprobs and the rest"
    logs = (hidden @ weight.T / temperature.double()[:, None]).log_softmax(-1)
    torch.testing.assert_close(compute(hidden, weight)[2], logs.gather(1, others))
    torch.testing.assert_close(compute(hidden, weight)[3], outside_of(logs, others))


# -- a batch with a teacher


def logits_of(model, batch):
    """[N, V] that predict each token, from whole forward passes; the first of a sequence has none."""
    made = torch.zeros(len(batch.tokens), VOCABULARY)
    with torch.no_grad():
        for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch.tokens[begin:end]).long()[None]
            made[begin + 1 : end] = model(ids).logits[0, :-1]
    return made


def taught(batch, logits, k=4, every=1, own=False):
    """Return the batch with the teacher's k likeliest tokens at each sampled token, or only the sampled one."""
    logs = logits.log_softmax(-1).numpy()
    speaks = batch.sampled & (np.arange(len(batch.tokens)) % every == 0)
    ids = batch.tokens[:, None] if own else np.argsort(-logs, axis=1)[:, :k]
    counts = speaks * ids.shape[1]
    values = np.take_along_axis(logs, ids.astype(np.int64), axis=1)
    columns = {
        "teacher_token_ids": ids[speaks].ravel().astype(np.int32),
        "teacher_logprobs": values[speaks].ravel().astype(np.float32),
    }
    return replace(batch, ragged={name: Ragged(offsets_of(counts), column) for name, column in columns.items()})


@pytest.fixture
def teacher(model_of):
    return AutoModelForCausalLM.from_pretrained(model_of(tied=False)).eval()


@pytest.fixture
def update_of(model_of):
    def make(batch, distillation, **options):
        options = GrpoOptions(distillation=distillation, **options)
        model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True)
        optimizer = Optimizer(model.named_parameters(), options)
        update = Update(model, optimizer, options, LOSSES[options.loss], batch, "cpu", 0)
        (chosen,) = update.minibatches()
        update.backward(chosen)
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        gradient = torch.cat([part.flatten() for part in flat])
        update.write()
        return update.tally.losses[0], gradient, update.metrics()

    return make


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_the_loss_is_the_divergence_at_the_token_that_each_entry_predicts(
    update_of, make_batch, model_of, teacher, average
):
    """An entry at the token before or after it would give another value: both are tried."""
    batch = make_batch()
    towards = logits_of(teacher, batch)
    student = logits_of(AutoModelForCausalLM.from_pretrained(model_of()), batch)
    apart, _ = dense(student, towards, 4)
    mask = torch.from_numpy(batch.sampled)
    rows = [apart[b:e][mask[b:e]] for b, e in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
    expected = torch.cat(rows).mean() if average == "token" else torch.stack([row.mean() for row in rows]).mean()
    loss, _, reported = update_of(taught(batch, towards), ALONE, average=average)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert reported["distill/kl"] == pytest.approx(float(torch.cat(rows).mean()), rel=1e-5)
    assert reported["distill/positions"] == 1.0
    inside = towards.double().softmax(-1).topk(4).values.sum(-1)[mask].mean()
    assert reported["distill/coverage"] == pytest.approx(float(inside), rel=1e-5)
    for shift in (-1, 1):
        other, _, _ = update_of(taught(batch, towards.roll(shift, 0)), ALONE, average=average)
        assert abs(other - float(expected)) > 1e-2


def test_each_column_of_a_teacher_reaches_the_loss(update_of, make_batch, teacher):
    batch = make_batch()
    whole = taught(batch, logits_of(teacher, batch))
    mixed = {"coefficient": 0.5}
    loss, gradient, _ = update_of(whole, mixed)
    ids, logprobs = whole.ragged["teacher_token_ids"], whole.ragged["teacher_logprobs"]
    others = {
        "ids": replace(
            whole, ragged={**whole.ragged, "teacher_token_ids": replace(ids, values=(ids.values + 1) % VOCABULARY)}
        ),
        "logprobs": replace(
            whole, ragged={**whole.ragged, "teacher_logprobs": replace(logprobs, values=logprobs.values - 0.5)}
        ),
        "positions": taught(batch, logits_of(teacher, batch), every=2),
        "advantages": replace(whole, advantages=-whole.advantages),
    }
    for name, other in others.items():
        assert (update_of(other, mixed)[1] - gradient).abs().max() > 1e-4, name
    for options in ({"coefficient": 0.25}, ALONE, {"kind": "reverse"}):
        found = update_of(whole, options)
        assert (found[1] - gradient).abs().max() > 1e-4, options
    policy = update_of(whole, {"coefficient": 1e-9})
    distilled = update_of(whole, {"coefficient": 0.5, "alone": True})
    assert loss == pytest.approx(policy[0] + distilled[0], abs=1e-6)
    torch.testing.assert_close(gradient, policy[1] + distilled[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("distillation", [ALONE, REVERSE, {"coefficient": 0.3}], ids=str)
@pytest.mark.parametrize(
    "other",
    [{"tokens_per_microbatch": 60}, {"tokens_per_microbatch": 1}, {"share_prompts": False}, {"logprob_chunk": 5}],
    ids=str,
)
def test_options_that_save_memory_change_nothing(update_of, make_batch, teacher, distillation, other):
    batch = make_batch()
    made = taught(batch, logits_of(teacher, batch), every=3, own=distillation is REVERSE)
    one, same = update_of(made, distillation), update_of(made, distillation, **other)
    assert one[0] == pytest.approx(same[0], abs=1e-6, rel=1e-6)
    torch.testing.assert_close(one[1], same[1], atol=1e-5, rtol=1e-4)
    for name in ("distill/kl", "distill/positions"):
        assert one[2][name] == pytest.approx(same[2][name], rel=1e-5)


def test_in_reverse_the_advantage_of_a_token_is_what_the_teacher_gives_it_over_the_policy(
    update_of, make_batch, teacher
):
    batch = make_batch()
    logs = logits_of(teacher, batch).log_softmax(-1).numpy()
    own = np.take_along_axis(logs, batch.tokens[:, None].astype(np.int64), 1)[:, 0]
    behind = np.where(batch.sampled, own - batch.logprobs, 0).astype(np.float32)
    batch_taught = taught(batch, torch.from_numpy(logs), own=True)
    for options, expected in (
        (REVERSE, behind),
        ({"kind": "reverse", "coefficient": 0.2}, batch.advantages + np.float32(0.2) * behind),
    ):
        loss, gradient, reported = update_of(batch_taught, options)
        plain = replace(batch, advantages=expected)
        wanted = update_of(replace(plain, ragged=batch_taught.ragged), {"kind": "forward", "coefficient": 1e-12})
        assert loss == pytest.approx(wanted[0], abs=1e-5)
        torch.testing.assert_close(gradient, wanted[1], atol=1e-5, rtol=1e-4)
        assert reported["distill/kl"] == pytest.approx(-float(behind[batch.sampled].mean()), rel=1e-4)


async def test_a_student_reaches_its_teacher(open_trainer, make_batch, teacher, gate):
    batch = make_batch(groups=2, size=2)
    towards = logits_of(teacher, batch)
    trainer = await open_trainer(distillation=ALONE, average="token", learning_rate=3e-2, betas=(0.9, 0.95))
    reported = [
        await trainer.step(replace(taught(batch, towards, k=VOCABULARY), version=v), gate) for v in range(1, 601)
    ]
    assert reported[0]["distill/kl"] > 0.3
    assert reported[-1]["distill/kl"] < 1e-3


def test_a_batch_without_a_teacher_or_with_one_of_another_vocabulary_is_refused(update_of, make_batch, teacher):
    batch = make_batch()
    with pytest.raises(DataError, match="no group of the batch came with a teacher's"):
        update_of(batch, ALONE)
    made = taught(batch, logits_of(teacher, batch))
    ids = made.ragged["teacher_token_ids"]
    made = replace(made, ragged={**made.ragged, "teacher_token_ids": replace(ids, values=ids.values + VOCABULARY)})
    with pytest.raises(DataError, match="another tokenizer"):
        update_of(made, ALONE)


def test_in_reverse_a_teacher_that_says_nothing_of_what_was_sampled_is_refused(update_of, make_batch, teacher):
    made = taught(make_batch(), logits_of(teacher, make_batch()), own=True)
    ids = made.ragged["teacher_token_ids"]
    made = replace(
        made, ragged={**made.ragged, "teacher_token_ids": replace(ids, values=(ids.values + 1) % VOCABULARY)}
    )
    with pytest.raises(DataError, match="logprobs of the sampled tokens, but the teacher sent none"):
        update_of(made, REVERSE)
