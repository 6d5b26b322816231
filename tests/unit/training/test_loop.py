"""The loop's own promises, in virtual time: one version an evaluation, stale groups replaced, a stop that saves no half step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import Interrupted, Misaligned, NoProgress, NoSuchVersion
from atropos_core.interfaces import Transform
from atropos_core.storage.checkpoint import seconds_between
from atropos_core.training.alignment_check import AlignmentCheck
from atropos_core.training.loop import unusual_s
from atropos_core.training.metrics import staleness
from atropos_core.types import UNKNOWN_VERSION, Completion, ScoredGroup
from tests.unit import virtual_time
from tests.unit.parts import group
from tests.unit.schedules import Disk, Life, Numbers, Weather, check


def weather(seed: int = 0, **settings: Any) -> Weather:
    """Plain, but for what is printed."""
    made = Weather(seed)
    plain = {
        "deterministic": False, "staleness": 0, "publish_every": 1, "steps": 6, "groups_per_step": 2, "group_size": 2,
        "refill_rounds": 0, "tasks": 8, "hub_groups": 100, "checkpoint_every": 0, "evaluate_every": 0,
        "rollout_s": 1.0, "engine_s": 0.1, "train_s": 1.0, "may_hang": False,
    }  # fmt: skip
    for name, value in (plain | settings).items():
        setattr(made, name, value)
    return made


def life(of: Weather, folder: Path) -> Life:
    return Life(of, Disk(of), folder)


def test_an_evaluation_is_of_the_version_that_is_reported_while_training_rollouts_go_on(tmp_path):
    async def main() -> tuple[Life, list[tuple[str, int]]]:
        one = life(weather(staleness=2, evaluate_every=1), tmp_path)
        tasks, drawn = one.source._runner.environments["numbers"], []
        rollout = tasks.rollout

        async def watched(task: Any, policy: Any, *, seed: int) -> Any:
            episode = await rollout(task, policy, seed=seed)
            drawn.extend((task.id, int(version)) for version in episode.rollouts[0].policy_version[1:])
            return episode

        tasks.rollout = watched  # type: ignore[method-assign]
        await one.run(None)
        return one, drawn

    one, drawn = virtual_time.run(main())
    evaluated = [step["eval/version"] for step in one.record.steps[1:]]
    assert evaluated == [step["policy/version"] for step in one.record.steps[1:]]
    assert evaluated[-1] >= 4, "or this shows little"
    ended_meanwhile = 0
    for version in (0, *evaluated):
        at = [place for place, drawing in enumerate(drawn) if drawing[0].startswith("test") and drawing[1] == version]
        assert at, "each version was evaluated"
        ended_meanwhile += sum(task.startswith("train") for task, _ in drawn[at[0] : at[-1]])
    assert ended_meanwhile, "or this shows nothing"
    settled = [number for number, _, _ in one.curriculum.settled]
    assert (
        len(set(settled))
        == len(settled)
        == sum(int(s[f"groups/{cause}"]) for s in one.record.steps[1:] for cause in ("trained", "flat", "stale"))
    )


class SkipsTheSecondStep(Transform):
    calls = 0

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        self.calls += 1
        return [] if self.calls == 2 else [group.with_advantages(np.ones(len(group.episodes))) for group in groups]


def test_the_last_evaluation_is_of_the_last_policy_where_a_skipped_step_left_the_engines_behind(tmp_path):
    """Five steps and one of them skipped end at version 4, of which a bridge for every third has published 1 and 3."""

    async def main() -> Life:
        one = life(weather(staleness=2, publish_every=3, steps=5), tmp_path)
        one.loop._parts.transforms = {"skips": SkipsTheSecondStep()}
        await one.run(None)
        return one

    steps = virtual_time.run(main()).record.steps
    assert [step.get("step/skipped", 0) for step in steps[1:]] == [0, 1, 0, 0, 0]
    assert steps[-1]["policy/version"] == 4
    assert steps[-1]["eval/version"] == 4


def test_an_evaluation_that_saw_two_versions_is_an_error_with_a_name(tmp_path):
    async def main() -> None:
        one = life(weather(), tmp_path)
        sample = one.engine.sample

        async def slips(*arguments: Any) -> list[Completion]:
            completions = await sample(*arguments)
            one.engine._version += 1
            return completions

        one.engine.sample = slips  # type: ignore[method-assign]
        await one.run(None)

    with pytest.raises(Misaligned, match="an evaluation of version 0 was sampled from version 1"):
        virtual_time.run(main())


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (
            "alignment/max_abs_logprob_diff",
            r"weights that the trainer published, or its logprobs were changed(.|\n)*then at the environment",
        ),
        ("alignment/impossible_nats", "has logprobs that its tokens were not sampled with"),
        ("alignment/truncated_excess_nats", "was not sampled from the weights that the trainer published"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_an_alignment_that_is_beyond_its_bound_or_no_number_ends_the_run(metric, says, value, tmp_path):
    async def main() -> None:
        one = life(weather(), tmp_path)
        step = one.trainer.step

        async def tells(*arguments: Any) -> dict[str, float]:
            return {**await step(*arguments), metric: value}

        one.trainer.step = tells  # type: ignore[method-assign]
        await one.run(None)

    with pytest.raises(Misaligned, match=says):
        virtual_time.run(main())


@pytest.mark.parametrize(
    ("difference", "rounding", "given", "ends"),
    [
        (1.84e-4, 2.4e-4, None, False),  # a float32 model that rounds so
        (9e-4, 2.4e-4, None, False),
        (2e-3, 2.4e-4, None, True),  # more than its rounding explains
        (1.84e-4, 3e-5, None, True),
        (1.84e-4, None, None, True),  # a trainer that cannot tell
        (1.84e-4, float("nan"), None, True),
        (0.6, 10.0, None, True),  # a model that computes nothing
        (1.84e-4, 2.4e-4, 1e-4, True),  # the user's own bound holds
    ],
)
@pytest.mark.parametrize("metric", ["alignment/max_abs_logprob_diff", "alignment/truncated_excess_nats"])
def test_a_difference_that_the_models_own_rounding_explains_ends_no_run(
    metric, difference, rounding, given, ends, tmp_path, capsys
):
    measured = []

    async def main() -> None:
        one = life(weather(), tmp_path)
        one.loop._alignment = AlignmentCheck(given, "float32", one.trainer)  # numbers have no type of their own
        step = one.trainer.step

        async def tells(*arguments: Any) -> dict[str, float]:
            return {**await step(*arguments), metric: difference, "alignment/fresh_tokens": 8.0}

        async def rounds(sequences: Any, temperature: float = 1.0) -> float | None:
            measured.append(len(sequences))
            return rounding

        one.trainer.step, one.trainer.rounding = tells, rounds  # type: ignore[method-assign]
        await one.run(None)

    if ends:
        with pytest.raises(Misaligned):
            virtual_time.run(main())
    else:
        virtual_time.run(main())
        assert measured == measured[:1], "once: the bound is known from then on"
        assert "from here on, engine and trainer may differ by 0.00096 nats" in "".join(capsys.readouterr())


@pytest.mark.parametrize("allowed", [0, 1])
def test_before_the_trainer_of_an_on_policy_run_computes_engines_may_give_memory_back(tmp_path, allowed):
    async def main() -> list[str]:
        one = life(weather(staleness=allowed), tmp_path)
        engine, trainer = one.loop._parts.engine, one.loop._parts.trainer
        seen: list[str] = []
        step, logprobs, sample = trainer.step, trainer.logprobs, engine.sample

        async def released() -> None:
            seen.append("released")

        async def sampled(*arguments: Any, **options: Any) -> Any:
            seen.append("sampled")
            return await sample(*arguments, **options)

        async def scored(*arguments: Any) -> Any:
            seen.append("scored")
            return await logprobs(*arguments)

        async def stepped(*arguments: Any) -> Any:
            seen.append("update")
            return await step(*arguments)

        engine.release_cache, engine.sample = released, sampled  # type: ignore[method-assign]
        trainer.step, trainer.logprobs = stepped, scored  # type: ignore[method-assign]
        await one.run(None)
        return seen

    seen = virtual_time.run(main())
    assert seen.count("update") > 2 and seen.count("scored") > 2 and "sampled" in seen
    assert bool(allowed) == ("released" not in seen)
    computes = [at for at, what in enumerate(seen) if what in ("update", "scored")]
    rested = [next(what for what in reversed(seen[:at]) if what in ("released", "sampled")) for at in computes]
    assert allowed or set(rested) == {"released"}, "nothing was sampled since"


def test_groups_too_old_are_dropped_counted_and_replaced_in_the_same_step(tmp_path):
    """A rollout may take longer than two updates: then what was begun for later is too old by then."""

    async def main() -> Life:
        one = life(weather(staleness=1, rollout_s=5.0, steps=12), tmp_path)
        await one.run(None)
        return one

    one = virtual_time.run(main())
    stale = [step["groups/stale"] for step in one.record.steps[1:]]
    assert sum(stale) > 0
    assert all(
        step["groups/trained"] + step["groups/flat"] + step["groups/dropped"] == 2 for step in one.record.steps[1:]
    )
    assert max(step.get("staleness/max", 0) for step in one.record.steps) == 1
    assert sum(outcome == "stale" for _, _, outcome in one.curriculum.settled) == sum(stale)
    for record in one.record.records[1:]:
        found = Counter(settled.outcome for settled in record.settled)
        assert found == {
            name: n for name in ("trained", "flat", "stale") if (n := record.metrics.get(f"groups/{name}"))
        }
        for settled in record.settled:
            expected = {"trained": "", "stale": "training.max_staleness", "flat": "transform.flat"}
            assert settled.dropped_by == expected[settled.outcome]
        batch = [settled for settled in record.settled if settled.outcome == "trained"]
        lengths = [sum(len(r.tokens) for e in settled.group.episodes for r in e.rollouts) for settled in batch]
        assert sorted(settled.batch_start for settled in batch) == np.cumsum([0, *lengths])[:-1].tolist()
        assert [settled.group for settled in record.settled if settled.outcome != "stale"] == list(record.groups)


def test_engines_that_never_move_on_end_the_run_by_name_and_soon(tmp_path):
    async def main() -> float:
        one = life(weather(staleness=1), tmp_path)

        async def stays(version: int) -> None:
            one.engine._may_run.set()

        one.engine.resume = stays  # type: ignore[method-assign]
        with pytest.raises(NoProgress, match="all too old to train: sampled from version 0, and the trainer is at 2"):
            await one.run(None)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) < 600, "not by the deadline of a lease"


def test_a_stop_in_the_middle_of_a_step_saves_the_state_before_it(tmp_path):
    """A refill has begun: its first groups have been seen by a running statistic, and will be again."""

    async def main(*, stops: bool) -> Life:
        of = weather(refill_rounds=3, steps=3)
        disk = Disk(of)
        one = Life(of, disk, tmp_path)
        if stops:
            running = asyncio.ensure_future(one.run(None))
            while one.loop.progress.step < 1:
                await asyncio.sleep(0.01)
            before = len(one.seen.draws)
            while len(one.seen.draws) == before:
                await asyncio.sleep(0.01)
            one.stop.set()
            with pytest.raises(Interrupted):
                await running
            assert disk.saved is not None
            assert disk.saved.step == 1
            assert len(disk.saved.state["parts"]["transform.seen"]["draws"]) == before < len(one.seen.draws)
            one = Life(of, disk, tmp_path)
        await one.run(disk.saved)
        check(of, one)
        return one

    whole, resumed = virtual_time.run(main(stops=False)), virtual_time.run(main(stops=True))
    assert sorted(resumed.seen.draws) == sorted(whole.seen.draws)


def test_a_group_of_versions_that_never_were_is_refused_and_another_is_run_in_its_place(tmp_path, capsys):
    """An environment that writes versions of its own, in the run's own process."""

    class Claims(Numbers):
        async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
            episode = await super().rollout(task, policy, seed=seed)
            if task.id == "train-3":
                episode.rollouts[0].policy_version[1:] = 2**31 - 1
            return episode

    async def main() -> Life:
        of = weather(steps=8)
        one = life(of, tmp_path)
        one.source._runner.environments["numbers"] = Claims(of)
        await one.run(None)
        return one

    one = virtual_time.run(main())
    steps = one.record.steps[1:]
    refused = sum(step.get("groups/no_such_version", 0) for step in steps)
    assert refused >= 1
    assert all(step["groups/trained"] + step["groups/flat"] + step["groups/dropped"] == 2 for step in steps)
    assert [outcome for _, index, outcome in one.curriculum.settled if index == 3] == ["dropped"] * int(refused)
    recorded = [settled for record in one.record.records for settled in record.settled if settled.group.draw.index == 3]
    assert [(settled.outcome, settled.dropped_by) for settled in recorded] == [("dropped", "no_such_version")] * int(
        refused
    )
    assert "claim to be sampled from policy version 2147483647" in " ".join(capsys.readouterr().err.split())


def test_groups_that_all_claim_versions_that_never_were_end_the_run_by_name(tmp_path):
    class Claims(Numbers):
        async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
            episode = await super().rollout(task, policy, seed=seed)
            episode.rollouts[0].policy_version[1:] += task.id.startswith("train")
            return episode

    async def main() -> None:
        one = life(weather(), tmp_path)
        one.source._runner.environments["numbers"] = Claims(weather())
        await one.run(None)

    with pytest.raises(NoSuchVersion, match="version 1, and the newest that there can be is 0"):
        virtual_time.run(main())


def test_staleness_counts_trained_tokens_of_known_versions():
    groups = [group(1, version=3), group(2, version=1), group(3, version=UNKNOWN_VERSION)]
    assert staleness(groups, 3) == {"staleness/max": 2.0, "staleness/mean": 1.0}
    assert staleness(groups[2:], 3) == {}
    assert staleness([], 3) == {}
    assert np.isfinite(staleness(groups, 3)["staleness/mean"])


def test_without_an_interval_a_checkpoint_follows_the_first_step_and_then_when_it_is_due(tmp_path):
    ended: dict[int, float] = {}
    saved: list[tuple[int, float, float]] = []

    async def main() -> None:
        one = life(weather(checkpoint_every=None, steps=60, rollout_s=0.5, train_s=0.5), tmp_path)
        save, record, now = one.loop.checkpoints.save, one.record.step, asyncio.get_running_loop().time

        async def noted(step: int, *rest: Any) -> Any:
            began = now()
            made = await save(step, *rest)
            saved.append((step, began, now()))
            return made

        async def timed(step: int, *rest: Any) -> None:
            ended[step] = now()
            await record(step, *rest)

        one.loop.checkpoints.save = noted  # type: ignore[method-assign]
        one.record.step = timed  # type: ignore[method-assign]
        await one.run(None)

    virtual_time.run(main())
    assert saved[0][0] == 1 and saved[-1][0] == 60 and len(saved) > 4
    for (step, began, done), (following, begins, _) in pairwise(saved):
        wait_s = seconds_between(done - began)
        assert begins - done >= wait_s or following == 60
        assert all(ended[one] - done < wait_s for one in range(step + 1, following)), "one was due, and was not made"


def test_only_the_first_step_of_a_process_or_an_unusually_long_one_is_shown_as_waited_for():
    assert unusual_s(None) is None  # as soon as any wait
    assert unusual_s(2.0) == 60.0
    assert unusual_s(40.0) == 200.0


@pytest.mark.parametrize("measured", [False, True])
def test_step_metrics_is_called_once_a_step_and_only_for_engines_that_have_some(tmp_path, measured):
    async def main() -> tuple[Life, int]:
        one = life(weather(evaluate_every=2), tmp_path)
        parts, asked = one.loop._parts, 0

        async def counted() -> dict[str, float]:
            nonlocal asked
            asked += 1
            return {"drafted_tokens": float(asked)}

        parts.engine.step_metrics = counted  # type: ignore[method-assign]
        parts.measured = {"engine/replica/second": parts.engine} if measured else {}
        await one.run(None)
        return one, asked

    one, asked = virtual_time.run(main())
    found = [step.get("engine/replica/second/drafted_tokens") for step in one.record.steps]
    steps = len(one.record.steps)
    assert asked == (steps if measured else 0)
    assert found == (list(range(1, steps + 1)) if measured else [None] * steps)
