"""What is forked from the template is what the interpreter would have been, as far as a process can tell."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.warm import forked, is_template
from tests.warm.template import hides_what_is_imported

pytestmark = [
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason="commands start warm on Linux and x86_64 alone",
    ),
    pytest.mark.cold,  # the program below has a template of its own
]

SEEN = "tests.warm.seen"
PROGRAM = """
import json, os, pathlib, signal, subprocess, sys, tempfile
from tests.warm import requests, template
template.WARM = (*template.WARM, "tests.warm.seen")
os.environ.pop("COLD", None)

def scenes():
    def seen(**how):
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "tests.warm.seen", "two words", "last"]
        process = subprocess.Popen(command, stdout=writing, pass_fds=how.pop("pass_fds", ()), **how)
        os.close(writing)
        with open(reading) as file:
            text = file.read()
        return json.loads(text) | {"code": process.wait(30), "pids": process.pid > 1}

    file = os.dup2(os.open(os.devnull, os.O_RDONLY), 76)
    far = os.dup2(file, 77)
    yield "plain", seen()
    yield "session", seen(start_new_session=True)
    yield "descriptors", seen(pass_fds=[file, far])
    yield "environment", seen(env={**os.environ, "NEW": "\\u00e4", "PYTHONUNBUFFERED": "1", "EXIT": "7"})
    yield "directory", seen(cwd="/usr")
    path = [pathlib.Path(sys.argv[2], name) for name in ("plain", "hiding")]
    for name, one in zip(("path", "hiding"), path):
        one.mkdir(exist_ok=True)
        (one / f"{'torch' if name == 'hiding' else 'other'}.py").write_text(f"name = {name!r}")
        front = os.pathsep.join(["relative", str(one), "", str(one), *filter(None, [os.environ.get("PYTHONPATH")])])
        yield name, seen(env={**os.environ, "PYTHONPATH": front, "IMPORT": "torch" if name == "hiding" else "other"})
    yield "input", seen(stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    yield "signals", seen()

if sys.argv[1] == "warm":
    requests.install_with_template()
found = dict(scenes())
found["warm"] = bool(requests._templates)
print(json.dumps(found))
"""


def scenes(how: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(folder)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("path")
    programs = [scenes(how, folder) for how in ("warm", "cold")]
    warm, cold = (json.loads(program.communicate(timeout=120)[0]) | {"pid": program.pid} for program in programs)
    return warm, cold


SCENES = (
    "plain",
    "session",
    "descriptors",
    "environment",
    "directory",
    "path",
    "hiding",
    "input",
    "signals",
)


@pytest.mark.parametrize("scene", SCENES)
def test_a_warm_process_sees_what_a_new_interpreter_sees(scene, both):
    warm, cold = both
    assert warm["warm"]
    assert not cold["warm"]
    for made in both:
        assert made[scene].pop("parent") == made["pid"], "whoever called Popen is its parent"
    assert warm[scene] == cold[scene]


def test_a_worker_of_make_test_is_forked_and_has_a_template_of_its_own(request):
    if not (hasattr(request.config, "workerinput") and request.config.getoption("--warm")):
        pytest.skip("no worker of `pytest --warm -n`, as `make test` has")
    worker = psutil.Process()
    assert forked.ROOM, "each would import what the template has imported once"
    assert [is_template(child.pid) for child in worker.children()].count(True) == 1


@pytest.mark.parametrize(
    ("made", "hides"),
    [
        ("json.py", True),
        ("json/__init__.py", True),
        ("json/test_it.py", False),  # no package: `import json` finds another
        ("xyzzy.py", False),
        ("sitecustomize.py", True),
    ],
)
def test_a_folder_in_front_of_the_path_hides_what_python_would_import_from_it(made, hides, tmp_path):
    (tmp_path / made).parent.mkdir(exist_ok=True)
    (tmp_path / made).write_text("")
    assert hides_what_is_imported([str(tmp_path)]) is hides
