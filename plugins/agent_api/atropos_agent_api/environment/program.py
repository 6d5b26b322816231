"""The program of one episode: arguments, environment variables and files, with their placeholders filled."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from atropos_agent_api.config import AgentOptions, FileOptions, LimitOptions
from atropos_agent_api.dialects.values import writable
from atropos_agent_api.sandboxes import function
from atropos_agent_api.sandboxes.installations import needed_by
from atropos_agent_api.server.running import MODEL
from atropos_agent_api.templates import check, fill, fixed, of_task, plain, prompt_of
from atropos_core.errors import ConfigError, DataError
from atropos_core.sandboxes import Inside, Limits, Network, Program
from atropos_core.types import Task

MOST_FILE_BYTES = 256_000_000  # of all files that each program gets
PASSED = ("LANG", "LC_ALL", "TZ", "TERM")  # passed on from our own environment
TASK_FILE = ".atropos-task.json"  # in HOME
FUNCTION = Path(function.__file__)


class Files:
    """The files that every program gets. They are read once: later changes on disk have no effect."""

    def __init__(self, files: Mapping[str, FileOptions]) -> None:
        """Raises ConfigError if a file cannot be read."""
        self._texts: dict[str, str] = {}
        self._bytes: dict[str, bytes] = {}
        for target, options in files.items():
            if options.copy_of is not None:
                self._bytes |= _read_all(target, options.copy_of)
            elif options.template is not None:
                text = _read(options.template).decode(errors="replace")
                try:
                    check(text, str(options.template))
                except ValueError as error:
                    raise ConfigError(str(error)) from None
                self._texts[target] = text
            else:
                self._texts[target] = options.text or ""
        if (size := sum(map(len, self._bytes.values()))) > MOST_FILE_BYTES:
            raise ConfigError(
                f"the files of each program are {size / 1e6:,.1f} MB, above {MOST_FILE_BYTES / 1e6:g} MB: every episode copies them.",
                remedy="Have the program read them at their present place.",
            )

    def filled(self, values: Mapping[str, str]) -> dict[str, bytes]:
        return self._bytes | {target: fill(text, values).encode() for target, text in self._texts.items()}


def argv(options: AgentOptions) -> tuple[str, ...]:
    """The command with placeholders; empty if nothing is started here."""
    if options.is_external:
        return ()
    if options.command is not None:
        return options.command
    return ("{python}", *(plain(text) for text in (str(FUNCTION), *function_of(options))))


def shown_to(options: AgentOptions) -> tuple[Path, ...]:
    """Return what a sandbox that hides the disk shows each program: the installation of its command, and files that the command
    names. Only the options decide this, never a task's text, which could name any file of this machine. Folders with the tasks
    and their answers, the reward, or `here`, where runs are, are not shown on the program's account."""
    values = {"here": str(options.here), "python": sys.executable}
    path = fixed(options.env.get("PATH", ""), values) or os.environ.get("PATH", os.defpath)
    reward = () if options.reward is None else options.reward.code()
    code = [options.here / fixed(text, values) for text in reward if text.endswith(".py")]
    kept_from = [one for one in (options.here, options.tasks, options.test_tasks, *code) if one is not None]
    return tuple(needed_by([fixed(text, values) for text in argv(options)], path, kept_from))


def function_of(options: AgentOptions) -> tuple[str, str]:
    """The function's module, or the path of its file, and its name."""
    assert options.function is not None, "the options have one of the two"
    where, _, name = options.function.rpartition(":")
    return (str((options.here / where).resolve()) if where.endswith(".py") else where, name)


def values_of(options: AgentOptions, task: Task, inside: Inside, key: str, seed: int) -> dict[str, str]:
    """By placeholder."""
    return of_task(task) | {
        "base_url": f"{inside.api_url}/v1",
        "root_url": inside.api_url,
        "api_key": key,
        "model": MODEL,
        "work": inside.work,
        "home": inside.home,
        "here": str(options.here),
        "python": sys.executable,
        "seed": str(seed),
        "task_file": f"{inside.home}/{TASK_FILE}",
    }


def program_of(
    options: AgentOptions,
    files: Files,
    task: Task,
    values: Mapping[str, str],
    *,
    name: str,
    streams: Path,
    network: Network,
    api_url: str,
    shown: Sequence[Path] = (),
) -> Program:
    """Raises DataError for a placeholder that the task cannot fill, or fills with something that no program can receive."""
    found = files.filled(values)
    home = {
        target.removeprefix("{home}/"): content for target, content in found.items() if target.startswith("{home}/")
    }
    arguments, environment = [fill(text, values) for text in argv(options)], _environment(options, values)
    if any("\0" in text for text in (*arguments, *environment.values())):
        raise DataError(
            f"task {task.id!r} has a zero character, which no argument or environment variable can hold.",
            remedy="Give its text by stdin or in a file: ATROPOS_TASK_FILE has the prompt.",
        )
    return Program(
        name=name,
        argv=arguments,
        stdout=streams / "stdout.txt",
        stderr=streams / "stderr.txt",
        environment=environment,
        stdin=fill(options.stdin, values).encode(),
        files={target: content for target, content in found.items() if not target.startswith("{home}/")},
        home_files=home | {TASK_FILE: _task_file(task)},
        shown=shown,
        network=network,
        api_url=api_url,
        limits=limits_of(options.limits),
    )


def _environment(options: AgentOptions, values: Mapping[str, str]) -> dict[str, str]:
    """The environment variables. OpenAI's SDKs expect /v1 in their URL; Anthropic's add it."""
    given = {} if options.is_external else {name: os.environ[name] for name in PASSED if name in os.environ}
    if options.function is not None:
        given |= {"PYTHONPATH": str(options.here), "PYTHONUNBUFFERED": "1"}
    if not options.is_external:
        given["ATROPOS_TASK_FILE"] = values["task_file"]
    given |= {
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_BASE": values["base_url"],  # for the SDK before its version 1, and for litellm
        "OPENAI_API_KEY": values["api_key"],
        "ANTHROPIC_BASE_URL": values["root_url"],
        "ANTHROPIC_API_KEY": values["api_key"],
    }
    return given | {name: fill(text, values) for name, text in options.env.items()}


def _task_file(task: Task) -> bytes:
    """The task without its answer, and without its data, which may hold the answer."""
    told = {"id": task.id, "prompt": prompt_of(task), "messages": list(task.messages)}
    return writable(json.dumps(told, ensure_ascii=False)).encode()


def limits_of(options: LimitOptions) -> Limits:
    return Limits(
        wall_time_s=options.wall_s,
        output_bytes=int(options.output_mb * 1e6),
        processes=options.processes,
        memory_bytes=int(options.memory_mb * 1e6),
        disk_bytes=int(options.disk_mb * 1e6),
    )


def _read_all(target: str, path: Path) -> dict[str, bytes]:
    """A file, or all files of a folder, by path."""
    if not path.is_dir():
        return {target: _read(path)}
    return {
        f"{target.rstrip('/')}/{one.relative_to(path)}": _read(one) for one in sorted(path.rglob("*")) if one.is_file()
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}, a file for each program, cannot be read: {error.strerror}.") from error
