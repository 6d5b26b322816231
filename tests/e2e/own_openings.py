"""Components whose `open` matters: what they need is there only after it, or it fails, or never ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.interfaces import Sink, Teacher
from tests.e2e.own_parts import Sevens

NOTES = Path("notes")


def note(text):
    with NOTES.open("a") as file:
        file.write(f"{text}\n")


class Opened:
    """A reward that is 1 once it is open."""

    async def open(self):
        self.value = 1.0

    async def __call__(self, task, episodes):
        return np.full(len(episodes), self.value, np.float32)

    async def close(self):
        note("closed")


async def zero(task, episodes):
    return np.zeros(len(episodes), np.float32)


class Missing:
    async def open(self):
        self.text = Path("bonus.txt").read_text()  # the line that is named

    async def __call__(self, task, episodes):
        return np.zeros(len(episodes), np.float32)


class NoCoroutine(Missing):
    def open(self):
        self.text = ""


class Hangs(Missing):
    async def open(self):
        await asyncio.sleep(1e9)


class MissingEnvironment(Missing, Sevens):
    pass


class MissingTeacher(Missing, Teacher):
    async def annotate(self, groups):
        return groups


class MissingSink(Missing, Sink):
    async def step(self, step, metrics, groups):
        pass


async def misshapen(groups):
    return [group.with_advantages(group.rewards[:-1]) for group in groups]


async def raises(groups):
    return groups["first"]


class Empty(OrderedCurriculum):
    def __init__(self) -> None:
        super().__init__(0, shuffled=False)

    def draw(self, n):
        return []
