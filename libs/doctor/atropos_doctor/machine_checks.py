"""Checks of this machine for `atropos doctor`: one Finding each, with a remedy.

`ok` is False only if no run could work, or if something that is installed is broken. It is None for missing things that only
some runs need (a GPU, the hub). Checks that wait run in parallel, each with a deadline.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from tempfile import gettempdir
from urllib.parse import urlsplit

from atropos_core import __version__
from atropos_core.errors import PluginError
from atropos_core.interfaces import Finding
from atropos_core.launch.machine_memory import host_memory
from atropos_core.plugins.manager import Plugins, load_plugins

HUB = "https://huggingface.co"
HUB_DEADLINE_S = 1.5
TORCH_DEADLINE_S = 3.5  # importing torch takes 1 to 3 s from a warm disk
SMALL_SHM_BYTES = 1 << 30
SMALL_DISK_BYTES = 2 << 30
SMALL_MEMORY_BYTES = 4 << 30
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).close()"
_TORCH = """
import torch
print(torch.__version__, torch.version.cuda or torch.version.hip or "cpu", torch.get_num_threads(), sep="|")
for at in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(at)
    print(found.name, found.total_memory, sep="|")
"""


def examine() -> list[Finding]:
    """Return all findings, in the order of the report. Takes as long as the slowest check, at most about 5 s."""
    slow: tuple[Callable[[], list[Finding]], ...] = (check_torch, check_hub)
    quick: tuple[Callable[[], list[Finding]], ...] = (
        check_python, check_plugins, check_memory, check_shared_memory, check_disk, check_ports,
    )  # fmt: skip
    with ThreadPoolExecutor(len(slow)) as pool:
        waiting = [pool.submit(check) for check in slow]
        first = [finding for check in quick for finding in check()]
        rest = [finding for one in waiting for finding in one.result()]
    return first + rest


def check_python() -> list[Finding]:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    where = f"{version} at {sys.executable}; {platform.system()} {platform.release()} on {platform.machine()}"
    remedy = "" if fine else "Atropos needs Python 3.11 or newer: make a virtual environment with one."
    found = [Finding("python", fine, where, remedy)]
    if sys.platform != "linux":
        found.append(
            Finding(
                "platform", None, f"{sys.platform} has no memfd: bridges that share memory need Linux", "Run on Linux."
            )
        )
    return found


def check_plugins(plugins: Plugins | None = None) -> list[Finding]:
    """Check core and every plugin; name the broken, blocked, contested or refused ones."""
    plugins = plugins or load_plugins()
    offers = len(plugins.registry.offers())
    whole = [report for report in plugins.reports if report.error is None and not report.blocked]
    found = [Finding("atropos-core", True, f"{__version__}; {len(whole)} plugins load and offer {offers} components")]
    for report in plugins.reports:
        who = f"{report.name} ({report.distribution} {report.version})"
        if report.blocked:
            found.append(Finding("plugin", None, f"{who} is blocked by ATROPOS_DISABLE_PLUGINS"))
        elif report.error is not None:
            first = (Exception.__str__(report.error).splitlines() or [""])[0]
            found.append(
                Finding(
                    "plugin",
                    False,
                    f"{who} does not load: {type(report.error).__name__}: {first}",
                    f"Repair it (pip install --force-reinstall {report.distribution}), or block it: "
                    f"ATROPOS_DISABLE_PLUGINS={report.name}",
                )
            )
        for _, error in report.refused:
            remedy = error.remedy if isinstance(error, PluginError) else None
            found.append(Finding("plugin", False, Exception.__str__(error), remedy or f"Update {report.distribution}."))
    for contested in plugins.registry.contested():
        both = " and ".join(sorted(offer.distribution for offer in contested))
        found.append(
            Finding(
                "plugin",
                False,
                f"{contested[0].kind} {contested[0].provider.name!r} is offered by both {both}",
                f"Uninstall one, or block it: ATROPOS_DISABLE_PLUGINS={contested[-1].plugin}",
            )
        )
    return found


def check_memory() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total, free = host_memory()
    detail = f"{cores} cores to use, {_size(free)} of {_size(total)} memory available" if total else f"{cores} cores"
    if total and free < SMALL_MEMORY_BYTES:
        return [Finding("memory", None, detail, "A small model needs about 2 GB: close other programs.")]
    return [Finding("memory", True, detail)]


def check_shared_memory(directory: Path = Path("/dev/shm")) -> list[Finding]:
    """Check memfd, which bridge ipc needs on a CPU, and /dev/shm, which torch's data loaders and NCCL use."""
    found = []
    if not hasattr(os, "memfd_create"):
        detail = "this Python has no memfd_create: --bridge ipc cannot share memory"
        found.append(Finding("memfd", None, detail, "Use --bridge checkpoint, or Linux."))
    else:
        try:
            handle = os.memfd_create("atropos-doctor", os.MFD_CLOEXEC)
            try:
                os.ftruncate(handle, 1 << 20)
            finally:
                os.close(handle)
            found.append(Finding("memfd", True, "anonymous shared memory can be made"))
        except OSError as error:
            detail = f"memfd_create fails: {error.strerror}"
            found.append(Finding("memfd", None, detail, "A sandbox may forbid it; use --bridge checkpoint."))
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        found.append(Finding(str(directory), None, "is not there", "Mount a tmpfs there."))
        return found
    small = usage.total < SMALL_SHM_BYTES
    remedy = "In a container, start it with --shm-size=8g; several GPUs need it." if small else ""
    detail = f"{_size(usage.free)} of {_size(usage.total)} free"
    return [*found, Finding(str(directory), None if small else True, detail, remedy)]


def check_disk(directory: Path | None = None) -> list[Finding]:
    """Check the disks of runs and of temporary files."""
    found = []
    for subject, path in (("disk", directory or Path.cwd()), ("temporary", Path(gettempdir()))):
        usage = shutil.disk_usage(path)
        writable = os.access(path, os.W_OK)
        small = usage.free < SMALL_DISK_BYTES
        detail = f"{_size(usage.free)} free in {path}" + ("" if writable else ", which cannot be written")
        remedy = (
            "A checkpoint of a 0.5B model takes 2 GB: free some, or choose another place: `atropos run --dir DIR`."
            if small
            else ""
        )
        if not writable:
            remedy = "Run where you may write, or `atropos run --dir DIR` (TMPDIR for temporary files)."
        found.append(Finding(subject, None if small or not writable else True, detail, remedy))
    return found


def check_ports(port: int = 8000) -> list[Finding]:
    """Check that our servers could listen on this machine. `port` is the usual port of the old trajectory API."""
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            free = sock.getsockname()[1]
    except OSError as error:
        detail = f"no loopback port can be bound: {error.strerror}"
        return [Finding("ports", False, detail, "A sandbox or firewall forbids it; allow 127.0.0.1.")]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            detail = f"127.0.0.1 can be bound (tried {free}); port {port} is taken by another program"
            return [
                Finding(
                    "ports",
                    None,
                    detail,
                    f"It matters only to old clients that expect {port}: `atropos serve --port` chooses another.",
                )
            ]
    return [Finding("ports", True, f"127.0.0.1 can be bound (tried {free} and {port})")]


def check_torch(deadline_s: float = TORCH_DEADLINE_S) -> list[Finding]:
    """Check torch in a child process: this one does not import it, and a broken torch must not end it."""
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        detail = "not installed: no engine or trainer but the toy ones works"
        return [
            Finding(
                "torch", None, detail, "pip install torch (for a CPU: --index-url https://download.pytorch.org/whl/cpu)"
            )
        ]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"{installed}; it did not import within {deadline_s:g} s"
        return [
            Finding(
                "torch",
                None,
                detail,
                "A first import reads 1 GB from disk, and a busy machine takes longer: look again.",
            )
        ]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        detail = f"{installed} does not import: {last}"
        return [Finding("torch", False, detail, "pip install --force-reinstall torch")]
    head, *devices = done.stdout.strip().splitlines()
    version, build, threads = head.split("|")
    found = [Finding("torch", True, f"{version}, built for {'CUDA ' * (build != 'cpu')}{build}; {threads} CPU threads")]
    for device in devices:
        name, memory = device.split("|")
        found.append(Finding("GPU", True, f"{name}, {_size(int(memory))}"))
    if not devices and Path("/dev/nvidia0").exists():
        remedy = (
            "Install a CUDA build of torch."
            if build == "cpu"
            else "Compare `nvidia-smi` with what torch was built for."
        )
        found.append(Finding("GPU", None, "this machine has one that torch cannot use", remedy))
    elif not devices:
        found.append(Finding("GPU", None, "none; everything runs on the CPU"))
    return found


def check_hub(endpoint: str | None = None, deadline_s: float = HUB_DEADLINE_S) -> list[Finding]:
    """Check that models and data sets can be fetched. Not needed for those that are already here."""
    url = urlsplit(endpoint or os.environ.get("HF_ENDPOINT") or HUB)
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    offline = next((name for name in _OFFLINE if os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON")), None)
    if offline is not None:
        return [
            Finding("hub", None, f"{offline} is set: nothing is fetched", f"Unset {offline} to fetch models by name.")
        ]
    proxy = next(
        (os.environ[name] for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY") if os.environ.get(name)), None
    )
    if proxy is not None:
        return [Finding("hub", None, f"not tried: requests go through the proxy {_without_password(proxy)}")]
    # In a child: a name lookup has no deadline, and a thread that does it could not be ended.
    asking = [sys.executable, "-S", "-c", _CONNECT, host, str(port)]
    try:
        done = subprocess.run(asking, capture_output=True, timeout=deadline_s, check=False)
        reached = done.returncode == 0
    except subprocess.TimeoutExpired:
        reached = False
    if reached:
        return [Finding("hub", True, f"{host} can be reached")]
    detail = f"{host} does not answer within {deadline_s:g} s: models and data sets must be here already"
    remedy = "Name a model by its directory, or use --model tiny; HF_HUB_OFFLINE=1 saves the waiting."
    return [Finding("hub", None, detail, remedy)]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes < 1e11 else f"{size_bytes / 1e9:.0f} GB"


def _without_password(url: str) -> str:
    scheme, _, rest = url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]
