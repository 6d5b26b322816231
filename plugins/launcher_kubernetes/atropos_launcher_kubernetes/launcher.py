"""The launcher `kubernetes`, in the pod of the run: the pods of the roles already exist and connect to it. Data travels over the run's
own connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atropos_core import console
from atropos_core.errors import AtroposError, FitError
from atropos_core.launchers import Launcher, Machine, StartedProcess
from atropos_core.processes.dialing import SECRET, Listener, connected
from atropos_core.processes.local import how_ended
from atropos_core.processes.rpc import Peer
from atropos_launcher_kubernetes.config import POD_ADDRESS, SECRETS, KubernetesOptions
from atropos_launcher_kubernetes.manifests import label

START_DEADLINE_S = 120.0  # of a process in a pod that has connected
CALL_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 5.0
T = TypeVar("T")
INHERITED = ("HF_", "TRANSFORMERS_")  # prefixes of variables that processes in other pods get from this one


class Thread:
    """A thread that reads connections to pods: the end of a process must be known even while the run's own event loop blocks on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pods", daemon=True)
        self._thread.start()

    def post(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_DEADLINE_S)
        if not self._thread.is_alive():
            self._loop.close()


class PodProcess(StartedProcess):
    """A process in another pod, whose holder reports its output and how it ended."""

    def __init__(self, pod: Pod, number: int, log: Path, thread: Thread) -> None:
        self.named = f"in pod {pod.name}"
        self.connection: socket.socket
        self._pod = pod
        self._number = number
        self._log = log
        self._how: str | None = None
        self._thread = thread

    def ended(self) -> str | None:
        if self._how is None and self._pod.peer.lost.is_set():
            self._how = "was lost: its pod is gone or cannot be reached"
        return self._how

    def note_end(self, code: int) -> None:
        self._how = how_ended(code)

    def note_output(self, text: str) -> None:
        with self._log.open("ab", buffering=0) as log:
            log.write(text.encode())

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.ended() is None:
            self._thread.post(self._try(number))

    async def _try(self, number: signal.Signals) -> None:
        try:
            await self._pod.peer.call("send", self._number, int(number), deadline_s=CALL_DEADLINE_S)
        except AtroposError:
            pass  # it is lost, and ended() says so


class Pod:
    """A pod that has connected."""

    def __init__(self, role: str, connection: socket.socket) -> None:
        self.name = role
        self.cpus = 0
        self.processes: dict[int, PodProcess] = {}
        self.peer = Peer(connection, f"the pod of {role}", {"output": self._output, "ended": self._ended})

    @classmethod
    async def of(cls, role: str, connection: socket.socket) -> Pod:
        """Create it, in the thread that reads it. Raises AtroposError if the pod does not describe itself."""
        pod = cls(role, connection)
        found = await pod.peer.call("describe", deadline_s=CALL_DEADLINE_S)
        pod.name, pod.cpus = str(found["name"]), int(found["cpus"])
        return pod

    async def close(self) -> None:
        self.peer.close()

    async def _output(self, number: int, text: str) -> None:
        self.processes[number].note_output(text)

    async def _ended(self, number: int, code: int) -> None:
        self.processes[number].note_end(code)


class KubernetesLauncher(Launcher):
    """Waits for pods; creates none, and deletes none."""

    def __init__(self, options: KubernetesOptions, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._listener: Listener | None = None
        self._thread: Thread
        self._pods: dict[str, Pod] = {}
        self._waiting: list[asyncio.Task[None]] = []
        self._started = 0

    async def open(self) -> None:
        if SECRETS not in os.environ:
            raise FitError(
                "launcher 'kubernetes': this process is not running in one of the run's Kubernetes pods.",
                remedy="Use `atropos run` with it: it writes the manifests and prints the command that applies them.",
            )
        host = os.environ.get(POD_ADDRESS) or "0.0.0.0"
        try:
            self._listener = Listener(host, self._options.port)
        except OSError as error:
            raise FitError(
                f"launcher 'kubernetes' cannot listen at {host}:{self._options.port}: {error}.",
                remedy="Set launcher.port to one that is free in this pod.",
            ) from error
        self._thread = Thread()

    async def machines(self) -> Sequence[Machine]:
        return [Machine(pod.name, pod.cpus) for pod in self._pods.values() if not pod.peer.lost.is_set()]

    async def check(self, roles: Sequence[str]) -> None:
        """Wait for a pod of each role. Raises FitError with the roles whose pods have not connected."""
        self._waiting = [asyncio.create_task(self._welcome(role)) for role in roles]
        until = time.monotonic() + self._options.wait_s
        say_at = time.monotonic() + 10
        while missing := [role for role in roles if role not in self._pods]:
            for one in self._waiting:
                if one.done():
                    one.result()
            if time.monotonic() > until:
                raise FitError(
                    f"no pod of {' and '.join(missing)} has connected within {self._options.wait_s:g} s.",
                    remedy=f"`kubectl get pods -l atropos/role={label(missing[0])}` shows if there is one, and "
                    "`kubectl describe` what it waits for.",
                )
            if time.monotonic() > say_at:
                say_at = until
                console.say(f"waiting for the pods of {', '.join(missing)} to connect")
            await asyncio.sleep(0.05)

    async def _welcome(self, role: str) -> None:
        """Accept pods of this role. The latest counts: a former one is gone, or will be."""
        while self._listener is not None:
            try:
                secret = (Path(os.environ[SECRETS]) / role).read_text().strip()
            except OSError as error:
                raise FitError(f"there is no secret for {role} in {os.environ[SECRETS]}: {error.strerror}.") from error
            _, dialled = self._listener.expect(secret)
            connection = await dialled
            try:
                pod = await self._thread.run(Pod.of(role, connection))
            except AtroposError:
                continue
            former = self._pods.get(role)
            self._pods[role] = pod
            if former is not None:
                await self._thread.run(former.close())

    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> StartedProcess:
        assert self._listener is not None, "open() comes first"
        if role not in self._pods:
            await self.check([role])
        pod = self._pods[role]
        self._started += 1
        log.open("ab").close()  # the process checks by this file that its pod has the run directory
        secret, dialled = self._listener.expect()
        process = pod.processes[self._started] = PodProcess(pod, self._started, log, self._thread)
        inherited = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
        try:
            given = {**inherited, **environment, SECRET: secret}
            pid = await self._thread.run(
                pod.peer.call("start", self._started, program, role, given, deadline_s=START_DEADLINE_S)
            )
            process.named = f"pid {pid} in pod {pod.name}"
            process.connection = await connected(process, dialled, role, START_DEADLINE_S, log)
        finally:
            dialled.cancel()
        return process

    async def close(self) -> None:
        """Hang up: each holder ends its processes, and connects to the next pod."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        if self._listener is None:
            return
        pods, self._pods = list(self._pods.values()), {}
        for process in [one for pod in pods for one in pod.processes.values()]:
            process.kill()
        until = time.monotonic() + CLOSE_DEADLINE_S
        while time.monotonic() < until and any(one.ended() is None for pod in pods for one in pod.processes.values()):  # noqa: ASYNC110 - a process does not announce it
            await asyncio.sleep(0.05)
        for pod in pods:
            await self._thread.run(pod.close())
        self._thread.close()
        self._listener.close()
        self._listener = None
