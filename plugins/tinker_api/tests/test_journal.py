"""The journal of a model: what was acknowledged is there after any kill, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from atropos_core.errors import RunDirectoryError, StoreFull
from atropos_core.stepwise import AdapterSettings
from atropos_tinker_api.refused import Refused
from atropos_tinker_api.state import model as model_module
from atropos_tinker_api.state.journal import Journal, Kind
from atropos_tinker_api.state.model import Model, ModelRecord

RECORD = ModelRecord("0" * 16 + ":train:0", "0" * 16, "base", AdapterSettings(2, 32.0, 1), 0.0)


def bodies(journal: Journal) -> list[tuple[Kind, int, bytes]]:
    return [(entry.kind, entry.seq, journal.body(entry)) for entry in journal.entries]


def test_records_are_there_when_it_is_opened_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    written = [(Kind.CREATE, 0, b"{}"), (Kind.FORWARD_BACKWARD, 2, b"x" * 5000), (Kind.DONE_JSON, 0, b"")]
    for record in written:
        journal.append(*record)
    journal.close()
    assert bodies(Journal(tmp_path / "journal")) == written


def test_a_file_that_was_cut_anywhere_has_the_whole_records_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    sizes = [journal.size_bytes]
    for seq in range(4):
        journal.append(Kind.OPTIM_STEP, seq, b"body" * seq)
        sizes.append(journal.size_bytes)
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = Journal(path)
        records = sum(size <= cut for size in sizes[1:])
        assert [entry.seq for entry in again.entries] == list(range(records)), cut
        again.append(Kind.OPTIM_STEP, 9, b"after")
        again.close()
        assert bodies(Journal(path))[-1] == (Kind.OPTIM_STEP, 9, b"after")


def test_a_damaged_record_ends_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for seq in range(3):
        last = journal.append(Kind.OPTIM_STEP, seq, b"body")
    journal.close()
    data = bytearray(path.read_bytes())
    data[last.offset] ^= 1
    path.write_bytes(data)
    assert [entry.seq for entry in Journal(path).entries] == [0, 1]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a letter to a friend")
    with pytest.raises(RunDirectoryError, match="is not a journal"):
        Journal(tmp_path / "journal")
    assert (tmp_path / "journal").read_text() == "a letter to a friend"


def test_a_full_disk_refuses_the_record_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(Kind.CREATE, 0, b"{}")
    written = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        if len(data) > 100:
            return written(file, data[:50], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreFull, match="No space left"):
        journal.append(Kind.FORWARD_BACKWARD, 1, b"x" * 200)
    monkeypatch.undo()
    journal.append(Kind.OPTIM_STEP, 2, b"{}")
    journal.close()
    assert [entry.seq for entry in Journal(tmp_path / "journal").entries] == [0, 2]


def test_a_model_continues_with_the_first_request_that_has_no_result(tmp_path: Path) -> None:
    model = Model.create(RECORD, tmp_path)
    model.finish(Kind.DONE_JSON, b"{}")
    for seq in (3, 1, 2):
        model.accept(Kind.OPTIM_STEP, seq, b"%d" % seq)
    assert model.is_ready and model.next_seq == 1
    model.finish(Kind.FAILED, b"no")
    model.close()
    again = Model.open(tmp_path / RECORD.id.replace(":", "-"))
    assert (again.next_seq, sorted(again.pending)) == (2, [2, 3])
    assert again.record == RECORD
    assert asyncio.run(again.result(1, 0.0)) == (Kind.FAILED, b"no")
    assert asyncio.run(again.result(2, 0.0)) is None
    with pytest.raises(Refused, match="no request 9"):
        asyncio.run(again.result(9, 0.0))


def test_a_long_journal_loses_what_no_restart_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "JOURNAL_BYTES", 2000)
    model = Model.create(RECORD, tmp_path)
    model.finish(Kind.DONE_JSON, b"{}")
    for seq in range(1, 31):
        model.accept(Kind.FORWARD_BACKWARD, seq, b"x" * 100)
        model.finish(Kind.DONE_PROTOBUF, b"%d" % seq)
    model.accept(Kind.OPTIM_STEP, 31, b"waits")
    before = model.journal.size_bytes
    model.shorten()
    assert model.journal.size_bytes == before  # no state is saved
    model.state_directory(28).mkdir()
    model.shorten()
    assert model.journal.size_bytes < before / 2
    model.close()
    again = Model.open(model.directory)
    assert (again.next_seq, list(again.pending)) == (31, [31])
    assert [seq for seq, *_ in again.carried_out_since(28)] == [29, 30]
    assert asyncio.run(again.result(30, 0.0)) == (Kind.DONE_PROTOBUF, b"30")
    again.accept(Kind.FORWARD_BACKWARD, 5, b"sent again, long ago")
    assert again.next_seq == 31 and list(again.pending) == [31]
