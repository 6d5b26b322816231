"""What several things that end tell of it: no error of one hides another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core import console
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.errors import DataError, ProcessDied
from atropos_core.guards.endings import add_notes, raise_first
from atropos_core.interfaces import Environment
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.training.parts import EvaluationParts

CONTEXT = RunContext(directory=Path("."), model=TOY_MODEL)


def test_the_first_error_is_raised_and_has_the_others_as_notes():
    first, second, third = DataError("one"), OSError("two"), KeyError("three")
    with pytest.raises(DataError, match="one") as raised:
        raise_first([None, first, "a result", second, third])
    assert raised.value.__notes__ == ["and: OSError: two", "and: KeyError: 'three'"]


def test_results_are_no_errors():
    raise_first([])
    raise_first([None, 7])


def test_the_notes_of_an_error_are_on_the_screen(capsys):
    error = ProcessDied("the trainer has ended", remedy="Look at its log.")
    add_notes(error, [OSError("the engine [red] went on")], "nor could an engine be paused")
    console.fail(error)
    said = capsys.readouterr().err
    lines = ("the trainer has ended", "Look at its log.", "nor could an engine be paused: OSError: the engine [red]")
    first, remedy, note = (said.index(line) for line in lines)
    assert first < remedy < note


class Stuck(Environment):
    def __init__(self, why: str) -> None:
        self.why = why

    def tasks(self, split):
        return []

    async def close(self) -> None:
        raise OSError(self.why)


async def test_what_does_not_close_after_an_evaluation_is_named_each():
    engine = ToyEngine(ToyEngineOptions(), CONTEXT)
    parts = EvaluationParts({"a": Stuck("the tool hangs"), "b": Stuck("the disk is full")}, [], engine, [])
    with pytest.raises(OSError, match="the tool hangs") as raised:
        await parts.close()
    assert raised.value.__notes__ == ["and: OSError: the disk is full"]


class Deaf(ToyEngine):
    async def pause(self) -> None:
        raise ProcessDied("the engine has gone")


async def test_an_engine_that_a_bridge_cannot_pause_is_named_beside_what_went_wrong(tmp_path):
    from atropos_bridge_checkpoint.bridge import CheckpointBridge
    from atropos_bridge_checkpoint.config import CheckpointBridgeOptions

    bridge = CheckpointBridge(CheckpointBridgeOptions(), RunContext(directory=tmp_path, model=TOY_MODEL))
    await bridge.connect(LocalEndpoint(object()), [Deaf(ToyEngineOptions(), CONTEXT)])
    with pytest.raises(ZeroDivisionError) as raised:
        async with bridge.writing(1):
            raise ZeroDivisionError
    assert raised.value.__notes__ == ["nor could an engine be paused: ProcessDied: the engine has gone"]
