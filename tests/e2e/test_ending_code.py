"""Code of components that ends its process: a failed rollout or a named error, and never a run that ended well."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.conftest import metrics_of, plant

TOY = ("run", "--model", "toy", "--dir", "run", "--steps", "2", "--set", "evaluation.problems=0",
       "--set", "training.groups_per_step=12", "--set", "training.group_size=2")  # fmt: skip


def side_by_side(work: Callable[[Any], Any], *cases: Any) -> list[Any]:
    """What `work` makes of each case: processes that wait for one another no more than they must."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(work, cases))


ENDING = '''
import asyncio, os, signal
from atropos_core.interfaces import Environment
from atropos_core.types import Task


class Own(BaseException):
    pass


async def task_of_its_own():
    raise SystemExit(3)


async def exits(): raise SystemExit(3)
async def exits_well(): raise SystemExit(0)
async def interrupts(): raise KeyboardInterrupt
async def unwinds(): raise GeneratorExit
async def raises_its_own(): raise Own("mine")
async def ends_at_once(): os._exit(0)
async def aborts(): os.abort()
async def becomes_another(): os.execvp("true", ["true"])
async def in_a_thread(): await asyncio.to_thread(os._exit, 0)
async def in_a_task(): await asyncio.gather(task_of_its_own(), asyncio.sleep(1))

async def forks_and_both_return():
    os.fork()

async def forks_as_one_should():
    if (pid := os.fork()) == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

async def changes_surroundings():
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)

WAYS = [exits, exits_well, interrupts, unwinds, raises_its_own, ends_at_once, aborts, becomes_another, in_a_thread,
        in_a_task, forks_and_both_return, forks_as_one_should, changes_surroundings]


class Ending(Environment):
    def tasks(self, split):
        return [Task(way.__name__, ({"role": "user", "content": "?"},)) for way in WAYS]

    async def rollout(self, task, policy, *, seed):
        if seed % 2:
            await next(way for way in WAYS if way.__name__ == task.id)()
        return await super().rollout(task, policy, seed=seed)

    async def score(self, task, reply):
        return float(len(reply["content"]))
'''  # fmt: skip


def test_what_ends_a_process_is_a_failed_rollout_with_its_cause(atropos, tmp_path):
    (tmp_path / "ending.py").write_text(ENDING)
    ended = atropos(*TOY, "--env", "./ending.py:Ending")
    assert ended.code == 0, ended.err
    causes: dict[str, set[str]] = {}
    for path in (tmp_path / "run/rollouts").glob("step-*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            if "failed" in row:
                causes.setdefault(row["task"], set()).add(row["failed"])
    wanted = {
        "exits": "SystemExit(3) in ending.py:", "exits_well": "SystemExit(0)", "interrupts": "KeyboardInterrupt",
        "unwinds": "GeneratorExit", "raises_its_own": "Own(mine)", "ends_at_once": "SystemExit(os._exit(0))",
        "aborts": "SystemExit(os.abort())", "becomes_another": "SystemExit(os.execv", "in_a_thread": "os._exit(0)",
        "in_a_task": "task_of_its_own() raised SystemExit(3)",
    }  # fmt: skip
    assert causes.keys() == wanted.keys()
    for way, text in wanted.items():
        assert all(text in cause for cause in causes[way]), (way, causes[way])
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2], "written once: no fork ran on"
    assert (tmp_path / "run/summary.json").is_file()
    assert "replaced the run's handler for SIGTERM" in ended.err


LIMIT = "resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))"  # `ulimit -v`, in mid-run
PLUGIN = """
import ctypes, os, resource, sys
from atropos_core.plugins.spec import hookimpl
from atropos_core.interfaces import Sink
from atropos_core.plugins.options import Options
from atropos_core.plugins.provider import Provider

class Reward:
    async def __call__(self, task, episodes): {reward}

class Transform:
    async def __call__(self, groups): {transform}

class Ends(Sink):
    async def step(self, step, metrics, groups): {sink}

def of(name, kind): return [Provider(name, "ends", Options, lambda options, context: kind())]

@hookimpl
def atropos_rewards(): return of("ends", Reward)
@hookimpl
def atropos_transforms(): return of("ends", Transform)
@hookimpl
def atropos_sinks(): return of("ends", Ends)
"""


def test_a_component_that_ends_the_process_ends_the_run_by_name(atropos, sevens, tmp_path):
    def ends_run(case: tuple[str, str, str]) -> None:
        kind, code, named = case
        folder = tmp_path / f"{kind}-{abs(hash(code))}"
        folder.mkdir()
        shutil.copy(tmp_path / "sevens.py", folder)
        parts = {"reward": "return [1.0 for _ in episodes]", "transform": "return groups", "sink": "pass"} | {
            kind: code
        }
        source = PLUGIN
        for name, text in parts.items():
            source = source.replace("{" + name + "}", text)
        plant(folder, "ends", source)
        alone = ("--set", "sink.console.use=none", "--set", "sink.jsonl.use=none") if kind == "sink" else ()
        ended = atropos(
            *TOY, "--env", sevens, "--set", f"{kind}.ends.use=ends", *alone, PYTHONPATH=str(folder), cwd=folder
        )
        assert ended.code in (1, 137), (case, ended.out, ended.err)
        assert named in ended.err, (case, ended.err)
        assert not (folder / "run/summary.json").exists()

    side_by_side(
        ends_run,
        ("reward", "sys.exit(0)", "reward 'ends' raised SystemExit(0) in ends.py"),
        ("transform", "raise KeyboardInterrupt", "raised KeyboardInterrupt in ends.py"),
        ("sink", "sys.exit(3)", "raised SystemExit(3) in ends.py"),
        ("sink", "ctypes.CDLL(None)._exit(0)", "was ended with exit code 0 by code in it, before it was done"),
        ("sink", "os.kill(os.getpid(), 9)", "was killed by SIGKILL (the kernel does that when memory runs out)"),
        ("sink", "os.closerange(3, 4096)", "a descriptor of this process was closed by code that does not own it"),
        ("sink", "os.closerange(0, 4096)", "was ended with exit code 1 by code in it, before it was done"),
        ("sink", f"{LIMIT}; bytearray(1 << 33)", "OutOfMemory this process was refused memory in ends.py"),
    )


HOSTED = """
import ctypes, os, sys
from atropos_core.plugins.spec import hookimpl
from atropos_core.plugins.options import Options
from atropos_core.plugins.provider import Provider

async def exits(): sys.exit(3)
async def exits_well(): sys.exit(0)
async def interrupts(): raise KeyboardInterrupt
async def ends_at_once(): os._exit(0)
async def aborts(): os.abort()
async def ends_in_c(): ctypes.CDLL(None)._exit(0)
async def closes_descriptors(): os.closerange(3, 4096)
WAYS = [exits, exits_well, interrupts, ends_at_once, aborts, ends_in_c, closes_descriptors]

class Reward:
    def __init__(self, options): self.options = options

    async def __call__(self, task, episodes):
        number = int(task.id.split("-")[1]) % 12
        if self.options.always:
            os._exit(0)
        if number < len(WAYS):
            await WAYS[number]()
        return [float(os.getpid() > 0) for _ in episodes]

class Always(Options):
    always: bool = False

@hookimpl
def atropos_rewards():
    return [Provider("ends", "ends", Always, lambda options, context: Reward(options), runs_in="process")]
"""


def test_a_hosted_reward_that_ends_its_process_fails_those_rollouts_and_one_that_always_does_ends_the_run(
    atropos, sevens, tmp_path
):
    plant(tmp_path, "ends", HOSTED)
    hosted = (*TOY, "--env", sevens, "--set", "reward.ends.use=ends")

    def run(how: tuple[str, ...]):
        return atropos(*hosted, *how, PYTHONPATH=str(tmp_path))

    ways, always = side_by_side(
        run,
        ("--steps", "1"),
        ("--set", "reward.ends.always=true", "--set", "training.groups_per_step=2", "--dir", "always"),
    )
    assert ways.code == 0, ways.err
    causes: dict[int, set[str]] = {}
    for row in map(json.loads, (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()):
        if "failed" in row:
            causes.setdefault(int(row["task"].split("-")[1]) % 12, set()).add(row["failed"])
    wanted = ("SystemExit(3) in ends.py:", "SystemExit(0) in ends.py:", "KeyboardInterrupt in ends.py:", "ended with exit code 0",
            "was killed by SIGABRT", "ended with exit code 0", "reward-ends (pid ")  # fmt: skip
    assert sorted(causes) == list(range(len(wanted))), causes
    for number, text in enumerate(wanted):
        assert all(text in cause for cause in causes[number]), (number, causes)
    assert always.code == 1
    printed_always = " ".join(always.err.split())
    assert (
        "NoProgress" in printed_always and "reward-ends (pid " in printed_always and "exit code 0" in printed_always
    ), always.err


def test_a_check_names_what_ends_the_process_and_goes_on_to_its_end(atropos, tmp_path):
    def check(case: tuple[str, str]) -> None:
        code, named = case
        folder = tmp_path / f"check-{abs(hash(code))}"
        folder.mkdir()
        (folder / "ending.py").write_text(CHECKED.replace("{code}", code))
        ended = atropos("check", "./ending.py:Ending", cwd=folder)
        assert ended.code == 1, (case, ended.out, ended.err)
        assert named in " ".join((ended.out + ended.err).split()), (case, ended.out, ended.err)

    side_by_side(
        check,
        ("raise SystemExit(3)", "breaks"),
        ("os._exit(0)", "breaks"),
        ("await asyncio.gather(leave(), leave())", "breaks"),
        ("ctypes.CDLL(None)._exit(0)", "was ended with exit code 0 by code in it, before it was done"),
    )


CHECKED = """
import asyncio, ctypes, os
from atropos_core.interfaces import Environment
from atropos_core.types import Task

async def leave():
    raise SystemExit(0)

class Ending(Environment):
    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"?{n}"},), answer="7") for n in range(8)]

    async def rollout(self, task, policy, *, seed):
        {code}

    async def score(self, task, reply):
        return 1.0
"""


def test_a_file_that_ends_the_process_as_it_is_imported_is_named(atropos, tmp_path):
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")

    def run(arguments: tuple[str, ...]) -> None:
        ended = atropos(*arguments)
        assert ended.code == 2, (arguments, ended.out, ended.err)
        assert "SystemExit(0) in ends.py:2" in ended.err

    side_by_side(
        run,
        ("run", "--model", "toy", "--env", "./ends.py:Mine"),
        ("eval", "--model", "toy", "--env", "./ends.py:Mine"),
        ("check", "./ends.py:Mine"),
    )


def test_ctrl_c_before_a_command_has_begun_is_no_fault_of_a_component(tmp_path):
    """To the whole group, as a terminal sends it. The command imports its plugins by then, and has no handler of its own."""
    (tmp_path / "slow.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(60)\n")
    for command in ("check", "eval"):
        arguments = ("./slow.py:Mine",) if command == "check" else ("--env", "./slow.py:Mine", "--model", "toy")
        process = subprocess.Popen(
            [sys.executable, "-m", "atropos_core", command, *arguments],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130 and said in ("", "Interrupted ended by SIGINT, before it was done.\n"), (
            command,
            said,
        )
