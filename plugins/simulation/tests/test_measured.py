"""Figures computed from records whose times come from known figures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import ConfigError, RunDirectoryError
from atropos_simulation.measured import from_run

DECODE_S, SEQUENCE_S, REST_S = 0.02, 0.003, 0.4
GROUPS, SIZE = 4, 3


def write_run(
    directory: Path,
    steps: int = 8,
    *,
    decode_s: float = DECODE_S,
    sequence_s: float = SEQUENCE_S,
    longest: int = 0,
    **training: Any,
) -> Path:
    """Write a run of one engine whose rollouts took the time that these figures give, decode step by decode step."""
    (directory / "rollouts").mkdir(parents=True)
    shape = {"groups_per_step": GROUPS, "group_size": SIZE, "max_staleness": 0, "refill_rounds": 0} | training
    lines = "\n".join(f"{name} = {value}" for name, value in shape.items())
    (directory / "config.toml").write_text(f'[training]\n{lines}\n[engine]\nuse = "hf"\nmax_batch = 64\n')
    source, rows = random.Random(0), []
    for step in range(1, steps + 1):
        groups = [[source.randint(3, 40) for _ in range(SIZE)] for _ in range(GROUPS)]
        groups = [[*group[1:], longest] if longest else group for group in groups]
        every = [length for group in groups for length in group]
        at = [0.0]
        for token in range(1, max(every) + 1):
            at.append(at[-1] + decode_s + sequence_s * sum(length >= token for length in every))
        ended = [at[max(group)] + REST_S for group in groups]
        rows.append(
            {
                "step": step, "time/rollouts_s": max(ended), "time/queue_mean_s": max(ended) - float(np.mean(ended)),
                "time/engine/sample_s": at[-1],
                "time/trainer_s": 0.5 + 0.01 * sum(every) * 0.75, "tokens/sampled": sum(every), "groups/trained": 3.0, "groups/flat": 1.0,
                "bridge/publish_s": 0.05,
            }
        )  # fmt: skip
        episodes = [
            {
                "draw": number,
                "task": "t",
                "environment": "e",
                "tokens": length,
                "messages": [{"role": "assistant", "content": ""}],
            }
            for number, group in enumerate(groups)
            for length in group
        ]
        (directory / f"rollouts/step-{step:06d}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in episodes))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds = {
        "start-up": 9.0,
        "waiting": 30.0,
        "trainer": 4.0,
        "publishing": 0.4,
        "packing": 1.0,
        "sink.jsonl": 0.6,
        "other": 0.8,
    }
    (directory / "summary.json").write_text(json.dumps({"steps": steps, "seconds": seconds}))
    return directory


def test_the_rates_of_an_engine_are_those_that_its_steps_took(tmp_path):
    known = from_run(write_run(tmp_path / "run"))
    assert known.values["engine.single_tokens_per_s"] == pytest.approx(1 / (DECODE_S + SEQUENCE_S))
    assert known.values["engine.peak_tokens_per_s"] == pytest.approx(1 / SEQUENCE_S)
    assert known.values["rollout.environment_s"] == pytest.approx(REST_S)


def test_what_passes_without_any_sequence_in_an_engine_is_not_taken_for_decoding(tmp_path):
    """All groups end with the longest reply. Only the engine's time in use separates decode steps from the rest."""
    run = write_run(tmp_path / "run", longest=40)
    assert from_run(run).values["rollout.environment_s"] == pytest.approx(REST_S)
    assert from_run(run).values["engine.single_tokens_per_s"] == pytest.approx(1 / (DECODE_S + SEQUENCE_S))


def test_every_other_figure_is_what_the_records_say_and_names_where(tmp_path):
    known = from_run(write_run(tmp_path / "run"))
    assert known.values["loop.group_s"] == pytest.approx(1.6 / (8 * GROUPS))
    assert known.values["loop.step_s"] == pytest.approx(0.1)
    assert known.values["bridge.publish_s"] == pytest.approx(0.05)
    assert known.values["run.kept_share"] == pytest.approx(0.75)
    assert known.values["engine.max_sequences"] == 64
    assert len(known.values["rollout.tokens"]) == 6 * GROUPS * SIZE, "of the steps after the first two"
    assert known.origins.keys() == known.values.keys()
    assert all(str(tmp_path) in said for said in known.origins.values())


def test_an_update_has_a_fixed_part_where_its_tokens_vary_enough_to_tell(tmp_path):
    known = from_run(write_run(tmp_path / "run", steps=40))
    per_token = known.values["trainer.token_s"]
    fixed = known.values["trainer.step_s"]
    mean = np.mean(known.values["rollout.tokens"]) * GROUPS * SIZE * 0.75
    assert fixed + per_token * mean == pytest.approx(0.5 + 0.01 * mean, rel=0.02)
    assert fixed == 0 or per_token == pytest.approx(0.01)


@pytest.mark.parametrize("training", [{"max_staleness": 1}, {"refill_rounds": 2}])
def test_a_run_that_does_not_tell_an_engines_rates_says_why(tmp_path, training):
    known = from_run(write_run(tmp_path / "run", **training))
    assert "engine.peak_tokens_per_s" not in known.values
    with pytest.raises(ConfigError, match=r"(?s)engine.peak_tokens_per_s: .*(max_staleness = 1|refilled)"):
        known.figures()


def test_a_rate_that_no_time_went_with_is_not_known(tmp_path):
    known = from_run(write_run(tmp_path / "run", sequence_s=0.0))
    assert known.values["engine.single_tokens_per_s"] == pytest.approx(1 / DECODE_S)
    assert "engine.peak_tokens_per_s" not in known.values


def test_a_run_that_has_not_ended_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match="is not a finished run"):
        from_run(run)


def test_a_step_whose_rollouts_were_lost_is_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    sorted((run / "rollouts").glob("step-*.jsonl"))[-1].write_text("")
    assert from_run(run).values["rollout.environment_s"] == pytest.approx(REST_S)
