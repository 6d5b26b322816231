"""Publishes while requests are in flight: how long they take, and that nothing of a request is lost."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from atropos_core.types import Completion, Sampling
from tests.gpu.pair import Pair, Setting, ids
from tests.gpu.report import Report, gap

PUBLISHES = 20


async def publishes(setting: Setting, pair: Pair, report: Report) -> None:
    random = np.random.default_rng(2)
    probe = [ids(random, 8000, 32)]
    before = await pair.engine.logprobs(probe)
    # Twice: what is made lazily is there before the clock runs, on a GPU the kernels of each shape, a second for the first pass of some.
    first = await _published_under_load(pair, random, range(1, PUBLISHES + 1))
    found = await _published_under_load(pair, random, range(PUBLISHES + 1, 2 * PUBLISHES + 1))
    after = await pair.engine.logprobs(probe)
    slowest = f"publish, slowest of {PUBLISHES} (pause, version, resume)"
    report.note("publish, slowest before every kernel had run", max(first.outside), "s")
    if setting.device == "cpu":  # a pause waits for the pass that computes: on a busy machine, that is what it measures
        report.note(slowest, max(found.outside), "s")
    else:
        report.at_most(slowest, max(found.outside), 0.5, "s")
    report.note("publish, median", statistics.median(found.outside), "s")
    report.note("publish, slowest by the bridge's own clock", max(found.own), "s")
    report.note("one write into every parameter, median (not counted)", statistics.median(found.writes), "s")
    copied = first.bytes_copied + found.bytes_copied
    report.holds("nothing copied", copied == 0, f"{copied} bytes")
    made = first.made + found.made
    report.holds("requests in flight came to their end", all(len(c.tokens) == 48 for c in made), f"{len(made)}")
    report.at_least("versions that they saw", max(int(c.policy_version.max()) for c in found.made) - PUBLISHES, 1)
    report.at_least("the engine's probe moved by", gap(after, before), 1e-2, "nats")


@dataclass
class Publishes:
    """While eight requests are in flight."""

    outside: list[float] = field(default_factory=list)  # seconds to enter and to leave
    own: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    bytes_copied: int = 0
    made: list[Completion] = field(default_factory=list)


async def _published_under_load(pair: Pair, random: np.random.Generator, versions: range) -> Publishes:
    found = Publishes()
    load = [pair.engine.sample(ids(random, 8000, 24), 1, Sampling(48), [i], 300) for i in range(8)]
    in_flight = asyncio.gather(*load)
    try:
        for version in versions:
            times = [time.perf_counter()]
            async with pair.bridge.writing(version):
                times.append(time.perf_counter())
                await pair.scale(1.01)
                times.append(time.perf_counter())
            times.append(time.perf_counter())
            entered, wrote, left = np.diff(times).tolist()
            found.outside.append(entered + left)
            found.writes.append(wrote)
            published = pair.bridge.published
            assert published is not None, "writing was entered"
            found.own.append(published.seconds)
            found.bytes_copied += published.bytes_copied
        found.made = [completion for (completion,) in await in_flight]
    finally:
        in_flight.cancel()
    return found
