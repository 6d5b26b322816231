"""The interpreter that has imported everything, and forks what it is asked for: `python -m tests.warm.template DESCRIPTOR PADDING`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from execnet.gateway_io import popen_bootstrapline

from atropos_core.cli.guarded import GUARDED
from atropos_core.plugins.manager import load_plugins
from tests.warm import NAME, forked, requests

WARM = (
    "atropos_core", "atropos_core.processes.child_main", "atropos_trainer_grpo.rank", "atropos_env_atroposlib.host", "pytest",
    "tests.warm.program", "tests.e2e.api_programs", "plugins.bridge_ipc.tests.holder_process",
    "atropos_core.rollouts.template_process", "atropos_trainer_grpo.layout_probe", "atropos_engine_hf.probe",
)  # fmt: skip
STARTS = ("serve", "engine", "env")  # commands that start processes of ours, besides those of GUARDED
WORKER = ("-u", "-c", popen_bootstrapline)  # what pytest-xdist starts its workers with
ALSO = "WARM_ALSO"  # a variable of the environment: modules to import beside these
PADDING = "/" * 4096  # room for the names of the processes to be
IMPORTED = (
    "torch", "torch.distributed", "transformers", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "peft", "safetensors.torch", "httpx", "uvicorn", "starlette.applications", "starlette.routing",
    "atropos_core.processes.child_main", "atropos_core.launch.supervisor", "atropos_core.rollouts.producer",
    "atropos_core.cli.run", "atropos_core.cli.resume", "atropos_evaluation.evaluate", "atropos_core.cli.plugins",
    "atropos_testing.new_command", "atropos_testing.check_command",
    "atropos_config.command", "atropos_recipes.command", "atropos_doctor.command", "atropos_adapter_kit.command",
    "atropos_testing.environments", "atropos_engine_hf.engine", "atropos_trainer_grpo.trainer",
    "atropos_torch_models.small_model",
    "atropos_bridge_ipc.bridge", "atropos_bridge_ipc.trainer_extension", "torch.profiler",
    "atropos_bridge_lora.bridge", "atropos_bridge_checkpoint.bridge",
    "atropos_env_gsm8k.environment", "atropos_trajectory_api.server.app", "pytest",
    "atropos_core.builtin.config", "atropos_core.builtin.rewards", "atropos_core.builtin.curricula", "atropos_core.builtin.recording",
    "atropos_core.builtin.sinks", "atropos_core.builtin.transforms", "atropos_core.builtin.local", "atropos_core.builtin.toy",
    "atropos_core.conversation", "atropos_core.rollouts.control_tokens", "atropos_core.rollouts.template_process",
    "atropos_core.launch.scheduler_files", "atropos_torch_models.tensors",
    "atropos_engine_hf.config", "atropos_engine_hf.memory", "atropos_trainer_grpo.config", "atropos_trainer_grpo.memory",
    "atropos_bridge_ipc.config", "atropos_bridge_lora.config", "atropos_bridge_checkpoint.config",
    "numpy.ma", "safetensors.numpy", "typer._adapters", "typer._click.decorators",
    "anyio._backends._asyncio", "certifi", "encodings.idna", "httpcore", "httpcore._backends.auto", "pydantic.v1",
    "uvicorn.lifespan.on", "uvloop",
    "atropos_debugging.bisect_command", "atropos_debugging.replay_command", "atropos_debugging.rescore_command",
    "atropos_records.audit_command", "atropos_records.export_command", "atropos_core.cli.plot", "atropos_records.dataset",
    "atropos_records.record_checks", "atropos_records.audit", "atropos_http_server.server",
    "atropos_trajectory_client.remote_engine",
    "atropos_trajectory_client.source", "atropos_trajectory_client.shm.consumer",
    "atropos_trajectory_client.shm.listener", "atropos_trajectory_client.shm.producer",
    "atropos_adapter_skyrl.command", "atropos_agent_api.serve_agent", "atropos_env_atroposlib.importing.command",
    "atropos_simulation.command", "atropos_credit.bias_command", "atropos_tinker_api.command", "atropos_tinker_api.serving",
    "atropos_trainer_grpo.plan_command", "atropos_trainer_grpo.quantize_command", "atropos_viewer.command",
    "atropos_trajectory_api.engine_http.server", "atropos_trajectory_api.native.same_host", "atropos_trajectory_api.roles.commands",
    "atropos_trajectory_api.roles.environment_worker", "atropos_trajectory_api.roles.process_command",
    "atropos_trajectory_api.roles.serve_command", "atropos_trajectory_api.server.serving",
)  # fmt: skip


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    forked.end_with_parent(int(sys.argv[2]))
    ignore_signals()
    for name in (*IMPORTED, *os.environ.get(ALSO, "").split()):
        importlib.import_module(name)
    load_plugins()
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # of all families at once: 0.3 s wherever a first model is loaded
    leave_torchs_libraries()
    refuse_threads()
    gc.collect()
    gc.freeze()
    forked.take_huge_pages()
    run(serve(channel))


def leave_torchs_libraries() -> None:
    """At the end of a process torch takes each of its libraries of operators apart, which takes 0.1 s, and says how long it compiled."""
    from torch.library import _del_library

    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if finalizer.peek()[1] is _del_library:
            finalizer.atexit = False
    from torch._dynamo.utils import dump_compile_times

    atexit.unregister(dump_compile_times)  # which makes a table of no times


def refuse_threads() -> None:
    if threads := [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()][1:]:
        named = ", ".join(threads)
        sys.exit(f"the template has threads ({named}): what is forked from it would have their locks without them")


def hides_what_is_imported(folders: list[str]) -> bool:
    """Whether one of these folders, in front of the path, has a module that was imported here from another, or one that an
    interpreter runs as it starts."""
    return any(hides(entry) for one in folders if os.path.isdir(one) for entry in os.scandir(one))


def hides(entry: os.DirEntry[str]) -> bool:
    name = entry.name.partition(".")[0]
    if name in ("sitecustomize", "usercustomize"):
        return True
    if entry.is_dir() and not os.path.exists(os.path.join(entry.path, "__init__.py")):
        # The `tests` of a plugin, say. It would be a part of a namespace package, and hides nothing else.
        return name in sys.modules and getattr(sys.modules[name], "__file__", None) is None
    return name in sys.modules


def ignore_signals() -> None:
    """Of the process group, and for another: this one ends with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def serve(channel: socket.socket) -> tuple[str, list[str]]:
    """Fork what is asked for. Returns in each new process, with its module; never here."""
    while True:
        text, received, _, _ = socket.recv_fds(channel, requests.LARGEST, requests.DESCRIPTORS)
        if not text:
            os._exit(0)
        wanted: dict[str, Any] = json.loads(text)
        answer = requests.REFUSED
        if not hides_what_is_imported(wanted["in_front"]):
            pid = forked.fork_sibling()
            if pid == 0:
                channel.detach()  # its number is another file's from here on
                return new_process(wanted, received)
            answer = str(pid).encode()
        for one in received:
            os.close(one)
        channel.send(answer)


def new_process(wanted: dict[str, Any], received: list[int]) -> tuple[str, list[str]]:
    forked.become(wanted, received)
    command = wanted["command"]
    if tuple(command[1:]) == WORKER:
        with_template()
    elif command[2] == "atropos_core" and command[3:4] and command[3] in GUARDED:
        os.register_at_fork(after_in_child=once(with_template))  # the fork that does the work, in cli/guarded.py
    elif (command[3:4] and command[3] in STARTS) or command[-1].startswith("trainer"):
        with_template()
    return command[2], command


def with_template() -> None:
    """A template of this process's own, for the processes that it starts. It has no other threads yet."""
    ours, theirs = requests.channel()
    us = os.getpid()
    if os.fork() == 0:
        forked.end_with_parent(us)
        ignore_signals()
        forked.name_process([sys.executable, "-m", NAME])
        forked.take_descriptors([0, 1, 2, 3], [*(os.open(os.devnull, os.O_RDWR) for _ in range(3)), theirs.fileno()])
        ours.detach(), theirs.detach()
        run(serve(socket.socket(fileno=3)))
        os._exit(0)
    theirs.close()
    requests.install(ours)


def once(work: Callable[[], None]) -> Callable[[], None]:
    done = False

    def first() -> None:
        nonlocal done
        if not done:
            done = True
            work()

    return first


def run(job: tuple[str, list[str]]) -> None:
    """What `python -m` does, but for the end of the interpreter, which would take torch apart piece by piece."""
    code: object = 0
    try:
        module, command = job
        if module == "-c":
            exec(command[-1], {"__name__": "__main__"})
        else:
            sys.modules.pop(module, None)  # or runpy warns that it was imported before
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code or 0) & 0xFF)


if __name__ == "__main__":
    main()
