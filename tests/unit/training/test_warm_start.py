"""A warm start in a checkpoint, its held-out loss, and the runs that cannot have one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from atropos_core.cli import run_app
from atropos_core.config.run_file import WarmupSection
from atropos_core.errors import CheckpointError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.warm_start import WarmStart, check_state, state_of
from atropos_env_dataset.completions import open_completions
from tests.conftest import REPOSITORY

TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"


class Scorer:
    """Scores each token with minus its place in the sequence."""

    async def logprobs(self, sequences, temperature=1.0):
        return [-np.arange(len(one), dtype=np.float32) for one in sequences]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = ({"prompt": f"What is {n} + 1?", "completion": str(n + 1)} for n in range(12))
    (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(data: Path, **options) -> WarmStart:
    section = WarmupSection(data=data, **options)
    return WarmStart(open_completions(section, ChatTokenizer(TINY), max_tokens=99, seed=0), 0.5)


def test_a_checkpoint_of_another_warm_start_is_refused(data):
    warmup, other = opened(data, steps=4), opened(data, steps=4, rows_per_step=3)
    state = json.loads(json.dumps(state_of(warmup, 4)))
    check_state(state, opened(data, steps=4), 4, 2)
    check_state({}, None, 0, 2)  # of a run without one, also of an older version
    with pytest.raises(CheckpointError, match="the rows of the warm start, or their order, have changed"):
        check_state(state, other, 4, 2)
    check_state(state, other, 4, 4)  # it is over
    with pytest.raises(CheckpointError, match=r"has 4 steps, and now it has 5.*") as caught:
        check_state(state, opened(data, steps=5), 5, 2)
    assert "Set warmup.steps=4." in str(caught.value)
    with pytest.raises(CheckpointError, match="now it has 0"):
        check_state(state, None, 0, 6)


async def test_the_held_out_loss_is_the_mean_over_trained_tokens(data):
    warmup = opened(data, steps=30, held_out=3)
    rows = warmup.rows.held_out
    places = np.concatenate([np.flatnonzero(row.trained) for row in rows])
    found = await warmup.held_out_loss(30, Scorer())
    assert found == {"warmup/held_out_loss": pytest.approx(places.mean())}
    measured = [step for step in range(31) if await warmup.held_out_loss(step, Scorer())]
    assert measured == list(range(0, 31, 3))
    assert await opened(data, held_out=0).held_out_loss(0, Scorer()) == {}


def test_a_batch_has_its_rows_as_groups_of_their_own_with_unit_advantages(data):
    warmup = opened(data, rows_per_step=4, held_out=0)
    batch = warmup.batch(2)
    assert (batch.sequences, batch.version) == (4, 2)
    assert batch.group.tolist() == [0, 1, 2, 3] and batch.columns["sft"].values.all()
    assert np.array_equal(batch.advantages != 0, batch.trained) and set(batch.advantages.tolist()) == {0.0, 1.0}
    assert not batch.sampled.any() and not batch.has_logprobs.any()
    assert max(map(warmup.rate, range(1, warmup.rows.steps + 1))) == 0.5


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ("--trainer", "es", "--bridge", "checkpoint"),
            "[warmup] needs a trainer that takes supervised steps, and 'es' does not",
        ),
        (("--set", "trainer.kl.coefficient=0.1"), "trainer.kl keeps the policy near the model that the run began with"),
        (("--set", "api.url=http://127.0.0.1:1"), "[warmup] is for rollouts in this process"),
        (("--set", "warmup.steps=3", "--set", "warmup.epochs=2"), "warmup.epochs has no effect with warmup.steps"),
        (("--set", "warmup.max_tokens=100000"), "warmup.max_tokens = 100000 is more than the model"),
        (("--set", "warmup.data=/not/there.jsonl"), "/not/there.jsonl does not exist"),
    ],
)
def test_what_cannot_be_warmed_up_is_refused_before_anything_starts(more, says, data, tmp_path, capfd):
    given = () if any("warmup.data" in one for one in more) else ("--set", f"warmup.data={data}")
    assert run_app(["run", "--env", "gsm8k", "--dry-run", "--dir", str(tmp_path / "run"), *given, *more]) != 0
    said = re.sub(r"\s+", " ", capfd.readouterr().err)
    assert says in said
