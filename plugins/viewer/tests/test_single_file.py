"""The file that can be mailed: bounded, whole, and with nothing in it that runs but its own script."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from atropos_core.cli import run_app
from atropos_viewer.page_records import PageRecords
from atropos_viewer.server import PAGE
from atropos_viewer.single_file import write

HOSTILE = "</script><img src=x onerror=alert(1)><!-- <script>\u2028]]>"


class Scripts(HTMLParser):
    """The scripts and styles of a page as a browser finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.policy = ""
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("script", "style"):
            self.found.append((dict(attrs) | {"tag": tag}, ""))
            self.inside = True
        if tag == "meta" and dict(attrs).get("http-equiv") == "content-security-policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            attributes, text = self.found[-1]
            self.found[-1] = (attributes, text + data)


def parsed(path: Path) -> tuple[Scripts, dict[str, Any]]:
    page = Scripts()
    page.feed(path.read_text())
    blocks = {
        str(attributes["data-address"]): json.loads(gzip.decompress(base64.b64decode(text)))
        for attributes, text in page.found
        if attributes.get("type") == "application/gzip"
    }
    return page, blocks


def hostile_copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    for path in (to / "rollouts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["task"] = HOSTILE
            for message in row.get("messages", ()):
                message["content"] = HOSTILE
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return to


def test_no_text_of_a_run_is_in_the_file_as_text_and_only_hashed_scripts_run(toy_run, tmp_path):
    run = hostile_copy(toy_run, tmp_path / "sums<b>")
    assert write(PageRecords([run]), tmp_path / "a.html", 20_000_000) == []
    page, blocks = parsed(tmp_path / "a.html")
    assert "img" not in page.tags and "b" not in page.tags and "onerror" not in (tmp_path / "a.html").read_text()
    assert blocks["runs/0/details/5"][0]["messages"][0]["content"] == HOSTILE
    for attributes, text in page.found:
        if attributes.get("type") == "application/gzip":
            continue
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{attributes['tag']}-src" in page.policy and f"'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy and "unsafe" not in page.policy


def test_it_has_the_records_of_the_run(toy_run, tmp_path):
    records = PageRecords([toy_run])
    write(records, tmp_path / "a.html", 20_000_000)
    _, blocks = parsed(tmp_path / "a.html")
    assert blocks["runs/0/metrics"]["columns"] == records.get("runs/0/metrics", {})["columns"]
    assert blocks["runs"][0]["rollouts"] == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert blocks[f"runs/0/rollouts/{step}"] == records.get(f"runs/0/rollouts/{step}", {})
        assert blocks[f"runs/0/details/{step}"][3] == records.get(f"runs/0/rollouts/{step}/3", {})
    assert blocks["runs/0/evaluations/0"]["task"]


def test_it_stays_below_its_bound_and_says_what_is_left_out(toy_run, tmp_path, capsys):
    run = tmp_path / "long"
    shutil.copytree(toy_run, run)
    text = (run / "rollouts/step-000001.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for step in range(1, 101):
        for number, row in enumerate(rows):  # as if sampled: hardly compressible
            row["messages"] = [
                {"role": "assistant", "content": hashlib.sha512(f"{step} {number}".encode()).hexdigest() * 9}
            ]
        (run / f"rollouts/step-{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_app(["view", str(run), "--html", str(tmp_path / "a.html"), "--html-mb", "0.5"]) == 0
    assert (tmp_path / "a.html").stat().st_size <= 500_000
    _, blocks = parsed(tmp_path / "a.html")
    kept = blocks["runs"][0]["rollouts"]
    assert 1 in kept and 100 in kept and len(kept) < 100
    left_out = f"long: the rollouts of {100 - len(kept)} of 100 recorded steps"
    assert f"left out: {left_out}" in " ".join(capsys.readouterr().out.split())
    assert blocks["runs"][0]["notices"] == [f"Left out of this file: {left_out}."]


def test_what_is_vendored_is_what_was_published():
    folder = PAGE / "vendored"
    listed = dict(re.findall(r"^\| `(\S+)` .*`([0-9a-f]{64})` \|$", (folder / "VENDORED.md").read_text(), re.M))
    files = {one.name for one in folder.iterdir() if one.name.endswith((".js", ".css"))}
    assert listed.keys() == files and files
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
