"""The doctor: quick, honest about what is missing, and never the one that breaks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pytest

from atropos_core.interfaces import Finding
from atropos_core.plugins.manager import load_plugins
from atropos_doctor import machine_checks as doctor
from tests.conftest import plant

NOBODY = 65534
OFFER = """
from atropos_core import hookimpl
from atropos_core.plugins.options import Options
from atropos_core.plugins.provider import Provider


@hookimpl
def atropos_adapters():
    yield Provider("twice", "an adapter that two packages have", Options, dict)
"""


def only(findings: list[Finding], subject: str) -> Finding:
    [found] = [finding for finding in findings if finding.subject == subject]
    return found


def test_a_sound_machine_ends_with_0_within_seconds(atropos: Callable[..., Any]) -> None:
    start = perf_counter()
    ended = atropos("doctor", HF_HUB_OFFLINE="")
    assert perf_counter() - start < 60  # two or three, where nothing else runs
    assert ended.code == 0, ended.out + ended.err
    for subject in ("python", "atropos-core", "memory", "memfd", "disk", "ports", "torch", "hub"):
        assert subject in ended.out


def test_everything_that_is_not_fine_has_a_remedy_or_a_reason() -> None:
    for finding in doctor.examine():
        assert finding.detail
        assert finding.ok is not False or finding.remedy


def test_an_offline_hub_is_a_note_and_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)  # and with its queue full, it answers nobody
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        start = perf_counter()
        [found] = doctor.check_hub(f"http://127.0.0.1:{server.getsockname()[1]}", deadline_s=0.7)
    assert 0.5 < perf_counter() - start < 60  # and not the minutes that a connection is tried for
    assert found.ok is None and "--model tiny" in found.remedy


def test_a_hub_that_answers_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        [found] = doctor.check_hub(f"http://127.0.0.1:{server.getsockname()[1]}", deadline_s=10)
    assert found.ok is True


def test_a_hub_that_is_switched_off_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        [found] = doctor.check_hub(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert found.ok is None and "HF_HUB_OFFLINE is set" in found.detail
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    [found] = doctor.check_hub()
    assert found.ok is None and "http://proxy:3128" in found.detail and "secret" not in found.detail


def test_a_taken_port_is_only_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [found] = doctor.check_ports(port)
    assert found.ok is None and str(port) in found.detail


def test_a_missing_dev_shm_is_named(tmp_path: Path) -> None:
    found = only(doctor.check_shared_memory(tmp_path / "shm"), str(tmp_path / "shm"))
    assert found.ok is None and found.remedy


def test_a_torch_that_takes_too_long_is_a_note() -> None:
    found = only(doctor.check_torch(deadline_s=0.01), "torch")
    assert found.ok is None and "within 0.01 s" in found.detail


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        child = os.fork()
        if not child:
            if os.getuid() == 0:
                os.setuid(NOBODY)  # root may write anywhere
            found = only(doctor.check_disk(Path(folder)), "disk")
            os._exit(0 if found.ok is None and "cannot be written" in found.detail else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_broken_plugin_is_named_with_its_error_and_remedy() -> None:
    broken = EntryPoint("env_gone", "atropos_env_gone.plugin", "atropos")
    [found] = [finding for finding in doctor.check_plugins(load_plugins([broken])) if finding.ok is False]
    assert "env_gone" in found.detail and "No module named 'atropos_env_gone'" in found.detail
    assert "ATROPOS_DISABLE_PLUGINS=env_gone" in found.remedy


def test_a_blocked_plugin_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_DISABLE_PLUGINS", "env_gone")
    blocked = EntryPoint("env_gone", "atropos_env_gone.plugin", "atropos")
    found = doctor.check_plugins(load_plugins([blocked]))
    assert [finding.ok for finding in found] == [True, None]


def test_a_component_that_two_plugins_offer_is_named_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("adapter_one", "adapter_other"):
        plant(tmp_path, name, OFFER)
    [found] = [finding for finding in doctor.check_plugins() if finding.ok is False]
    assert "adapter 'twice' is offered by both adapter_one and adapter_other" in found.detail
    assert "ATROPOS_DISABLE_PLUGINS=adapter_" in found.remedy
