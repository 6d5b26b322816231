"""The newest client that the package index has: it works with the server, and what it changed is said by name."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.server import CLIENT, SCRIPTS, TinkerServer

NEWEST = os.path.abspath(os.environ["NEWEST_TINKER_PYTHON"]) if os.environ.get("NEWEST_TINKER_PYTHON") else ""


def surface(client: str, out: Path) -> dict[str, str]:
    subprocess.run([client, str(SCRIPTS / "surface.py"), str(out)], check=True, timeout=120)
    found: dict[str, str] = json.loads(out.read_text())
    return found


def changes(pinned: Mapping[str, str], newest: Mapping[str, str]) -> list[str]:
    """Return a line for each name that is new, gone, or not the same."""
    lines = [f"new: {name} {newest[name]}".rstrip() for name in sorted(newest.keys() - pinned.keys())]
    lines += [f"gone: {name} {pinned[name]}".rstrip() for name in sorted(pinned.keys() - newest.keys())]
    both = sorted(pinned.keys() & newest.keys())
    return lines + [
        f"changed: {name}: {pinned[name]} -> {newest[name]}" for name in both if pinned[name] != newest[name]
    ]


def test_each_change_is_said_by_name() -> None:
    pinned = {"version": "1", "A.f": "(x)", "path /a": ""}
    newest = {"version": "2", "A.f": "(x, y)", "types.B.c": "int"}
    assert changes(pinned, newest) == [
        "new: types.B.c int", "gone: path /a", "changed: A.f: (x) -> (x, y)", "changed: version: 1 -> 2",
    ]  # fmt: skip
    assert changes(pinned, pinned) == []


@pytest.mark.skipif(not NEWEST, reason="needs the newest client: `make test-tinker` installs it")
def test_the_newest_client_gets_the_answers_of_the_pinned_one(server: TinkerServer, tiny: str, tmp_path: Path) -> None:
    pinned = surface(CLIENT, tmp_path / "pinned.json")
    assert {"TrainingClient.forward_backward", "types.AdamParams.eps", "path /api/v1/asample"} <= pinned.keys()
    assert len([name for name in pinned if name.startswith("message ")]) > 20
    changed = "\n".join(changes(pinned, surface(NEWEST, tmp_path / "newest.json")))
    if changed:
        warnings.warn(f"the newest client of Tinker differs from the pinned one:\n{changed}", stacklevel=1)
    out = tmp_path / "found.json"
    found: dict[str, Any] = server.run("every_call.py", tiny, out=out, client=NEWEST, hint=changed)
    assert found["losses"].keys() == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}
    assert all(found["refused"].values())
