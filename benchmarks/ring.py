"""Messages per second and latency between two processes: the shared-memory ring beside a plain Unix socket.

    python -m benchmarks.ring [--count 200000] [--repeat 5] [--slots 1000]

One process sends, this one receives; ways alternate, and the median of the repetitions counts. `ring` reads two numbers
of each message in place; `ring, copied` copies it out, as a server or a trainer does; `ring, asyncio` does that on an
event loop; `ring, hub` also puts it into a hub without a journal, from which a session takes it; `socket` is sendmsg of a
length and the payload over SOCK_STREAM, and recv_into one buffer. `ring, server` is the endpoint of a real `atropos serve`
without a journal, `ring, journal` with one: this process is a worker, whose messages are scored groups of about that
size; each is checked, put into the hub and answered, and none is leased. It has a tenth of the messages, and the 64 slots
that a worker has; `server us` is what a group takes of the server's processor. Latency is one way, from the moment that a
message is due (a sender that is blocked has no excuse) until its reader has it, at half of the goal's rate, one doorbell
for each message; for these two until the worker has the answer, at 10,000 groups a second of 8 kB and 2,500 of 98 kB, with a
journal at half of that, and again for a worker that has one group on its way at a time (`alone`). `there and back` is what
two wake-ups take by themselves: a byte over a socket between two processes that do nothing else. `nothing` is the machine
itself: two processes that only look at the clock, and how late a message would be for the times in which one of them did
not run. No way can be sooner than that. Writes benchmarks/results/ring.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.codec import encode_bytes
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, Label, Limits
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task
from atropos_trajectory_client.client import Api
from atropos_trajectory_client.shm.consumer import RingConsumer, SlotLease
from atropos_trajectory_client.shm.listener import RingListener
from atropos_trajectory_client.shm.producer import SLOTS, RingProducer
from atropos_trajectory_client.shm.segment import HEADER_BYTES
from atropos_trajectory_client.shm.socket import short
from benchmarks.machine import RESULTS, described
from tests.served import Server, atropos_serve, serving

SERVERS = {"ring, server": ["--no-journal"], "ring, journal": []}  # options of `atropos serve`
SIZES = {"8,224 B": (8_224, 40_000), "98,368 B": (98_368, 20_000)}  # bytes, messages a second that are required
PACE = {"8,224 B": 10_000, "98,368 B": 2_500}  # groups a second; with a journal half of that
ALONE = 5_000  # groups, one after the other
NONCE = "benchmark"
DEADLINE_S = 120.0
_SENT = struct.Struct("<q")  # ns, at the head of a payload
_LENGTH = struct.Struct("<I")
_LOOK_NS = 20_000  # between two looks at the clock: more than that is time in which the process did not run


def produce(way: str, path: Path, size: int, count: int, rate: float, slots: int) -> None:
    """Send `count` messages, as fast as they are taken, or `rate` a second."""
    payload = bytearray(os.urandom(size))
    if way == "socket":
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short(path) as address:
            stream.connect(address)
        length = _LENGTH.pack(size)

        def send() -> None:
            sent = stream.sendmsg([length, payload])
            if sent < len(length) + size:
                stream.sendall(memoryview(length + payload)[sent:])
    else:
        ring = RingProducer.connect(path, NONCE, slots=slots, slot_bytes=size + 64)

        def send() -> None:
            ring.send([payload], key=str(number), deadline_s=DEADLINE_S)
            if rate:
                ring.ring()

    number = 0
    start = time.perf_counter_ns()
    for number in range(count):
        due = 0
        if rate:
            due = start + int(number * 1e9 / rate)
            while (left := due - time.perf_counter_ns()) > 0:
                if left > 500_000:
                    time.sleep(left / 2e9)
        _SENT.pack_into(payload, 0, due if rate else time.perf_counter_ns())
        send()
    if way == "socket":
        stream.close()
    else:
        ring.flush(DEADLINE_S)
        ring.close()


class Reader:
    """Looks at each message, and at the clock."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.first = self.last = self.count = 0
        self.latencies: list[int] = []

    def see(self, payload: Any) -> None:
        now = time.perf_counter_ns()
        self.first = self.first or now
        self.last = now
        self.count += 1
        assert len(payload) == self.size
        self.latencies.append(now - _SENT.unpack_from(payload)[0])

    def copy(self, lease: SlotLease) -> None:
        self.see(lease.copy())

    def view(self, lease: SlotLease) -> None:
        self.see(lease.payload)


def from_ring(ring: RingConsumer, see: Callable[[SlotLease], None]) -> None:
    while not ring.ended:
        for lease in ring.take(DEADLINE_S):
            see(lease)
            lease.release()
    ring.close()


async def on_a_loop(listener: RingListener, reader: Reader, *, into_hub: bool) -> None:
    done = asyncio.Event()
    hub: Hub[bytes] = Hub(Limits(1 << 30), max_staleness=None, on_dropped=lambda entry, cause: None)
    session = hub.open("benchmark")
    label = Label("benchmark", 1, reader.size)

    async def handle(ring: RingConsumer) -> None:
        async for leases in ring.arrivals():
            for lease in leases:
                if into_hub:
                    frame = lease.copy()
                    lease.release(await hub.put(frame, label, key=lease.key, deadline_s=DEADLINE_S))
                    reader.see(frame)
                else:
                    reader.copy(lease)
                    lease.release()
            if into_hub and (entries := session.try_lease(BatchSize(groups=len(leases)), 0)):
                session.commit([entry.id for entry in entries])
        done.set()

    serving = asyncio.create_task(listener.serve(handle))
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def through_server(server: Server, size: int, count: int, rate: float) -> dict[str, float]:
    """As many groups as a worker's slots hold at a time, or `rate` a second; then some one after the other."""
    api = Api(f"http://127.0.0.1:{server.port}")
    offer = (await api.about())["same_host"]
    ring = await RingProducer.open(Path(offer["path"]), offer["nonce"], name="benchmark")
    frame, latencies, spent_s = scored_group(size), [], server.cpu_s()
    start = time.perf_counter_ns()

    async def put(number: int, due: int) -> None:
        await ring.put([frame], key=str(number), deadline_s=DEADLINE_S)
        latencies.append(time.perf_counter_ns() - due)

    async def put_on(numbers: Iterator[int]) -> None:
        for number in numbers:
            await put(number, time.perf_counter_ns())

    async with asyncio.TaskGroup() as puts:
        if rate:
            for number in range(count):
                due = start + int(number * 1e9 / rate)
                while time.perf_counter_ns() < due:  # noqa: ASYNC110 - a sleep would be late by a millisecond
                    await asyncio.sleep(0)
                puts.create_task(put(number, due))
        else:
            numbers = iter(range(count))
            for _ in range(SLOTS):
                puts.create_task(put_on(numbers))
    seconds, spent_s = (time.perf_counter_ns() - start) / 1e9, server.cpu_s() - spent_s
    found = {"per_s": count / seconds, "server_us": spent_s / count * 1e6} | of_latencies(latencies)
    latencies.clear()
    alone = ALONE if rate else 0
    for number in range(count, count + alone):
        await put(number, time.perf_counter_ns())
    assert (await api.status())["hub"]["groups"] == count + alone
    ring.close()
    await api.close()
    return found | {f"alone_{name}": value for name, value in of_latencies(latencies).items()} if alone else found


def scored_group(size: int) -> bytes:
    """A frame of about so many bytes: four rollouts, the second half of each sampled."""
    random, length = np.random.default_rng(7), int((size - 420) / 32.5)  # of a header, and of a position in all four

    def episode(score: float) -> Episode:
        sampled = np.arange(length) >= length // 2
        tokens = random.integers(0, 1 << 15, length).astype(np.int32)
        logprobs = np.where(sampled, -random.random(length), 0).astype(np.float32)
        return Episode((Rollout(tokens, sampled, sampled, logprobs, np.zeros(length, np.int32), 1.0),), score)

    episodes = tuple(episode(float(member)) for member in range(4))
    return encode_bytes(
        ScoredGroup(Draw(-1, "benchmark", "train", 0, 0), Task("t", ()), episodes, np.arange(4, dtype=np.float32))
    )


def from_socket(path: Path, reader: Reader, start: Callable[[], None]) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short(path) as address:
        listening.bind(address)
    listening.listen(1)
    start()
    listening.settimeout(DEADLINE_S)
    stream, _ = listening.accept()
    buffer = memoryview(bytearray(reader.size + _LENGTH.size))
    while True:
        got = 0
        while got < len(buffer):
            more = stream.recv_into(buffer[got:])
            if not more:
                stream.close()
                listening.close()
                return
            got += more
        reader.see(buffer[_LENGTH.size :])


def measure(way: str, size: int, count: int, rate: float, slots: int) -> dict[str, float]:
    """One run of two processes."""
    if way in SERVERS:
        with tempfile.TemporaryDirectory() as folder:
            room = str(1 + 2 * size * (count + ALONE) / 1e6)
            command = atropos_serve("--dir", f"{folder}/api", "--hub-mb", room, *SERVERS[way])
            with serving(command, Path(folder) / "output") as server:
                return asyncio.run(through_server(server, size, count, rate))
    reader = Reader(size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rings" / "ring.sock"
        children: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            values = (way, str(path), str(size), str(count), str(rate), str(slots))
            children.append(subprocess.Popen([sys.executable, "-m", "benchmarks.ring", "--produce", *values]))

        if way == "socket":
            path.parent.mkdir()
            from_socket(path, reader, start)
        else:
            listener = RingListener(path, NONCE)
            start()
            if way in ("ring, asyncio", "ring, hub"):
                asyncio.run(on_a_loop(listener, reader, into_hub=way == "ring, hub"))
            else:
                ring = listener.accept(DEADLINE_S)
                assert ring is not None, "the producer did not come"
                from_ring(ring, reader.copy if way == "ring, copied" else reader.view)
            listener.close()
        code = children[0].wait(DEADLINE_S)
    assert code == 0 and reader.count == count, (way, code, reader.count)
    return {"per_s": (count - 1) / (reader.last - reader.first) * 1e9} | of_latencies(reader.latencies)


def of_latencies(latencies: list[int]) -> dict[str, float]:
    ordered = sorted(latencies)
    return {"p50_ms": ordered[len(ordered) // 2] / 1e6, "p99_ms": ordered[len(ordered) * 99 // 100] / 1e6}


def there_and_back(count: int = 20_000) -> dict[str, float]:
    """Of one byte between two processes that wait for nothing else."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other = multiprocessing.get_context("fork").Process(target=echo, args=(ours, theirs))
    other.start()
    theirs.close()
    latencies = []
    for _ in range(count):
        start = time.perf_counter_ns()
        ours.send(b"a")
        ours.recv(1)
        latencies.append(time.perf_counter_ns() - start)
    ours.close()
    other.join(DEADLINE_S)
    return of_latencies(latencies)


def echo(ours: socket.socket, theirs: socket.socket) -> None:
    ours.close()
    while data := theirs.recv(1):
        theirs.send(data)


def stalls(seconds: float) -> list[int]:
    """How long this process did not run, each time, in ns."""
    last = time.perf_counter_ns()
    end, gaps = last + int(seconds * 1e9), []
    while last < end:
        now = time.perf_counter_ns()
        if now - last > _LOOK_NS:
            gaps.append(now - last)
        last = now
    return gaps


def nothing(seconds: float = 2.0) -> float:
    """The lateness in ms that one message in a hundred would suffer: due at any moment, and either process may be away."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        both = [pool.submit(stalls, seconds) for _ in range(2)]
        gaps = np.array([gap for one in both for gap in one.result()], dtype=np.float64)
    if not len(gaps):
        return _LOOK_NS / 1e6
    low, high = 0.0, float(gaps.max())
    for _ in range(50):  # the share of the time in which a message is late by more than x falls with x
        middle = (low + high) / 2
        if np.maximum(gaps - middle, 0).sum() / (seconds * 1e9) > 0.01:
            low = middle
        else:
            high = middle
    return high / 1e6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000, help="messages of 8,224 B; a quarter as many of 98,368 B")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--slots", type=int, default=1000)
    parser.add_argument("--produce", nargs=6, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.produce:
        way, path, size, count, rate, slots = options.produce
        produce(way, Path(path), int(size), int(count), float(rate), int(slots))
        return
    machine, measured = described(), {}
    print(
        f"load {os.getloadavg()[0]:.1f} on {machine['cores']} cores; {options.slots} slots; median (best) of {options.repeat}"
    )
    print("size      way              messages/s (best)       p50 / p99 [ms] at half of the goal's rate")
    for name, (size, goal) in SIZES.items():
        count = options.count if size < 50_000 else options.count // 4
        ways = ("ring", "ring, copied", "ring, asyncio", "ring, hub", *SERVERS, "socket")
        runs: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {way: [] for way in ways}
        alone = []
        for _ in range(options.repeat):
            alone.append(nothing())
            for way in ways:
                many = count // 10 if way in SERVERS else count
                full = measure(way, size, many, 0.0, options.slots)
                rate = goal / 2
                if way in SERVERS:
                    rate = PACE[name] / (1 if way == "ring, server" else 2)
                runs[way].append((full, measure(way, size, many if way in SERVERS else many // 4, rate, options.slots)))
        for way, pairs in runs.items():
            rates = [full["per_s"] for full, _ in pairs]
            row = {
                "per_s": statistics.median(rates),
                "per_s_best": max(rates),
                "p50_ms": statistics.median(half["p50_ms"] for _, half in pairs),
                "p99_ms": statistics.median(half["p99_ms"] for _, half in pairs),
                "p99_ms_best": min(half["p99_ms"] for _, half in pairs),
            }
            if way in SERVERS:
                row["server_us"] = statistics.median(full["server_us"] for full, _ in pairs)
                row |= {
                    key: statistics.median(half[key] for _, half in pairs) for key in ("alone_p50_ms", "alone_p99_ms")
                }
            measured[f"{name}, {way}"] = row
            print(
                f"{name:9s} {way:15s} {row['per_s']:10,.0f} ({row['per_s_best']:9,.0f})"
                f"   {row['p50_ms']:.3f} / {row['p99_ms']:.3f} (best p99 {row['p99_ms_best']:.3f})"
                + (
                    f"   server us {row['server_us']:.0f}, alone {row['alone_p50_ms']:.3f} / {row['alone_p99_ms']:.3f}"
                    if way in SERVERS
                    else ""
                )
            )
        measured[f"{name}, nothing"] = {"p99_ms": statistics.median(alone), "p99_ms_best": min(alone)}
        print(f"{name:9s} {'nothing':15s} {'':24s}     / {statistics.median(alone):.3f} (best p99 {min(alone):.3f})")
    measured["there and back"] = there_and_back()
    print("there and back: {p50_ms:.3f} / {p99_ms:.3f}".format(**measured["there and back"]))
    segment = {
        name: options.slots * (HEADER_BYTES + size + 64 + -size % HEADER_BYTES) for name, (size, _) in SIZES.items()
    }
    figures = {"machine": machine, "load_at_end": os.getloadavg()[0], "slots": options.slots, "segment_bytes": segment}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ring.json").write_text(json.dumps(figures | {"measured": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
