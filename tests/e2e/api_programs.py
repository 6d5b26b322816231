"""The processes that the kills kill: producers and a trainer, each a program of its own.

    python -m tests.e2e.api_programs ROLE URL FOLDER NAME NUMBER

What a producer tried and what was acknowledged to it is one line each in FOLDER, written before the next step is taken.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from atropos_core.codec import encode_bytes
from atropos_core.errors import AtroposError, HubFull, LeaseLost, StoreFull
from atropos_core.storage.checkpoint import Checkpoints
from atropos_core.types import Sampling
from atropos_trajectory_client.client import Api, SessionSpec, TrainerSession, Worker, WorkerSpec
from atropos_trajectory_client.shm.producer import RingProducer
from tests.e2e.api_units import SERIALS, native_unit, old_unit, serials_of

GROUP, AT_ONCE = 4, 4
LENGTHS = {"http": 48, "ring": 512, "old": 48, "pieces": 32}
PATIENCE_S = 120.0
LEASE_LOST = 3  # exit code of the trainer: start it again, it resumes
NEVER_STALE = 1 << 20


class Record:
    """Lines in FOLDER/NAME.WHAT, and the next serial: never one that was tried before."""

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self._files = {
            what: os.open(folder / f"{name}.{what}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for what in ("tried", "acked", "cut", "torn", "full")
        }
        tried = [int(line) for line in (folder / f"{name}.tried").read_text().split()]
        self._next = max(tried, default=number * SERIALS) + 1

    def say(self, what: str, serial: int) -> None:
        os.write(self._files[what], f"{serial}\n".encode())

    def take(self) -> int:
        serial, self._next = self._next, self._next + 1
        self.say("tried", serial)
        return serial


def stopped_by_signal() -> asyncio.Event:
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    return end


async def native(record: Record, put: Callable[[int], Awaitable[None]]) -> None:
    """Several puts at a time, until SIGTERM. What is under way is finished."""
    end = stopped_by_signal()

    async def one_after_another() -> None:
        while not end.is_set():
            serial = record.take()
            await put(serial)
            record.say("acked", serial)

    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))


async def over_http(url: str, record: Record, name: str) -> None:
    api = Api(url, timeout_s=PATIENCE_S)

    async def put(serial: int) -> None:
        frame = encode_bytes(native_unit(name, serial, GROUP, LENGTHS["http"]))
        body = {"groups": [{"key": f"{name}-{serial}", "worker": "", "frame": frame}], "wait_s": 2.0}
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                await api.call("POST", "/v1/groups", body, wait_s=2.0)
                return
            except HubFull as error:
                if isinstance(error, StoreFull):
                    record.say("full", serial)
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.1)

    await native(record, put)
    await api.close()


async def through_shared_memory(url: str, record: Record, name: str) -> None:
    """SIGUSR1: die in the middle of writing a slot."""
    api = Api(url, timeout_s=PATIENCE_S)
    worker = await Worker.register(api, WorkerSpec(name, name, tasks=1), deadline_s=PATIENCE_S)

    async def put(serial: int) -> None:
        await worker.put(native_unit(name, serial, GROUP, LENGTHS["ring"]), deadline_s=PATIENCE_S)

    async def die_in_a_slot() -> None:
        serial = record.take()
        record.say("torn", serial)
        frame = encode_bytes(native_unit(name, serial, GROUP, LENGTHS["ring"]))
        while True:
            offer = (await api.about())["same_host"]
            try:
                ring = RingProducer.connect(Path(offer["path"]), offer["nonce"], name=name)
                await ring.put(DiesHalfWritten([frame[:3000], frame[3000:]]), key=f"{name}-{serial}")
            except AtroposError:  # a server that has just been started anew has another path
                await asyncio.sleep(0.1)

    dying: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: dying.append(loop.create_task(die_in_a_slot())))
    await native(record, put)
    await worker.close()
    await api.close()


class DiesHalfWritten(list[bytes]):
    """Buffers of which only the first gets into the slot: sizes are read first, then they are copied."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(parts)
        self._looked = 0

    def __iter__(self) -> Iterator[bytes]:
        self._looked += 1
        for place in range(len(self)):
            if self._looked == 2 and place == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield self[place]


def old_environment(url: str, folder: Path, record: Record, name: str) -> None:
    """As atroposlib's BaseEnv: registers until a trainer is there, repeats a POST that got no answer. The one named
    `pieces` sends less than a group at a time, and before it ends, what completes its last one."""
    length, whole = LENGTHS[name], name != "pieces"
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    client = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def post(path: str, body: dict[str, Any], cut: Callable[[], None] = lambda: None) -> Any:
        content = gzip.compress(json.dumps(body).encode(), 1)
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                answer = client.post(path, content=content, headers=headers)
            except httpx.ConnectError:
                time.sleep(0.1)
            except httpx.TransportError:
                cut()
                time.sleep(0.1)
            else:
                if answer.status_code == 200:
                    return answer.json()
                assert answer.status_code == 503, (answer.status_code, answer.text)
                time.sleep(0.2)
        raise AssertionError(f"{name}: no answer to {path} within {PATIENCE_S} s")

    env_id = registered(folder / f"{name}.env_id", name, post)
    buffered = 0
    for number in count():
        if ending and not buffered:
            return
        of = GROUP if whole else 1 if ending else (1, 3)[number % 2]
        serial = record.take()
        found = post("/scored_data", old_unit(serial, of, length, env_id), partial(record.say, "cut", serial))
        buffered = found.get("buffer_size", 0)
        record.say("acked", serial)
        time.sleep(0.005)


def registered(known: Path, name: str, post: Callable[..., Any]) -> int:
    """The environment's id: it stays the same when its process is started anew, as its pieces do."""
    if known.exists():
        return int(known.read_text())
    wanted = {"max_token_length": 512, "desired_name": name, "weight": 1.0, "group_size": GROUP}
    while (found := post("/register-env", wanted))["status"] != "success":
        time.sleep(0.2)
    partial = known.with_suffix(".partial")
    partial.write_text(str(found["env_id"]))
    partial.rename(known)
    return int(found["env_id"])


async def trainer(url: str, folder: Path, name: str) -> int:
    """Adds the serials of each group to a log, which only a checkpoint makes durable; takes up from the last one.
    Ends once FOLDER/finish is there and nothing waits any more."""
    chance = random.Random()
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.sweep()
    found = checkpoints.latest(print)
    log: list[int] = json.loads((found.policy / "log.json").read_text()) if found else []
    torn: list[str] = list(found.state["torn"]) if found else []
    step = found.step if found else 0
    spec = SessionSpec("kills", GROUP, 1, Sampling(), batch_groups=GROUP, max_staleness=NEVER_STALE)
    api = Api(url, timeout_s=PATIENCE_S)
    session = await TrainerSession.open(
        api, spec, committed=found.state["trained"] if found else (), deadline_s=PATIENCE_S
    )
    trained: list[int] = []
    empty_since: float | None = None

    async def save() -> None:
        nonlocal trained, step
        step += 1

        async def write(directory: Path) -> None:
            (directory / "log.json").write_text(json.dumps(log))

        await checkpoints.save(step, {"trained": trained, "torn": torn}, write)
        await session.commit(trained)
        trained = []

    try:
        while True:
            finishing = (folder / "finish").exists()
            leased = await session.lease(1 if finishing else GROUP, 0, 0.3)
            for _, group in leased.entries:
                try:
                    log += serials_of(group)
                except ValueError as error:
                    torn.append(str(error))
            await asyncio.sleep(chance.uniform(0, 0.01))
            ids = [number for number, _ in leased.entries]
            if ids:
                session.trained(ids)
                trained += ids
                empty_since = None
            else:
                empty_since = empty_since or time.monotonic()
            done = finishing and empty_since is not None and time.monotonic() > empty_since + 1
            if trained and (session.commit_due or done or chance.random() < 0.2):
                await save()
            if done:
                await session.close()
                return 0
    except LeaseLost as error:
        print(f"{name}: {error}", flush=True)
        return LEASE_LOST


def dying_server(after: int, written: float, arguments: list[str]) -> None:
    """`atropos serve`, killed in its write number `after` to the journal: only this share of it is written."""
    from atropos_core.cli import main

    whole, writes = os.writev, count()

    def last(descriptor: int, buffers: Any) -> int:
        if next(writes) < after:
            return whole(descriptor, buffers)
        data = b"".join(buffers)
        os.write(descriptor, data[: int(written * len(data))])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    os.writev = last
    sys.argv = ["atropos", *arguments]
    main()


def program(role: str, url: str, where: str, name: str, number: str) -> int:
    folder = Path(where)
    if role == "trainer":
        return asyncio.run(trainer(url, folder, name))
    record = Record(folder, name, int(number))
    if role == "http":
        asyncio.run(over_http(url, record, name))
    elif role == "ring":
        asyncio.run(through_shared_memory(url, record, name))
    else:
        old_environment(url, folder, record, name)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "dying-server":
        dying_server(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(program(*sys.argv[1:]))
