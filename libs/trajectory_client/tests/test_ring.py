"""Messages through shared memory, within one process: order, credits, refusals, limits, and who is let in."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import AccessRefused, DataError, DeadlineExceeded, HubFull, ProcessDied, RemoteError
from atropos_trajectory_client.shm import producer as producer_module
from atropos_trajectory_client.shm.consumer import RingConsumer, SlotLease
from atropos_trajectory_client.shm.listener import RingListener
from atropos_trajectory_client.shm.producer import Ack, RingProducer
from atropos_trajectory_client.shm.segment import LAYOUT, Slots
from atropos_trajectory_client.shm.socket import BELL, RingSocket, hello, short
from tests.conftest import REPOSITORY

Pair = tuple[RingProducer, RingConsumer]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[RingListener]:
    made = RingListener(tmp_path / "rings" / "ring.sock", "nonce", message_bytes=1 << 20)
    yield made
    made.close()


@pytest.fixture
def pair(listener: RingListener) -> Iterator[Callable[..., Pair]]:
    """Both ends of a ring. Either closes at the end of the test."""
    ends: list[Any] = []

    def make(**options: Any) -> Pair:
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(
                RingProducer.connect, listener.path, "nonce", **{"slots": 4, "slot_bytes": 256, **options}
            )
            consumer = listener.accept(10)
            assert consumer is not None
            producer = connecting.result()
        ends.extend((producer, consumer))
        return producer, consumer

    yield make
    for end in ends:
        end.close()


def taken(consumer: RingConsumer, count: int) -> list[SlotLease]:
    leases: list[SlotLease] = []
    until = time.monotonic() + 10
    while len(leases) < count and time.monotonic() < until:
        leases += consumer.take(0.1)
    return leases


def test_messages_arrive_whole_and_in_order_with_their_keys(pair):
    producer, consumer = pair(checksum=True)
    array = np.arange(30, dtype=np.int32)
    producer.send([b"head", memoryview(array).cast("B"), bytearray(b"tail")], key="schlüssel", meta=b"\0meta")
    producer.send([], key="", meta=b"")
    producer.ring()
    first, second = taken(consumer, 2)
    assert first.copy() == b"head" + array.tobytes() + b"tail"
    assert (first.key, first.meta, first.number) == ("schlüssel", b"\0meta", 1)
    assert (second.copy(), second.key, second.meta) == (b"", "", b"")


def test_a_payload_is_aligned_for_any_dtype_and_read_only(pair):
    producer, consumer = pair(slot_bytes=1001)
    for _ in range(3):
        producer.send([np.linspace(0, 1, 100)])
    producer.ring()
    for lease in taken(consumer, 3):
        array = np.frombuffer(lease.payload, np.float64)
        assert array.ctypes.data % 64 == 0 and not array.flags.writeable
        np.testing.assert_array_equal(array, np.linspace(0, 1, 100))


def test_a_leased_slot_is_never_written_and_its_release_is_the_next_one_s_credit(pair):
    producer, consumer = pair(slots=2)
    for letter in (b"a", b"b"):
        producer.send([letter * 256])
    with pytest.raises(DeadlineExceeded, match="no slot became free within 0.05 s"):
        producer.send([b"c"], deadline_s=0.05)
    first, second = taken(consumer, 2)
    assert (first.copy(), second.copy()) == (b"a" * 256, b"b" * 256)
    second.release()  # in any order
    consumer.send_answers()
    producer.send([b"c" * 256], deadline_s=10)
    producer.ring()
    (third,) = taken(consumer, 1)
    assert (first.copy(), third.copy()) == (b"a" * 256, b"c" * 256)


def test_a_lease_is_given_back_once_and_not_read_afterwards(pair):
    producer, consumer = pair()
    producer.send([bytes(16)])
    producer.ring()
    (lease,) = taken(consumer, 1)
    lease.release(7)
    with pytest.raises(ValueError, match="released"):
        lease.copy()
    with pytest.raises(DataError, match="answered twice"):
        lease.release()


def test_a_message_larger_than_a_slot_travels_apart_and_in_its_turn(pair):
    producer, consumer = pair(checksum=True)
    large = os.urandom(200_000)
    for payload in (b"before", large, b"after"):
        producer.send([payload], key="k", meta=b"m")
    producer.ring()
    leases = taken(consumer, 3)
    assert [lease.copy() for lease in leases] == [b"before", large, b"after"]
    assert {(lease.key, lease.meta) for lease in leases} == {("k", b"m")}
    for lease in leases:
        lease.release(lease.number)
    consumer.send_answers()
    producer.flush(10)
    del lease, leases
    assert not maps(200_000), "its memory goes with its lease"


def test_one_large_message_is_on_its_way_at_a_time(pair):
    producer, consumer = pair()
    producer.send([bytes(2000)])
    with pytest.raises(DeadlineExceeded):
        producer.send([bytes(300)], deadline_s=0.05)
    (lease,) = taken(consumer, 1)
    lease.release()
    consumer.send_answers()
    producer.send([bytes(300)], deadline_s=10)


def test_a_message_over_the_consumer_s_limit_is_refused_where_it_is_made(pair):
    producer, _ = pair()
    with pytest.raises(DataError, match=r"1,048,577 bytes is more than the 1,048,576"):
        producer.send([bytes((1 << 20) + 1)])
    assert producer.send([b"small"]) == 1


def test_a_refusal_is_raised_as_what_it_was_and_frees_the_slot(pair):
    producer, consumer = pair(slots=1)
    producer.send([b"a"])
    producer.ring()
    taken(consumer, 1)[0].refuse(HubFull("no room for 60 s", remedy="wait"))
    consumer.send_answers()
    with pytest.raises(HubFull, match="no room") as caught:
        producer.flush(10)
    assert caught.value.remedy == "wait"
    answers: list[Ack] = []
    producer.on_ack = answers.append
    producer.send([b"b"])
    producer.ring()
    with taken(consumer, 1)[0]:
        pass
    consumer.send_answers()
    producer.send([b"c"])
    producer.ring()
    with pytest.raises(ZeroDivisionError), taken(consumer, 1)[0]:
        raise ZeroDivisionError("in the consumer")
    consumer.send_answers(now=True)
    producer.flush(10)
    assert answers[0] == Ack(2, 0) and "ZeroDivisionError: in the consumer" in str(answers[1].error)
    assert isinstance(answers[1].error, RemoteError)


@pytest.mark.parametrize("held_back", [1, 3])
def test_answers_that_were_held_back_go_out_as_soon_as_the_producer_waits_for_them(pair, held_back):
    """The bell that asks for them carries no message."""
    producer, consumer = pair(slots=64)
    for _ in range(held_back):
        producer.send([b"x"])
    producer.ring()
    for lease in taken(consumer, held_back):
        lease.release()
    consumer.take(0.01)
    assert not producer._socket.wait(0.05), "no reader waits for them yet"

    def wait() -> None:
        producer.flush(10)
        producer.close()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert consumer.take(20) == [] and consumer.ended
        waiting.result()
    assert producer.answered == held_back


def test_a_producer_that_leaves_is_seen_after_all_that_it_had_sent_also_with_answers_unread(pair):
    producer, consumer = pair(slots=64)
    for number in range(20):
        producer.send([b"%d" % number])
    producer.ring()
    for lease in taken(consumer, 20):
        lease.release()
    consumer.send_answers()  # unread by the producer: its end then resets the connection
    for number in range(20, 30):
        producer.send([b"%d" % number])
    producer._notify()
    producer.close()
    assert [int(lease.copy()) for lease in taken(consumer, 10)] == list(range(20, 30))
    assert consumer.take(10) == [] and consumer.ended


def test_a_consumer_that_leaves_is_seen_by_every_call_after_the_answers_that_it_gave(pair):
    producer, consumer = pair()
    answers: list[Ack] = []
    producer.on_ack = answers.append
    producer.send([b"a"])
    producer.ring()
    taken(consumer, 1)[0].release(5)
    consumer.send_answers()
    producer.send([b"unread"])
    producer._notify()
    consumer.close()
    with pytest.raises(ProcessDied, match="gone away"):
        producer.flush(10)
    with pytest.raises(ProcessDied):
        producer.send([b"c"])
    assert answers == [Ack(1, 5)]


def test_leases_outlive_both_ends_and_memory_goes_with_the_last(pair):
    producer, consumer = pair(slots=3, slot_bytes=12_288)
    producer.send([b"a" * 5000])
    producer.ring()
    (lease,) = taken(consumer, 1)
    size = 3 * (12_288 + 64)
    producer.close()
    consumer.close()
    assert lease.copy() == b"a" * 5000
    assert len(maps(size)) == 1
    lease.release()
    del lease
    assert not maps(size)


def maps(size: int) -> list[str]:
    """Mappings of a ring's memory in this process, of that size (rounded up to pages)."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:atropos-ring" in line:
            start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            if end - start >= size:
                found.append(line)
    return found


def raw(
    listener: RingListener, fields: dict[str, Any], slots: int = 2, slot_bytes: int = 64
) -> tuple[RingSocket, Slots]:
    """A producer that says what it likes."""
    sock = RingSocket.connect(listener.path)
    segment, descriptor = Slots.create(slots, slot_bytes)
    sock.send(hello({"layout": LAYOUT, "nonce": "nonce", "name": "raw", "slots": slots, "slot_bytes": slot_bytes} | fields),
              [descriptor])  # fmt: skip
    os.close(descriptor)
    return sock, segment


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"nonce": "other"}, AccessRefused, "another server"),
        ({"layout": 9}, DataError, "layout 9"),
        ({"slots": 3}, DataError, "not a sealed segment"),
        ({"slots": -1}, DataError, "not a sealed segment"),
        ({"slots": 1 << 40}, DataError, "a ring may have"),
        ({"slots": "many"}, DataError, "invalid greeting"),
    ],
)
def test_a_producer_that_is_not_what_it_says_is_turned_away(listener, fields, error, words):
    sock, _ = raw(listener, fields)
    with pytest.raises(error, match=words):
        listener.accept(5)
    assert sock.wait(5) and words.encode() in (sock.receive() or (b"",))[0]
    sock.close()


@pytest.mark.parametrize("torn", ["never written", "not committed", "checksum", "no such slot", "unknown"])
def test_a_slot_that_was_never_finished_is_never_delivered(listener, torn):
    sock, slots = raw(listener, {})
    consumer = listener.accept(5)
    assert consumer is not None
    if torn != "never written":
        slots.write(0, 1, [b"whole"], [5], b"", b"", checksum=True)
    if torn == "not committed":
        slots._memory[56:64] = bytes(8)
    if torn == "checksum":
        slots._memory[64:65] = b"W"
    slot = 99 if torn == "no such slot" else 0
    sock.send((b"?" if torn == "unknown" else BELL) + slot.to_bytes(4, "little"))
    with pytest.raises(DataError):
        taken(consumer, 1)
    assert consumer.ended, "a producer that cannot be understood is hung up on"
    sock.close()


def test_another_user_s_process_is_refused_by_the_kernel_s_word():
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    with tempfile.TemporaryDirectory() as folder:
        listener = RingListener(Path(folder) / "rings" / "ring.sock", "nonce")
        for path in (Path(folder), listener.path.parent, listener.path):
            path.chmod(0o777)  # as if the user had made the directory accessible
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10); "
            "s.connect(sys.argv[1]); s.send(b'H{}'); print(s.recv(4000))"
        )
        child = subprocess.Popen(
            ["/usr/bin/env", "python3", "-c", code, str(listener.path)], user=65534, cwd="/", stdout=subprocess.PIPE
        )
        with pytest.raises(AccessRefused, match="user 65534"):
            listener.accept(20)
        assert b"AccessRefused" in child.communicate(timeout=20)[0]
        listener.close()


def test_a_dead_listener_s_socket_is_replaced_a_living_one_s_is_not_and_long_paths_work(tmp_path):
    path = tmp_path / ("d" * 60) / ("e" * 60) / "ring.sock"
    code = "import sys; from pathlib import Path; from atropos_trajectory_client.shm.socket import listen; listen(Path(sys.argv[1]), 1)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=REPOSITORY)
    assert path.exists()
    with pytest.raises(ProcessDied, match="no server listens"):
        RingProducer.connect(path, "nonce")
    listener = RingListener(path, "nonce")
    with pytest.raises(DataError, match="another process listens"):
        RingListener(path, "nonce")
    listener.close()
    assert not path.exists()
    with pytest.raises(ProcessDied, match="no server listens"):
        RingProducer.connect(path, "nonce")


def test_a_listener_that_is_behind_is_not_replaced(tmp_path):
    listener = RingListener(tmp_path / "rings" / "ring.sock", "nonce", rings=1)
    waiting = [RingSocket.connect(listener.path)]
    with pytest.raises(DeadlineExceeded, match="takes no connection now"):
        while len(waiting) < 10:
            waiting.append(RingSocket.connect(listener.path))
    with pytest.raises(DataError, match="another process listens"):
        RingListener(listener.path, "nonce")
    assert listener.path.exists()
    for sock in waiting:
        sock.close()
    listener.close()


def test_whoever_is_refused_hangs_up_also_while_somebody_keeps_the_error(listener: RingListener):
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(RingProducer.connect, listener.path, "another nonce")
        with pytest.raises(AccessRefused):
            listener.accept(20)
        kept = connecting.exception(20)
    assert isinstance(kept, AccessRefused)
    trace, ends = kept.__traceback__, []
    while trace is not None:
        ends += [value for value in trace.tb_frame.f_locals.values() if isinstance(value, RingSocket)]
        trace = trace.tb_next
    assert ends and all(end.fileno() < 0 for end in ends)


def test_a_directory_that_others_may_write_to_is_no_place_for_a_ring(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(AccessRefused, match="chmod 700"):
        RingListener(tmp_path / "open" / "ring.sock", "nonce")


def test_a_listener_that_never_answers_is_a_deadline_not_a_hang(listener):
    with pytest.raises(DeadlineExceeded, match="no answer within 0.1 s"):
        RingProducer.connect(listener.path, "nonce", deadline_s=0.1)


def test_rings_that_come_and_go_leave_no_descriptor_and_no_memory(pair, listener):
    pair()
    descriptors, mappings = len(os.listdir("/proc/self/fd")), ring_mappings()
    for _ in range(20):
        producer, consumer = pair()
        producer.send([bytes(1000)])
        producer.ring()
        taken(consumer, 1)[0].release()
        producer.close()
        consumer.close()
        sock, slots = raw(listener, {"nonce": "wrong"})
        with pytest.raises(AccessRefused):
            listener.accept(5)
        sock.close()
        slots.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert ring_mappings() == mappings


def ring_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:atropos-ring")


# -- asyncio


class Serving:
    """A listener on this loop that answers every message with its number plus a thousand."""

    def __init__(self, listener: RingListener) -> None:
        self.hold = asyncio.Event()
        self.hold.set()
        self.seen: list[bytes] = []
        self.left = asyncio.Event()
        self.task = asyncio.create_task(listener.serve(self.handle))

    async def handle(self, ring: RingConsumer) -> None:
        async for leases in ring.arrivals():
            for lease in leases:
                await self.hold.wait()
                self.seen.append(lease.copy())
                if lease.copy() == b"bad":
                    lease.refuse(HubFull("no room"))
                else:
                    lease.release(lease.number + 1000)
        self.left.set()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def serving(listener: RingListener) -> Any:
    made = Serving(listener)
    yield made
    await made.stop()


async def test_many_puts_share_few_slots_and_each_gets_its_own_answer(listener, serving):
    ring = await RingProducer.open(listener.path, "nonce", slots=3, slot_bytes=64)
    payloads = [b"%d" % number * (1 + 40 * (number % 7 == 0)) for number in range(300)]
    acks = await asyncio.gather(*(ring.put([payload]) for payload in payloads))
    assert [ack.value for ack in acks] == list(range(1001, 1301))
    assert serving.seen == payloads
    assert ring.unanswered == 0
    ring.close()
    await asyncio.wait_for(serving.left.wait(), 10)


async def test_an_asyncio_consumer_answers_a_bell_that_carries_no_message(listener, serving):
    ring = await RingProducer.open(listener.path, "nonce", slots=64, slot_bytes=64)
    ring.send([b"x"])
    ring.ring()
    while not serving.seen:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(ring.flush, 10)
    assert ring.answered == 1
    ring.close()


async def test_a_put_raises_a_refusal_and_one_that_is_given_up_does_not_keep_its_slot(listener, serving):
    ring = await RingProducer.open(listener.path, "nonce", slots=1, slot_bytes=64)
    with pytest.raises(HubFull):
        await ring.put([b"bad"])
    serving.hold.clear()
    with pytest.raises(DeadlineExceeded, match="message 2 was not answered"):
        await ring.put([b"slow"], deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match="no slot became free"):
        await ring.put([b"late"], deadline_s=0.05)
    waiting = asyncio.create_task(ring.put([b"cancelled"]))
    await asyncio.sleep(0.01)
    waiting.cancel()
    serving.hold.set()
    assert (await ring.put([b"next"])).value == 1003
    assert serving.seen == [b"bad", b"slow", b"next"]
    ring.close()


async def test_waiting_puts_end_when_the_consumer_does(listener, serving):
    ring = await RingProducer.open(listener.path, "nonce", slots=1, slot_bytes=64)
    serving.hold.clear()
    puts = [asyncio.create_task(ring.put([b"x"])) for _ in range(3)]
    await asyncio.sleep(0.05)
    await serving.stop()
    ended = await asyncio.wait_for(asyncio.gather(*puts, return_exceptions=True), 10)
    assert [type(error) for error in ended] == [ProcessDied] * 3
    with pytest.raises(ProcessDied):
        await ring.put([b"x"])


async def test_a_consumer_that_is_busy_elsewhere_uses_no_processor_time(listener, serving):
    ring = await RingProducer.open(listener.path, "nonce", slots=8, slot_bytes=64)
    serving.hold.clear()
    puts = [asyncio.create_task(ring.put([b"x"])) for _ in range(8)]
    await asyncio.sleep(0.1)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.25  # half a second of repeated requests
    serving.hold.set()
    await asyncio.gather(*puts)
    ring.close()


class Beside:
    """A consumer in this process, which runs when the loop has a turn for it, and when the producer yields the processor."""

    def __init__(self, consumer: RingConsumer) -> None:
        self.consumer = consumer
        self.turns = self.yields = 0
        self.holds = False
        self.task = asyncio.create_task(self._take_turns())

    def answer(self) -> None:
        if not self.holds:
            for lease in self.consumer.take(0):
                lease.release(lease.number)
            self.consumer.send_answers(now=True)

    async def _take_turns(self) -> None:
        while True:
            self.turns += 1
            self.answer()
            await asyncio.sleep(0)

    def yielded(self) -> None:
        self.yields += 1
        self.answer()


@pytest.mark.parametrize(("turn_s", "turns"), [(60.0, False), (0.0, True)], ids=["seldom", "each time"])
async def test_one_message_after_the_other_is_answered_without_sleep_and_others_have_their_turns(
    pair, monkeypatch, turn_s, turns
):
    monkeypatch.setattr(producer_module, "SPIN_S", 60.0)  # however slow this machine is
    monkeypatch.setattr(producer_module, "TURN_S", turn_s)
    ring, consumer = pair()
    beside = Beside(consumer)
    monkeypatch.setattr(os, "sched_yield", beside.yielded)
    for number in range(1, 102):
        assert (await ring.put([b"x"], deadline_s=10)).value == number
        if number == 1:
            had = beside.turns
    assert beside.yields >= 100, "all but the first, before which nothing was known of the consumer"
    assert (beside.turns - had >= 100) is turns
    with pytest.raises(ProcessDied):
        beside.holds = True
        monkeypatch.setattr(os, "sched_yield", consumer.close)
        await ring.put([b"x"], deadline_s=10)
    beside.task.cancel()


async def test_an_answer_that_is_late_is_waited_for_asleep_and_so_is_the_next(pair, monkeypatch):
    monkeypatch.setattr(producer_module, "SPIN_S", 0.1)
    ring, consumer = pair()
    beside = Beside(consumer)
    monkeypatch.setattr(os, "sched_yield", beside.yielded)
    for _ in range(5):
        await ring.put([b"x"], deadline_s=10)
    beside.task.cancel()
    beside.holds, before = True, time.process_time()
    with pytest.raises(DeadlineExceeded, match="was not answered within 1 s"):
        await ring.put([b"x"], deadline_s=1)
    assert time.process_time() - before < 0.5, "a tenth of a second of it awake"
    beside.holds, beside.yields = False, 0
    beside.answer()
    asyncio.get_running_loop().call_later(0.2, beside.answer)
    await ring.put([b"x"], deadline_s=10)
    assert beside.yields == 0


async def test_a_listener_takes_no_more_rings_than_it_may(tmp_path):
    listener = RingListener(tmp_path / "rings" / "ring.sock", "nonce", rings=1)
    serving = Serving(listener)
    first = await RingProducer.open(listener.path, "nonce", slots=1, slot_bytes=64)
    with pytest.raises(Exception, match="its limit"):
        await RingProducer.open(listener.path, "nonce", slots=1, slot_bytes=64)
    first.close()
    await asyncio.wait_for(serving.left.wait(), 10)
    second = await RingProducer.open(listener.path, "nonce", slots=1, slot_bytes=64)
    assert (await second.put([b"x"])).value == 1001
    second.close()
    await serving.stop()
    listener.close()


@pytest.fixture
async def reported() -> list[tuple[str, BaseException]]:
    """Collect the log of this test's loop."""
    found: list[tuple[str, BaseException]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: found.append((context["message"], context["exception"]))
    )
    return found


@pytest.mark.parametrize("fails", ["at work", "when it is cancelled"])
async def test_a_handler_that_fails_is_reported_once_by_name_and_closes_its_ring_alone(listener, reported, fails):
    async def handle(ring: RingConsumer) -> None:
        try:
            async for leases in ring.arrivals():
                for lease in leases:
                    if lease.copy() == b"fail":
                        raise ValueError("a fault of the handler")
                    lease.release(lease.number)
        except asyncio.CancelledError:
            raise ValueError("a fault at its end") from None

    task = asyncio.create_task(listener.serve(handle))
    healthy = await RingProducer.open(listener.path, "nonce", name="healthy")
    ring = await RingProducer.open(listener.path, "nonce", name="worker seven")
    assert (await ring.put([b"x"])).value == 1
    if fails == "at work":
        with pytest.raises(ProcessDied):
            await ring.put([b"fail"], deadline_s=10)
        assert (await healthy.put([b"x"])).value == 1
    healthy.close()
    await asyncio.sleep(0.05)  # until its handler has ended
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gc.collect()  # only now would asyncio report an error that was not retrieved
    [(message, error)] = reported
    assert message == f"the ring of 'worker seven' (pid {os.getpid()}) is closed: its handler failed"
    assert type(error) is ValueError


async def test_a_listener_without_descriptors_says_so_once_and_takes_rings_when_it_has_some(listener, reported):
    serving = Serving(listener)
    await asyncio.sleep(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early, short(listener.path) as address:
        early.connect(address)  # waits to be taken, and has its descriptor
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = os.dup(0)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))  # none is left
        try:
            await asyncio.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        [(message, error)] = reported
        assert message == f"no ring can be taken at {listener.path} now; it is tried on"
        assert isinstance(error, OSError) and error.errno == errno.EMFILE
    ring = await RingProducer.open(listener.path, "nonce")
    assert (await ring.put([b"x"])).value == 1001
    ring.close()
    await serving.stop()


async def test_a_closed_consumer_wakes_whoever_waits_for_arrivals(listener):
    ended = asyncio.Event()

    async def handle(ring: RingConsumer) -> None:
        asyncio.get_running_loop().call_later(0.05, ring.close)
        async for _ in ring.arrivals():
            pass
        ended.set()

    task = asyncio.create_task(listener.serve(handle))
    ring = await RingProducer.open(listener.path, "nonce")
    await asyncio.wait_for(ended.wait(), 10)
    with pytest.raises(ProcessDied):
        await ring.put([b"x"], deadline_s=10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_watcher_sees_every_message_until_the_producer_has_gone_and_its_answers_arrive(pair):
    producer, consumer = pair(slots=4, slot_bytes=64)
    seen: list[bytes] = []

    def handle(leases: list[SlotLease]) -> None:
        for lease in leases:
            seen.append(lease.copy())
            lease.release(lease.number)

    def send() -> int:
        for number in range(3000):
            producer.send([b"%d" % number * (1 + 40 * (number % 97 == 0))], deadline_s=20)
        producer.flush(20)
        answered = producer.answered
        producer.close()
        return answered

    sending = asyncio.create_task(asyncio.to_thread(send))
    await asyncio.wait_for(consumer.watch(handle), 30)
    assert await sending == 3000
    assert seen == [b"%d" % number * (1 + 40 * (number % 97 == 0)) for number in range(3000)]


async def test_leases_that_a_watcher_keeps_are_answered_when_they_are_released(pair):
    producer, consumer = pair(slots=4, slot_bytes=64)
    kept: list[SlotLease] = []
    watching = asyncio.create_task(consumer.watch(kept.extend))
    producer.send([b"x"])
    producer.ring()
    while not kept:
        await asyncio.sleep(0.001)
    assert not producer.answered
    kept.pop().release()
    await asyncio.to_thread(producer.flush, 10)
    assert producer.answered == 1
    consumer.close()
    await asyncio.wait_for(watching, 10)


async def test_what_a_watchers_handler_raises_ends_the_watching(pair):
    producer, consumer = pair()

    def handle(leases: list[SlotLease]) -> None:
        raise DataError("not for me")

    watching = asyncio.create_task(consumer.watch(handle))
    await asyncio.sleep(0.01)
    producer.send([b"x"])
    producer.ring()
    with pytest.raises(DataError, match="not for me"):
        await asyncio.wait_for(watching, 10)


async def test_a_producer_that_breaks_the_protocol_ends_the_watching(listener):
    sock, slots = raw(listener, {})
    consumer = listener.accept(5)
    assert consumer is not None
    sock.send(b"?")
    with pytest.raises(DataError, match="unknown kind"):
        await asyncio.wait_for(consumer.watch(lambda leases: None), 10)
    assert consumer.ended
    sock.close()
    slots.close()


def test_a_blocking_producer_and_consumer_run_at_full_speed_through_full_sockets(pair):
    """Both ends are behind by turns: the doorbell's and the answers' sockets fill up and drain."""
    producer, consumer = pair(slots=2000, slot_bytes=64)
    count = 20_000

    def send() -> None:
        for number in range(count):
            producer.send([number.to_bytes(4, "little")], deadline_s=60)
            if number % 3:
                producer.ring()
        producer.flush(60)

    thread = threading.Thread(target=send)
    thread.start()
    expected = 0
    while expected < count:
        if expected % 5000 < 100:
            time.sleep(0.01)
        for lease in consumer.take(10):
            assert int.from_bytes(lease.payload, "little") == expected
            lease.release()
            expected += 1
    consumer.send_answers()
    while thread.is_alive():
        consumer.take(0.01)
    thread.join(60)
    assert producer.answered == count and producer.error is None
