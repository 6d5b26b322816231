"""The hub on its journal: what was acknowledged is there after a restart, what is settled is gone for good, and the
disk stays bounded."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from atropos_core.errors import LeaseLost, StoreFull
from atropos_core.hub.hub import Hub
from atropos_core.hub.ledger import KEYS
from atropos_core.hub.records import BatchSize, GroupRecord, Label, Limits
from atropos_core.hub.session import Session
from atropos_trajectory_api.journal.log import Sync
from atropos_trajectory_api.journal.store import JournalStore
from atropos_trajectory_api.legacy.pieces import Piece, Pieces
from tests.disks import mounted
from tests.unit.hubs import Clock, ids, payloads, settle
from tests.waiting import wait_until

ROOM = 100_000_000
ONE, TWO = BatchSize(groups=1), BatchSize(groups=2)


@contextmanager
def served(
    directory: Path, *, size_bytes: int = ROOM, segment_bytes: int = 1 << 20, sync: Sync = "never", **more: Any
) -> Iterator[tuple[Hub[bytes], JournalStore]]:
    """A hub on a journal. Its end leaves on the disk what a killed process leaves: nothing is written at the close."""
    store = JournalStore(directory, sync=sync, segment_bytes=segment_bytes)
    dropped: list[tuple[GroupRecord[bytes], str]] = more.pop("dropped", [])
    values: dict[str, Any] = {"max_staleness": None, **more}
    try:
        yield Hub(Limits(size_bytes), on_dropped=lambda *one: dropped.append(one), store=store, **values), store
    finally:
        store.close()


def on_disk(directory: Path) -> int:
    """Bytes of the journal's files. One that another thread deletes meanwhile counts nothing."""
    size = 0
    for path in directory.glob("*.journal"):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def put(hub: Hub[bytes], payload: bytes, key: str | None = None, **label: Any) -> int:
    number = hub.try_put(payload, Label("words", 1, len(payload), **label), key=key)
    assert number is not None
    return number


def lease(session: Session[bytes], n: int, version: int = 0) -> list[GroupRecord[bytes]]:
    entries = session.try_lease(BatchSize(groups=n), version)
    assert entries is not None
    return entries


def test_everything_that_was_acknowledged_is_there_again_with_its_label_and_its_key(tmp_path):
    label = Label("ünïcode", 3, 5, oldest_version=-2, draw=1 << 40, task="täsk")
    with served(tmp_path) as (hub, _):
        assert hub.try_put(b"hello", label, key="k") == 0
        assert put(hub, b"", task="plain") == 1
    with served(tmp_path) as (hub, _):
        assert list(hub.labels()) == [(0, label), (1, Label("words", 1, 0, task="plain"))]
        assert hub.try_put(b"again", label, key="k") == 0, "the producer's retry after the server's death"
        assert payloads(lease(hub.open("t"), 2)) == [b"hello", b""]
        assert put(hub, b"third") == 2


def test_what_is_inside_a_checkpoint_is_never_served_again(tmp_path):
    with served(tmp_path) as (hub, _):
        for number in range(4):
            put(hub, b"%d" % number)
        session = hub.open("t")
        leased = ids(lease(session, 3))
        session.trained(leased)
        session.commit(leased[1:])
    with served(tmp_path) as (hub, _):
        assert hub.status().committed == 2
        assert payloads(lease(hub.open("t"), 2)) == [b"0", b"3"]


def test_a_trainer_that_lived_through_the_servers_death_goes_on_with_what_it_leased(tmp_path):
    clock = Clock()
    with served(tmp_path, clock=clock, lease_s=10.0) as (hub, _):
        for number in range(5):
            put(hub, b"%d" % number)
        session = hub.open("t")
        leased = ids(lease(session, 4))
        session.trained(leased[:2])
        session.give_back(leased[3:])
    with served(tmp_path, clock=clock, lease_s=10.0) as (hub, _):
        session = hub.session(1)
        assert session.holder == "t"
        assert session.holds == {0: "trained", 1: "trained", 2: "leased"}
        assert payloads(lease(session, 2)) == [b"3", b"4"]
        assert session.commit(leased[:3]) == 3
        clock.now += 10.1
    with served(tmp_path, clock=clock, lease_s=10.0) as (hub, _):
        assert hub.session(1).holds == {3: "leased", 4: "leased"}, "the time of the restart does not count against it"
        clock.now += 10.1
        with pytest.raises(LeaseLost):
            hub.session(1)
    with served(tmp_path, clock=clock, lease_s=10.0) as (hub, _):
        assert hub.current is None
        assert len(hub) == 2
        assert hub.open("t").number == 2, "a number is never given twice"


def test_who_holds_what_is_the_same_after_a_death_at_any_step(tmp_path):
    """Each line is one record more in the journal, and what must be there when it is the last."""
    with served(tmp_path) as (hub, _):
        for number in range(6):
            put(hub, b"%d" % number)
        hub.open("t")
    steps: list[tuple[Callable[[Session[bytes]], object], dict[int, str]]] = [
        (lambda one: lease(one, 4), {0: "leased", 1: "leased", 2: "leased", 3: "leased"}),
        (lambda one: one.trained([1, 2]), {0: "leased", 1: "trained", 2: "trained", 3: "leased"}),
        (lambda one: one.give_back([0]), {1: "trained", 2: "trained", 3: "leased"}),
        (lambda one: lease(one, 2), {0: "leased", 1: "trained", 2: "trained", 3: "leased", 4: "leased"}),
        (lambda one: one.commit([2, 3]), {0: "leased", 1: "trained", 4: "leased"}),
        (lambda one: one.give_back([4, 0]), {1: "trained"}),
        (lambda one: lease(one, 1), {0: "leased", 1: "trained"}),
        (lambda one: one.trained([0]), {0: "trained", 1: "trained"}),
    ]
    for step, held in steps:
        with served(tmp_path) as (hub, _):
            step(hub.session(1))
        with served(tmp_path) as (hub, _):
            assert hub.session(1).holds == held
    with served(tmp_path) as (hub, _):
        hub.open("t")
    with served(tmp_path) as (hub, _):
        assert hub.session(2).holds == {}, "what the session before had leased waits again"
        assert payloads(lease(hub.session(2), 4)) == [b"0", b"1", b"4", b"5"]


def test_a_group_that_goes_back_is_read_from_the_journal(tmp_path):
    with served(tmp_path) as (hub, _):
        put(hub, b"payload")
        session = hub.open("t")
        session.give_back(ids(lease(session, 1)))
        assert payloads(lease(session, 1)) == [b"payload"]


def test_stale_groups_are_settled_on_the_disk_as_well(tmp_path):
    dropped: list[tuple[GroupRecord[bytes], str]] = []
    with served(tmp_path, max_staleness=0) as (hub, _):
        put(hub, b"old", oldest_version=0)
    with served(tmp_path, max_staleness=0, dropped=dropped) as (hub, _):
        assert hub.open("t").try_lease(ONE, 1) is None
        assert [(entry.payload, cause) for entry, cause in dropped] == [(b"old", "stale")]
    with served(tmp_path, max_staleness=0) as (hub, _):
        assert len(hub) == 0


def test_a_group_that_the_disk_has_damaged_is_dropped_aloud_and_the_others_are_served(tmp_path, capsys):
    dropped: list[tuple[GroupRecord[bytes], str]] = []
    with served(tmp_path) as (hub, _):
        for number in range(3):
            put(hub, b"payload-%d" % number)
    with served(tmp_path, dropped=dropped) as (hub, _):
        [path] = tmp_path.glob("*.journal")
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(b"payload-1"))
            file.write(b"!")
        assert payloads(lease(hub.open("t"), 2)) == [b"payload-0", b"payload-2"]
        assert [(entry.id, entry.payload, cause) for entry, cause in dropped] == [(1, None, "damaged")]
        assert hub.status().dropped == {"damaged": 1}
        assert "is damaged" in capsys.readouterr().err


def test_what_the_owner_saved_is_there_again(tmp_path):
    with served(tmp_path) as (_, store):
        assert store.meta == {}
        store.save_meta({"old": {"step": 3}})
    with served(tmp_path, segment_bytes=1) as (hub, store):
        assert store.meta == {"old": {"step": 3}}
        put(hub, b"a new segment")
    with served(tmp_path) as (_, store):
        assert store.meta == {"old": {"step": 3}}


def test_a_kill_between_a_new_segment_and_its_summary_forgets_nothing(tmp_path):
    with served(tmp_path, segment_bytes=2000) as (hub, store):
        hub.open("t")
        store.save_meta({"of": "the owner"})
        while not store._journal.is_due:
            put(hub, b"x" * 300)
        store._journal.roll()
        number = len(hub)
    with served(tmp_path, segment_bytes=2000) as (hub, store):
        session = hub.session(1)
        session.commit(ids(lease(session, number)))
        assert len(store._journal.segments) == 1, "the segments before went with their groups"
    with served(tmp_path, segment_bytes=2000) as (hub, store):
        assert store.meta == {"of": "the owner"}
        assert hub.session(1).holder == "t"
        assert hub.status().committed == number
        assert put(hub, b"next") == number, "an id is never given twice"


def test_a_new_segment_without_room_for_its_summary_is_given_up(tmp_path, capsys):
    with served(tmp_path, segment_bytes=2000) as (hub, store):
        session = hub.open("t")
        while not store._journal.is_due:
            put(hub, b"x" * 300)
        before, number = resource.getrlimit(resource.RLIMIT_FSIZE), len(hub)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))  # a segment's head, and no more
        try:
            with pytest.raises(StoreFull, match="File too large"):
                put(hub, b"more")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(store._journal.segments) == 1
        session.commit(ids(lease(session, number)))
    with served(tmp_path, segment_bytes=2000) as (hub, _):
        assert hub.status().committed == number
        assert put(hub, b"next") == number


# -- room


def test_the_disk_stays_below_twice_what_is_live_and_two_segments(tmp_path):
    """Some groups are never trained: they are copied out of the segments in which they would hold everything."""
    segment_bytes, payload = 50_000, os.urandom(1000)
    with served(tmp_path, segment_bytes=segment_bytes) as (hub, store):
        hub.share("words")
        session = hub.open("t")
        for round in range(400):
            for number in range(5):
                put(hub, payload + b"%d" % (5 * round + number), key=f"{5 * round + number}")
            leased = ids(lease(session, 5))
            if round % 40 == 0:
                continue  # leased to the end
            session.trained(leased)
            session.commit(leased)
            assert store.size_bytes <= 2 * store.live_bytes + 2 * segment_bytes + 24 * 5 * round
        assert on_disk(tmp_path) == store.size_bytes
        assert store.size_bytes < 400_000, "of more than 2,000,000 that were written"
        kept = sorted(session.holds)
        assert len(kept) == 50
    with served(tmp_path) as (hub, _):
        assert sorted(hub.session(1).holds) == kept, "a copied group keeps its holder"
        assert all(hub.knows(str(number)) for number in range(2000)), "nor a key"
        assert not hub.knows("2000")
        assert payloads(lease(hub.open("t"), 50)) == [payload + b"%d" % number for number in kept]


def test_keys_are_remembered_for_the_last_hundred_thousand_groups_across_a_restart(tmp_path):
    with served(tmp_path, segment_bytes=4 << 20) as (hub, store):
        session = hub.open("t")
        for number in range(KEYS + 500):
            put(hub, b"x", key=str(number))
            if len(hub) == 1000:
                session.commit(ids(lease(session, 1000)))
        assert not hub.knows("499")
        assert hub.knows("500")
        assert store.size_bytes < 15_000_000
    with served(tmp_path) as (hub, _):
        assert not hub.knows("499")
        assert hub.knows("500")
        assert put(hub, b"again", key="500") == 500


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as where:
        yield where


def test_a_full_disk_refuses_the_group_by_name_loses_none_and_goes_on_once_there_is_room(small_disk, capsys):
    sizes = {"segment_bytes": 100_000}
    payload = os.urandom(9_000)
    with served(small_disk / "journal", **sizes) as (hub, _):
        taken = []
        with pytest.raises(StoreFull, match=r"the journal in .* cannot be written: No space left on device") as caught:
            while True:
                taken.append(put(hub, payload + b"%d" % len(taken), key=str(len(taken))))
        assert "Free space on that disk" in str(caught.value)
        assert len(taken) > 50
        assert len(hub) == len(taken)
        with pytest.raises(StoreFull):
            put(hub, payload)
        session = hub.open("t")
        first = ids(lease(session, 15))
        session.trained(first)
        assert session.commit(first) == 15, "what frees room can be written on a full disk"
        said = capsys.readouterr().err
        assert said.count("from now on groups are refused: the journal in") == 1
        more = put(hub, payload + b"more")
        assert capsys.readouterr().err.count("has space again: groups are accepted") == 1
    with served(small_disk / "journal", **sizes) as (hub, _):
        assert capsys.readouterr().err == "", "nothing was torn"
        left = payloads(lease(hub.open("t"), len(hub)))
        assert left == [*(payload + b"%d" % number for number in taken[15:]), payload + b"more"]
        assert more == taken[-1] + 1


def test_pieces_of_groups_leave_the_room_that_the_reserve_gave_to_what_frees_more(small_disk: Path):
    with served(small_disk / "journal") as (hub, store):
        pieces = Pieces(small_disk / "pieces", may_write=store.has_reserve)
        pieces.add(0, Piece("first", b"f" * 100, 1, ""))
        for _ in range(400):
            put(hub, b"x" * 1000)
        (small_disk / "ballast").write_bytes(b"")
        with pytest.raises(OSError, match="No space"):
            (small_disk / "ballast").write_bytes(b"x" * 2_000_000)
        session = hub.open("t")
        for _ in range(400):  # they pass a page of the disk: from then on they are on the reserve
            lease(session, 1)
            with pytest.raises(StoreFull, match="No space left on device"):
                for number in range(200):
                    pieces.add(0, Piece(str(number), b"p" * 4000, 1, ""))
        os.remove(small_disk / "ballast")
        pieces.add(0, Piece("later", b"p" * 4000, 1, ""))


async def test_a_disk_that_fills_up_while_a_put_waits_refuses_it_alone(small_disk):
    with served(small_disk / "journal", size_bytes=20_000) as (hub, _):
        put(hub, b"x" * 15_000)
        waiting = asyncio.ensure_future(hub.put(b"w" * 15_000, Label("words", 1, 15_000), deadline_s=60))
        await settle()
        assert not waiting.done()
        (small_disk / "ballast").write_bytes(b"")
        with pytest.raises(OSError, match="No space"):
            (small_disk / "ballast").write_bytes(b"x" * 2_000_000)
        session = hub.open("t")
        assert session.commit(ids(lease(session, 1))) == 1
        with pytest.raises(StoreFull):
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(StoreFull):
            put(hub, b"y" * 15_000)
        os.remove(small_disk / "ballast")
        put(hub, b"z" * 15_000)
    with served(small_disk / "journal") as (hub, _):
        assert payloads(lease(hub.open("t"), 1)) == [b"z" * 15_000]


@pytest.mark.parametrize("sync", ["never", "second", "always"])
def test_a_journal_that_filled_its_disk_gives_the_room_back_once_next_to_nothing_is_live(small_disk, capsys, sync):
    """All of it is one segment, which is written to: there is no older one to be dropped."""
    payload, sizes = os.urandom(9_000), {"segment_bytes": 64 << 20, "sync": sync}
    with served(small_disk / "journal", **sizes) as (hub, _):
        session = hub.open("t")
        for round in range(4):
            kept = put(hub, b"small and live", key=f"kept {round}")
            with pytest.raises(StoreFull):
                while True:
                    put(hub, payload, key=f"{round} {len(hub)}")
            leased = ids(lease(session, len(hub)))
            assert len(leased) > 60, "the whole disk is used in every round"
            session.commit([one for one in leased if one != kept])
        assert hub.knows("0 1"), "keys outlive the segments in which they came"
        assert len(list((small_disk / "journal").glob("*.journal"))) <= 2
    with served(small_disk / "journal", **sizes) as (hub, _):
        assert hub.knows("0 1")
        assert payloads(_records_left(hub)) == [b"small and live"] * 4
        assert "damaged" not in capsys.readouterr().err


def _records_left(hub: Hub[bytes]) -> list[GroupRecord[bytes]]:
    session = hub.open("another")
    return lease(session, len(hub))


def test_a_disk_that_has_room_again_is_noticed_though_nobody_sends(small_disk, capsys):
    with served(small_disk / "journal") as (hub, store):
        with pytest.raises(OSError, match="No space"):
            (small_disk / "ballast").write_bytes(b"x" * 2_000_000)
        with pytest.raises(StoreFull):
            put(hub, b"y" * 15_000)
        store.tick()
        assert store.full is not None
        assert "No space left on device" in store.full
        os.remove(small_disk / "ballast")
        store.tick()
        assert store.full is None
        assert "has space again" in capsys.readouterr().err


def test_small_groups_do_not_eat_what_is_kept_for_the_records_that_free_room(small_disk):
    with served(small_disk / "journal", segment_bytes=64 << 20) as (hub, _):
        session = hub.open("t")

        def fill() -> None:
            for size in (9_000, 300, 0):
                with pytest.raises(StoreFull):
                    while True:
                        put(hub, b"x" * size)

        fill()
        for _ in range(10):
            session.give_back(ids(lease(session, len(hub))))  # written on the reserve
        fill()
        leased = ids(lease(session, len(hub)))
        assert session.commit(leased) == len(leased)
        put(hub, b"x" * 9_000)


@pytest.mark.parametrize("sync", ["second", "always"])
def test_what_is_dropped_is_deleted_once_the_disk_has_the_rest_and_no_caller_waits_for_it(tmp_path, sync):
    with served(tmp_path, segment_bytes=50_000, sync=sync) as (hub, store):
        session = hub.open("t")
        for _ in range(100):
            put(hub, b"x" * 5_000)
            session.commit(ids(lease(session, 1)))
        wait_until(lambda: on_disk(tmp_path) == store.size_bytes, "what the store counts is what is on the disk")
        assert store.size_bytes < 120_000
    assert len(list(tmp_path.glob("*.journal"))) <= 2
