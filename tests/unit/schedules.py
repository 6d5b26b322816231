"""One run of the real loop, source, producer, hub, session, runner and curriculum in virtual time, with parts that take
as long, fail and die as a seed says. What must hold of every run is checked here; the soak runs many more of them.

Only what costs time is made up: an engine that samples numbers, a trainer whose weights are the list of what it was
trained on, a disk in memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.builtin.local import LocalBridge
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.builtin.transforms import DropFlat, GroupAdvantage
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import Interrupted, NoProgress, ProcessDied
from atropos_core.interfaces import (
    Engine,
    Environment,
    ModelInfo,
    Outcome,
    Sink,
    StepRecord,
    Trainer,
    Transform,
    Writing,
)
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.rollouts.source import LocalSource
from atropos_core.seeds import derive
from atropos_core.storage.checkpoint import Checkpoint, Checkpoints
from atropos_core.training.loop import Loop
from atropos_core.training.parts import Parts
from atropos_core.types import (
    Batch,
    Completion,
    Draw,
    Episode,
    Floats,
    Metrics,
    Rollout,
    Sampling,
    ScoredGroup,
    Task,
    Tokens,
    tokens,
)
from tests.unit import virtual_time
from tests.unit.parts import TOKENIZER

INFO = ModelInfo("Simulated", 0, TOKENIZER.vocabulary, "float32", "cpu", TOKENIZER.fingerprint)
DEADLINE_S = 300.0  # of a rollout, which takes 240 s where every wait is the longest
GROUP_BYTES = 6000  # at most, with what the hub allows for Python


class Weather:
    """Everything that chance decides: `luck` what is run and how it ends, `delays` only how long things take."""

    def __init__(self, seed: int, *, calm: bool = False) -> None:
        luck = random.Random(seed)
        self.seed = seed
        self.delays = random.Random(-1 - seed if calm else seed)
        self.deterministic = luck.random() < 0.25
        self.staleness = 0 if self.deterministic else luck.choice([0, 1, 1, 2, 3])
        self.publish_every = luck.randint(1, 1 + self.staleness)
        self.steps = luck.randint(2, 8)
        self.groups_per_step = luck.randint(1, 4)
        self.group_size = luck.randint(1, 3)
        self.refill_rounds = luck.randint(0, 2)
        self.tasks = luck.randint(2, 9)
        self.hub_groups = luck.choice([self.groups_per_step + 1, 100])
        self.checkpoint_every = luck.choice([0, 1, 2, 3])
        self.evaluate_every = luck.choice([0, 1, 3])
        self.rollout_s, self.engine_s, self.train_s = (luck.choice([0.01, 0.1, 1.0]) for _ in range(3))
        self.may_hang = not self.deterministic and luck.random() < 0.5
        self.crashes = 0 if calm else luck.choice([0, 1, 2, 4])

    def config(self) -> RunConfig:
        return RunConfig.model_validate(
            {
                "seed": self.seed,
                "deterministic": self.deterministic,
                "environment": {"numbers": {"use": "numbers"}},
                "training": {
                    "steps": self.steps,
                    "groups_per_step": self.groups_per_step,
                    "group_size": self.group_size,
                    "max_staleness": self.staleness,
                    "refill_rounds": self.refill_rounds,
                    "rollout_deadline_s": DEADLINE_S,
                },
                "evaluation": {"problems": 2, "every": self.evaluate_every},
                "checkpoint": {"every": self.checkpoint_every},
                "hub": {"size_mb": self.hub_groups * GROUP_BYTES / 1e6},
            }
        )

    async def passes(self, seconds: float) -> None:
        """About so long; now and then no time at all, or twenty times as long."""
        await asyncio.sleep(seconds * self.delays.choice([0.0, 1.0, 1.0, 1.0, 20 * self.delays.random()]))


class Numbers(Environment):
    """Rollouts of one to three turns. What a rollout samples, scores and whether it fails follow from its seed."""

    def __init__(self, weather: Weather) -> None:
        self._weather = weather
        self._may_hang = (
            weather.may_hang
        )  # once: a lease waits for two rollouts that end by their deadline, not for three

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{n}", (), data={"n": n}) for n in range(self._weather.tasks)]

    async def rollout(self, task: Task, policy: Any, *, seed: int) -> Episode:
        luck = random.Random(seed)
        spoken: list[Completion] = []
        for turn in range(luck.randint(1, 3)):
            await self._weather.passes(self._weather.rollout_s)
            if self._may_hang and task.id.startswith("train") and self._weather.delays.random() < 0.05:
                self._may_hang = False
                await asyncio.sleep(DEADLINE_S)
            spoken += await policy.sample(tokens([task.data["n"], turn]), seed=derive(seed, turn))
        if task.id.startswith("train") and luck.random() < 0.08:
            raise ValueError("a bad day")
        ids = np.concatenate([np.zeros(1, np.int32), *(one.tokens for one in spoken)])
        chosen = np.arange(len(ids)) > 0
        versions = np.concatenate([np.zeros(1, np.int32), *(one.policy_version for one in spoken)])
        rollout = Rollout(ids, chosen, chosen, np.zeros(len(ids), np.float32), versions, 1.0)
        return Episode((rollout,), luck.choice([0.0, 0.0, luck.random()]), correct=True)


class NumberEngine(Engine):
    """Samples numbers by seed, each a while after the other. Over a pause, what is in flight is kept."""

    def __init__(self, weather: Weather) -> None:
        self.endpoint = LocalEndpoint(self)
        self.weights: dict[str, Any] = {}
        self.dead = False
        self._weather = weather
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._version = 0

    async def open(self) -> ModelInfo:
        return INFO

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        drawn_ids, versions = [], []
        for number in np.random.default_rng(seeds[0]).integers(1, 2**31 - 1, 3):
            await self._weather.passes(self._weather.engine_s)
            await self._may_run.wait()
            if self.dead:
                raise ProcessDied("engine was killed")
            drawn_ids.append(int(number))
            versions.append(self._version)
        return [Completion(tokens(drawn_ids), np.zeros(3, np.float32), np.array(versions, np.int32), "stop", 1.0)]

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return [np.zeros(len(ids), np.float32) for ids in sequences]

    async def pause(self) -> None:
        self._may_run.clear()
        await self._weather.passes(0.01)

    async def resume(self, version: int) -> None:
        await self._weather.passes(0.01)
        self._version = version
        self._may_run.set()


class ListTrainer(Trainer):
    """Its weights are the sampled tokens of each batch that it was trained on, in order."""

    def __init__(self, weather: Weather, disk: dict[str, str]) -> None:
        self.endpoint = LocalEndpoint(self)
        self.weights: dict[str, Any] = {}
        self.trained: list[list[list[int]]] = []
        self.version = 0
        self.dead = False
        self._weather = weather
        self._disk = disk

    async def open(self) -> ModelInfo:
        return INFO

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        assert batch.version == self.version + 1, "a batch for other weights than these"
        behind = self.version - batch.policy_version[batch.sampled & batch.trained]
        assert behind.max() <= self._weather.staleness, "a token is older than the bound"
        assert behind.min() >= 0, "a token is of weights that are not there any more"
        await self._works()
        async with writing():
            await self._works()
            ends = list(zip(batch.offsets, batch.offsets[1:], strict=False))
            self.trained.append([batch.tokens[start:end].tolist() for start, end in ends])
            self.version = batch.version
        return {"alignment/fresh_tokens": float((behind == 0).sum())}

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return [np.zeros(len(ids), np.float32) for ids in sequences]

    async def save(self, directory: Path) -> None:
        await self._works()
        self._disk[str(directory)] = json.dumps([self.trained, self.version])

    async def restore(self, directory: Path) -> None:
        self.trained, self.version = json.loads(self._disk[str(directory)])

    async def _works(self) -> None:
        await self._weather.passes(self._weather.train_s)
        if self.dead:
            raise ProcessDied("trainer was killed")


class SometimesBridge(LocalBridge):
    """Publishes every so many versions, and the first one that it hears of: it may be a checkpoint's."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every
        self._new = True

    def writing(self, version: int) -> AbstractAsyncContextManager[None]:
        due = self._new or version % self._every == 0
        self._new = False
        return super().writing(version) if due else self._unpublished()

    async def publish(self, version: int) -> None:
        async with super().writing(version):
            pass

    @asynccontextmanager
    async def _unpublished(self) -> AsyncIterator[None]:
        self.published = None
        yield


class Ledger(OrderedCurriculum):
    """Writes down how each draw was settled."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, shuffled=True)
        self.settled: list[list[Any]] = []  # draw, task number, outcome

    def settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None:
        super().settle(draw, outcome, group)
        self.settled.append([draw.id, draw.index, outcome])

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "settled": self.settled}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.settled = [list(entry) for entry in state["settled"]]


class Seen(Transform):
    """A running statistic: the draws that it saw."""

    def __init__(self) -> None:
        self.draws: list[int] = []

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        self.draws += [group.draw.id for group in groups]
        return groups

    def state(self) -> Mapping[str, Any]:
        return {"draws": self.draws}

    def load(self, state: Mapping[str, Any]) -> None:
        self.draws = list(state["draws"])


class Record(Sink):
    """The metrics of each step and the draws that it trained, cut back to the checkpoint as a file would be."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.trained: list[int] = []
        self.records: list[StepRecord] = []

    async def record(self, record: StepRecord) -> None:
        self.records.append(record)
        await super().record(record)

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        assert step == len(self.steps), "steps come in order, and once"
        self.steps.append(dict(metrics))
        assert all(group.draw.split == "train" for group in groups), "evaluation goes past the hub"

    def state(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        self.steps = list(state["steps"])


class Disk(Checkpoints):
    """Checkpoints in memory, which appear at the end of a save or not at all."""

    def __init__(self, weather: Weather) -> None:
        super().__init__(Path("disk"))
        self.files: dict[str, str] = {}
        self.saved: Checkpoint | None = None
        self._weather = weather

    async def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], Awaitable[None]]) -> Checkpoint:
        at, text = self.directory / f"step-{step}", json.dumps(state)
        await write(at / "policy")
        await self._weather.passes(self._weather.train_s)
        self.saved = Checkpoint(at, step, json.loads(text))
        return self.saved


class Life:
    """One process's life, from a checkpoint or from nothing to the last step or a crash."""

    def __init__(self, weather: Weather, disk: Disk, folder: Path) -> None:
        self.engine, self.trainer = NumberEngine(weather), ListTrainer(weather, disk.files)
        self.curriculum, self.seen, self.record = Ledger(weather.seed), Seen(), Record()
        self.stop = asyncio.Event()
        self.bridge = SometimesBridge(weather.publish_every)
        config, environments = weather.config(), {"numbers": Numbers(weather)}
        rewards = [WeightedReward("environment", EnvironmentReward(), 1.0, DEADLINE_S)]
        parts = Parts(
            environments=dict(environments), rewards=rewards, engines=[self.engine], engine=self.engine,
            trainer=self.trainer, bridge=self.bridge, curriculum=self.curriculum,
            transforms={
                "seen": self.seen, "advantage": GroupAdvantage(GroupAdvantageOptions()), "flat": DropFlat(),
            },
            teachers={}, sinks={"record": self.record}, children=[],
        )  # fmt: skip
        rollout_runner = RolloutRunner(
            environments, rewards, self.engine, TOKENIZER, deadline_s=DEADLINE_S, deterministic=weather.deterministic
        )
        self.source = LocalSource(config, rollout_runner, self.curriculum)
        self.loop = Loop(config, parts, self.source, rollout_runner, INFO, folder, self.stop)
        self.loop.checkpoints = disk

    async def run(self, checkpoint: Checkpoint | None) -> None:
        await self.bridge.connect(self.trainer.endpoint, [self.engine])
        await self.source.open(checkpoint.state["source"] if checkpoint else None)
        if checkpoint is not None:
            await self.loop.restore(checkpoint)
        await self.loop.run()


async def live(weather: Weather, folder: Path) -> tuple[Life, Counter[str]]:
    """Lives until the last step is done. Also what ended the ones before."""
    disk, ends = Disk(weather), Counter[str]()
    for left in range(weather.crashes, -1, -1):
        life = Life(weather, disk, folder)
        task = asyncio.ensure_future(life.run(disk.saved))
        if left:
            typical = weather.steps * (weather.train_s + weather.engine_s + weather.rollout_s)
            await asyncio.wait([task], timeout=weather.delays.random() * 3 * typical)
            _crash(weather.delays.choice(("trainer", "engine", "supervisor", "stopped")), life, task)
        others = {asyncio.current_task()}
        try:
            await task
            assert asyncio.all_tasks() == others, "all that was begun has ended"
        except (ProcessDied, Interrupted, asyncio.CancelledError) as error:
            ends[type(error).__name__] += 1
            for orphan in asyncio.all_tasks() - others:  # as the end of their process would
                orphan.cancel()
                await asyncio.gather(orphan, return_exceptions=True)
        if life.loop.progress.step == weather.steps and disk.saved and disk.saved.step == weather.steps:
            return life, ends
    raise AssertionError(f"the last life came to step {life.loop.progress.step} of {weather.steps}")


def _crash(what: str, life: Life, task: asyncio.Task[None]) -> None:
    if what == "supervisor":
        task.cancel()
    elif what == "stopped":
        life.stop.set()
    else:
        getattr(life, what).dead = True


def check(weather: Weather, life: Life) -> None:
    """What must hold at the end, whatever happened on the way."""
    trained = [tuple(ids) for batch in life.trainer.trained for ids in batch]
    assert len(set(trained)) == len(trained), "trained twice"
    settled = life.curriculum.settled
    ids = [number for number, _, _ in settled]
    state = life.curriculum.state()
    open_ = [fields[0] for fields in state["unsettled"]]
    assert sorted(ids + open_) == list(range(state["next"])), "every draw is settled once, or open"
    reported = Counter[str]()
    for step in life.record.steps:
        reported.update(
            {name: int(step.get(f"groups/{name}", 0)) for name in ("trained", "stale", "failed", "flat", "dropped")}
        )
    assert +reported == Counter(outcome for _, _, outcome in settled), "what was reported is what was settled"
    assert weather.staleness or not reported["stale"]
    assert sorted(life.seen.draws) == sorted(n for n, _, how in settled if how in ("trained", "flat", "dropped"))
    index = {number: task for number, task, _ in settled} | {fields[0]: fields[3] for fields in state["unsettled"]}
    for epoch in range(state["next"] // weather.tasks):
        drawn = [index[number] for number in range(epoch * weather.tasks, (epoch + 1) * weather.tasks)]
        assert sorted(drawn) == list(range(weather.tasks)), "an epoch has every task once"
    assert [step.get("policy/version", 0) for step in life.record.steps][-1] == life.trainer.version
    assert len(life.trainer.trained) == life.trainer.version
    if "eval/version" in life.record.steps[-1]:
        assert life.record.steps[-1]["eval/version"] == life.trainer.version, (
            "the last evaluation is of the last policy"
        )
    most = max((step.get("staleness/max", 0) for step in life.record.steps), default=0)
    assert most <= weather.staleness


def run_schedule(seed: int) -> Counter[str]:
    """One schedule, with all checks. What happened in it."""
    weather = Weather(seed)
    with tempfile.TemporaryDirectory() as folder:
        try:
            life, ends = virtual_time.run(live(weather, Path(folder)))
        except NoProgress:  # so many rollouts in a row were to fail
            return Counter(schedules=1, gave_up=1)
        check(weather, life)
        if weather.deterministic and ends:
            calm, _ = virtual_time.run(live(Weather(seed, calm=True), Path(folder)))
            assert calm.trainer.trained == life.trainer.trained, "a resumed run has other weights"
            assert calm.seen.draws == life.seen.draws
            ends["compared"] += 1
    stale = sum(step.get("groups/stale", 0) for step in life.record.steps)
    failed = sum(step.get("groups/failed", 0) for step in life.record.steps)
    return ends + Counter(schedules=1, steps=weather.steps, stale=int(stale), failed=int(failed))
