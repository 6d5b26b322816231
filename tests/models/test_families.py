"""Each family of models trains by the defaults, exactly, or is refused by name before anything starts."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ended, metrics_of
from tests.e2e.runs import RunningRun, finish, weights
from tests.models.families import FAMILIES, REFUSED
from tests.real.runs import largest_difference, plain

DIGESTS = f"{Path(__file__).parent / 'digests.py'}:Digests"
STEPS = 3
RUN = (
    "--env", DIGESTS, "--engine", "hf", "--steps", str(STEPS), "--deterministic", "--set", "training.groups_per_step=2",
    "--set", "training.group_size=2", "--set", "sampling.max_tokens=24", "--set", "evaluation.problems=0", "--set", "checkpoint.every=1",
    "--set", "trainer.learning_rate=1e-4",
    "--set", "sampling.temperature=6",  # some copies are so sure of a token that all replies would be the same
)  # fmt: skip
EXACT = 1e-4  # nats


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_a_family_trains_exactly_resumes_to_the_same_bits_and_is_exported(
    name: str, model_of: Callable[[str], Path], atropos: Callable[..., Ended], tmp_path: Path
) -> None:
    model = model_of(name)
    command = ("run", "--model", str(model), *RUN)
    whole = finish(tmp_path / "whole", *command, "--dir", str(tmp_path / "whole")).folder
    steps = metrics_of(whole)
    assert [line["step"] for line in steps] == [1, 2, 3] and all(line["groups/trained"] == 2 for line in steps)
    assert max(line["alignment/max_abs_logprob_diff"] for line in steps) <= EXACT, "trainer and engine"
    assert largest_difference(whole, 1, plain(model), temperature=6.0) <= EXACT, (
        "the engine, and transformers one sequence at a time"
    )

    killed = RunningRun(tmp_path / "killed", *command, "--dir", str(tmp_path / "killed"))
    try:
        killed.wait_for_step(1)
        killed.kill("supervisor")
        assert killed.ended_within(60) == -signal.SIGKILL
    finally:
        killed.process.kill()
    finish(killed.folder, "resume", str(killed.folder))
    assert weights(killed.folder, STEPS) == weights(whole, STEPS) != weights(whole, STEPS - 1)

    ended = atropos("export", str(whole), "--as", "hf", "--out", "exported", timeout=120)
    assert ended.code == 0, ended.err
    exported: Any = plain(tmp_path / "exported")
    before: Any = plain(model)
    assert type(exported) is type(before)
    ids = torch.arange(3, 40)[None]
    assert not torch.equal(exported(input_ids=ids).logits, before(input_ids=ids).logits), "it was trained"


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_path_computes_exactly_is_refused_by_name_with_the_number_before_anything_starts(
    name: str, model_of: Callable[[str], Path], atropos: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = atropos("run", "--model", str(model_of(name)), *RUN, "--dir", "run", timeout=200)
    assert ended.code == 2 and not (tmp_path / "run").exists(), ended.err
    said = " ".join(ended.err.split())
    assert f"'{name}'" in said and re.search(r"differ.* by .*\d", said), said
    assert REFUSED[name] in said
    assert "--engine vllm" not in said, "the trainer takes none of them"
