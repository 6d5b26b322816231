"""docs/trajectory-api.md says what the code does: its flags, calls and metrics are those that there are, its example runs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

from atropos_trajectory_api.native.routes import native_routes
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.roles import serve_command as commands
from atropos_trajectory_api.server.metrics_routes import render_prometheus
from atropos_trajectory_api.service.service import Service
from tests.conftest import REPOSITORY
from tests.served import atropos_serve, serving

PAGE = (REPOSITORY / "docs/trajectory-api.md").read_text()
NO_FLAG = {"allocation_grace_s"}


def shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_the_table_of_limits_has_every_option_of_serve_with_its_default():
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| ([^|]+) \|", PAGE.partition("## Limits")[2], re.M))
    fields = {name: shown(field.default) for name, field in ServeOptions.model_fields.items() if name not in NO_FLAG}
    assert rows == {name.replace("directory", "dir").replace("_", "-"): default for name, default in fields.items()}
    parameters = inspect.signature(commands.serve).parameters.values()
    assert {one.name: shown(one.default) for one in parameters} == fields
    grace = ServeOptions().allocation_grace_s
    assert f"at most {grace:g} s after its last group" in PAGE


def test_the_table_of_calls_has_every_call():
    written = set(re.findall(r"^\| `([A-Z]+) /v1/?([^`]*)` \|", PAGE, re.M))
    assert written == {(method, path) for method, path in native_routes(Service(ServeOptions(journal=False)))._table}


def test_the_table_of_metrics_has_every_family():
    service = Service(ServeOptions(journal=False))
    service.counters.request("/batch", "worker", 0.1, 200, 1, 1)
    service.counters.group("worker", "words", 4, 100)
    service.counters.dropped("stale")
    service.counters.refused("url")
    families = set(re.findall(r"^# TYPE (\w+)", render_prometheus(service), re.M))
    assert set(re.findall(r"`(atropos_\w+)`", PAGE)) == families


def test_the_example_client_runs_leases_and_commits(tmp_path):
    [source] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    [said] = re.findall(r"`python example.py \S+` prints (.*?)\. ", PAGE)
    (tmp_path / "example.py").write_text(source)
    with serving(atropos_serve("--dir", str(tmp_path / "api")), tmp_path / "serve.log") as server:
        ended = subprocess.run(
            [sys.executable, "example.py", f"http://127.0.0.1:{server.port}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^(?:group|committed) \d+$", ended.stdout, re.M) == re.findall(r"`([^`]+)`", said)
