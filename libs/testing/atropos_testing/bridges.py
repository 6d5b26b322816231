"""The contract of a bridge, tested between a real engine and a real trainer: the toy pair, or the first pair that fits."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from atropos_core.config import run_file as config
from atropos_core.config.resolve import WITH_EVERY_ENGINE
from atropos_core.errors import AtroposError, DeadlineExceeded, FitError
from atropos_core.interfaces import Finding, Transport
from atropos_core.launch.builder import build
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.plugins.manager import Plugins, load_plugins
from atropos_core.plugins.model_provider import BridgeProvider, WeightsProvider
from atropos_core.plugins.offers import Offer
from atropos_core.plugins.provider import Provider
from atropos_core.plugins.requirements import check_requires
from atropos_core.rollouts.chat_template import end_renderer
from atropos_core.training.parts import Parts
from atropos_core.types import Completion
from atropos_testing import eventloop
from atropos_testing.bridge_setup import DEADLINE_S, PAUSED_FOR_S, SAMPLES_ON, Scene, connect, wrong_with
from atropos_testing.report import RAISED, Report, of_error
from atropos_testing.subject import Subject

WORDS = {  # check -> text if it is fine, and the remedy if not
    "offer": ("", "BridgeProvider.transports says what the bridge carries under its options, and build makes it."),
    "extensions": (
        "they can be found",
        'extensions() names classes as "pkg.mod:Class", importable where engine and trainer run, or as "/path/file.py:Class".',
    ),
    "connects": ("", "connect() lays the way, once both ends are open and their extensions loaded."),
    "pauses": (
        "nothing is sampled from weights that are being written",
        "Pause every engine before yielding: `await engine.pause()`. If engines have their own copy of the weights (adapter, "
        "checkpoint), they may continue with the version before.",
    ),
    "versions": ("tokens carry the version just written", "Resume every engine at it: `await engine.resume(version)`."),
    "weights": (
        "the engine samples from what was written",
        "Every weight that the trainer wrote must be what the engine reads once writing() ends.",
    ),
    "publication": (
        "published says version, time and bytes",
        "Set self.published = Publication(version, seconds, bytes_copied) at the end of writing().",
    ),
    "failure": (
        "an exception inside writing() comes out, and leaves the engine paused",
        "Do not resume in a `finally` around the yield in writing(). If the engines kept sampling inside, add an `except` that "
        "pauses them: half-written weights must never be sampled from.",
    ),
    "closes": ("closed twice", "close() may be called twice, also after a failure."),
    "handles": ("no descriptor is left open here", "close() releases every handle that the bridge opened or was sent."),
}
STEPS = 2
_BOUND = {"float32": 1e-4, "float64": 1e-4}  # nats between trainer and engine; other dtypes: 0.5


class OnPurpose(Exception):
    """Raised inside `writing` by the check."""


class BridgeContract:
    """Checks one bridge. Without `engine` and `trainer`, it is tested with the first installed pair that it fits. If there is none, that
    is a note, unless it `must_run` or one of the two is named."""

    def __init__(
        self,
        subject: Subject,
        *,
        model: str | None = None,
        engine: str | None = None,
        trainer: str | None = None,
        must_run: bool = False,
        skip: Sequence[str] = (),
    ) -> None:
        self._subject = subject
        self._model, self._engine, self._trainer = model, engine, trainer
        self._must_run = must_run or engine is not None or trainer is not None
        self._report = Report(tuple(WORDS), skip)
        self._transports: frozenset[Transport] = frozenset()
        self._samples_on = False

    def findings(self) -> list[Finding]:
        if self._describes_itself():
            plan = self._plan(load_plugins())
            if plan is not None:
                eventloop.run(self._check(plan))
        return self._report.findings

    def _say(self, name: str, problems: Sequence[str], addition: str = "") -> bool:
        good, remedy = WORDS[name]
        return self._report.check(name, problems, good=good + addition, remedy=remedy)

    # -- what it is to be checked between

    def _describes_itself(self) -> bool:
        problems = []
        missing: list[str] = []
        try:
            provider = self._subject.provider
            assert isinstance(provider, BridgeProvider)
            self._transports = provider.transports(self._subject.options)
            missing = [
                reference for reference in self._subject.make().extensions().values() if not _is_there(reference)
            ]
            if not self._transports:
                problems.append("its Provider names no transport, so that no engine and trainer fit it")
        except RAISED as error:  # the plugin boundary: a bridge's code
            problems.append(of_error(error))
        offered = self._say("offer", problems, f"carries {', '.join(sorted(self._transports))}")
        return offered and self._say("extensions", [f"{reference!r} cannot be found" for reference in missing])

    def _plan(self, plugins: Plugins) -> Plan | None:
        """Return a plan with this bridge between the first pair that fits, or None and a note."""
        under_check = replace(self._subject.provider, name=f"{self._subject.provider.name} (under check)")
        plugins.registry.add(Offer("bridge", under_check, "under check", "under check"))
        refused = ""
        for engine in plugins.registry.offers("engine"):
            for trainer in plugins.registry.offers("trainer"):
                if not self._may_pair(engine, trainer):
                    continue
                try:
                    return self._plan_of(plugins, engine, trainer, under_check.name)
                except AtroposError as error:
                    refused = f" ({engine.provider.name} and {trainer.provider.name}: {str(error).splitlines()[0]})"
        self._not_run(f"no installed engine and trainer share {', '.join(sorted(self._transports))}{refused}")
        return None

    def _not_run(self, why: str) -> None:
        remedy = "Install an engine and a trainer that this bridge joins, and a plugin that knows the model 'tiny'."
        if self._must_run:
            self._report.check("connects", [f"not run: {why}"], good="", remedy=remedy)
        else:
            self._report.note("connects", f"not run: {why}", remedy)

    def _may_pair(self, engine: Offer, trainer: Offer) -> bool:
        if self._engine not in (None, engine.provider.name) or self._trainer not in (None, trainer.provider.name):
            return False
        try:
            check_requires(engine)
            check_requires(trainer)
            sides = [
                offer.provider.transports(offer.provider.options())
                for offer in (engine, trainer)
                if isinstance(offer.provider, WeightsProvider)
            ]
            sides[0] |= WITH_EVERY_ENGINE
        except (FitError, ValidationError):
            return False
        return bool(self._transports & sides[0] & sides[1])

    def _plan_of(self, plugins: Plugins, engine: Offer, trainer: Offer, bridge: str) -> Plan:
        model = plugins.resolve_model(self._model or ("toy" if engine.provider.name == "toy" else "tiny"))
        values = {
            "engine": _one_thread(engine.provider),
            "trainer": _one_thread(trainer.provider),
            "bridge": {"use": bridge, **self._subject.options.model_dump()},
            "environment": {"none": {"use": "atropos_testing.samples:TwoSums"}},
            "sink": {},
        }
        return make_plan(config.load([config.Layer("check", values)]).config, model, plugins)

    # -- between the two ends

    async def _check(self, plan: Plan) -> None:
        handles = _open_handles()
        directory = self._subject.context.directory
        (directory / "logs").mkdir(exist_ok=True)
        try:
            parts = await build(plan, directory)
        except AtroposError as error:
            self._not_run(of_error(error))
            return
        try:
            await self._run_scene(plan, parts)
        finally:
            problems = await _close_twice(parts)
            await parts.close()
        self._say("closes", problems)
        left = _open_handles() - handles
        self._say("handles", [f"{left} descriptors are open that were not before"] if left > 0 else [])

    async def _run_scene(self, plan: Plan, parts: Parts) -> None:
        pair = f"engine {plan.config.engine.use!r} and trainer {plan.config.trainer.use!r}, by {plan.transports[0]}"
        try:
            scene = await connect(plan, parts)
        except RAISED as error:  # the plugin boundary: a bridge's code
            self._say("connects", [of_error(error)])
            return
        self._say("connects", [], pair)
        self._samples_on = plan.transports[0] in SAMPLES_ON
        await self._publishes(scene)
        await self._fails(scene)

    async def _publishes(self, scene: Scene) -> None:
        """Run some steps: what was sampled comes back as a batch, and is trained inside `writing`."""
        problems: dict[str, list[str]] = {name: [] for name in ("pauses", "versions", "weights", "publication")}
        apart = 0.0
        try:
            for version in range(1, STEPS + 1):
                apart = float(np.max([apart, await self._publish(scene, version, problems)]))
            early = await scene.sampled_while_writing(STEPS + 1)
            if early is not None:
                problems["pauses"] += self._wrong_with_early(early)
        except RAISED as error:  # the plugin boundary: a bridge's code
            problems["weights"].append(of_error(error))
        bound = _BOUND.get(scene.dtype, 0.5)
        if not apart <= bound:
            problems["weights"].append(
                f"the engine's logprobs of what it samples are {apart:.3g} nats from the trainer's; the bound is {bound:g}"
            )
        for name, wrong in problems.items():
            self._say(name, wrong, f": {apart:.1e} nats apart after {STEPS} steps" if name == "weights" else "")

    def _wrong_with_early(self, completion: Completion) -> list[str]:
        if not self._samples_on:
            return ["a sample that was requested inside writing() came back inside it"]
        marked = sorted(set(completion.policy_version.tolist()))
        return [] if marked == [STEPS] else [f"what was sampled inside writing({STEPS + 1}) carries versions {marked}"]

    async def _publish(self, scene: Scene, version: int, problems: dict[str, list[str]]) -> float:
        """Run one step. Return how far apart the two ends are afterwards, in nats."""
        bridge, trainer = scene.parts.bridge, scene.parts.trainer
        batch = await scene.batch(version)
        probe = batch.tokens[batch.offsets[0] : batch.offsets[1]]
        [before] = await trainer.logprobs([probe])
        await trainer.step(batch, lambda: bridge.writing(version))
        [after] = await trainer.logprobs([probe])
        if np.array_equal(before, after):
            problems["weights"].append(f"step {version} left the trainer as it was: nothing was written")
        completion = await scene.sample()
        marked = sorted(set(completion.policy_version.tolist()))
        if marked != [version]:
            problems["versions"].append(f"after writing({version}) tokens carry {marked}")
        problems["publication"] += wrong_with(bridge.published, version)
        [own] = await trainer.logprobs([np.concatenate([scene.prompt, completion.tokens])])
        return float(np.abs(own[len(scene.prompt) :] - completion.logprobs).max())

    async def _fails(self, scene: Scene) -> None:
        problems = []
        try:
            async with scene.parts.bridge.writing(STEPS + 2):
                raise OnPurpose
        except OnPurpose:
            pass
        except RAISED as error:  # the plugin boundary: a bridge's code
            problems.append(f"an exception inside writing() came out as {of_error(error)}")
        else:
            problems.append("an exception inside writing() was swallowed")
        try:
            await scene.sample(PAUSED_FOR_S)
            problems.append("the engine sampled after an exception inside writing()")
        except (TimeoutError, DeadlineExceeded):
            pass
        self._say("failure", problems)


async def _close_twice(parts: Parts) -> list[str]:
    try:
        for _ in range(2):
            async with asyncio.timeout(DEADLINE_S):
                await parts.bridge.close()
    except RAISED as error:  # the plugin boundary: a bridge's code
        return [of_error(error)]
    return []


def _is_there(reference: str) -> bool:
    module, _, name = reference.rpartition(":")
    if module.endswith(".py"):
        return Path(module).is_file()
    try:
        return bool(name) and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _open_handles() -> int:
    end_renderer()  # its socket is this process's, not the bridge's
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0  # no such thing on this system


def _one_thread(provider: Provider[Any]) -> dict[str, Any]:
    """Set threads for a component in a child process; elsewhere that option has no effect, and is refused."""
    return {"use": provider.name} | ({"threads": 1} if provider.runs_in == "process" else {})
