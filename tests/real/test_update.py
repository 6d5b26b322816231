"""The update over a tree of shared prefixes is that of a padded forward and backward pass of plain transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_trainer_grpo.model import open_model, score
from atropos_trainer_grpo.packed_rows import pack

REPLIES = ("He has 42 apples.", "He has 42.", "12 + 30 = 42, so 42", "I do not know")
WITHIN = 1e-5


def test_loss_and_gradient_are_those_of_padded_rows(model: Path) -> None:
    tokenizer = ChatTokenizer(model)
    prompt = tokenizer.render([{"role": "user", "content": "Tom has 12 apples and buys 30 more. How many has he?"}])
    rows = [np.concatenate([prompt, tokenizer.encode(reply)]).astype(np.int32) for reply in REPLIES]
    lengths = np.array([len(row) for row in rows])
    tokens, starts = np.concatenate(rows), np.cumsum([0, *lengths[:-1]])
    inside = np.setdiff1d(np.arange(len(tokens)), starts)
    weights = torch.linspace(-1, 1, len(inside))

    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], batch_first=True)
    mask = torch.arange(padded.shape[1])[None] < torch.from_numpy(lengths)[:, None]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    table = plain(input_ids=padded, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
    expected = table.gather(2, padded[:, 1:, None])[..., 0][mask[:, 1:]]
    loss = (expected * weights).sum()
    loss.backward()

    ours = open_model(model, dtype="float32", device="cpu", with_weights=True)
    packing = pack(tokens, lengths, share=True)
    assert packing.tokens.numel() < 0.6 * len(tokens), "the prompt is computed once"
    targets = torch.from_numpy(tokens[inside].astype(np.int64))
    scored = score(ours, packing, packing.at(inside - 1), targets, torch.ones(len(inside)), 8192)
    own_loss = (scored.logprobs * weights).sum()
    own_loss.backward()
    torch.testing.assert_close(scored.logprobs, expected, atol=1e-4, rtol=0)
    scale = float((expected.detach().abs() * weights.abs()).sum())
    assert abs(own_loss.item() - loss.item()) <= WITHIN * scale
    theirs = dict(plain.named_parameters())
    apart = sum(float((one.grad - theirs[name].grad).square().sum()) for name, one in ours.named_parameters())
    whole = sum(float(one.grad.square().sum()) for one in theirs.values())
    print(f"gradient: {(apart / whole) ** 0.5:.2g} of its norm apart")
    assert (apart / whole) ** 0.5 <= WITHIN
