"""Components in real child processes: they answer, fail, hang, are killed, and never outlive anyone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.console import waits
from atropos_core.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    OutOfMemory,
    ProcessDied,
    ProcessSilent,
    RemoteError,
    TrainingDiverged,
    UnknownComponent,
)
from atropos_core.guards.patience import Patience
from atropos_core.health.reward_rescoring import Rescoring
from atropos_core.processes.child import Child
from atropos_core.processes.endpoints import LocalEndpoint, PeerEndpoint
from atropos_core.processes.local import LocalProcess
from atropos_core.processes.proxies import HostedEngine, HostedReward, HostedTrainer
from atropos_core.rollouts.runner import WeightedReward
from atropos_core.training.batch import to_batch
from atropos_core.types import Sampling, Score, Task, tokens
from tests.unit.parts import ASSISTANT, USER, episode, group, install_plugin
from tests.waiting import until

RIGGED = """
import asyncio, gc, os, signal, subprocess, sys, time
import numpy as np
from pydantic import BaseModel
from atropos_core import hookimpl
from atropos_core.console.waits import waiting
from atropos_core.errors import TrainingDiverged
from atropos_core.interfaces import Engine, ModelInfo, Trainer
from atropos_core.plugins.options import Options
from atropos_core.plugins.provider import Provider
from atropos_core.plugins.model_provider import EngineProvider, TrainerProvider
from atropos_core.types import Completion, Score


class Rigged(Options):
    how: str = ""
    note: str = ""  # a file that tells what happened in the child


def note(options, text):
    with open(options.note, "a") as file:
        file.write(text + "\\n")


async def misbehave(options):
    if options.how == "slow":
        await asyncio.sleep(1.0)
    if options.how == "raise":
        raise KeyError("my own bug")
    if options.how == "memory":
        import resource
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20),) * 2)
        bytearray(1 << 30)
    if options.how == "die":
        print("last words", flush=True)
        os._exit(7)
    if options.how == "wait":
        note(options, "waiting")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            note(options, "cancelled")
            raise
    if options.how == "hang":
        note(options, "hanging")
        time.sleep(600)
    if options.how == "hang later":
        if os.path.exists(options.note):
            time.sleep(600)
        note(options, "once")
    if options.how == "slow later":
        slow = os.path.exists(options.note)
        note(options, "once")
        time.sleep(1.0 if slow else 0.3)


class RiggedEngine(Engine):
    def __init__(self, options, context):
        self.options, self.context = options, context
        if options.how.startswith("collector"):
            note(options, f"built: {gc.isenabled()}")
        if options.how == "imports":
            note(options, "importing")
            time.sleep(600)
        if options.how == "no build":
            raise ValueError("cannot be built")
        if options.how == "parent":
            self.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            note(options, str(self.helper.pid))
        self.version = 0

    async def open(self):
        if self.options.how.startswith("collector"):
            note(self.options, f"opened: {gc.isenabled()}")
        if self.options.how == "collector, not opened":
            raise KeyError("my own bug")
        if self.options.how == "server":
            with waiting("its server to come up"):
                while not os.path.exists(self.options.note):
                    await asyncio.sleep(0.01)
        return ModelInfo("Rigged", os.getpid(), 5, "float32", ",".join(self.context.devices), str(self.context.directory))

    async def sample(self, prompt, n, sampling, seeds, deadline_s):
        await misbehave(self.options)
        if self.options.how.startswith("collector"):
            note(self.options, f"sampled: {gc.isenabled()}")
        assert prompt.dtype == np.int32
        made = np.append(prompt, seeds).astype(np.int32)
        return [Completion(made, np.zeros(len(made), np.float32), np.full(len(made), self.version, np.int32), "stop",
                           sampling.temperature) for _ in range(n)]

    async def logprobs(self, sequences, temperature=1.0):
        return [np.full(len(ids), temperature, np.float32) for ids in sequences]

    async def pause(self):
        note(self.options, "pause")

    async def resume(self, version):
        self.version = version

    async def close(self):
        if self.options.note:
            note(self.options, "closed")


class RiggedTrainer(Trainer):
    def __init__(self, options, context):
        self.options = options

    async def open(self):
        return ModelInfo("Rigged", 0, 5, "float32", "cpu", "")

    async def step(self, batch, writing):
        if self.options.how == "diverge":
            raise TrainingDiverged("no number", remedy="a smaller learning rate")
        async with writing():
            await misbehave(self.options)
        return {"loss": float(batch.tokens.sum())}

    async def logprobs(self, sequences, temperature=1.0):
        return []

    async def save(self, directory):
        (directory / "saved").write_text("yes")

    async def restore(self, directory):
        assert (directory / "saved").read_text() == "yes"


class RiggedReward:
    def __init__(self, options):
        self.options = options

    async def open(self):
        if self.options.how == "opens":
            note(self.options, "opened")

    async def __call__(self, task, episodes):
        await misbehave(self.options)
        if self.options.how == "turns":
            return [Score(one.score * 2, turns=[one.score]) for one in episodes[:-1]] + [0.5]
        if self.options.how == "metrics":
            return [0.5, *(Score(one.score, metrics={"canary/leak": 1.0}) for one in episodes[1:])]
        return np.array([one.score * 2 for one in episodes], np.float32)


class Extension:
    def __init__(self, component):
        self.component = component

    async def swap(self, text, *, descriptors):
        from atropos_core.processes.rpc import Reply
        [given] = descriptors
        with open(given, "r+b", closefd=True) as file:
            read = file.read()
            file.write(b" and child")
        made = os.memfd_create("made")
        os.write(made, text.encode())
        return Reply([read, type(self.component).__name__], [made])

    async def none(self, *arguments):
        return list(arguments)

    async def count(self):
        return len(os.listdir("/proc/self/fd"))


@hookimpl
def atropos_engines():
    return [EngineProvider("rigged", "", Rigged, RiggedEngine)]


@hookimpl
def atropos_trainers():
    return [TrainerProvider("rigged", "", Rigged, RiggedTrainer)]


@hookimpl
def atropos_rewards():
    return [Provider("rigged", "", Rigged, lambda options, context: RiggedReward(options))]
"""

Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a rigged component; whatever is still there at the end is ended."""
    install_plugin(tmp_path, "rigged", RIGGED)
    children: list[Child] = []

    async def begin(
        kind: str = "engine", how: str = "", *, name: str = "rigged", role: str | None = None, **watched: Any
    ) -> Child:
        child = await Child.start(
            role or kind,
            {
                "kind": kind,
                "name": name,
                "options": {"how": how, "note": str(tmp_path / "note")} if name == "rigged" else {},
                "context": {"directory": "/run", "model": str(TOY_MODEL), "devices": ("cpu", "cpu:1"), "threads": 3},
            },
            tmp_path / "log",
            threads=3,
            environment={"PYTHONPATH": str(tmp_path)},
            **watched,
        )
        children.append(child)
        return child

    yield begin
    await asyncio.gather(*(child.kill() for child in children))


async def until_written(folder: Path, wanted: str) -> None:
    """Until the child has noted `wanted`."""
    async with asyncio.timeout(60):
        while wanted not in ((folder / "note").read_text() if (folder / "note").exists() else ""):
            await asyncio.sleep(0.01)


async def gone(pid: int, within_s: float = 30.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        await asyncio.sleep(0.01)
    return False


def sample(engine: HostedEngine, deadline_s: float = 30.0) -> Any:
    return engine.sample(tokens([USER, 5, ASSISTANT]), 2, Sampling(temperature=0.5), [8, 9], deadline_s)


# -- answers


async def test_a_hosted_engine_answers_as_it_would_here(start, tmp_path):
    engine = HostedEngine(await start())
    info = await engine.open()
    assert info.parameters == engine.child.process.pid != os.getpid(), "it runs over there"
    assert info.device == "cpu,cpu:1"
    assert info.tokenizer == "/run"
    first, second = await sample(engine)
    assert first.tokens.tolist() == second.tokens.tolist() == [USER, 5, ASSISTANT, 8, 9]
    assert first.tokens.dtype == np.int32
    assert first.temperature == 0.5
    assert [ids.tolist() for ids in await engine.logprobs([tokens([1, 2]), tokens([3])], 0.25)] == [
        [0.25, 0.25],
        [0.25],
    ]
    async with engine.paused(6):
        assert "pause" in (tmp_path / "note").read_text()
    [after, _] = await sample(engine)
    assert set(after.policy_version.tolist()) == {6}


@pytest.mark.parametrize("how", ["collector", "collector, not opened"])
async def test_the_collector_rests_while_a_child_starts_and_works_afterwards(start, tmp_path, how):
    engine = HostedEngine(await start(how=how))
    with contextlib.suppress(RemoteError):
        await engine.open()
    await sample(engine)
    assert (tmp_path / "note").read_text().split("\n")[:3] == ["built: False", "opened: False", "sampled: True"]


async def test_a_hosted_reward_answers_as_it_would_here(start):
    reward = HostedReward(lambda: start("reward"), 10.0)
    made = await reward(Task("t", ()), [episode(0.5), episode(2.0)])
    assert made.tolist() == [1.0, 4.0]
    assert made.dtype == np.float32


async def test_a_hosted_reward_gives_turn_rewards_as_it_would_here(start):
    reward = HostedReward(lambda: start("reward", "turns"), 10.0)
    [first, last] = await reward(Task("t", ()), [episode(0.1), episode(2.0)])
    assert (first.value, last) == (0.2, 0.5)
    assert first.turns[0].values.tolist() == [0.1]
    await reward.close()


async def test_a_hosted_reward_reports_metrics_of_rollouts_as_it_would_here(start):
    reward = HostedReward(lambda: start("reward", "metrics"), 10.0)
    [first, last] = await reward(Task("t", ()), [episode(0.1), episode(2.0)])
    assert (first, last) == (0.5, Score(2.0, metrics={"canary/leak": 1.0}))
    await reward.close()


async def test_a_hosted_reward_that_hangs_is_ended_and_the_next_call_gets_a_new_process(start):
    ways = iter(["hang", ""])
    started: list[Child] = []

    async def begin() -> Child:
        started.append(await start("reward", next(ways)))
        return started[-1]

    reward = HostedReward(begin, 1.0)
    await reward.open()
    with pytest.raises(DeadlineExceeded):
        await reward(Task("t", ()), [episode(0.5)])
    assert started[0].process.popen.poll() is not None
    assert (await reward(Task("t", ()), [episode(2.0)])).tolist() == [4.0]


async def test_a_hosted_reward_is_opened_in_each_process_that_is_started_for_it(start, tmp_path):
    started: list[Child] = []

    async def begin() -> Child:
        started.append(await start("reward", "opens"))
        return started[-1]

    reward = HostedReward(begin, 30.0)
    await reward.open()
    await started[0].kill()
    assert (await reward(Task("t", ()), [episode(2.0)])).tolist() == [4.0]
    assert (tmp_path / "note").read_text() == "opened\n" * 2


async def test_closing_a_hosted_reward_that_hangs_asks_it_nothing(start, tmp_path):
    hanging = await start("reward", "hang")

    async def begin() -> Child:
        return hanging

    reward = HostedReward(begin, 60.0)
    call = asyncio.ensure_future(reward(Task("t", ()), [episode(0.5)]))
    while not (tmp_path / "note").exists():
        await asyncio.sleep(0.01)
    await reward.close()
    with pytest.raises(RemoteError, match="closed"):
        await call
    assert hanging.process.popen.poll() == -signal.SIGKILL


async def test_a_look_that_does_not_wait_for_a_slow_reward_ends_neither_its_process_nor_its_answer(start, monkeypatch):
    monkeypatch.setattr("atropos_core.health.reward_rescoring.MOST_S", 0.2)
    slow = await start("reward", "slow")
    starts = [slow]

    async def begin() -> Child:
        return starts.pop()  # there is one alone

    reward = HostedReward(begin, 30.0)
    await reward.open()
    looking = Rescoring([WeightedReward("slow", reward, 1.0, 30.0)], {}, every=1, groups=1, deterministic=True)
    made = group(1)
    seen = [replace(made, parts={"slow": made.rewards})]
    monkeypatch.setattr("atropos_core.health.reward_rescoring.BUDGET", 1.0)
    for _ in range(3):
        assert await looking.look(1, seen) == {}
    assert len(await reward(made.task, made.episodes)) == len(made.episodes)
    assert slow.process.popen.poll() is None
    monkeypatch.setattr("atropos_core.health.reward_rescoring.MOST_S", 20.0)
    assert "rescore/difference" in await looking.look(1, seen)


async def test_a_child_has_its_threads_and_leads_a_group_of_its_own(start, monkeypatch):
    monkeypatch.setenv("COLD", "1")  # its environment is read from outside, where a warm one shows its template's
    child = await start()
    process = psutil.Process(child.process.pid)
    assert process.environ()["OMP_NUM_THREADS"] == "3"
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0), "a Ctrl-C in the terminal does not reach it"
    assert process.cmdline()[-1] == "engine"


# -- a trainer writes through the supervisor


class Bridge:
    """What `writing` went through here."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        self.seen.append("enter")
        try:
            yield
        except BaseException as error:
            self.seen.append(f"{type(error).__name__}: {error}")
            raise
        self.seen.append("leave")


BATCH = to_batch([group(0).with_advantages(np.zeros(2, np.float32))], version=1)


async def test_a_hosted_trainers_writing_is_entered_and_left_here(start, tmp_path):
    trainer, bridge = HostedTrainer(await start("trainer")), Bridge()
    assert await trainer.step(BATCH, bridge.writing) == {"loss": float(BATCH.tokens.sum())}
    assert await trainer.step(BATCH, bridge.writing)
    assert bridge.seen == ["enter", "leave"] * 2
    (tmp_path / "policy").mkdir()
    await trainer.save(tmp_path / "policy")
    await trainer.restore(tmp_path / "policy")
    assert (tmp_path / "policy/saved").read_text() == "yes"


async def test_a_step_that_fails_before_writing_leaves_the_bridge_alone_and_keeps_its_class(start):
    trainer, bridge = HostedTrainer(await start("trainer", "diverge")), Bridge()
    with pytest.raises(TrainingDiverged, match="no number") as caught:
        await trainer.step(BATCH, bridge.writing)
    assert caught.value.remedy == "a smaller learning rate"
    assert bridge.seen == []


async def test_a_step_that_fails_while_writing_tells_the_bridge(start):
    trainer, bridge = HostedTrainer(await start("trainer", "raise")), Bridge()
    with pytest.raises(RemoteError, match="my own bug"):
        await trainer.step(BATCH, bridge.writing)
    assert bridge.seen == ["enter", "RemoteError: trainer failed while it was writing weights: KeyError: 'my own bug'"]


async def test_a_bridge_that_cannot_be_entered_fails_the_step_under_its_own_name(start):
    @asynccontextmanager
    async def closed() -> AsyncIterator[None]:
        raise DataError("the bridge is down")
        yield

    trainer = HostedTrainer(await start("trainer"))
    with pytest.raises(DataError, match="the bridge is down"):
        await trainer.step(BATCH, closed)


async def test_a_step_cancelled_while_writing_leaves_the_bridge_with_an_error(start, tmp_path):
    trainer, bridge = HostedTrainer(await start("trainer", "wait")), Bridge()
    step = asyncio.ensure_future(trainer.step(BATCH, bridge.writing))
    await until_written(tmp_path, "waiting")
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    async with asyncio.timeout(30):
        while len(bridge.seen) < 2:
            await asyncio.sleep(0.01)
    assert bridge.seen[0] == "enter"
    assert "CancelledError" in bridge.seen[1]


# -- errors


async def test_what_a_child_raises_arrives_with_its_traceback(start):
    engine = HostedEngine(await start(how="raise"))
    with pytest.raises(RemoteError) as caught:
        await sample(engine)
    assert "engine raised KeyError: my own bug" in str(caught.value)
    assert "rigged.py" in str(caught.value), "the line over there"
    assert (await engine.open()).architecture == "Rigged", "the child lives on"


async def test_a_child_that_is_refused_memory_is_an_error_of_that_name_and_says_where(start):
    with pytest.raises(OutOfMemory, match=r"engine was refused memory: MemoryError") as raised:
        await sampled(await start("engine", "memory"))
    assert "bytearray(1 << 30)" in str(raised.value) and "ulimit -v" in str(raised.value)


async def test_a_start_that_is_given_up_ends_a_process_that_still_imports(start, tmp_path):
    """It would answer a request to close once it has imported, and that may take long."""
    starting = asyncio.create_task(start(how="imports"))
    await until_written(tmp_path, "importing")
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    [pid] = [one.pid for one in alive if "atropos_core.processes.child_main" in one.cmdline()]
    starting.cancel()
    async with asyncio.timeout(8):  # a request to close has 10 s
        await asyncio.gather(starting, return_exceptions=True)
    assert await gone(pid)


async def test_a_component_that_cannot_be_built_leaves_no_process(start, tmp_path):
    with pytest.raises(RemoteError, match="cannot be built"):
        await start(how="no build")
    left = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    assert not [each for each in left if "atropos_core.processes.child_main" in each.cmdline()]


async def test_an_unknown_component_and_one_that_cannot_be_hosted_are_named(start):
    with pytest.raises(UnknownComponent, match="no engine named 'riged'"):
        await start(name="riged")
    with pytest.raises(ConfigError, match="a transform cannot run in a child process"):
        await start("transform", name="drop_flat")


# -- deadlines and cancellation


async def test_a_call_past_its_deadline_ends_here_and_over_there(start, tmp_path):
    engine = HostedEngine(await start(how="wait"))
    with pytest.raises(DeadlineExceeded, match=r"engine: sample\(\) gave no answer within 0.3 s"):
        await sample(engine, 0.3)
    await until_written(tmp_path, "cancelled")
    assert (await engine.open()).architecture == "Rigged"


async def test_a_call_that_is_cancelled_here_is_cancelled_over_there(start, tmp_path):
    engine = HostedEngine(await start(how="wait"))
    call = asyncio.ensure_future(sample(engine))
    await until_written(tmp_path, "waiting")
    call.cancel()
    await until_written(tmp_path, "cancelled")
    assert call.cancelled()


async def test_a_child_that_blocks_its_own_loop_still_meets_our_deadline_and_can_be_ended(start, tmp_path):
    child = await start(how="hang")
    start_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await sample(HostedEngine(child), 0.3)
    await child.kill()
    assert time.monotonic() - start_s < 20
    assert child.process.popen.returncode == -signal.SIGKILL


# -- the end of a child


async def test_kill_9_ends_every_waiting_call_at_once_by_name(start, tmp_path):
    child = await start(how="wait")
    engine = HostedEngine(child)
    calls = [asyncio.ensure_future(sample(engine)) for _ in range(3)]
    await until_written(tmp_path, "waiting")
    os.kill(child.process.pid, signal.SIGKILL)
    start_s = time.monotonic()
    for call in calls:
        with pytest.raises(ProcessDied, match=r"engine \(pid \d+\) was killed by SIGKILL .*memory runs out"):
            await call
    assert time.monotonic() - start_s < 20
    with pytest.raises(ProcessDied, match="SIGKILL"):
        await engine.open()
    assert child.peer.lost.is_set()
    await child.close()
    await child.close()


async def test_a_child_that_exits_says_its_code_and_the_end_of_its_log(start, tmp_path):
    with pytest.raises(ProcessDied) as caught:
        await sample(HostedEngine(await start(how="die")))
    text = str(caught.value)
    assert "ended with exit code 7" in text
    assert "  | last words" in text
    assert f"Its log is {tmp_path / 'log'}" in text


async def test_close_lets_the_component_close_itself_and_may_be_called_twice(start, tmp_path):
    child = await start()
    engine = HostedEngine(child)
    await engine.close()
    assert child.process.popen.returncode == 0
    assert (tmp_path / "note").read_text().split() == ["closed"]
    await engine.close()
    with pytest.raises(ProcessDied):
        await engine.open()


async def test_a_child_that_hears_nothing_is_ended_all_the_same(start, tmp_path):
    child = await start(how="hang")
    call = asyncio.ensure_future(sample(HostedEngine(child)))
    await until_written(tmp_path, "hanging")
    await child.close()
    assert child.process.popen.returncode == -signal.SIGTERM
    with pytest.raises(ProcessDied):
        await call


@pytest.mark.parametrize("end", ["close", "kill", "kill -9 of the child"])
async def test_what_a_child_started_ends_with_it(start, tmp_path, end):
    child = await start(how="parent")
    await until_written(tmp_path, "\n")
    helper = int((tmp_path / "note").read_text().split()[0])
    assert psutil.pid_exists(helper)
    if end == "kill -9 of the child":
        os.kill(child.process.pid, signal.SIGKILL)
        await child.peer.lost.wait()
    await (child.kill() if end == "kill" else child.close())
    ended = await gone(helper)
    if not ended:
        os.kill(helper, signal.SIGKILL)
    assert ended, "a process that the child started in its group is still there"


SUPERVISOR = """
import asyncio, os, signal, sys
from pathlib import Path
from atropos_core.processes.child import Child

async def main():
    child = await Child.start("worker", {"kind": "function", "name": "time:sleep"}, Path("/dev/null"), threads=1)
    print(child.process.pid, flush=True)
    if sys.argv[1] == "busy":
        asyncio.ensure_future(child.peer.call("call", 600))
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
async def test_a_supervisor_that_is_killed_takes_its_children_along(state):
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, state], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    child = int(supervisor.stdout.readline())
    if state == "busy":
        await asyncio.sleep(0.2)
    assert not await gone(child, 0.05)
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    assert await gone(child)


# -- descriptors


def memory(text: bytes) -> int:
    made = os.memfd_create("given")
    os.write(made, text)
    os.lseek(made, 0, os.SEEK_SET)
    return made


@pytest.mark.parametrize("where", ["there", "here"])
async def test_descriptors_go_both_ways_and_each_side_owns_its_own(start, where, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    endpoint: Any = PeerEndpoint((await start()).peer) if where == "there" else LocalEndpoint(object())
    await endpoint.load_extension("rigged:Extension")
    given = memory(b"hello")
    [read, component], [made] = await endpoint.call("swap", "from there", descriptors=[given])
    assert read == b"hello"
    assert component == ("RiggedEngine" if where == "there" else "object")
    assert os.pread(made, 100, 0) == b"from there"
    assert os.pread(given, 100, 0) == b"hello and child", "one memory, seen from both ends"
    for descriptor in (given, made):
        os.close(descriptor)  # both are ours: neither was closed


async def test_passing_descriptors_a_hundred_times_leaks_none(start):
    endpoint = PeerEndpoint((await start()).peer)
    await endpoint.load_extension("rigged:Extension")
    [before, _] = await endpoint.call("count")
    ours = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        given = memory(b"x")
        _, [made] = await endpoint.call("swap", "y", descriptors=[given])
        os.close(given)
        os.close(made)
    assert (await endpoint.call("count"))[0] == before
    assert len(os.listdir("/proc/self/fd")) == ours


@pytest.mark.parametrize("where", ["there", "here"])
async def test_an_extension_without_descriptors_gets_its_arguments_alone(start, where, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    endpoint: Any = PeerEndpoint((await start()).peer) if where == "there" else LocalEndpoint(object())
    await endpoint.load_extension("rigged:Extension")
    assert await endpoint.call("none", 1, "two") == ([1, "two"], [])


# -- processes that are there and say nothing

SHORT = Patience(say_s=0.4, least_s=1.2, times=2.0)


async def sampled(child: Child) -> None:
    await sample(HostedEngine(child), 60)


async def needed(start: Start, how: str, patience: Patience = SHORT) -> Child:
    child: Child = await start("engine", how, patience=patience, needed=True)
    return child


async def printed_until(text: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What has been printed, once `text` is in it."""
    printed = ""
    async with asyncio.timeout(30):
        while text not in printed:
            await asyncio.sleep(0.01)
            printed += "".join(capfd.readouterr())
    return printed


@pytest.mark.parametrize("how", ["", "hang later"])
async def test_a_process_that_is_stopped_or_hangs_is_named_and_given_up_at_the_bound(how, start, capfd):
    child = await needed(start, how)
    await sampled(child)
    if not how:
        child.process.popen.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(
        ProcessSilent, match=rf"engine \(pid {child.process.pid}\) gave no answer to sample\(\) for"
    ) as raised:
        await sampled(child)
    assert 1.2 <= time.monotonic() - began < 10
    printed = capfd.readouterr().err
    assert f"engine (pid {child.process.pid}) has given no answer to sample() for" in printed
    for text in (printed, str(raised.value)):
        assert (
            f"is stopped; to continue it: kill -CONT {child.process.pid}" if not how else "uses no CPU time"
        ) in text
    assert "watch.least_s" in printed and "watch.times" in str(raised.value)
    await until(lambda: child.process.popen.poll() is not None, "its end")
    assert child.process.popen.returncode == -signal.SIGKILL, "it is ended"


async def test_a_process_that_goes_on_in_time_is_kept_and_that_is_reported(start, capfd):
    child = await needed(start, "", replace(SHORT, least_s=60.0))
    await sampled(child)
    child.process.popen.send_signal(signal.SIGSTOP)
    call = asyncio.create_task(sampled(child))
    await printed_until("has given no answer to sample()", capfd)
    child.process.popen.send_signal(signal.SIGCONT)
    await call
    await printed_until("answers again", capfd)


@pytest.mark.parametrize("how", ["hang", "slow later"])
async def test_no_process_is_given_up_before_its_usual_call_is_known_or_while_it_may_be_silent(how, start):
    child = await needed(start, how, Patience(say_s=0.2, least_s=0.4, times=2.0))
    if how == "hang":  # a first call: its own deadline
        with pytest.raises(DeadlineExceeded, match="no answer within 1 s"):
            await child.peer.call("sample", tokens([USER]), 1, Sampling(), [0], 60.0, deadline_s=1.0)
        return
    await sampled(child)
    child.paused = True
    await sampled(child)
    child.paused = False
    assert not child.peer.lost.is_set()


async def test_a_paused_engine_owes_the_call_that_is_to_give_it_weights(start):
    """Its samples wait for whoever paused it; other calls meanwhile do not."""
    child = await needed(start, "")
    engine = HostedEngine(child)
    await sampled(child)
    await engine.pause()
    child.process.popen.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(sampled(child))
    await asyncio.sleep(0.05)
    with pytest.raises(ProcessSilent, match=r"gave no answer to load_adapter\(\) for"):
        async with asyncio.timeout(60):
            await engine.load_adapter(Path("/adapter"), 1)
    with pytest.raises(ProcessSilent):
        await waiting


async def test_what_a_process_waits_for_while_it_opens_is_said_here(start, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(waits, "WAIT_S", 0.0)
    child = await start("engine", "server")
    child.loads = "tiny (3 parameters)"
    opening, said = asyncio.create_task(HostedEngine(child).open()), ""
    async with asyncio.timeout(30):
        while "its server" not in said:
            await asyncio.sleep(0.01)
            said += capfd.readouterr().err
    (tmp_path / "note").write_text("it is up")
    assert (await opening).architecture == "Rigged"
    assert said.splitlines() == [
        "waiting for engine to load tiny (3 parameters)",
        "waiting for engine: its server to come up",
    ]


async def test_the_end_of_the_log_is_reported_where_it_is_new(start, tmp_path, capfd):
    child = await needed(start, "", replace(SHORT, least_s=60.0))
    await sampled(child)
    child.process.popen.send_signal(signal.SIGSTOP)
    call = asyncio.create_task(sampled(child))
    await asyncio.sleep(0.1)
    with (tmp_path / "log").open("a") as log:
        log.write("first\nwaiting for a server elsewhere\n")
    await printed_until("Its log ends: | waiting for a server elsewhere", capfd)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_deadlines_that_pass_one_after_another_add_up_to_silence(start):
    child = await needed(start, "")
    await sampled(child)
    child.process.popen.send_signal(signal.SIGSTOP)
    with pytest.raises(ProcessSilent):
        while True:
            try:
                await child.peer.call("sample", tokens([USER]), 1, Sampling(), [0], 0.3, deadline_s=0.3)
            except DeadlineExceeded as error:
                assert "is stopped" in str(error) or child.peer.lost.is_set(), "given up and killed in the same moment"


async def test_a_stopped_process_beneath_the_one_that_was_called_is_named(start, tmp_path, capfd):
    child = await needed(start, "parent", replace(SHORT, least_s=60.0))
    helper = int((tmp_path / "note").read_text())
    os.kill(helper, signal.SIGSTOP)
    child.process.popen.send_signal(signal.SIGSTOP)  # its caller waits for it
    call = asyncio.create_task(sampled(child))
    await printed_until(f"(pid {helper})", capfd)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_process_that_has_no_group_of_its_own_yet_is_ended_all_the_same(end):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        process = LocalProcess(popen, ours)
        getattr(process, end)()
        assert popen.wait(20) < 0 and "was killed by" in (process.ended() or "")
