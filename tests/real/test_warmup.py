"""A warm start of the real model compared with TRL's SFTTrainer: the same tokens, loss and gradient."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.trl.test_supervised import check_beside_trl, says, user

ROWS = [{"prompt": [user(f"{a} + {b}")], "completion": [says(f"#### {a + b}")]} for a, b in ((2, 3), (10, 5))]
# torch's log_softmax in float32 over 49,152 tokens rounds: our loss is 1.4e-5 from that in float64, and the gradient 8e-5 of its norm, as
# in plain transformers. With the log_softmax alone in float64, plain transformers is 2e-6 of the norm from TRL.
WITHIN = 2e-4


@pytest.mark.timeout(600)
@pytest.mark.skipif("TRL_PYTHON" not in os.environ, reason="needs TRL in an environment of its own: `make test-real`")
async def test_loss_and_gradient_are_those_of_trl(model: Path, tmp_path: Path) -> None:
    await check_beside_trl(ROWS, model, tmp_path, within=WITHIN)
