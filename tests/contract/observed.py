"""What an option can be seen by: a whole run of the toy policy (a tenth of a second), or the component itself, built as a run
builds it. Each function returns what was seen, to be compared with what is seen under another value."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.codec import encode_bytes
from atropos_core.config.run_file import ApiSection, Layer, load, nest
from atropos_core.errors import AtroposError
from atropos_core.guards.patience import DEFAULT_PATIENCE
from atropos_core.launch.builder import contexts
from atropos_core.launch.plan import make_plan
from atropos_core.launch.supervisor import execute
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import Provider, RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.processes.extension import Extension
from atropos_core.storage.run_directory import RunDirectory
from atropos_core.types import Sampling, Task, Tokens, TopK
from atropos_testing.samples import make_episode, make_group, make_task
from atropos_trajectory_client.http import CONTENT_TYPE, GROUP_FRAMES
from tests.contract.watched_tasks import SCORED
from tests.unit import virtual_time
from tests.warm import is_template

Seen = Mapping[str, object]
ANOTHER = "another"  # of `model`: the toy's, with another chat template
TOY = {
    "model": "toy",
    "environment.watched.use": "tests.contract.watched_tasks:Watched",
    "training.steps": 2, "training.groups_per_step": 2, "training.group_size": 3,
    "sampling.max_tokens": 6, "evaluation.problems": 2, "checkpoint.every": 0, "sink.jsonl.use": "jsonl",
    "engine.use": "toy", "trainer.use": "toy", "bridge.use": "local",
}  # fmt: skip
CLOCKS = (
    "time/", "tokens/s", "trajectories/s", "bridge/publish_s", "seconds", "at", "rescore/",
    "health/slow_disk", "health/throughput", "health/silence",
)  # fmt: skip


# -- whole runs


def ran(values: Mapping[str, Any]) -> Seen:
    """What a run leaves in its directory, but for times, and how it ended."""
    with TemporaryDirectory(prefix="atropos-observed-") as made:
        folder = Path(made)
        requested = dict(values)
        if requested.get("model") == ANOTHER:
            requested["model"] = str(_with_another_template(folder / "model"))
        SCORED.clear()
        try:
            execute(_plan({**TOY, **requested}), RunDirectory(folder / "run").make())
            ended = "whole"
        except AtroposError as error:
            ended = f"{type(error).__name__}: {error}".replace(made, "")
        return {"ended": ended, "scored": len(SCORED), **left_in(folder / "run")}


def requested(values: Mapping[str, Any]) -> Seen:
    """What a run asks first of the server of its [api]. http://h is a server that refuses everything."""
    with listening() as (url, heads), TemporaryDirectory() as folder:
        (Path(folder) / "token").write_text("a-token")
        there = {
            key: value.replace("http://h", url).replace("FOLDER", folder) if isinstance(value, str) else value
            for key, value in values.items()
        }
        try:
            execute(_plan({**TOY, **there}), RunDirectory(Path(folder) / "run").make())
        except AtroposError:
            pass
        return {"heads": heads[:1]}


def opened(values: Mapping[str, Any]) -> Seen:
    """Where the endpoint of a run's engines opens."""

    async def main() -> str:
        engine = load_plugins().registry.find("engine", "toy").provider
        made = engine.build(engine.options(), RunContext(Path("/"), TOY_MODEL))
        section = ApiSection(url="http://h", engine_address=values["api.engine_address"])
        server = await load_plugins().engine_server()(made, section.engine_address, None, await made.open())
        await server.close()
        return str(server.url)

    return {"url": asyncio.run(main())}


def planned(values: Mapping[str, Any]) -> Seen:
    """What each component would be built with."""
    plan = _plan({**TOY, **values})
    around = contexts(plan, Path("/run"))
    return {
        "options": [(one.label, repr(one.options)) for one, _ in around],
        "devices": [(one.label, context.devices, context.threads, context.transport) for one, context in around],
        "dates": [context.today for _, context in around],
    }


def _plan(values: Mapping[str, Any]) -> Any:
    plugins = load_plugins()
    config = load([Layer("test", nest(values.items()))]).config
    return make_plan(config, plugins.resolve_model(config.model), plugins)


def _with_another_template(folder: Path) -> Path:
    shutil.copytree(TOY_MODEL, folder)
    template = folder / "chat_template.jinja"
    template.write_text("<|user|>" + template.read_text())
    return folder


def left_in(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl" and path.name != "health.jsonl":
            found[name] = [_without_clocks(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == "table.npy":
            found[name] = path.read_bytes()
        elif path.is_file():
            found[name] = ""
    return found


def _without_clocks(row: Any) -> Any:
    if isinstance(row, dict):
        return {key: _without_clocks(value) for key, value in row.items() if not key.startswith(CLOCKS)}
    return row


# -- parts of a run


async def connected(name: str, options: Any, provider: Provider[Any]) -> Seen:
    """How long a bridge waits for a trainer that never answers."""

    class Silent:
        def __getattr__(self, method: str) -> Any:
            async def never(*arguments: Any, **keywords: Any) -> None:
                await asyncio.Event().wait()

            return never

    async def waited() -> float:
        endpoint = LocalEndpoint(None)
        endpoint._extension = Extension(Silent())
        with TemporaryDirectory() as folder:
            context = RunContext(Path(folder), TOY_MODEL, transport="posix_shm", transports=("posix_shm",))
            bridge = provider.build(options, context)
            engine = load_plugins().registry.find("engine", "toy").provider
            sink = engine.build(engine.options(), context)
            sink.endpoint = endpoint
            try:
                await bridge.connect(endpoint, [sink])
                async with bridge.writing(1):
                    pass
            except AtroposError:
                pass
            return asyncio.get_running_loop().time()

    return {"waited_s": await asyncio.to_thread(lambda: virtual_time.run(waited()))}


async def exported(name: str, options: Any, provider: Provider[Any]) -> Seen:
    """The files that an adapter writes for another framework."""
    with TemporaryDirectory() as folder:
        made = provider.build(options, RunContext(Path(folder), Path("tiny")))
        config = load([Layer("test", {"model": "tiny", "environment": {"gsm8k": {}}})]).config
        (out := Path(folder) / "out").mkdir()
        made.export(config, out)
        return {path.name: path.read_text().replace(folder, "") for path in out.iterdir()}


async def slept(name: str, options: Any, provider: Provider[Any]) -> Seen:
    """How long the toy engine takes."""

    async def sampled() -> float:
        engine = provider.build(options, RunContext(Path("/"), TOY_MODEL))
        await engine.sample(np.array([3], np.int32), 1, Sampling(2), [0], 60.0)
        return asyncio.get_running_loop().time()

    return {"took_s": await asyncio.to_thread(lambda: virtual_time.run(sampled()))}


async def graded(name: str, options: Any, provider: Provider[Any]) -> Seen:
    one = provider.build(options, RunContext(Path("/"), Path("/")))
    task = Task("one", (), "7", {"number": "7"})
    try:
        scores = [
            (await one.score(task, {"role": "assistant", "content": message})).value
            for message in ("I think that it is 7.", "\\boxed{2^3 - 1}")  # the latter by a process of the grader's
        ]
    finally:
        await one.close()
    return {
        "scores": scores,
        "tasks": [(len(one.tasks(split)), repr(one.tasks(split)[3])) for split in ("train", "test")],
    }


def _processes() -> int:
    """How many this one has below it."""
    return sum(not is_template(one.pid) for one in psutil.Process().children(recursive=True))


async def rated(name: str, options: Any, provider: Provider[Any]) -> Seen:
    """What an ensemble says of a reply, and how many processes it has for that."""
    before = _processes()
    with TemporaryDirectory() as folder:
        one = provider.build(options, RunContext(Path(folder), TOY_MODEL, label="reward.several"))
        if hasattr(one, "open"):
            await one.open()
        try:
            found = await one(make_task("7"), [make_episode(make_task("7"), reply) for reply in ("7", "#### 7")])
            return {"rewards": found.tolist(), "processes": _processes() - before}
        finally:
            if hasattr(one, "close"):
                await one.close()


class RecordingSource:
    """Stands where a teacher's engine would: keeps how many sequences it was given at once."""

    remedy = ""

    def __init__(self, *, answers: bool) -> None:
        self.answers, self.sizes = answers, list[int]()

    async def open(self) -> None: ...
    async def release_cache(self) -> None: ...
    async def close(self) -> None: ...

    async def score(self, sequences: list[Tokens], k: int, temperature: float) -> list[TopK]:
        self.sizes.append(len(sequences))
        if not self.answers:
            await asyncio.Event().wait()
        empty = np.empty(0, np.int32), np.empty(0, np.float32)
        return [TopK(np.zeros(len(one) + 1, np.int64), *empty) for one in sequences]


async def taught(name: str, options: Any, provider: Provider[Any]) -> Seen:
    from atropos_distillation.plugin import teacher_context
    from atropos_distillation.server import ServerSource
    from atropos_distillation.teacher import TokenTeacher

    groups = [make_group(1, [1.0, 0.0]), make_group(2, [1.0, 0.0])]

    def annotated(*, answers: bool) -> tuple[list[int], float]:
        async def main() -> float:
            try:
                await TokenTeacher(options, source, 1, "teacher.big").annotate(groups)
            except AtroposError:
                pass
            return asyncio.get_running_loop().time()

        source = RecordingSource(answers=answers)
        return virtual_time.run(main()), source.sizes  # type: ignore[return-value]

    seen: dict[str, object] = {
        "sizes": await asyncio.to_thread(lambda: annotated(answers=True)),
        "waited": await asyncio.to_thread(lambda: annotated(answers=False)),
    }
    if options.url is None:
        engine, around = (
            options.resolved_engine(),
            teacher_context(options, RunContext(Path("/"), Path("/")), Path("/")),
        )
        seen |= {"engine": (engine.offer.provider.name, around.devices, around.threads)}
    else:
        with listening() as (url, heads):
            source = ServerSource(options.model_copy(update={"url": url}), DEFAULT_PATIENCE)
            try:
                await source.open()
            except AtroposError:
                pass
            await source.close()
            seen["heads"] = list(heads)
    return seen


async def called(name: str, options: Any, provider: Provider[Any]) -> Seen:
    """The first request of a client: where it went, and with which token. http://h is a server that refuses everything."""
    with listening() as (url, heads), TemporaryDirectory() as folder:
        (Path(folder) / "token").write_text("a-token")
        changed = options.model_copy(update={"url": options.url.replace("http://h", url)})
        if getattr(changed, "token_file", None):
            changed = changed.model_copy(update={"token_file": Path(folder) / "token"})
        one = provider.build(changed, RunContext(Path("/"), TOY_MODEL, label="one"))
        try:
            if name == "judge":
                await one(make_task("7"), [make_episode(make_task("7"), "7")])
            else:
                await asyncio.wait_for(one.open(), 5)
        except (AtroposError, TimeoutError, ValueError):
            pass
        finally:
            await one.close()
        return {"heads": heads[:1]}


class Heads(list[tuple[str, str | None]]):
    """Path and token of each request, and their bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []


@contextmanager
def listening() -> Iterator[tuple[str, Heads]]:
    """A server that says it is a trajectory API, refuses everything else, and keeps its requests."""
    heads = Heads()
    about = encode_bytes({"protocol": 1, "frames": GROUP_FRAMES, "version": "0", "policy": None, "same_host": None})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heads.append((self.path, self.headers.get("Authorization")))
            heads.bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            found = about if self.path.endswith("/v1/") else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(found)))
            self.send_header("Content-Type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(found)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # how soon it sees that it is to end
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heads
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
