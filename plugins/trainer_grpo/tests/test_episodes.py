"""An episode counts once, however many rollouts it is in: splitting one into rollouts that train the same tokens changes no
loss and no gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atropos_core.types import Batch, Column, Ragged, offsets_of
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.episodes import Episodes, side_by_side
from atropos_trainer_grpo.losses import LOSSES as LOSSES_BY_NAME
from atropos_trainer_grpo.model import open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.update import Update
from plugins.trainer_grpo.tests.test_update import LOSSES, NAMED

VOCABULARY = 37
RECOMPUTED = {"loss": "grpo", "old_logprobs": "recompute"}
MORE = [
    {"loss": "grpo", "whiten_advantages": True},
    {"loss": "grpo", "average": "token"},
    {"loss": "gspo", "clip_low": 0.9, "clip_high": 5.0, "average": "sum"},
    {"loss": "dapo", "average": "constant", "loss_length": 9},
    {"loss": "grpo", "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}, "whiten_advantages": True},
    {**RECOMPUTED, "correction": {"kind": "sequence_tis", "high": 1.5}},
    {**RECOMPUTED, "correction": {"kind": "geometric_mis", "low": 0.2, "high": 0.6}},
    {"loss": "grpo", "distillation": {"kind": "forward", "coefficient": 0.5}},
    {"loss": "grpo", "distillation": {"kind": "reverse"}},
]
MEMORY = [{}, {"tokens_per_microbatch": 1}, {"tokens_per_microbatch": 90}, {"share_prompts": False}, {"layout": "rows"}]
MEMORY += [{"layout": "rows", "tokens_per_microbatch": 90}]


def conversations(seed=0, groups=2, size=3, tokens_of=np.float32):
    """Make two batches of the same episodes of one to four turns: one with each episode in one sequence, one with each turn
    in its own sequence, after all earlier turns as context. The groups' advantages are by token, and some tokens have none."""
    random = np.random.default_rng(seed)
    whole, pieces = [], []  # (tokens, trained, logprobs, advantages, top k), group, episode
    for group in range(groups):
        prompt = random.integers(2, VOCABULARY, random.integers(2, 9))
        for episode in range(group * size, (group + 1) * size):
            tokens, sampled = list(prompt), [False] * len(prompt)
            ends = []
            for _ in range(random.integers(1, 5)):
                reply, tool = random.integers(1, 9, 2)
                tokens += list(random.integers(2, VOCABULARY, reply + tool))
                sampled += [True] * reply + [False] * tool
                ends.append(len(tokens))
            n, mask = len(tokens), np.array(sampled)
            columns = {
                "tokens": np.array(tokens, np.int32),
                "sampled": mask,
                "trained": mask,
                "logprobs": np.where(mask, random.normal(-3.0, 0.5, n), 0).astype(np.float32),
                "advantages": np.where(mask & (random.random(n) < 0.8), random.normal(size=n), 0).astype(np.float32),
                "ref": random.normal(-3.0, 0.5, n).astype(np.float32),
            }
            taught = np.stack([random.permutation(VOCABULARY)[:4] for _ in range(n)]).astype(np.int32)
            taught[:, 0] = columns["tokens"]
            logits = random.normal(size=(n, VOCABULARY))
            logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            columns |= {"ids": taught, "teacher": np.take_along_axis(logs, taught, 1).astype(np.float32)}
            whole.append((columns, group, episode))
            for begin, end in zip([0, *ends], ends, strict=False):
                own = np.arange(end) >= begin
                piece = {name: column[:end] for name, column in columns.items()}
                piece |= {"trained": piece["trained"] & own, "advantages": np.where(own, piece["advantages"], 0)}
                pieces.append((piece, group, episode))
    return batch_of(whole), batch_of(pieces)


def batch_of(parts):
    def joined(name):
        return np.concatenate([columns[name] for columns, _, _ in parts])

    tokens, count = joined("tokens"), len(parts)
    teacher = offsets_of(np.full(len(tokens), 4))
    return Batch(
        tokens=tokens, offsets=offsets_of([len(columns["tokens"]) for columns, _, _ in parts]), sampled=joined("sampled"),
        trained=joined("trained"), logprobs=joined("logprobs"), has_logprobs=np.ones(count, np.bool_),
        policy_version=np.zeros(len(tokens), np.int32), advantages=joined("advantages"),
        temperature=np.ones(count, np.float32), truncated=np.zeros(count, np.bool_),
        group=np.array([group for _, group, _ in parts], np.int32),
        version=1,
        columns={
            "ref_logprobs": Column("token", joined("ref"), np.ones(len(tokens), np.bool_)),
            "episode": Column("sequence", np.array([episode for *_, episode in parts], np.int32), np.ones(count, np.bool_)),
        },
        ragged={
            "teacher_token_ids": Ragged(teacher, joined("ids").ravel()),
            "teacher_logprobs": Ragged(teacher, joined("teacher").ravel()),
        },
    )  # fmt: skip


def same(one, other):
    """In float64, so that a difference is one of weights and not of rounding (in float32 it is 2e-6 of the largest entry)."""
    assert one[0] == pytest.approx(other[0], abs=1e-6, rel=1e-6)
    largest = one[1].abs().max()
    assert largest > 0 and (one[1] - other[1]).abs().max() < 1e-6 * max(1.0, largest)


@pytest.mark.parametrize("memory", MEMORY, ids=str)
@pytest.mark.parametrize("loss", LOSSES + MORE, ids=NAMED)
def test_an_episode_in_several_rollouts_has_the_gradient_of_one(gradient, loss, memory):
    whole, pieces = conversations()
    assert pieces.sequences > 2 * whole.sequences
    same(gradient(whole, **loss, double=True), gradient(pieces, **loss, **memory, double=True))


@pytest.mark.parametrize("loss", [{"loss": "grpo"}, {"loss": "gspo"}], ids=NAMED)
def test_where_the_rollouts_of_an_episode_stand_in_the_batch_changes_nothing(gradient, loss):
    whole, pieces = conversations()
    one_group = replace(pieces, group=np.zeros_like(pieces.group))
    order = np.random.default_rng(1).permutation(pieces.sequences)
    alone = gradient(replace(whole, group=np.zeros_like(whole.group)), **loss, double=True)
    same(alone, gradient(one_group.select(order), **loss, double=True))


def test_optimizer_steps_end_between_episodes(model_of):
    whole, pieces = conversations(groups=1, size=6)
    model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True)
    options = GrpoOptions(minibatches=4)

    def steps(batch):
        update = Update(
            model, Optimizer(model.named_parameters(), options), options, LOSSES_BY_NAME["grpo"], batch, "cpu", 0
        )
        return [batch.episode[part].tolist() for part in update.minibatches()]

    assert steps(whole) == [[0, 1], [2, 3], [4], [5]]
    assert [sorted(set(part)) for part in steps(pieces)] == steps(whole)
    assert sorted(sum(steps(pieces), [])) == sorted(pieces.episode.tolist())


def test_a_loss_of_ones_own_has_whole_episodes_unless_it_says_that_it_needs_none(gradient, monkeypatch):
    from atropos_trainer_grpo.losses import Rows, Surrogate, register

    @register(average="sum")
    def by_sequence(rows: Rows, clip):
        ratio = rows.mean_by_sequence(rows.ratio())  # with gradient through every token of the sequence
        return Surrogate(-ratio * rows.advantages, ratio.detach())

    monkeypatch.setitem(LOSSES_BY_NAME, "grpo", by_sequence)
    whole, pieces = conversations()
    same(gradient(whole, double=True), gradient(pieces, tokens_per_microbatch=1, double=True))


def test_episodes_and_their_sequences():
    _, pieces = conversations()
    shuffled = pieces.select(np.random.default_rng(2).permutation(pieces.sequences))
    batch = side_by_side(shuffled)
    assert (np.diff(batch.episode) >= 0).all() and side_by_side(batch) is batch
    episodes = Episodes.of(batch)
    assert episodes.several and len(episodes.first) == 6
    last = episodes.sequences(np.array([5, 0]))
    assert batch.episode[last].tolist() == sorted(batch.episode[last].tolist(), reverse=True)
    assert episodes.numbers(last).tolist() == [5, 0]
    offsets = episodes.token_offsets(last)
    assert offsets.tolist() == [0, batch.lengths[batch.episode == 5].sum(), batch.lengths[last].sum()]
    assert torch.equal(
        torch.from_numpy(episodes.counted(np.repeat(last, 2))),
        torch.from_numpy((np.repeat(batch.episode[last], 2) == 0) * 1),
    )
