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
from atropos_core.processes.forwarding import ForwardingEngine, ForwardingTrainer, methods
from atropos_core.processes.proxies import HostedEngine, HostedTrainer
from atropos_core.processes.timing import TimedEngine, TimedTrainer
from atropos_core.rollouts.engine_router import EngineRouter
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
    "close": (),
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
WRAPPERS: Mapping[type[Engine | Trainer], Callable[[Any], Any]] = {
    HostedEngine: HostedEngine,
    HostedTrainer: HostedTrainer,
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
            bound = inspect.signature(getattr(interface, name)).bind(None, *given)
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


@pytest.mark.parametrize(("base", "interface"), [(ForwardingEngine, Engine), (ForwardingTrainer, Trainer)])
def test_the_base_of_all_wrappers_forwards_each_method_itself(base, interface):
    assert set(vars(base)) >= set(methods(interface))


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
