"""Kill the processes of two environments at random during a run, and compare what was trained with what they wrote down."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import RemoteError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_records.rollout_records import RolloutRecords
from plugins.env_atroposlib.tests.hosted import FILES, N, group_of, within_environment
from tests.e2e.runs import RunningRun
from tests.waiting import has_ended
from tests.waiting import until as until_holds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # each start of an environment is a process, on a machine that others load

KILLS, DEADLINE_S = 6, 240.0
NAMES = ("first", "second")
IN_PROGRESS = 20  # draws at most when the run is stopped: groups_per_step times one more than max_staleness
SINCE = 30  # groups of each behind the last kill, so that none of those in progress is older than it


def run_file(folder: Path) -> Path:
    tables = [
        f'[environment.{name}]\nuse = "atroposlib:{FILES}/written_down.py"\nconfig.ledger = "{folder}/{name}.jsonl"\n'
        for name in NAMES
    ]
    path = folder / "run.toml"
    path.write_text(
        'model = "toy"\nengine.use = "toy"\ntrainer.use = "toy"\nbridge.use = "local"\nevaluation.problems = 0\n'
        "training = { steps = 100000, groups_per_step = 4, group_size = 4, max_staleness = 4 }\nsampling.max_tokens = 4\n"
        "sink.jsonl.rollouts_every = 1\n" + "".join(tables)
    )
    return path


def given(folder: Path, name: str) -> list[dict]:
    path = folder / f"{name}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def until(what: str, holds: Callable[[], bool], run: RunningRun) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert run.process.poll() is None, f"the run ended:\n{run.text}"
        assert time.monotonic() < end, f"no {what} within {DEADLINE_S} s:\n{run.text}"
        time.sleep(0.02)


def test_killed_six_times_at_random_nothing_is_lost_or_trained_twice(tmp_path: Path) -> None:
    chance = random.Random(19)
    run = RunningRun(tmp_path / "run", "run", str(run_file(tmp_path)), "--dir", str(tmp_path / "run"))
    try:
        for number in range(KILLS):
            before = {name: len(given(tmp_path, name)) for name in NAMES}
            until("group of each", lambda: all(len(given(tmp_path, n)) > before[n] + 1 for n in NAMES), run)  # noqa: B023
            time.sleep(chance.uniform(0, 0.4))
            role = f"environment-{NAMES[number % 2]}"
            process = next(child for child in run.supervisor.children(recursive=True) if child.cmdline()[-1:] == [role])
            process.send_signal(signal.SIGKILL)
        before = {name: len(given(tmp_path, name)) for name in NAMES}
        until(
            "groups behind the last kill", lambda: all(len(given(tmp_path, n)) > before[n] + SINCE for n in NAMES), run
        )
        run.process.send_signal(signal.SIGINT)
        run.process.wait(DEADLINE_S)
    finally:
        run.process.kill()
        run.process.wait()
    assert run.text.count("has ended, and is started again") == KILLS

    records = RolloutRecords(tmp_path / "run")
    trained: Counter[tuple[str, int]] = Counter()
    steps_of_draw: dict[int, set[int]] = {}
    failed: dict[str, list[str]] = {name: [] for name in NAMES}
    decode = ChatTokenizer(TOY_MODEL).decode
    rows = {name: [(one["item"], row) for one in given(tmp_path, name) for row in one["rows"]] for name in NAMES}
    for step in map(records.step, records.steps()):
        groups: set[tuple[str, int]] = set()
        for episode in step.episodes:
            steps_of_draw.setdefault(episode.draw, set()).add(step.step)
            if episode.failed:
                failed[episode.environment].append(episode.failed)
                continue
            assert episode.outcome == "trained", episode
            [sequence] = step.sequences(episode)
            tokens = sequence.ids.tolist()
            match = re.match(r"item (\d+):", decode(sequence.ids))
            assert match is not None
            assert (int(match[1]), tokens) in rows[episode.environment], "what was trained is what it gave"
            groups.add((episode.environment, int(match[1])))
        trained.update(groups)
    assert trained.most_common(1)[0][1] == 1, "no item is trained twice"
    assert all(len(steps) == 1 for steps in steps_of_draw.values()), "and no draw"
    newest = max(steps_of_draw)
    missing = set(range(newest)) - steps_of_draw.keys()
    assert len(missing) <= IN_PROGRESS, "each draw was trained, or failed by name"
    assert all(draw > newest - 2 * SINCE for draw in missing), f"{min(missing)} was drawn before the last kill"
    for name in NAMES:
        assert failed[name], "kills met groups in progress"
        assert all(f"environment-{name} " in why and "SIGKILL" in why for why in failed[name]), failed[name]


def test_killed_as_it_is_started_again_it_fails_that_group_alone(tmp_path: Path) -> None:
    def host(but: int = 0) -> psutil.Process | None:
        found = [
            one for one in psutil.Process().children() if one.pid != but and one.cmdline()[-1:] == ["environment-it"]
        ]
        return found[0] if found else None

    async def use(environment: Any, policy: Any) -> list[Any]:
        first = host()
        assert first is not None
        first.send_signal(signal.SIGKILL)
        await until_holds(lambda: has_ended(first.pid), "the end of the first")
        await asyncio.sleep(0.05)  # a turn of the loop, which hears of it
        going = asyncio.ensure_future(group_of(environment, policy))
        while (second := host(first.pid)) is None:
            await asyncio.sleep(0.01)
        second.send_signal(signal.SIGSTOP)  # it is starting, however quick the machine is
        await asyncio.sleep(0.5)
        second.send_signal(signal.SIGKILL)
        with pytest.raises(RemoteError, match="SIGKILL"):
            await going
        return await group_of(environment, policy)

    assert len(within_environment(tmp_path, use, "many_turns.py:Managed")) == N
