"""The page of clients says what the suite tests, in the versions that it installs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.agents.clients import CLIENTS, NODE, Client

REPOSITORY = Path(__file__).parents[2]
HEAD = "| client | version | API | calls of an episode | rollouts | what else it does |\n| --- | --- | --- | --- | --- | --- |\n"


def test_the_table_of_clients_is_that_of_the_suite():
    rows = [row(name, client) for name, client in CLIENTS.items()]
    assert HEAD + "".join(rows) in (REPOSITORY / "docs" / "agent-clients.md").read_text()


def test_the_page_shows_the_files_that_the_suite_gives_the_clients():
    page = (REPOSITORY / "docs" / "agent-clients.md").read_text()
    for file in sorted((Path(__file__).parent / "files").iterdir()):
        assert file.read_text() in page, file.name


def test_the_lock_file_of_node_names_no_registry_and_has_a_hash_for_what_linux_installs():
    lock = json.loads((Path(__file__).parent / "node" / "package-lock.json").read_text())
    packages = {name: one for name, one in lock["packages"].items() if name}
    assert not [name for name, one in packages.items() if "resolved" in one]
    here = [one for name, one in packages.items() if "os" not in one or name.endswith("linux-x64")]
    assert len(here) == 3 and all(one["integrity"].startswith("sha512-") for one in here)


def row(name: str, client: Client) -> str:
    api = f"{client.dialect}, {'streamed' if client.is_streamed else 'whole'}"
    return f"| {name} | `{client.package}` {version(client)} | {api} | {len(client.beginnings)} | {client.rollouts} | {client.seen} |\n"


def version(client: Client) -> str:
    if client.environment == NODE:
        given: str = json.loads((Path(__file__).parent / "node" / "package.json").read_text())["dependencies"][
            client.package
        ]
        return given
    lines = (REPOSITORY / f"environments/{client.environment.removeprefix('.venv-')}.txt").read_text().splitlines()
    [pinned] = [line for line in lines if line.startswith(f"{client.package}==")]
    return pinned.partition("==")[2]
