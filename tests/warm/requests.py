"""`subprocess.Popen` in a process that has a template: which programs it asks the template for, and how."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SILENT_S = 300  # its imports included, on a machine that does much else
LARGEST, DESCRIPTORS = 1 << 18, 64  # of one request
REFUSED = (
    b"0"  # in place of a pid: a folder in front of the path has a module that the template has imported from elsewhere
)
READ_AT_START = (
    "PYTHON",
    "ATROPOS_",
    "HF_",
    "LC_",
    "LANG",
    "LD_",
    "TORCH",
    "OMP_WAIT",
    "MALLOC",
    "FORCE_COLOR",
    "GITHUB_",
)
# The new process does it itself: streams, and folders in front of the path. And torch.compile looks for its cache when it compiles: it
# also puts the variable into the environment of whoever did, and all that a worker started after such a test would be cold.
NOT_READ = ("PYTHONUNBUFFERED", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
NAMESPACES = ("cgroup", "ipc", "mnt", "pid_for_children", "user", "uts")
NETWORK = "/proc/thread-self/ns/net"  # of whoever asks, and of the new process
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # of the template: numpy's begins others as it is imported
PYTHON = sys.executable  # a test may put another in its place
_original = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_original)


def channel() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST * 2)
    return ours, theirs


class Requests:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(SILENT_S)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._environment = read_at_start(os.environ)  # the template's own
        self._path = os.environ.get("PYTHONPATH")
        self._inherited = inherited()

    def started(self, popen: subprocess.Popen[Any], asked: Mapping[str, Any]) -> bool:
        """False: this one is started as ever."""
        request = self._request(asked)
        if request is None:
            return False
        descriptors = sorted({*asked["pass_fds"]})
        standard = [
            own if asked[name] == -1 else asked[name] for own, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        text = json.dumps(request | {"descriptors": [0, 1, 2, *descriptors]}).encode()
        if len(text) > LARGEST:
            return False
        with self._lock, open(NETWORK) as network:
            try:
                socket.send_fds(self._connection, [text], [*standard, *descriptors, network.fileno()])
                answer = self._connection.recv(64)
            except TimeoutError:
                subprocess.Popen._execute_child = _original  # type: ignore[attr-defined] # its answer may come later, to another
                raise RuntimeError(
                    f"the template that warm processes are forked from is silent for {SILENT_S} s"
                ) from None
        if not answer:
            raise RuntimeError("the template that warm processes are forked from has ended")
        if answer == REFUSED:
            return False
        popen.pid = int(answer)
        popen._child_created = True  # type: ignore[attr-defined]
        popen._close_pipe_fds(  # type: ignore[attr-defined]
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )
        return True

    def _request(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        command = asked["args"]
        if not isinstance(command, list | tuple) or not all(isinstance(word, str | os.PathLike) for word in command):
            return None
        words = [os.fspath(word) for word in command]
        usual = (
            os.getpid() == self._owner
            and words[:1] == [PYTHON]
            and can_be_warm(words)
            and asked["executable"] is None
            and asked["preexec_fn"] is None
            and asked["close_fds"]
            and not asked["shell"]
            and asked["gid"] is asked["gids"] is asked["uid"] is None
            and asked["umask"] == -1
            and asked["process_group"] in (None, -1)
        )
        if not usual:
            return None
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        directory = os.path.abspath(asked["cwd"] or os.getcwd())
        if environment.get("COLD") or not os.path.isdir(directory):
            return None
        in_front = added(environment.get("PYTHONPATH"), self._path, directory)
        if in_front is None or read_at_start(environment) != self._environment or inherited() != self._inherited:
            return None
        return {
            "command": words,
            "directory": directory,
            "in_front": in_front,
            "network": os.readlink(NETWORK),
            "environment": environment,
            "umask": umask(),
            "new_session": bool(asked["start_new_session"]),
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }


def can_be_warm(words: Sequence[object]) -> bool:
    """One of the template's modules, or a worker of pytest-xdist. No script: it would have a child that a test does not expect,
    its own template."""
    from tests.warm.template import WARM, WORKER

    return len(words) > 2 and ((words[1] == "-m" and words[2] in WARM) or tuple(words[1:]) == WORKER)


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name not in NOT_READ
    }


def added(wanted: str | None, own: str | None, directory: str) -> list[str] | None:
    """The folders that PYTHONPATH `wanted` has in front of `own`; None where it is not `own` with some in front."""
    folders, known = (text.split(os.pathsep) if text else [] for text in (wanted, own))
    front = folders[: len(folders) - len(known)]
    if front + known != folders:
        return None
    return list(dict.fromkeys(os.path.abspath(os.path.join(directory, one)) for one in front))


def umask() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def inherited() -> list[object]:
    """What a new program has from who starts it and the template cannot be told."""
    return [
        [resource.getrlimit(each) for each in range(16)],
        [os.readlink(f"/proc/thread-self/ns/{name}") for name in NAMESPACES],
        [os.getuid(), os.geteuid(), os.getgid(), os.getegid()],
        sorted(os.sched_getaffinity(0)),
        os.getpriority(os.PRIO_PROCESS, 0),
    ]


def install(connection: socket.socket) -> None:
    """From here on, what can be warm in this process is."""
    requests = Requests(connection)

    def execute_child(self: subprocess.Popen[Any], *arguments: Any, **named: Any) -> None:
        bound = _parameters.bind(self, *arguments, **named).arguments
        if not requests.started(self, bound):
            _original(self, *arguments, **named)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def install_with_template(also: Sequence[str] = ()) -> None:
    """The same with a template of this process's own, started when it is first needed. The channel to it is there from the
    beginning: a test that counts open descriptors would find a new one. `also`: modules that it imports where they are installed."""
    ours, theirs = channel()

    def start() -> None:
        from tests.warm.template import ALSO, PADDING

        _starts.clear()
        subprocess.Popen._execute_child = _original  # type: ignore[attr-defined]
        with theirs:
            template = subprocess.Popen(
                [sys.executable, "-m", "tests.warm.template", str(theirs.fileno()), str(os.getpid()), PADDING],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD, ALSO: " ".join([*os.environ.get(ALSO, "").split(), *installed_of(also)])},
            )  # fmt: skip
        _templates.append(template)
        install(ours)

    def execute_child(self: subprocess.Popen[Any], *arguments: Any, **named: Any) -> None:
        command = _parameters.bind(self, *arguments, **named).arguments["args"]
        if isinstance(command, list | tuple) and can_be_warm(command):
            start_template()
            if not _starts:
                return subprocess.Popen._execute_child(self, *arguments, **named)  # type: ignore[attr-defined, no-any-return]
        return _original(self, *arguments, **named)

    _starts.append(start)
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def installed_of(modules: Sequence[str]) -> list[str]:
    return [one for one in modules if importlib.util.find_spec(one.partition(".")[0])]


def installed() -> bool:
    """In a worker that was forked from a template: it has been given one of its own."""
    return subprocess.Popen._execute_child is not _original  # type: ignore[attr-defined]


def start_template() -> None:
    """Where there is to be one and is none. The main thread alone does it: the template ends with the thread that started it."""
    if _starts and threading.current_thread() is threading.main_thread():
        _starts[0]()


_starts: list[Callable[[], None]] = []
_templates: list[subprocess.Popen[bytes]] = []  # it ends with this process
