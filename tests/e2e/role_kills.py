"""`kill -9` of `atropos serve`, `train` and `env` themselves, and ledgers that none of them keeps: the environment writes
down each rollout as it ends, a curriculum how each draw was settled. The test kills a handful of times, the soak a hundred.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import TOY, in_front
from tests.e2e.ledger import check_epochs, plant_ledger, settled
from tests.e2e.roles import Scene, scene

KINDS = ("server", "trainer", "worker")
STEPS_A_KILL = 2
GROUPS, TASKS = 8, 16
TRAINED = ("--model", "toy", "--set", f"training.groups_per_step={GROUPS}",
           "--set", "training.group_size=4", "--set", "engine.latency_s=0.05", "--set", "checkpoint.every=2",
           "--set", "curriculum.use=ledger", "--set", "health.action=off")  # fmt: skip
ROLLOUT = """
    async def rollout(self, task, policy, *, seed):
        import json, os
        episode = await super().rollout(task, policy, seed=seed)
        line = json.dumps([task.id, episode.messages[-1]["content"]]) + "\\n"
        log = os.open(Path(__file__).with_name("played.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(log, line.encode())  # at once, or not at all
        os.close(log)
        return episode
"""


@dataclass
class Found:
    """What the ledgers say of the run."""

    kills: dict[str, int]
    seconds: float
    steps: int
    rollouts: int  # that ended, whether they were trained or died with a worker
    trained: int  # rollouts in the records of the steps
    draws_wrong: list[int]  # in the records not exactly once, or at all where they were settled as stale
    stale: int  # draws that were, which only a trainer's end may do: see `missed`
    unplayed: int  # trained, and in no environment's ledger, or more often than there

    def missed(self) -> list[str]:
        """Promises that were broken."""
        found = [f"draws not trained exactly once: {self.draws_wrong[:5]}"] * bool(self.draws_wrong)
        # a trainer that is resumed some steps back may give out draws of a later step while it trains what the server still has: what is
        # sampled then is too old once it gets there
        if self.stale > GROUPS * self.kills.get("trainer", 0):
            found.append(f"{self.stale} draws were stale, of {self.kills.get('trainer', 0)} ends of a trainer")
        return found + [f"{self.unplayed} rollouts were trained that nobody ran"] * bool(self.unplayed)


def killed_roles(
    folder: Path, kinds: Sequence[str], *, tell: Callable[[str], None] = lambda message: None, workers: int = 2
) -> Found:
    """One kill of each of these kinds, in this order, some steps apart at random moments. Raises AssertionError where
    someone does not get on afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sevens.py").write_text(TOY + ROLLOUT)
    steps, since = STEPS_A_KILL * len(kinds) + 4, time.monotonic()
    with _python_path(plant_ledger(folder)), scene(folder, "--silent-s", "4") as place:
        trainer = place.train(*TRAINED, "--steps", str(steps))
        working = {number: place.worker(number, "./sevens.py:Sevens") for number in range(1, workers + 1)}
        for number, kind in enumerate(kinds):
            place.wait_for_step(STEPS_A_KILL * number + 2, trainer)
            time.sleep(random.uniform(0, 0.5))
            if kind == "server":
                place.server.kill()
                place.server = place.serve("--port", place.url.rpartition(":")[2])
            elif kind == "trainer":
                trainer.kill()
                trainer = place.start("resume", "resume", "run")
            else:
                one = random.choice(list(working))
                working[one].kill()
                working[one] = place.worker(one, "./sevens.py:Sevens")
            tell(f"{number + 1} of {len(kinds)}: {kind}, at step {len(place.metrics)} of {steps}")
        assert trainer.ends(240) == 0, place.all_text
        return _found(place, steps, Counter(kinds), time.monotonic() - since)


def _found(place: Scene, steps: int, kinds: Counter[str], seconds: float) -> Found:
    run = place.folder / "run"
    assert [line["step"] for line in place.metrics] == list(range(1, steps + 1)), place.all_text
    entries = settled(run, steps)
    check_epochs(entries, TASKS)
    stale = {draw for draw, _, outcome in entries if outcome == "stale"}
    sampled = Counter(tuple(row) for row in _rows(place.folder / "played.jsonl"))
    drawn: Counter[int] = Counter()
    trained: Counter[tuple[str, str]] = Counter()
    for path in run.glob("rollouts/step-*.jsonl"):
        rows = [row for row in _rows(path) if "failed" not in row]
        drawn.update({row["draw"] for row in rows})
        trained.update((row["task"], row["messages"][-1]["content"]) for row in rows)
    wrong = [draw for draw in range(max(drawn) + 1) if drawn[draw] != int(draw not in stale)]
    unplayed = (trained - sampled).total()
    return Found(dict(kinds), seconds, steps, sampled.total(), trained.total(), wrong, len(stale), unplayed)


def _rows(path: Path) -> Iterator[dict[str, object]]:
    return map(json.loads, path.read_text().splitlines())


@contextmanager
def _python_path(first: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", in_front(first))
        yield
