"""`python -m tests.gpu.trees DEVICE`: gradients of random trees of sequences, by each way of attention, in one process."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from atropos_core.types import Batch
from tests.gpu.training import answer

BOUND = {"float32": 1e-4, "bfloat16": 0.05}  # of the norm of the difference, over the norm of the gradient


async def compared(device: str) -> list[dict[str, Any]]:
    """By dtype, attention and whether sequences are shared: `apart`, from the gradient of separate sequences in float32, and its bound."""
    found: list[dict[str, Any]] = await answer("tests.gpu.trees", device)
    return found


def tree(seed: int, vocabulary: int) -> Batch:
    """Two prompts, branches at three depths below each, one conversation that a later one continues."""
    from benchmarks.trainer_work import batch

    random = np.random.default_rng(seed)
    made = batch(np.full(2, 60), np.full(16, 180), vocabulary, seed=seed)
    rows = made.tokens.reshape(2, 8, 240)
    for shared, together in ((140, 4), (190, 2)):
        for first in range(0, 8, together):
            rows[:, first : first + together, 60:shared] = random.integers(2, vocabulary, (2, 1, shared - 60))
    return made


def main() -> None:
    import torch

    from atropos_trainer_grpo.losses import LOSSES
    from atropos_trainer_grpo.model import open_model
    from atropos_trainer_grpo.optimizer import Optimizer
    from atropos_trainer_grpo.update import Update
    from tests.gpu import models
    from tests.gpu.host import TRAINER

    device: str = json.loads(sys.argv[1])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    batch = tree(0, models.VOCABULARY)
    exact: torch.Tensor | None = None
    found = []
    with tempfile.TemporaryDirectory() as folder:
        models.make(models.SMALL, "float32", "cpu", Path(folder))
        for dtype, attention, share in (
            ("float32", "padded", False),
            ("float32", "padded", True),
            *((("float32", "flash", True),) if device == "cpu" else ()),  # its kernels for a GPU are of 16 bits
            ("bfloat16", "padded", False),
            ("bfloat16", "padded", True),
            ("bfloat16", "flash", False),
            ("bfloat16", "flash", True),
        ):
            options: Any = SimpleNamespace(**TRAINER | {"dtype": dtype, "attention": attention, "share_prompts": share})
            model = open_model(Path(folder), dtype=dtype, device=device, with_weights=True, attention=attention)
            optimizer = Optimizer(model.named_parameters(), options)
            update = Update(model, optimizer, options, LOSSES["grpo"], batch, device, 0)
            (whole,) = update.minibatches()
            update.backward(whole)
            gradient = torch.cat([tensor.grad.flatten().double().cpu() for tensor in optimizer.holders()])
            exact = gradient if exact is None else exact
            apart = float((gradient - exact).norm() / exact.norm())
            sequences = "shared" if share else "separate"
            found.append(
                {"dtype": dtype, "attention": attention, "sequences": sequences, "apart": apart, "bound": BOUND[dtype]}
            )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
