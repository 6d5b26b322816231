"""The table: read back by csv and pandas, cut back, and whole at every moment."""

from __future__ import annotations

import csv
import math
import random

import pandas
import pytest
from pydantic import ValidationError

from atropos_core.errors import RunDirectoryError
from atropos_sinks.config import CsvOptions
from atropos_sinks.csv_sink import CsvSink
from tests import sinks
from tests.unit.disk import watch_disk


async def recorded(folder, steps, state=None):
    return await sinks.recorded(CsvSink(CsvOptions(), folder), steps, state)


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


async def test_numbers_come_back_to_the_last_bit(tmp_path):
    rng = random.Random(0)
    values = {f"m/{n}": rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300) for n in range(200)}
    values |= {"nan": math.nan, "inf": math.inf, 'odd, "name"\nof two lines\u2028': 1.0}
    await recorded(tmp_path, {0: values})
    [row] = rows(tmp_path)
    assert row.pop("step") == "0"
    assert math.isnan(float(row.pop("nan"))) and math.isnan(values.pop("nan"))
    assert {name: float(value) for name, value in row.items()} == values


async def test_a_late_column_stands_on_the_right_and_is_empty_before(tmp_path):
    await recorded(tmp_path, {0: {"a": 1.0}, 1: {"b": 2.0, "a": 3.0}, 2: {"c": 4.0}})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,a,b,c", "0,1.0,,", "1,3.0,2.0,", "2,,,4.0"]
    table = pandas.read_csv(tmp_path / "metrics.csv", index_col="step")
    assert table["a"].dropna().to_dict() == {0: 1.0, 1: 3.0}
    assert table["c"].dropna().to_dict() == {2: 4.0}


async def test_a_resumed_table_is_cut_back_to_the_checkpoint(tmp_path):
    steps = {step: {"a": float(step)} for step in range(10)}
    state = await recorded(tmp_path, {step: steps[step] for step in range(5)})
    await recorded(tmp_path, {5: {"a": -1.0, "of the dead run": 1.0}, 6: {"a": -1.0}}, state)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1")  # the beginning of step 15's row
    await recorded(tmp_path, {step: steps[step] for step in range(5, 10)}, state)
    assert [(row["step"], row["a"]) for row in rows(tmp_path)] == [(str(step), str(float(step))) for step in range(10)]


async def test_a_row_that_was_cut_off_is_no_row_even_if_its_columns_are_there(tmp_path, capsys):
    state = await recorded(tmp_path, {0: {"a": 0.25}, 1: {"a": 0.125}})
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().rstrip()[:-2], newline="")
    await recorded(tmp_path, {2: {"a": 3.0}}, state)
    assert [(row["step"], row["a"]) for row in rows(tmp_path)] == [("0", "0.25"), ("2", "3.0")]
    assert "rows are gone" in " ".join(capsys.readouterr().err.split())


async def test_a_new_run_begins_a_new_table_and_a_second_state_goes_on(tmp_path):
    await recorded(tmp_path, {0: {"a": 1.0}, 1: {"a": 1.0}})
    state = await recorded(tmp_path, {0: {"b": 2.0}})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,b", "0,2.0"]
    assert state == {"step": 0}


async def test_a_table_that_is_gone_is_missed_aloud(tmp_path, capsys):
    state = await recorded(tmp_path, {0: {"a": 1.0}, 1: {"a": 1.0}})
    (tmp_path / "metrics.csv").unlink()
    await recorded(tmp_path, {2: {"a": 3.0}}, state)
    assert [row["step"] for row in rows(tmp_path)] == ["2"]
    assert "rows are gone" in " ".join(capsys.readouterr().err.split())


async def test_somebody_else_s_file_is_left_alone(tmp_path):
    (tmp_path / "metrics.csv").write_text("name,value\nx,1\n")
    with pytest.raises(RunDirectoryError, match=r"is not a table of this sink: its first column is 'name'"):
        await recorded(tmp_path, {1: {"a": 1.0}}, {"step": 0})
    assert (tmp_path / "metrics.csv").read_text() == "name,value\nx,1\n"


def without_room():
    return open("/dev/full", "w")


async def test_a_full_disk_is_one_error_that_says_so(tmp_path):
    sink = CsvSink(CsvOptions(), tmp_path)
    await sink.open()
    await sink.step(0, {"a": 1.0}, [])
    sink._file.close()
    sink._file = without_room()
    with pytest.raises(
        RunDirectoryError, match=r"metrics.csv cannot be written: the disk is full(.|\n)*atropos resume"
    ):
        await sink.step(1, {"a": 1.0}, [])
    with pytest.raises(RunDirectoryError):
        await sink.close()
    await sink.close()
    assert [row["step"] for row in rows(tmp_path)] == ["0"]


async def test_memory_does_not_grow_with_the_table(tmp_path):
    import tracemalloc

    sink = CsvSink(CsvOptions(), tmp_path)
    await sink.open()
    for step in range(40_000):
        await sink.step(step, {"a": step / 7, "b": step / 3}, [])
    assert (tmp_path / "metrics.csv").stat().st_size > 1_500_000
    tracemalloc.start()
    await sink.step(40_000, {"late": 1.0}, [])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await sink.close()
    assert peak < 400_000
    assert len(rows(tmp_path)) == 40_001


@pytest.mark.parametrize("name", ["", "a/b.csv", "..", "/tmp/x.csv"])
def test_the_file_is_in_the_run_directory(name):
    with pytest.raises(ValidationError, match="is not a file name"):
        CsvOptions(file=name)


async def test_at_a_checkpoint_every_row_is_on_the_disk(tmp_path, monkeypatch):
    sink = CsvSink(CsvOptions(), tmp_path)
    await sink.open()
    calls = watch_disk(monkeypatch)
    for step in range(3):
        await sink.step(step, {"a": float(step)}, [])
    sink.state()
    assert calls[-1] == ("sync", tmp_path / "metrics.csv", (tmp_path / "metrics.csv").stat().st_size)
    await sink.close()
