"""An installed plugin whose components fall ill at a step, `SICK_FROM`: what health must name. Planted by tests and the soak."""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from atropos_core.builtin.config import ToyEngineOptions, ToyTrainerOptions
from atropos_core.builtin.local import LocalBridge
from atropos_core.builtin.toy import ToyEngine, ToyTrainer
from atropos_core.interfaces import Environment, Sink
from atropos_core.plugins.model_provider import BridgeProvider, EngineProvider, TrainerProvider
from atropos_core.plugins.provider import Provider
from atropos_core.plugins.spec import hookimpl
from atropos_core.types import Task

FROM = int(os.environ.get("SICK_FROM", "6"))
_begun = [0]  # steps whose groups have come: counted by the transform `sick_clock`


def is_sick(*, running: bool = True) -> bool:
    return _begun[0] + running >= FROM


# -- trainers


class Trainer(ToyTrainer):
    """Replies of three tokens or so at first, so that there is room for longer ones."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self.end = int(self._tokenizer.encode(self._tokenizer.eos)[0])
        self.weights["table"][:, self.end] = 4.0

    async def step(self, batch, writing):
        table = self.weights["table"]
        before = table.copy()
        metrics = await super().step(batch, writing)
        return self.after(table, before, metrics) if is_sick(running=False) else metrics

    def after(self, table, before, metrics):
        return metrics


class Frozen(Trainer):
    def after(self, table, before, metrics):
        table[:] = before
        return metrics


class Collapsing(Trainer):
    def after(self, table, before, metrics):
        table[:] = 0.0
        table[:, 40] = 30.0
        return metrics


class Lengthening(Trainer):
    def after(self, table, before, metrics):
        table[:, self.end] = -20.0
        return metrics


class Diverging(Trainer):
    def after(self, table, before, metrics):
        return metrics | {"loss": math.nan}


# -- engines and bridges


class OtherTokenizer(ToyEngine):
    async def open(self):
        return replace(await super().open(), tokenizer="0123456789abcdef")


class Slowing(ToyEngine):
    async def sample(self, *arguments):
        await asyncio.sleep(4.0 if is_sick() else 0.01)
        return await super().sample(*arguments)


class StaleBridge(LocalBridge):
    """Copies the trainer's table to the engine, and forgets to."""

    async def connect(self, trainer, engines):
        await super().connect(trainer, engines)
        self.source = trainer.component.weights["table"]
        self.sinks = [engine.endpoint.component for engine in engines]
        for sink in self.sinks:
            sink.weights = {"table": self.source.copy()}

    def writing(self, version):
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def copied():
            async with LocalBridge.writing(self, version):
                yield
                if not is_sick(running=False):
                    for sink in self.sinks:
                        sink.weights["table"][:] = self.source

        return copied()


# -- rewards


class Constant:
    async def __call__(self, task, episodes):
        return np.array([0.5 if is_sick() else episode.score for episode in episodes], np.float32)


class SometimesNan:
    calls = 0

    async def __call__(self, task, episodes):
        self.calls += 1
        scores = np.array([episode.score for episode in episodes], np.float32)
        if is_sick() and self.calls % 3 == 0:
            scores[0] = np.nan
        return scores


class Hanging:
    calls = 0

    async def __call__(self, task, episodes):
        self.calls += 1
        if is_sick() and self.calls % 3 == 0:
            await asyncio.sleep(1e6)
        return np.array([episode.score for episode in episodes], np.float32)


class Random:
    async def __call__(self, task, episodes):
        noise = [random.random() if is_sick() else 0.0 for _ in episodes]
        return np.array([e.score + n for e, n in zip(episodes, noise, strict=True)], np.float32)


class Drifting:
    async def __call__(self, task, episodes):
        return np.array([e.score + (0.02 * (_begun[0] + 2 - FROM) if is_sick() else 0) for e in episodes], np.float32)


class Exploding:
    async def __call__(self, task, episodes):
        return np.array([e.score * (1000.0 if is_sick() else 1.0) for e in episodes], np.float32)


# -- transforms and sinks


class Clock:
    async def __call__(self, groups):
        _begun[0] += 1
        return groups


class Growing:
    async def __call__(self, groups):
        factor = 4.0 ** (_begun[0] + 1 - FROM) if is_sick(running=False) else 1.0
        return [group.with_advantages(group.advantages * factor) for group in groups]


class Nothing:
    async def __call__(self, groups):
        factor = 0.0 if is_sick(running=False) else 1.0
        return [group.with_advantages(group.advantages * factor) for group in groups]


class SlowDisk(Sink):
    async def step(self, step, metrics, groups):
        if is_sick(running=False):
            time.sleep(0.8)  # noqa: ASYNC251 - as a disk does


# -- environments


class Letters(Environment):
    """The more small letters, the better: rewards differ from the first step on."""

    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say {n}"},)) for n in range(16)]

    async def score(self, task, reply):
        text = reply["content"]
        return sum(letter.islower() for letter in text) / max(len(text), 1)


class DeadWorker(Letters):
    """Asks one of two helper processes for each score; one of them is killed."""

    async def open(self):
        self.helpers = [subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]

    async def close(self):
        for helper in self.helpers:
            helper.kill()
            helper.wait()

    async def score(self, task, reply):
        value = await super().score(task, reply)
        if is_sick():
            self.helpers[1].kill()
            self.helpers[1].wait()
        helper = self.helpers[int(task.id.split("-")[1]) % 2]
        helper.stdin.write(f"{value}\n".encode())
        helper.stdin.flush()
        return float(helper.stdout.readline())


class Partly(Letters):
    """The first rollout of every group fails."""

    def __init__(self):
        self.seen = {}

    async def score(self, task, reply):
        self.seen[task.id] = self.seen.get(task.id, -1) + 1
        if is_sick() and self.seen[task.id] % 8 == 0:
            raise RuntimeError("the first one always fails")
        return await super().score(task, reply)


class HangingRollout(Letters):
    async def score(self, task, reply):
        if is_sick():
            await asyncio.sleep(1e6)
        return await super().score(task, reply)


def _toy(provider, name, made, options):
    return provider(name, "sick", options, made, transports=lambda options: frozenset({"in_process"}))


@hookimpl
def atropos_trainers() -> Iterable[Provider]:
    named = {"sick_none": Trainer, "sick_frozen": Frozen, "sick_collapsing": Collapsing,
             "sick_lengthening": Lengthening, "sick_diverging": Diverging}  # fmt: skip
    return [_toy(TrainerProvider, name, kind, ToyTrainerOptions) for name, kind in named.items()]


@hookimpl
def atropos_engines() -> Iterable[Provider]:
    named = {"sick_tokenizer": OtherTokenizer, "sick_slow": Slowing}
    return [_toy(EngineProvider, name, kind, ToyEngineOptions) for name, kind in named.items()]


@hookimpl
def atropos_bridges() -> Iterable[Provider]:
    from atropos_core.plugins.options import Options

    return [_toy(BridgeProvider, "sick_bridge", lambda options, context: StaleBridge(), Options)]


def _plain(named):
    from atropos_core.plugins.options import Options

    return [Provider(name, "sick", Options, lambda options, context, kind=kind: kind()) for name, kind in named.items()]


@hookimpl
def atropos_rewards() -> Iterable[Provider]:
    return _plain({"sick_constant": Constant, "sick_nan": SometimesNan, "sick_hung": Hanging, "sick_random": Random,
                   "sick_drift": Drifting, "sick_exploding": Exploding})  # fmt: skip


@hookimpl
def atropos_transforms() -> Iterable[Provider]:
    return _plain({"sick_clock": Clock, "sick_growing": Growing, "sick_nothing": Nothing})


@hookimpl
def atropos_sinks() -> Iterable[Provider]:
    return _plain({"sick_disk": SlowDisk})


@hookimpl
def atropos_environments() -> Iterable[Provider]:
    return _plain(
        {"sick_letters": Letters, "sick_worker": DeadWorker, "sick_partly": Partly, "sick_play": HangingRollout}
    )
