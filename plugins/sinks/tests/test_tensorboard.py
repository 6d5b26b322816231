"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atropos_core.errors import RunDirectoryError
from atropos_sinks.config import TensorboardOptions
from atropos_sinks.tensorboard_sink import TensorboardSink
from tests import sinks


async def opened(folder, state=None, **options):
    return await sinks.opened(TensorboardSink(TensorboardOptions(**options), folder), state)


def scalars(folder):
    """{tag: {step: value}}; a step that is there twice is an error."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        found[tag] = {event.step: event.value for event in events}
        assert len(found[tag]) == len(events), f"{tag} has a step twice: {events}"
    return found


async def test_what_was_recorded_is_read_back_by_tensorboard(tmp_path):
    sink = await opened(tmp_path)
    await sink.step(0, {"eval/accuracy": 0.25}, [])
    await sink.step(1, {"reward/mean": 0.5, "loss": -3.0, "odd": math.nan}, [])
    await sink.close()
    await sink.close()
    found = scalars(tmp_path / "tensorboard")
    assert math.isnan(found.pop("odd")[1])
    assert found == {"eval/accuracy": {0: 0.25}, "reward/mean": {1: 0.5}, "loss": {1: -3.0}}


async def test_what_is_flushed_is_seen_while_the_run_goes_on(tmp_path):
    sink = await opened(tmp_path, flush_s=0)
    await sink.step(1, {"loss": 1.0}, [])
    assert scalars(tmp_path / "tensorboard") == {"loss": {1: 1.0}}
    late = await opened(tmp_path / "late", flush_s=3600)
    await late.step(1, {"loss": 1.0}, [])
    assert scalars(tmp_path / "late/tensorboard") == {}
    late.state()
    assert scalars(tmp_path / "late/tensorboard") == {"loss": {1: 1.0}}, "a checkpoint holds what came before it"
    for one in (sink, late):
        await one.close()


async def test_a_resumed_run_has_each_step_once_and_the_values_of_the_resume(tmp_path):
    """Three resumes within one second: the order of the files does not hang on the clock."""
    sink = await opened(tmp_path)
    for step in range(4):
        await sink.step(step, {"loss": float(step)}, [])
    state = sink.state()
    for step in range(4, 7):
        await sink.step(step, {"loss": -1.0, "of the dead run": 1.0}, [])
    await sink.close()
    for number in range(3):
        again = await opened(tmp_path, state)
        for step in range(4, 6):
            await again.step(step, {"loss": 10.0 * number + step}, [])
        await again.close()
    found = scalars(tmp_path / "tensorboard")
    assert found["loss"] == {0: 0, 1: 1, 2: 2, 3: 3, 4: 24, 5: 25}
    assert found.get("of the dead run", {}) == {}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 4, "what earlier runs wrote is not touched"


async def test_a_run_that_died_before_its_first_checkpoint_leaves_nothing_behind(tmp_path):
    sink = await opened(tmp_path)
    await sink.step(0, {"loss": -1.0}, [])
    await sink.step(1, {"loss": -1.0}, [])
    await sink.close()
    again = await opened(tmp_path)
    await again.step(0, {"loss": 5.0}, [])
    await again.close()
    assert scalars(tmp_path / "tensorboard") == {"loss": {0: 5.0}}


async def test_a_half_written_record_ends_a_file_and_not_the_reading(tmp_path):
    sink = await opened(tmp_path)
    await sink.step(0, {"loss": 1.0}, [])
    state = sink.state()
    await sink.step(1, {"loss": 2.0}, [])
    await sink.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    again = await opened(tmp_path, state)
    await again.step(1, {"loss": 3.0}, [])
    await again.close()
    assert scalars(tmp_path / "tensorboard") == {"loss": {0: 1.0, 1: 3.0}}


async def test_an_absolute_directory_is_taken(tmp_path):
    sink = await opened(tmp_path / "run", directory=tmp_path / "elsewhere")
    await sink.close()
    assert list((tmp_path / "elsewhere").iterdir())


def without_room():
    return open("/dev/full", "wb")


async def test_a_full_disk_is_one_error_that_says_so(tmp_path):
    from tensorboard.summary.writer.record_writer import RecordWriter

    sink = await opened(tmp_path, flush_s=0)
    sink._file.close()
    sink._file = without_room()
    sink._records = RecordWriter(sink._file)
    with pytest.raises(RunDirectoryError, match="cannot be written: the disk is full"):
        await sink.step(1, {"a": 1.0}, [])
    with pytest.raises(RunDirectoryError):
        await sink.close()
    await sink.close()


async def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        await opened(tmp_path)


def test_neither_torch_nor_tensorflow_is_imported(tmp_path):
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from atropos_sinks.config import TensorboardOptions\n"
        "from atropos_sinks.tensorboard_sink import TensorboardSink\n"
        "async def main(folder):\n"
        "    sink = TensorboardSink(TensorboardOptions(), folder)\n"
        "    await sink.open(); await sink.step(0, {'a': 1.0}, []); await sink.close()\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], timeout=60).returncode == 0
