"""What runs and servers write is their user's alone, whatever the umask."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_core.storage.file_permissions import make_private
from tests.old_payloads import environment, old_group, trainer
from tests.raw_http import request
from tests.served import JSON, atropos_serve, serving


@pytest.fixture(autouse=True)
def _generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(directory: Path) -> list[str]:
    """Everything in it, itself as well, that is not this user's alone."""
    return [
        f"{path.relative_to(directory)} {stat.S_IMODE(path.lstat().st_mode):o}"
        for path in (directory, *directory.rglob("*"))
        if not path.is_symlink() and path.lstat().st_mode & 0o077
    ]


def test_everything_in_a_run_directory_is_its_users_alone(atropos, sevens, tmp_path: Path) -> None:
    ended = atropos("run", "--model", "toy", "--dir", "run", "--env", sevens, "--steps", "2")
    assert ended.code == 0, ended.err
    assert len(list((tmp_path / "run").rglob("*"))) > 10
    assert open_to_others(tmp_path / "run") == []
    (tmp_path / "run").chmod(0o755)  # as runs were made before
    assert atropos("resume", "run", "--steps", "3").code == 0
    assert open_to_others(tmp_path / "run") == []


def test_everything_that_a_server_keeps_is_its_users_alone(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir(mode=0o755)
    with serving(atropos_serve("--dir", str(tmp_path / "api"), "--sync", "always"), tmp_path / "output") as server:
        server.call(request("POST", "/register", trainer(8), **JSON))
        server.call(request("GET", "/batch"))
        number = json.loads(server.call(request("POST", "/register-env", environment("one", 4), **JSON)).body)["env_id"]
        for sequences in (4, 1):  # a group, and a piece of one
            body = json.dumps(old_group(sequences, 8, 1, number)).encode()
            assert server.call(request("POST", "/scored_data", body, **JSON)).status == 200
        kept = {path.parent.name for path in (tmp_path / "api").rglob("*") if not path.is_dir()}
        assert kept == {"api", "journal", "pieces", "rings"}
        assert open_to_others(tmp_path / "api") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user: run this as root")
def test_a_directory_of_another_user_is_not_used() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        theirs, link = Path(folder, "theirs"), Path(folder, "link")
        theirs.mkdir()
        os.chown(theirs, 1, 1)
        link.symlink_to(theirs)
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65534)
                make_private(link)
            except PermissionError as error:
                os._exit(7 if "user 1" in str(error) else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        make_private(theirs)  # root may use anybody's
        assert open_to_others(theirs) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can plant the links of another user: run this as root")
def test_links_that_another_user_planted_are_refused_and_what_they_lead_to_stays_as_it_was(atropos, sevens, tmp_path):
    run = ("run", "--model", "toy", "--env", sevens, "--dir", "run", "--steps", "1", "--set", "evaluation.problems=0")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(victim)
    ended = atropos(*run)
    assert ended.code != 0 and "is not empty" in ended.err, "a new run follows no link at all"
    (tmp_path / "run" / "lock").unlink()
    assert atropos(*run).code == 0
    for name in ("lock", "config.tmp", "checkpoints/latest"):
        link = tmp_path / "run" / name
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        os.chown(link, 1, 1, follow_symlinks=False)
        ended = atropos("resume", "run", "--steps", "2")
        assert ended.code == 1 and f"user 1 has put a link into it, {link.name}" in ended.err, ended.err
        link.unlink()
    (tmp_path / "run" / "logs").rename(tmp_path / "logs")
    (tmp_path / "run" / "logs").symlink_to(tmp_path / "logs")  # one's own, to a larger disk say
    assert atropos("resume", "run", "--steps", "2").code == 0
    assert victim.read_text() == "mine"
