"""Work sent through shared memory: answered, failed, late, and with workers that die. Uses real processes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atropos_adapter_skyrl.work_client import WorkClient
from atropos_adapter_skyrl.work_queue import NONCE, REQUEST_BYTES, SOCKET, WorkFailed, WorkQueue
from atropos_core.errors import AccessRefused, DataError, DeadlineExceeded, ProcessDied, ProcessSilent
from atropos_core.guards.patience import Patience
from atropos_trajectory_client.shm.listener import RingListener
from atropos_trajectory_client.shm.producer import RingProducer
from atropos_trajectory_client.shm.socket import wait_for

SPAWN = multiprocessing.get_context("spawn")
QUICK = Patience(say_s=0.2, least_s=0.8)


def answer(folder, concurrency=2):
    """Run a worker that does what each request's text says: fail, sleep, hang forever, or repeat it."""
    try:
        worker = WorkClient.connect(folder, concurrency)
        while not worker.ended:
            for job in worker.take(0.5):
                text = job.payload.decode()
                if text == "fail":
                    worker.failed(job, "cannot do that")
                elif text == "hang":
                    worker.send(job, [b"begun"], now=True)
                    time.sleep(60)
                else:
                    if text.startswith("sleep"):
                        time.sleep(0.5)
                    for number in range(3):
                        worker.send(job, [text.encode(), number.to_bytes(1, "little")])
                    worker.done(job)
        worker.close()
    except ProcessDied:
        pass


@asynccontextmanager
async def exchange_with(folder, workers, **options):
    exchange = WorkQueue(folder / "exchange", **options)
    await exchange.open()
    processes = [SPAWN.Process(target=answer, args=(folder / "exchange",), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    try:
        await until(lambda: exchange.workers == workers)
        yield exchange, processes
    finally:
        await exchange.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


async def until(what, deadline_s=60.0):
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


async def test_each_of_many_asks_gets_its_own_pieces_in_order(tmp_path):
    async with exchange_with(tmp_path, 2) as (exchange, _):
        names = [f"ask {number}" for number in range(300)]
        answers = await asyncio.gather(*(exchange.submit(name.encode(), deadline_s=30, read=bytes) for name in names))
        for name, pieces in zip(names, answers, strict=True):
            assert pieces == [name.encode() + bytes([number]) for number in range(3)]
        assert exchange.stashed_bytes == exchange.unwanted == 0


async def test_what_a_worker_cannot_do_is_raised_with_its_cause_and_it_goes_on(tmp_path):
    async with exchange_with(tmp_path, 1) as (exchange, _):
        with pytest.raises(WorkFailed, match="cannot do that"):
            await exchange.submit(b"fail", deadline_s=30, read=bytes)
        assert len(await exchange.submit(b"x", deadline_s=30, read=bytes)) == 3


async def test_a_late_answer_is_an_error_and_matches_nothing_when_it_comes(tmp_path):
    async with exchange_with(tmp_path, 1) as (exchange, _):
        with pytest.raises(DeadlineExceeded, match=r"within 0.1 s; 1 workers are connected"):
            await exchange.submit(b"sleep", deadline_s=0.1, read=bytes)
        assert [piece[:5] for piece in await exchange.submit(b"after", deadline_s=30, read=bytes)] == [b"after"] * 3
        assert exchange.unwanted > 0 and exchange.stashed_bytes == 0


async def test_a_worker_whose_jobs_hang_takes_nothing_from_one_that_answers(tmp_path):
    async with exchange_with(tmp_path, 1) as (exchange, processes):
        hanging = (exchange.submit(b"hang", deadline_s=0.5, read=bytes) for _ in range(2))  # all that it takes at once
        assert {type(error) for error in await asyncio.gather(*hanging, return_exceptions=True)} == {DeadlineExceeded}
        processes.append(SPAWN.Process(target=answer, args=(tmp_path / "exchange",), daemon=True))
        processes[-1].start()
        await until(lambda: exchange.workers == 2)
        for _ in range(2):
            requests = (exchange.submit(b"x", deadline_s=30, read=bytes) for _ in range(8))
            assert all(len(pieces) == 3 for pieces in await asyncio.gather(*requests))
        processes[0].kill()
        await until(lambda: exchange.workers == 1)
        assert exchange.requeued == 0, "the requester of what it had begun gave up long ago"


async def test_where_every_hand_hangs_an_ask_in_the_queue_is_late_as_well(tmp_path):
    async with exchange_with(tmp_path, 1) as (exchange, processes):
        requests = [asyncio.create_task(exchange.submit(b"hang", deadline_s=0.5, read=bytes)) for _ in range(3)]
        late = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(error) for error in late} == {DeadlineExceeded}
        assert "1 workers are connected, and none has a free slot or sent anything" in str(late[2])
        processes[0].kill()


async def test_an_ask_larger_than_a_slot_is_refused(tmp_path):
    async with exchange_with(tmp_path, 1) as (exchange, _):
        with pytest.raises(DataError, match="65,537 bytes is more than the 65,536"):
            await exchange.submit(bytes(REQUEST_BYTES + 1), deadline_s=30, read=bytes)
        assert len(await exchange.submit(b"x" * REQUEST_BYTES, deadline_s=30, read=len)) == 3


async def test_the_queue_ahead_does_not_count_to_the_deadline(tmp_path):
    async with exchange_with(tmp_path, 1) as (exchange, _):
        began = time.monotonic()
        requests = (
            exchange.submit(b"sleep", deadline_s=2.5, read=bytes) for _ in range(8)
        )  # half a second each, one after another
        assert all(len(pieces) == 3 for pieces in await asyncio.gather(*requests))
        assert time.monotonic() - began > 3.5


async def test_what_a_dead_worker_had_begun_goes_to_another_whole_and_death_is_noticed_at_once(tmp_path):
    async with exchange_with(tmp_path, 1) as (exchange, processes):
        submitter = asyncio.create_task(exchange.submit(b"hang", deadline_s=30, read=bytes))
        await until(lambda: exchange.stashed_bytes > 0)
        other = asyncio.create_task(exchange.submit(b"other", deadline_s=30, read=bytes))  # in its second slot
        await asyncio.sleep(0.05)
        os.kill(processes[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        await until(lambda: exchange.workers == 0)
        assert time.monotonic() - killed < 25  # instead of the deadline's 30 s
        await until(lambda: exchange.requeued == 2)
        assert exchange.stashed_bytes == 0
        submitter.cancel()
        processes.append(SPAWN.Process(target=answer, args=(tmp_path / "exchange",), daemon=True))
        processes[-1].start()
        assert await other == [b"other" + bytes([number]) for number in range(3)]


async def test_without_workers_an_ask_waits_no_longer_than_its_deadline_and_leaves_nothing(tmp_path):
    async with exchange_with(tmp_path, 0) as (exchange, _):
        with pytest.raises(DeadlineExceeded, match="no worker is connected at"):
            await exchange.submit(b"x", deadline_s=0.05, read=bytes)
        assert not exchange._waiting
    assert os.listdir(tmp_path / "exchange") == []


def test_a_worker_where_nobody_offers_work_gets_an_error(tmp_path):
    with pytest.raises(ProcessDied, match="no SkyRL trainer offers work at"):
        WorkClient.connect(tmp_path, 1)


async def test_a_piece_that_cannot_be_read_is_raised_and_the_next_ask_is_answered(tmp_path):
    def read(data):
        raise DataError(f"no such thing as {data!r}")

    async with exchange_with(tmp_path, 1) as (exchange, _):
        with pytest.raises(DataError, match="no such thing as b'x"):
            await exchange.submit(b"x", deadline_s=30, read=read)
        assert len(await exchange.submit(b"y", deadline_s=30, read=bytes)) == 3
        assert exchange.stashed_bytes == 0


async def test_a_worker_that_is_stopped_is_named_and_at_the_bound_its_work_goes_to_another(tmp_path, capfd):
    async with exchange_with(tmp_path, 1, patience=QUICK) as (exchange, processes):
        stopped = processes[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        pending = asyncio.create_task(exchange.submit(b"x", deadline_s=30, read=bytes))
        await asyncio.sleep(0.05)  # it is in the stopped worker's slot
        processes.append(SPAWN.Process(target=answer, args=(tmp_path / "exchange",), daemon=True))
        processes[-1].start()
        assert len(await pending) == 3
        assert exchange.requeued == 1 and exchange.workers == 1
        os.kill(stopped.pid, signal.SIGCONT)
        await asyncio.to_thread(stopped.join, 10)
        assert stopped.exitcode == 0, "it finds its rings closed, and ends as for any asker that has gone"
    text = capfd.readouterr().err
    assert (
        f"a worker (pid {stopped.pid}) is stopped, and is waited for; to continue it: kill -CONT {stopped.pid}" in text
    )
    assert "is shut out" in text and "has been stopped for" in text


def submit_for_ever(folder):
    async def ask():
        exchange = WorkQueue(folder)
        await exchange.open()
        await exchange.submit(b"x", deadline_s=600, read=bytes)

    asyncio.run(ask())


async def test_a_worker_names_whoever_asks_and_is_stopped_and_gives_it_up_at_the_bound(tmp_path, capfd):
    submitter = SPAWN.Process(target=submit_for_ever, args=(tmp_path / "exchange",), daemon=True)
    submitter.start()
    try:
        await until(lambda: (tmp_path / "exchange" / "nonce").exists())
        worker = await asyncio.to_thread(WorkClient.connect, tmp_path / "exchange", 1, patience=QUICK)
        with pytest.raises(ProcessSilent, match=rf"\(pid {submitter.pid}\) has been stopped for"):
            async for job in worker.jobs():
                os.kill(submitter.pid, signal.SIGSTOP)
                with pytest.raises(ProcessDied):
                    async with asyncio.timeout(20):
                        await worker.put(job, [b"answer"])
        assert f"the process that offers work (pid {submitter.pid}) is stopped" in capfd.readouterr().err
    finally:
        submitter.kill()
        submitter.join()


def open_rings():
    """Return this process's mappings, and its descriptors of memory and sockets."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    names = [os.readlink(link) for link in links]
    memory = Path("/proc/self/maps").read_text().count("memfd:atropos-ring")
    return memory, sum(name.startswith(("socket:", "/memfd:")) for name in names)


async def test_an_exchange_that_closes_while_a_worker_comes_in_leaves_nothing_open(tmp_path):
    before = open_rings()
    exchange = WorkQueue(tmp_path / "exchange")
    await exchange.open()
    coming = RingListener(tmp_path / "worker" / "ring.sock", "nonce")  # it accepts no connection yet
    text = json.dumps({"socket": str(coming.path), "concurrency": 2})
    nonce = (tmp_path / "exchange" / NONCE).read_text()
    up = await RingProducer.open(tmp_path / "exchange" / SOCKET, nonce, slots=2, slot_bytes=64, name=text)
    assert await asyncio.to_thread(wait_for, coming._socket, 20), "the exchange is on its way to the worker"
    await exchange.close()
    up.close()
    coming.close()
    assert open_rings() == before


def test_a_worker_that_is_given_no_work_hangs_up(tmp_path):
    submitter = RingListener(tmp_path / SOCKET, "nonce")
    (tmp_path / NONCE).write_text("nonce")
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(WorkClient.connect, tmp_path, 2)
        up = submitter.accept(20)
        with pytest.raises(AccessRefused):
            RingProducer.connect(Path(json.loads(up.name)["socket"]), "another nonce")
        assert isinstance(connecting.exception(20), AccessRefused)
    up.take(20)
    assert up.ended, "also while somebody keeps the error"
    up.close()
    submitter.close()
