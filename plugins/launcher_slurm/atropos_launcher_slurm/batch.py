"""The files of a Slurm job for a run. `atropos resume` begins or continues a run, and so does the script each time it is started."""

from __future__ import annotations

import re
import secrets
import shlex
import sys
from pathlib import Path

from atropos_core.errors import FitError
from atropos_core.launchers import (
    PlannedRun,
    SchedulerFiles,
    refuse_idle_workers,
    refuse_missing_workers,
    refuse_other_gpus,
    refuse_unprintable,
)
from atropos_launcher_slurm.config import Resources, SlurmOptions, Workers, megabytes
from atropos_launcher_slurm.placing import ANY_MEMORY, Node, place

FOLDER = "job"  # in the run directory: the scripts and their output
SCRIPT = f"{FOLDER}/run.sbatch"
PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]*")  # of an argument that sbatch reads as it is
WORDS = re.compile("(het|pack)(job)", re.IGNORECASE)  # sbatch takes it for a separator of jobs, anywhere in a line

SIGNALS = """\
signal="" run=""
stop() { signal=$1; [ -z "$run" ] || kill -TERM "$run" 2> /dev/null; }
trap 'stop USR1' USR1
trap 'stop TERM' TERM
"""
RUN = """\
{command} &
run=$!
[ -z "$signal" ] || kill -TERM "$run"
wait "$run"; code=$?
while kill -0 "$run" 2> /dev/null; do wait "$run"; code=$?; done  # a signal ends a wait, and not what is waited for
"""
REQUEUE = """\
# Saved, and asked to end ahead of the time limit: it goes on in the next turn. (What is preempted, Slurm queues again itself.)
if [ "$code" = 130 ] && [ "$signal" = USR1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""
SERVER = """\
# The server that workers send to: its port is one that the kernel gives.
log={log}
node=$(scontrol show node -o "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
address=$(getent ahostsv4 "${{node:-$(hostname)}}" | awk 'NR == 1 {{ print $1 }}')
: > "$log"
{python} -m atropos_core serve --host "$address" --port 0 --dir {api} --token-file {token} >> "$log" 2>&1 &
server=$!
trap 'kill -TERM "$server" 2> /dev/null; [ -z "${{workers:-}}" ] || scancel $workers' EXIT
for _ in $(seq 600); do
  url=$(sed -n 's/^listening on \\([^ ]*\\) .*/\\1/p' "$log")
  [ -z "$url" ] || break
  kill -0 "$server" 2> /dev/null || {{ cat "$log"; exit 1; }}
  sleep 0.1
done
[ -n "$url" ] || {{ echo "the server did not listen within 60 s: $log"; exit 1; }}
"""


def files(options: SlurmOptions, run: PlannedRun) -> SchedulerFiles:
    """The files. Raises FitError for roles that do not fit into such a job or could not be reached."""
    _check(options, run)
    nodes = [
        Node(f"node {n + 1}", options.node.cpus, options.node.gpus, _memory(options.node)) for n in range(options.nodes)
    ]
    place(options, list(run.roles), nodes)
    made = {"config.toml": run.run_file, SCRIPT: _script(options, run)}
    if options.workers:
        made[f"{FOLDER}/token"] = secrets.token_urlsafe(32) + "\n"
        made |= {_worker_script(name): _workers(name, one, options, run) for name, one in options.workers.items()}
    return SchedulerFiles(made, ("sbatch", str(run.directory / SCRIPT)), options.submit)


def _check(options: SlurmOptions, run: PlannedRun) -> None:
    paths = {
        "the run directory": str(run.directory),
        "this directory": str(Path.cwd()),
        "the Python of this run": sys.executable,
    }
    refuse_unprintable(
        paths | {"the name of a process": "".join(run.roles), "the name of an environment": "".join(options.workers)}
    )
    if "\\" in str(run.directory):
        raise FitError(
            f"the run directory is {run.directory}: Slurm drops the backslash from the path of a job's output.",
            remedy="Choose another with --dir.",
        )
    refuse_other_gpus(run, {role: one.gpus for role, one in options.roles.items()})
    refuse_missing_workers(run, options.workers)
    refuse_idle_workers(run, options.workers, '"http://127.0.0.1:0": the job sets the address of its server.')


def _script(options: SlurmOptions, run: PlannedRun) -> str:
    job, node = run.directory / FOLDER, options.node
    lines = [
        f"--job-name={run.directory.name}",
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={node.cpus}",
        *([f"--gpus-per-node={node.gpus}"] if node.gpus else []),
        *_of_both(options, options.partition, node.memory_gb),
        *([f"--time={options.time}"] if options.time else []),
        "--requeue",
        f"--signal=B:USR1@{options.save_s}",
        "--open-mode=append",
        f"--output={_unexpanded(job)}/slurm-%j.out",
    ]
    command = f"{_python()} -m atropos_core resume {shlex.quote(str(run.directory))}"
    before = ""
    if options.workers:
        paths = {"api": run.directory / "api", "token": job / "token", "log": run.directory / "logs" / "server.log"}
        quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
        before = f"mkdir -p {shlex.quote(str(run.directory / 'logs'))}\n" + SERVER.format(python=_python(), **quoted)
        submits = "\n".join(
            f'workers="${{workers:-}} $(sbatch --parsable {shlex.quote(str(run.directory / _worker_script(name)))} "$url")"'
            for name in options.workers
        )
        before += f"{submits}\n"
        command += f' --set "api.url=$url" --set api.token_file={quoted["token"]} --set "api.engine_address=$address:0"'
    return _head(lines, options) + SIGNALS + before + RUN.format(command=command) + REQUEUE


def _workers(name: str, workers: Workers, options: SlurmOptions, run: PlannedRun) -> str:
    if "/" in name or "\\" in name:
        raise FitError(
            f"environment {name!r} cannot have workers under Slurm: its script and its output are files of that name.",
            remedy="Choose a name without / and \\.",
        )
    lines = [
        f"--job-name={run.directory.name}-{name}",
        f"--array=0-{workers.count - 1}",
        "--ntasks=1",
        f"--cpus-per-task={workers.cpus}",
        *_of_both(options, workers.partition, workers.memory_gb),
        "--no-requeue",
        "--open-mode=append",
        f"--output={_unexpanded(run.directory / FOLDER)}/{_unexpanded(name)}-%a.out",
    ]
    config, token = (shlex.quote(str(run.directory / path)) for path in ("config.toml", f"{FOLDER}/token"))
    return _head(lines, options) + (
        f'exec {_python()} -m atropos_core env --api "$1" --token-file {token} --file {config} '
        f"--concurrency {workers.concurrency} -- {shlex.quote(name)}\n"
    )


def _head(lines: list[str], options: SlurmOptions) -> str:
    further = [f"#SBATCH {_argument(line)}\n" for line in (*lines, *options.sbatch)]
    return "".join(
        [
            "#!/bin/bash\n",
            *further,
            "set -u\n",
            f"cd {shlex.quote(str(Path.cwd()))}\n",
            *(f"{line}\n" for line in options.setup),
        ]
    )


def _argument(text: str) -> str:
    """One argument, as sbatch reads it from a line of a script: a backslash takes any next character as it is."""
    if not PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return WORDS.sub(r"\1\\\2", text)


def _unexpanded(path: Path | str) -> str:
    """The path with its % escaped, for a file name in which Slurm replaces %j by the job's number."""
    return str(path).replace("%", "%%")


def _of_both(options: SlurmOptions, partition: str, memory_gb: float) -> list[str]:
    named = {"partition": partition, "account": options.account, "mem": megabytes(memory_gb) if memory_gb else ""}
    return [f"--{name}={value}" for name, value in named.items() if value]


def _memory(resources: Resources) -> float:
    return resources.memory_gb or ANY_MEMORY


def _worker_script(name: str) -> str:
    return f"{FOLDER}/workers-{name}.sbatch"


def _python() -> str:
    return shlex.quote(sys.executable)
