"""docs/tutorial, typed from the first page to the last in one folder: files are saved, commands and programs run, what is shown comes.

A block of Python or TOML whose first line is a comment with a file's name is saved under it; other Python is a program. A block of
text shows lines of what the blocks since the last such block printed, but for figures. A command that ends in & goes on beside the
others until its page ends."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.pages.blocks import Block, blocks_of
from tests.pages.typed import alike

PAGES = sorted((REPOSITORY / "docs/tutorial").glob("*.md"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Reader:
    """Who reads the pages in their order. Port 8000 is a free one here, and `pip install` goes into a folder of the reader's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: list[str] = []
        self._started: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        path = [str(folder / "installed"), *os.environ.get("PYTHONPATH", "").split(":")]
        self._environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, path)),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def up_to(self, page: Path) -> None:
        for one in PAGES[: PAGES.index(page) + 1]:
            if one.name not in self.read:
                self.read.append(one.name)
                try:
                    self._page(one)
                finally:
                    self.end()

    def _page(self, page: Path) -> None:
        printed, fresh = "", False
        for block in blocks_of(page):
            if block.language == "text":
                shows(block, printed)
                fresh = False
                continue
            printed, fresh = (printed if fresh else ""), True
            name = re.match(r"# ([\w.]+)\n", block.text)
            if name:
                (self.folder / name[1]).write_text(block.text)
            elif block.language == "python":
                printed += self._ran([sys.executable, "-c", block.text], block)
            else:
                assert block.language == "bash", block
                for command in block.commands:
                    printed += self._typed(command, block)

    def _typed(self, command: str, block: Block) -> str:
        command = command.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}")
        if command.startswith("atropos serve"):
            command = command.replace("serve", f"serve --port {self._port}", 1)
        words = shlex.split(command.removesuffix("&"))
        if words[:3] == ["pip", "install", "-e"]:
            options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", self.folder / "installed"]
            return self._ran([sys.executable, "-m", "pip", "install", *options, words[3]], block)
        if words[0] == "atropos":
            words = [sys.executable, "-m", "atropos_core", *words[1:]]
        if command.endswith("&"):
            output = (self.folder / f"{len(self._started)}.output").open("wb")
            self._started.append(
                subprocess.Popen(words, cwd=self.folder, env=self._environment, stdout=output, stderr=output)
            )
            output.close()
            return ""
        return self._ran(words, block)

    def _ran(self, words: list[str | Path], block: Block) -> str:
        with tempfile.TemporaryFile() as output:
            ended = subprocess.run(
                words, cwd=self.folder, env=self._environment, stdout=output, stderr=output, timeout=240
            )
            output.seek(0)
            printed = output.read().decode()
        assert ended.returncode == 0, f"{block}: {words} ended with {ended.returncode}\n{printed}"
        return printed

    def end(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            process.wait(60)
        self._started.clear()


def shows(block: Block, printed: str) -> None:
    plain = re.sub(r"[ \t]+", " ", printed)
    for line in filter(str.strip, block.text.splitlines()):
        assert re.search(alike(line), plain), f"{block} shows {line!r}, which nothing printed:\n{printed}"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    one = Reader(tmp_path_factory.mktemp("tutorial"))
    yield one
    one.end()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_it_stands(page, reader):
    reader.up_to(page)


def test_there_are_ten_short_pages_each_of_which_leads_to_the_next():
    assert [page.stem[:2] for page in PAGES] == [f"{number:02}" for number in range(1, 11)]
    for page, following in pairwise(PAGES):
        assert f"]({following.name})" in page.read_text()
    assert max(len(page.read_text().splitlines()) for page in PAGES) < 120


def test_a_line_that_nothing_printed_is_noticed():
    with pytest.raises(AssertionError, match="nothing printed"):
        shows(Block("a page", 1, "text", "step 8/8 done\n"), "step 9/9\n")
