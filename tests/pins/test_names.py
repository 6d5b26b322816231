"""What plugins rely on, and what travels by name, is as it is recorded."""

from __future__ import annotations

import difflib

import pytest

from atropos_core import codec
from atropos_core.errors import DataError
from tests.pins import names, wire


def changes(recorded: list[str], now: list[str]) -> str:
    return "\n".join(line for line in difflib.unified_diff(recorded, now, "recorded", "now", lineterm="", n=0))


def test_plugins_take_the_same_names_with_the_same_signatures_from_core():
    assert not (changed := changes(names.RECORDED.read_text().splitlines(), names.lines())), (
        f"if that is meant: python -m tests.pins.names\n{changed}"
    )


def test_a_changed_default_a_moved_module_and_a_new_parameter_are_seen(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "from atropos_core import errors\nfrom atropos_core.processes.rpc import Reply\nerrors.DataError()"
    )
    assert sorted(names.taken(tmp_path / "plugin.py")) == [
        ("atropos_core.errors", "DataError"),
        ("atropos_core.processes.rpc", "Reply"),
    ]

    def one(a: int, *, b: float = 1.0) -> None: ...
    def other(a: int, *, b: float = 2.0) -> None: ...

    assert names.described(one) == "(a: 'int', *, b: 'float' = 1.0) -> 'None'"
    assert names.described(one) != names.described(other)


def test_records_and_errors_have_the_names_and_fields_that_other_processes_know():
    recorded, now = wire.RECORDED.read_text().splitlines(), wire.lines()
    assert not (gone := wire.broken(recorded, now)), f"codec.MAGIC must change with these: {gone}"
    assert recorded == now, f"python -m tests.pins.wire\n{changes(recorded, now)}"


def test_a_renamed_record_or_error_is_broken_unless_the_magic_changes():
    before = wire.lines()
    renamed = [line.replace("record Rollout", "record Trace").replace("error HubFull", "error Full") for line in before]
    assert [line.split(":")[0] for line in wire.broken(before, renamed)] == ["error HubFull", "record Rollout"]
    assert not wire.broken(before, ["magic ATR2", *renamed[1:]])
    assert not wire.broken(before, [*before, "error Another"]), "what is new, an older end need not know"


def test_a_frame_of_another_version_is_refused_in_so_many_words():
    frame = codec.encode_bytes([1])
    with pytest.raises(DataError, match="not a frame of this program: it begins with b'ATR0'"):
        codec.decode(b"ATR0" + frame[4:])
