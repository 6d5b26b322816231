"""Whatever stands before an engine or a trainer forwards every method of it: those with a default as well."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.codec import encode_bytes
from atropos_core.interfaces import Engine, Trainer
from atropos_core.observe.profile import Profile
from atropos_core.processes.child import Child
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.processes.forwarding import (
    ForwardingAdapters,
    ForwardingEngine,
    ForwardingStepwise,
    ForwardingTrainer,
    extras,
    methods,
)
from atropos_core.processes.proxies import HostedAdapterEngine, HostedEngine, HostedStepwiseTrainer, HostedTrainer
from atropos_core.processes.timing import TimedEngine, TimedTrainer
from atropos_core.rollouts.engine_router import EngineRouter
from atropos_core.stepwise import AdamSettings, AdapterEngine, AdapterSettings, StepwiseTrainer, TargetSequence
from atropos_core.training.batch import to_batch
from atropos_core.types import Sampling, tokens
from tests.conftest import REPOSITORY
from tests.unit import recording
from tests.unit.parts import group, install_plugin
from tests.unit.recording import Recording, RecordingEngine, RecordingTrainer, line

SEQUENCES = [tokens([1, 2]), tokens([3])]
BATCH = to_batch([group(0).with_advantages(np.zeros(2, np.float32))], version=1)
ENGINE: Mapping[str, tuple[Any, ...]] = {  # arguments other than the defaults, `close` at the end
    "open": (),
    "sample": (tokens([1, 2, 3]), 2, Sampling(temperature=0.5), [8, 9], 30.0),
    "logprobs": (SEQUENCES, 0.7),
    "top_logprobs": (SEQUENCES, 2, 0.7),
    "pause": (),
    "resume": (11,),
    "load_weights": (Path("/weights"),),
    "load_adapter": (Path("/adapter"), 12),
    "release_cache": (),
    "step_metrics": (),
    "close": (),
}
OF_ADAPTERS: Mapping[str, tuple[Any, ...]] = {
    "add_adapter": (Path("/adapter"), "mine"),
    "remove_adapter": ("mine",),
    "sample_with": ("mine", tokens([1, 2, 3]), 2, Sampling(temperature=0.5), [8, 9], 30.0),
    "logprobs_with": (None, SEQUENCES, 0.7),
    "top_logprobs_with": ("mine", SEQUENCES, 2, 0.7),
}
TRAINER: Mapping[str, tuple[Any, ...]] = {
    "open": (),
    "step": (BATCH, None),  # the test gives its own `writing`
    "supervised_step": (BATCH, 0.001),
    "token_values": (),
    "logprobs": (SEQUENCES, 0.7),
    "rounding": (SEQUENCES, 0.7),
    "save": (Path("/saved"),),
    "restore": (Path("/saved"),),
    "close": (),
}
TARGETS = TargetSequence(tokens([1, 2]), np.int64([[2, 3], [4, 5]]), {"weights": np.float32([[1, -1], [0, 2]])})
STEPWISE: Mapping[str, tuple[Any, ...]] = {
    "create_adapter": ("mine", AdapterSettings(8, 16.0, 3, True, False, True)),
    "drop_adapter": ("mine",),
    "forward_backward": ("mine", [TARGETS], "ppo", {"clip_low_threshold": 0.5}, False),
    "optimizer_step": ("mine", AdamSettings(1e-3, 0.8, 0.9, 1e-6, 0.1, 2.0)),
    "clear_gradient": ("mine",),
    "save_adapter": (Path("/saved"), "mine", False),
    "restore_adapter": (Path("/saved"), "mine", True),
}
WRAPPERS: Mapping[type[Engine | Trainer], Callable[[Any], Any]] = {
    HostedEngine: HostedEngine,
    HostedTrainer: HostedTrainer,
    HostedAdapterEngine: HostedAdapterEngine,
    HostedStepwiseTrainer: HostedStepwiseTrainer,
    TimedEngine: lambda engine: TimedEngine(engine, "engine", Profile()),
    TimedTrainer: lambda trainer: TimedTrainer(trainer, Profile()),
    EngineRouter: lambda engine: EngineRouter([engine], deterministic=True),
}
ENDS = {"ToyEngine", "ToyTrainer"}  # stand before nothing that they could forward to


@asynccontextmanager
async def wrapped(wrapper: type[Engine | Trainer], folder: Path) -> AsyncIterator[Any]:
    """The wrapper around what records; `Hosted...` around a child process."""
    is_engine = issubclass(wrapper, Engine)
    notes = str(folder / "notes")
    if not issubclass(wrapper, (HostedEngine, HostedTrainer)):
        end = (RecordingEngine if is_engine else RecordingTrainer)(Recording(notes=notes))
        end.endpoint = LocalEndpoint(end)
        yield WRAPPERS[wrapper](end)
        return
    install_plugin(folder, "recorded", Path(recording.__file__).read_text())
    build = {
        "kind": "engine" if is_engine else "trainer",
        "name": "recording",
        "options": {"notes": notes},
        "context": {"directory": "/run", "model": str(TOY_MODEL)},
    }
    child = await Child.start("recorded", build, folder / "log", threads=1, environment={"PYTHONPATH": str(folder)})
    try:
        yield WRAPPERS[wrapper](child)
    finally:
        await child.kill()


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
async def test_every_method_reaches_what_is_behind_with_its_arguments_and_its_answer(wrapper, tmp_path):
    interface, calls = (Engine, ENGINE) if issubclass(wrapper, Engine) else (Trainer, TRAINER)
    assert set(calls) == set(methods(interface)), "each method of the interface is called here"
    if issubclass(wrapper, HostedAdapterEngine | HostedStepwiseTrainer):
        assert issubclass(wrapper, extras(interface))
        more = OF_ADAPTERS if interface is Engine else STEPWISE
        assert set(more) == set(methods(extras(interface)))
        calls = {**more, **calls}
    there: list[str] = []

    @asynccontextmanager
    async def writing() -> AsyncIterator[None]:
        there.append("entered")
        yield
        there.append("left")

    direct = (RecordingEngine if interface is Engine else RecordingTrainer)(Recording(notes=str(tmp_path / "direct")))
    wanted: list[str] = []
    async with wrapped(wrapper, tmp_path) as made:
        for name, given in calls.items():
            signature = inspect.signature(getattr(interface, name, None) or getattr(extras(interface), name))
            bound = signature.bind(None, *given)
            assert list(bound.arguments) == list(bound.signature.parameters), f"{name}() is given every argument"
            arguments = (given[0], writing) if name == "step" else given
            answer = await getattr(made, name)(*arguments)
            wanted.append(line(name, (given[0], True) if name == "step" else given))
            assert encode_bytes(answer) == encode_bytes(await getattr(direct, name)(*arguments)), name
    assert (tmp_path / "notes").read_text().splitlines() == wanted
    assert there == ([] if interface is Engine else ["entered", "left"] * 2), "by the wrapper, and directly"


def test_every_engine_and_trainer_of_core_is_tried_here_or_is_an_end():
    for path in (REPOSITORY / "atropos_core").rglob("*.py"):
        if "cli" not in path.parts:
            __import__(".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"))
    known = {made.__name__ for made in WRAPPERS} | ENDS
    bases = {ForwardingEngine.__name__, ForwardingTrainer.__name__}
    found = {made.__name__ for base in (Engine, Trainer) for made in subclasses(base) if of_core(made)}
    assert found - bases == known


@pytest.mark.parametrize(
    ("base", "interface"),
    [
        (ForwardingEngine, Engine),
        (ForwardingTrainer, Trainer),
        (ForwardingAdapters, AdapterEngine),
        (ForwardingStepwise, StepwiseTrainer),
    ],
)
def test_the_base_of_all_wrappers_forwards_each_method_itself(base, interface):
    assert set(vars(base)) >= set(methods(interface))


def test_only_wrappers_of_components_with_adapters_claim_to_work_with_them():
    assert not issubclass(HostedEngine, AdapterEngine) and issubclass(HostedAdapterEngine, AdapterEngine)
    assert not issubclass(HostedTrainer, StepwiseTrainer) and issubclass(HostedStepwiseTrainer, StepwiseTrainer)


async def test_a_component_without_adapters_says_so_when_it_is_called_for_one(tmp_path):
    build = {
        "kind": "trainer",
        "name": "toy",
        "options": {},
        "context": {"directory": str(tmp_path), "model": str(TOY_MODEL)},
    }
    child = await Child.start("toy", build, tmp_path / "log", threads=1)
    try:
        with pytest.raises(NotImplementedError, match=r"ToyTrainer has no save_adapter\(\)"):
            await HostedStepwiseTrainer(child).save_adapter(tmp_path, "mine", False)
    finally:
        await child.kill()


def subclasses(base: type[Any]) -> list[type[Any]]:
    return [found for made in base.__subclasses__() for found in (made, *subclasses(made))]


def of_core(made: type[Any]) -> bool:
    return made.__module__.startswith("atropos_core.")


@pytest.mark.parametrize("outlives", [False, True])
def test_an_engine_that_was_there_before_the_run_is_known_as_such_behind_a_timer(outlives, tmp_path):
    engine = RecordingEngine(Recording(notes=str(tmp_path / "notes")))
    engine.endpoint = LocalEndpoint(engine)
    engine.outlives_run = outlives
    assert TimedEngine(engine, "engine", Profile()).outlives_run is outlives
