"""The page as one file that opens anywhere: the same modules and records. It loads nothing, and its policy forbids loading."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from atropos_core.errors import AtroposError
from atropos_core.storage.atomic import unwritable, write_whole
from atropos_viewer.page_records import PageRecords
from atropos_viewer.server import page_files

FIRST = "app.js"
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";$', re.M)
EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.M)


def write(records: PageRecords, path: Path, most_bytes: int) -> list[str]:
    """Write the page to `path` and return what was left out to stay below `most_bytes`, one sentence each. Raises
    RunDirectoryError if the file cannot be written."""
    frame = _frame()
    blocks, left_out = _records(records, most_bytes - len(frame))
    text = frame.replace("<!-- records -->", "\n".join(blocks))
    try:
        write_whole(path, text)
    except OSError as error:
        raise unwritable(path, error) from error
    return left_out


def bundle(files: dict[str, bytes]) -> str:
    """The modules as one script. Each becomes a function that returns its exports, ordered so that a module comes after those
    that it imports."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = files[name].decode()
        for _, other in IMPORT.findall(text):
            add(other)
        exported = ", ".join(found for _, found in EXPORT.findall(text))
        body = IMPORT.sub(lambda found: f"const {{ {found[1]} }} = {_variable(found[2])};", text)
        body = EXPORT.sub(lambda found: f"{found[1]} {found[2]}", body)
        done[name] = f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"

    add(FIRST)
    return '"use strict";\n' + "\n".join(done.values())


def _variable(module: str) -> str:
    return "module_" + module.removesuffix(".js")


def _frame() -> str:
    files = page_files()
    scripts = [files["vendored/uPlot.iife.min.js"].decode(), bundle(files)]
    styles = [files["vendored/uPlot.min.css"].decode(), files["style.css"].decode()]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    head = "\n".join(
        [
            f'<meta http-equiv="content-security-policy" content="{policy}">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            "<title>atropos view</title>",
            *(f"<style>{style}</style>" for style in styles),
        ]
    )
    body = "\n".join(
        ['<div id="app"></div>', "<!-- records -->", *(f"<script>{script}</script>" for script in scripts)]
    )
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)


def _records(records: PageRecords, room: int) -> tuple[list[str], list[str]]:
    """Curves and evaluations first, then the rollouts of the first and the newest steps, until the room is used up."""
    left_out: list[str] = []
    blocks: list[str] = []
    overviews: list[dict[str, Any]] = records.get("runs", {})

    def keep(*made: str) -> bool:
        nonlocal room
        size = sum(len(one) + 1 for one in made)
        if size > room:
            return False
        room -= size
        blocks.extend(made)
        return True

    room -= 100_000 + 20 * sum(
        len(run["rollouts"]) for run in overviews
    )  # kept for the overview, which is written last
    for at, run in enumerate(overviews):
        run["living"] = False
        _keep_metrics(records, at, run, keep, left_out)
    for at, run in enumerate(overviews):
        run["evaluations"] = [
            step
            for step in _ends_first(run["evaluations"])
            if keep(*_blocks(records, [f"runs/{at}/evaluations/{step}"]))
        ]
        run["evaluations"].sort()
    queues = [_ends_first(run["rollouts"]) for run in overviews]
    kept: list[list[int]] = [[] for _ in overviews]
    while any(queues):  # in turns, so that each run gets some
        for at, queue in enumerate(queues):
            if not queue:
                continue
            step = queue.pop(0)
            if keep(*_step(records, at, step)):
                kept[at].append(step)
            else:
                queue.clear()
    for run, steps in zip(overviews, kept, strict=True):
        if len(steps) < len(run["rollouts"]):
            left_out.append(
                f"{run['name']}: the rollouts of {len(run['rollouts']) - len(steps)} of {len(run['rollouts'])} recorded steps"
            )
        run["rollouts"] = sorted(steps)
        run["notices"] += [
            f"Left out of this file: {text}." for text in left_out if text.startswith(f"{run['name']}: ")
        ]
    blocks.append(_block("runs", overviews))
    return blocks, left_out


def _keep_metrics(records: PageRecords, at: int, run: dict[str, Any], keep: Any, left_out: list[str]) -> None:
    """Keep all steps of every curve; if these are too many, every second, fourth, eighth and so on."""
    table = records.get(f"runs/{at}/metrics", {})
    every = 1
    while not keep(_block(f"runs/{at}/metrics", _thinned(table, every))):
        every *= 2
    if every > 1:
        left_out.append(f"{run['name']}: of the curves all but every {every}th step")


def _thinned(table: dict[str, Any], every: int) -> dict[str, Any]:
    columns = {name: values[::every] for name, values in table["columns"].items()}
    return table | {"steps": table["steps"][::every], "columns": columns}


def _ends_first(steps: list[int]) -> list[int]:
    """The last step, the first, then backwards from the end: what most readers look for is kept even if room is short."""
    return [*steps[-1:], *steps[:1], *reversed(steps[1:-1])] if len(steps) > 1 else list(steps)


def _step(records: PageRecords, at: int, step: int) -> list[str]:
    """The list of a step's rollouts, and each rollout in full."""
    try:
        table = records.get(f"runs/{at}/rollouts/{step}", {})
        details = [records.get(f"runs/{at}/rollouts/{step}/{row}", {}) for row in range(table["count"])]
    except AtroposError:  # damaged: the page says what is not in it
        return []
    return [_block(f"runs/{at}/rollouts/{step}", table), _block(f"runs/{at}/details/{step}", details)]


def _blocks(records: PageRecords, addresses: list[str]) -> list[str]:
    return [_block(address, records.get(address, {})) for address in addresses]


def _block(address: str, value: object) -> str:
    """A compressed value, in an alphabet without `<`, so that no text of a model can end the block."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str).encode("utf-8", "replace")
    packed = base64.b64encode(gzip.compress(text, 6, mtime=0)).decode()
    return f'<script type="application/gzip" data-address="{address}">{packed}</script>'
