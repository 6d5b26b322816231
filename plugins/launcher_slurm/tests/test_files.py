"""What the options of a job say in its scripts, and what is refused of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.launchers import PlannedRun
from atropos_launcher_slurm.batch import files
from atropos_launcher_slurm.config import SlurmOptions

CPU = {"engine": ("cpu",), "trainer": ("cpu",)}


def made(run: PlannedRun | None = None, **options: object) -> dict[str, str]:
    return dict(
        files(SlurmOptions.model_validate(options), run or PlannedRun(Path("/shared/a run"), "seed = 0\n", CPU)).files
    )


def test_what_a_site_wants_is_in_the_script() -> None:
    script = made(
        partition="gpu", account="lab", time="1:00:00", save_s=90, sbatch=["--constraint=h100"], setup=["module load cuda"],
        nodes=3, node={"cpus": 8, "memory_gb": 1.5},
    )["job/run.sbatch"]  # fmt: skip
    for line in ("--partition=gpu", "--account=lab", "--time=1:00:00", "--signal=B:USR1@90", "--constraint=h100", "--nodes=3",
                 "--cpus-per-task=8", "--mem=1500M", "--requeue"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert script.index("module load cuda\n") < script.index("atropos_core resume '/shared/a run' &")


def test_the_run_file_is_that_of_the_run_directory() -> None:
    assert made()["config.toml"] == "seed = 0\n"


@pytest.mark.parametrize(
    ("devices", "options", "said"),
    [
        (("cuda:0",), {}, r"uses cuda:0 \(engine.devices\)"),
        (("cpu",), {"roles": {"engine": {"gpus": 1}}, "node": {"cpus": 4, "gpus": 1}}, "engine asks for 1 GPUs"),
    ],
)
def test_devices_that_a_role_does_not_get_are_refused(
    devices: tuple[str, ...], options: dict[str, object], said: str
) -> None:
    run = PlannedRun(Path("/shared/run"), "", {**CPU, "engine": devices})
    with pytest.raises(FitError, match=said):
        made(run, **options)


def test_workers_need_an_api_and_an_environment_of_the_run() -> None:
    run = PlannedRun(Path("/shared/run"), "", CPU, ["gsm8k"], has_api=True)
    with pytest.raises(FitError, match="no workers would run its environments"):
        made(run)
    with pytest.raises(FitError, match="no such environment"):
        made(run, workers={"other": {}})
    with pytest.raises(FitError, match=r"launcher\.workers has no effect"):
        made(workers={"gsm8k": {}})
    script = made(run, workers={"gsm8k": {"count": 3, "cpus": 2, "memory_gb": 4, "concurrency": 5, "partition": "cpu"}})
    for line in ("--array=0-2", "--cpus-per-task=2", "--mem=4000M", "--partition=cpu"):
        assert f"#SBATCH {line}\n" in script["job/workers-gsm8k.sbatch"]
    assert "--concurrency 5" in script["job/workers-gsm8k.sbatch"] and len(script["job/token"]) > 40


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "1:00\n#SBATCH --x"},
        {"setup": ["a\nb"]},
        {"setup": ["a\x00b"]},
        {"roles": {"engine": {"cores": 1}}},
        {"save_s": 1},
        {"partition": "a\rb"},
        {"sbatch": ["-p gpu"]},
        {"sbatch": ["--gres gpu:1"]},
        {"sbatch": ["hetjob"]},
    ],
)
def test_what_would_not_be_one_line_or_is_misspelt_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SlurmOptions.model_validate(wrong)


def arguments(script: str) -> list[str]:
    """As sbatch reads them from the lines of a script: words in quotes of either kind, a backslash before any character, `#` before what is
    left out. A line with "hetjob" or "packjob" in it is another job's."""
    read = []
    for line in (one.removeprefix("#SBATCH") for one in script.split("\n") if one.startswith("#SBATCH")):
        assert not re.search("hetjob|packjob", line, re.IGNORECASE)
        rest = iter(line.strip())
        word, quote = "", ""
        for one in rest:
            if one == "\\":
                word += next(rest)
            elif quote:
                word, quote = (word, "") if one == quote else (word + one, quote)
            elif one in "\"'":
                quote = one
            else:
                assert not one.isspace() and one != "#", "a second word, or a comment"
                word += one
        assert not quote
        read.append(word)
    return read


PROGRAMS = {
    "py $(th) on": "[ \"$3\" != serve ] || { echo 'listening on http://h:1 x'; exec sleep 20; }",
    "sbatch": "echo 7",
    "scontrol": ":",
    "scancel": ":",
    "getent": "echo 10.0.0.1 STREAM",
}


def commands(script: str, folder: Path) -> list[list[str]]:
    """The words of each program that bash starts in the script. Python and Slurm's programs are replaced by ones that note their words."""
    noted = folder / "noted"
    done = subprocess.run(
        ["bash", "-c", script, "bash", "http://h:1"],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "NOTED": str(noted), "SLURMD_NODENAME": "n", "SLURM_JOB_ID": "1"},
        capture_output=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = noted.read_bytes().decode().split("\1\0")[:-1]
    noted.unlink()
    return [one.split("\0")[:-1] for one in words]


def check_any_names(directory: str, environment: str, partition: str) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        folder = Path(name)
        for program, does in PROGRAMS.items():
            (folder / program).write_text(
                f'#!/bin/bash\nprintf \'%s\\0\' "${{0##*/}}" "$@" $\'\\1\' >> "$NOTED"\n{does}\n'
            )
            (folder / program).chmod(0o755)
        patched.setattr(sys, "executable", str(folder / "py $(th) on"))
        check_scripts(folder, directory, environment, partition)


def check_scripts(folder: Path, directory: str, environment: str, partition: str) -> None:
    run = PlannedRun(folder / "runs" / directory, "", CPU, [environment], has_api=True)
    options = {"workers": {environment: {}}, "partition": partition, "sbatch": [f"--comment={partition}"]}
    control = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
    try:
        scripts = made(run, **options)
    except (FitError, ValidationError):
        assert control.search(directory + environment + partition) or "\\" in directory + environment
        return
    assert not control.search(directory + environment) and "\\" not in directory + environment
    run.directory.mkdir(parents=True)
    unexpanded = f"{run.directory}/job".replace("%", "%%")
    said = arguments(scripts["job/run.sbatch"])
    assert {f"--job-name={directory}", f"--output={unexpanded}/slurm-%j.out", f"--comment={partition}"} <= {*said}
    assert not partition or f"--partition={partition}" in said
    of_workers = arguments(scripts[f"job/workers-{environment}.sbatch"])
    assert f"--output={unexpanded}/{environment.replace('%', '%%')}-%a.out" in of_workers
    started = commands(scripts["job/run.sbatch"], folder)
    assert ["sbatch", "--parsable", f"{run.directory}/job/workers-{environment}.sbatch", "http://h:1"] in started
    [serve] = [one for one in started if one[3:4] == ["serve"]]
    assert serve[serve.index("--dir") + 1] == f"{run.directory}/api" and serve[-1] == f"{run.directory}/job/token"
    [resume] = [one for one in started if one[3:4] == ["resume"]]
    assert resume[4] == str(run.directory) and f"api.token_file={run.directory}/job/token" in resume
    [worker] = commands(scripts[f"job/workers-{environment}.sbatch"], folder)
    assert worker[-2:] == ["--", environment] and worker[worker.index("--file") + 1] == f"{run.directory}/config.toml"


@pytest.mark.parametrize(
    "name",
    ["a b", "$(touch X)y", "`id`", "'", '"', "--", "-x", "$HOME", "x # y", "é", "%j", "%%", "hetjob", "my-PackJob", "{log}", "; id",
     "a\\b", "a\nb", "a\r", "a\u2028b", "!x"],
)  # fmt: skip
def test_a_name_reaches_sbatch_and_the_program_as_it_is_or_is_refused(name: str) -> None:
    check_any_names(name, name, name)


NAMES = some.text(some.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=60).filter(
    lambda text: text not in (".", "..")
)


@settings(max_examples=12, deadline=None)
@given(NAMES, NAMES, NAMES)
def test_any_name_reaches_sbatch_and_the_program_as_it_is_or_is_refused(a: str, b: str, c: str) -> None:
    check_any_names(a, b, c)


def test_little_memory_is_not_all_of_the_node() -> None:
    assert "--mem=1M" in arguments(made(node={"memory_gb": 0.0001, "cpus": 4})["job/run.sbatch"])
