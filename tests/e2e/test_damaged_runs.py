"""Every command that reads a run directory, on a directory of which one file is damaged: it succeeds, or ends with an error of its own."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_core.cli import run_app
from atropos_core.errors import AtroposError

TOY = ("--model", "toy", "--engine", "toy", "--trainer", "toy", "--bridge", "local")
SMALL = ("--set", "training.groups_per_step=2", "--set", "training.group_size=2", "--set", "evaluation.problems=2")
DEADLINE_S = 30.0
MEMORY_BYTES = 3 << 30  # of addresses that one command may map beyond what this process has
STEPS = 4
SAMPLE = 5  # cases of each reader in the short form
TASKS = Path(__file__).parents[2] / "plugins/viewer/tests/sums.py"


# -- readers: what a user calls


def command(*arguments: str) -> Callable[[Path, Path], object]:
    """RUN stands for the run directory, OUT for a new place."""
    return lambda run, out: run_app([one.replace("RUN", str(run)).replace("OUT", str(out)) for one in arguments])


def not_json(name: str) -> None:
    raise AssertionError(f"{name} is not JSON: a browser refuses the whole answer")


def page(run: Path, out: Path) -> None:
    """All that the viewer's page reads, each at its address; what is refused is shown on the page. Of a step, its first two rows."""
    from atropos_viewer.page_records import PageRecords
    from atropos_viewer.server import json_answer

    records = PageRecords([run])
    overview = records.get("runs", {})[0]
    steps = [f"runs/0/rollouts/{step}" for step in overview["rollouts"]]
    evaluations = [f"runs/0/evaluations/{step}" for step in overview["evaluations"]]
    addresses = ["runs", "runs/0/metrics", *steps, *(f"{one}/search" for one in steps), *evaluations]
    refused = []
    for address in addresses:  # which grow
        try:
            answer = json_answer(200, records.get(address, {"text": "a"}))
            found = json.loads(answer.body, parse_constant=not_json)
            addresses += [f"{address}/{row}" for row in range(min(2, found["count"]))] if address in steps else []
        except AtroposError as error:
            refused.append(error)
    if refused:
        raise refused[0]


READERS: dict[str, Callable[[Path, Path], object]] = {
    "page": page,
    "view": command("view", "RUN", "--html", "OUT.html"),
    "plot": command("plot", "RUN", "--out", "OUT.png"),
    "audit": command("audit", "RUN"),
    "sft": command("export", "RUN", "--as", "sft", "--keep-cut-off", "--out", "OUT.jsonl"),
    "dpo": command("export", "RUN", "--as", "dpo", "--keep-cut-off", "--out", "OUT.jsonl"),
    "parquet": command("export", "RUN", "--as", "parquet", "--out", "OUT.parquet"),
    "hf": command("export", "RUN", "--as", "hf", "--out", "OUT"),
    "doctor": command("doctor", "RUN"),
    "eval": command("eval", "RUN", "--problems", "2", "--out", "OUT"),
    "simulate": command("simulate", "RUN", "--set", "hub.group_s=0.001", "--set", "worker.rollout_s=0",
                        "--set", "engine.single_tokens_per_s=100", "--set", "engine.peak_tokens_per_s=5000",
                        "--set", "engine.max_sequences=8", "--engines", "1"),
    "resume": command("resume", "RUN", "--steps", str(STEPS + 1)),
    "config": command("config", "show", "RUN/config.toml"),
    "config of the directory": command("config", "show", "RUN"),
}  # fmt: skip


# -- ways to damage a file


def overwrite(content: bytes) -> Callable[[Path, bytes], object]:
    return lambda path, whole: path.write_bytes(content)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path, bytes], object]:
    return lambda path, whole: path.write_bytes(change(whole))


def replace_values(value: str) -> Callable[[bytes], bytes]:
    """Replace every number and text that follows a name in JSON or TOML."""
    return lambda whole: re.sub(
        rb'(?<=[:=] )(-?[0-9][0-9.e+-]*|true|false|null|NaN|"(?:[^"\\]|\\.)*")', value.encode(), whole
    )


WAYS: dict[str, Callable[[Path, bytes], object]] = {
    "a pipe": lambda path, whole: os.mkfifo(path),
    "a directory": lambda path, whole: path.mkdir(),
    "a loop of links": lambda path, whole: path.symlink_to(path),
    "a link to nothing": lambda path, whole: path.symlink_to(path.parent / "nothing"),
    "a device": lambda path, whole: path.symlink_to("/dev/zero"),
    "a terminal": lambda path, whole: path.symlink_to("/dev/tty"),
    "nothing": lambda path, whole: None,
    "empty": overwrite(b""),
    "cut": rewrite(lambda whole: whole[: len(whole) // 2]),
    "twice": rewrite(lambda whole: whole + whole),
    "binary": overwrite(bytes(range(256)) * 40),
    "not UTF-8": rewrite(lambda whole: whole[:40] + b"\xff\xfe\xc3(" + whole[40:]),
    "UTF-16": rewrite(lambda whole: whole.decode(errors="replace").encode("utf-16")),
    "long numbers": rewrite(replace_values("9" * 400)),
    "longer numbers": rewrite(replace_values("9" * 5000)),
    "negative": rewrite(replace_values("-7")),
    "true": rewrite(replace_values("true")),
    "texts": rewrite(replace_values('"x"')),
    "lists": rewrite(replace_values("[[]]")),
    "NaN": rewrite(lambda whole: replace_values("NaN")(whole).replace(b"= NaN", b"= nan")),
    "infinite": rewrite(lambda whole: replace_values("Infinity")(whole).replace(b"= Infinity", b"= inf")),
    "half of a character": rewrite(replace_values(r'"\\ud800"')),
    "no names": overwrite(b"{}\n" * 9),
    "a list": overwrite(b"[1]\n"),
    "a number": overwrite(b"7\n"),
    "deep": overwrite(b'{"a": ' + b"[" * 100_000),
    "deep TOML": overwrite(b"a = " + b"[" * 100_000),
    "deep in a value": rewrite(lambda whole: re.sub(rb"(?<=[:=] )[0-9.]+", b"[" * 900 + b"]" * 900, whole, count=1)),
    "doubled names": rewrite(lambda whole: re.sub(rb'("[a-z_]+": [^,\[{}\]]+),', rb"\1, \1,", whole)),
    "a long line": rewrite(lambda whole: b"x" * 10_000_000 + whole),
    "a long text": rewrite(lambda whole: re.sub(rb'(?<=[:=] )"[^"]*"', b'"' + b"x" * 10_000_000 + b'"', whole, count=1)),
    "NUL": rewrite(lambda whole: whole.replace(b"a", b"\0")),
}  # fmt: skip


def files_of(run: Path) -> list[str]:
    """What may be damaged in a run directory: every file, but of steps, checkpoints and evaluations the last alone; and folders."""
    found = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    return [one for one in found if not re.search(r"step-00000[1-3]", one)]


def damage(run: Path, file: str, way: str) -> None:
    path = run / file
    whole = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    WAYS[way](path, whole)


# -- one case in a process of its own, which can be ended


def outcome(reader: str, run: Path, out: Path) -> tuple[int, str]:
    """The exit code, and what was printed. 98: an error of another kind than ours; 99: it did not end."""
    said = out.with_suffix(".said")
    pid = os.fork()
    if pid == 0:
        code = 98
        try:
            os.setsid()
            with said.open("wb") as file, open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            mapped = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
            try:
                code = int(READERS[reader](run, out) or 0)  # type: ignore[call-overload]
            except AtroposError as error:
                print(f"error: {error}")
                code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + DEADLINE_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 99, said.read_text(errors="replace")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1]), said.read_text(errors="replace")


def fault_of(reader: str, file: str, way: str, whole: Path, folder: Path) -> str:
    """Return the faults of a reader that meets one damaged file, or nothing if it has none."""
    run = folder / "run"
    shutil.copytree(whole, run)
    damage(run, file, way)
    code, said = outcome(reader, run, folder / "out")
    if code == 99:
        return "it hangs"
    if code == 98 or "Traceback" in said or code < 0:
        return f"it raises: {said.strip()[-700:]}"
    if reader == "audit" and "things in these records cannot be" in said:  # what it found, by step
        return ""
    if (
        code and file != "config.toml" and str(run) not in said.replace("\n", "")
    ):  # of config.toml, a wrong value is named
        return f"its error does not name the file: {said.strip()[-400:]}"
    return ""


# -- a checkpoint whose state has another form, with a valid digest


MOST_KEYS = 9  # as many as a part of a checkpoint has names of its own
VALUES: tuple[object, ...] = (None, True, -7, 10**30, "x", [[]], {"x": 1}, float("nan"))


def key_paths(value: object, key_path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each key in a JSON value; of many alike, of the first two."""
    yield key_path
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys if len(keys) <= MOST_KEYS else keys[:2]:
            yield from key_paths(value[key], (*key_path, key))  # type: ignore[index]


def replace_in_state(run: Path, key_path: tuple[str | int, ...], *value: object) -> None:
    """Replace a value in the newest checkpoint's state, or remove it if no value is given."""
    path = run / f"checkpoints/step-{STEPS:06d}/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    inside = manifest
    *way, last = ("state", *key_path)
    for key in way:
        inside = inside[key]
    if value:
        inside[last] = value[0]
    else:
        del inside[last]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def state_faults(cases: Iterable[tuple[Any, ...]], whole: Path, tmp_path: Path) -> dict[str, str]:
    found = {}
    for number, case in enumerate(cases):
        run = tmp_path / str(number) / "run"
        shutil.copytree(whole, run)
        replace_in_state(run, *case)
        code, said = outcome("resume", run, tmp_path / str(number) / "out")
        if code in (98, 99) or code < 0 or "Traceback" in said:
            found[str(case)] = said.strip()[-700:]
        shutil.rmtree(run.parent)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which every kind of record has something."""
    run = tmp_path_factory.mktemp("whole") / "run"
    more = ("--steps", str(STEPS), "--set", "checkpoint.every=2", "--dir", str(run))
    assert run_app(["run", *TOY, "--env", f"{TASKS}:Sums", *SMALL, *more]) == 0
    change = {"step": 3, "check": "length", "state": "ill", "since": 2, "says": "long", "do": "Look."}
    (run / "health.jsonl").write_text(json.dumps(change) + "\n")
    tool = {"type": "function", "function": {"name": "f"}}
    (run / "rollouts/tools.jsonl").write_text(json.dumps({"id": "a", "tools": [tool]}) + "\n")
    (run / "logs/engine.log").write_text("one\ntwo\n")
    return run


def faults(reader: str, cases: Iterable[tuple[str, str]], whole: Path, tmp_path: Path) -> dict[tuple[str, str], str]:
    shutil.copytree(whole, tmp_path / "warm")
    with contextlib.suppress(AtroposError):
        READERS[reader](tmp_path / "warm", tmp_path / "warm-out")  # imports are made here, once
    found = {}
    for number, (file, way) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        if fault := fault_of(reader, file, way, whole, folder):
            found[file, way] = fault
        shutil.rmtree(folder)
    return found


@pytest.mark.parametrize("reader", READERS)
def test_a_sample_of_damage_is_an_error_of_ours_or_left_out(reader: str, whole: Path, tmp_path: Path):
    """Over all readers, each file and each way of damaging it has its turn."""
    files, ways, first = files_of(whole), list(WAYS), list(READERS).index(reader)
    cases = [(files[(first + 5 * at) % len(files)], ways[(SAMPLE * first + at) % len(ways)]) for at in range(SAMPLE)]
    assert faults(reader, cases, whole, tmp_path) == {}


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_every_damage_to_every_file_is_an_error_of_ours_or_left_out(reader: str, whole: Path, tmp_path: Path):
    assert faults(reader, itertools.product(files_of(whole), WAYS), whole, tmp_path) == {}


SHORT: tuple[tuple[Any, ...], ...] = (
    ((), []), (("progress",),), (("progress", "version"),), (("progress", "version"), "x"), (("progress", "step"), 2),
    (("progress", "first"), 7), (("parts",), None), (("parts", "curriculum", "next"), "x"), (("parts", "sink.jsonl"), [[]]),
    (("source", "digests", "sums", "blocks"),), (("source", "tasks"), [1]), (("probe", "start"), "x"), (("settings",), "x"),
)  # fmt: skip


def test_a_whole_checkpoint_of_another_form_is_refused_in_one_error(whole: Path, tmp_path: Path):
    assert state_faults(SHORT, whole, tmp_path) == {}


@pytest.mark.long
def test_no_change_of_a_checkpoints_state_ends_in_a_raw_error(whole: Path, tmp_path: Path):
    state = json.loads((whole / f"checkpoints/step-{STEPS:06d}/manifest.json").read_text())["state"]
    cases = [
        (key_path, *value)
        for key_path in key_paths(state)
        if key_path and key_path[0] != "settings"
        for value in [(), *((one,) for one in VALUES)]
    ]
    assert state_faults(cases, whole, tmp_path) == {}
