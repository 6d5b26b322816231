"""From an environment's episodes to a GeneratorOutput that SkyRL has validated: trajectories a second, beside HTTP/JSON.

    .venv-skyrl/bin/python -m benchmarks.skyrl_throughput [--repeat 5] [--groups 4096] [--connections 4]

One producer process has scored groups of 16 episodes (numpy, as a rollout ends; running them is not measured). Measured is
all that follows: `rows_of`, one message for each group, the exchange in shared memory in a thread of its own, reading, the
checks of values, order and versions, the views of `AtroposGenerator.generate()` and SkyRL's own `validate_generator_output`,
in calls of 32 groups. HTTP: the same groups as JSON, one group a request, over several kept connections of one process, to a
server in this process, into the same rows, output and validation. Also given: seconds of CPU for a trajectory at both ends,
which do not depend on how busy the machine is as rates do, and the table of where this end's go. SkyRL's conversion of the
output to tensors is timed after that, with arrays and with lists, as it is SkyRL's. Ways alternate; medians. Writes
benchmarks/results/skyrl_throughput.json. With a checkout of SkyRL on PYTHONPATH it is that one: --results
skyrl_throughput_source.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output
from skyrl.utils.tok import get_tokenizer

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.dataset import KEY
from atropos_adapter_skyrl.generator import AtroposGenerator
from atropos_adapter_skyrl.rings import RingGroups, in_order
from atropos_adapter_skyrl.row_messages import packs, unpacked
from atropos_adapter_skyrl.rows import TrainingRow, output_of, rows_of
from atropos_adapter_skyrl.signatures import batch_tensors, form
from atropos_adapter_skyrl.source import GroupRequest, GroupResult, GroupSource
from atropos_adapter_skyrl.threaded_source import Aside
from atropos_core import console
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.types import Draw
from benchmarks.machine import RESULTS, described
from benchmarks.skyrl_producers import CONCURRENCY, KINDS, N, group_of, posting, producing

GOAL = 37_848
TOKENS = {"256 tokens": (64, 192), "1,000 tokens": (200, 800)}  # of prompt and reply
A_CALL = 32  # groups
SPAWN = multiprocessing.get_context("spawn")
PARAMS = {"max_tokens": 64}
VOCABULARY = 151_936


def from_json(body: bytes) -> list[list[TrainingRow]]:
    return [
        [TrainingRow(np.array(one["prompt"], np.int32), np.array(one["response"], np.int32), np.array(one["mask"], np.bool_),
             np.array(one["logprobs"], np.float32), np.array(one["versions"], np.int32), one["reward"], one["finish"])]
        for one in json.loads(body)
    ]  # fmt: skip


class Posted(GroupSource):
    """Groups as they are posted, to whoever asks next."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[list[list[TrainingRow]]] = asyncio.Queue(64)

    async def fetch(self, requests: Any, params: Any, *, step_wise: bool) -> list[GroupResult]:
        return [GroupResult(await self.arrived.get(), 0.0) for _ in requests]

    async def app(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await self.arrived.put(from_json(body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def call(number: int) -> dict[str, Any]:
    """SkyRL's GeneratorInput for 32 groups."""
    of = [(f"{number}-{group}", member) for group in range(A_CALL) for member in range(N)]
    extra = {KEY: {"environment": "none", "split": "train", "index": 0}}
    return {
        "prompts": [[]] * len(of), "env_classes": ["none"] * len(of), "env_extras": [extra] * len(of), "sampling_params": PARAMS,
        "trajectory_ids": [TrajectoryID(*one) for one in of], "batch_metadata": BatchMetadata(number, "train"),
    }  # fmt: skip


async def generated(source: GroupSource, calls: int) -> tuple[float, float]:
    """Trajectories a second, and this process's seconds of CPU for one."""
    generator = AtroposGenerator(source)
    inputs = [call(number) for number in range(calls)]
    began, cpu = time.perf_counter(), time.process_time()
    following = asyncio.create_task(generator.generate(inputs[0]))
    for one in [*inputs[1:], None]:  # the next call's groups come while this one's are validated, as in SkyRL's loops
        output = await following
        if one is not None:
            following = asyncio.create_task(generator.generate(one))
        validate_generator_output(A_CALL * N, output)
    count = calls * A_CALL * N
    return count / (time.perf_counter() - began), (time.process_time() - cpu) / count


async def through_memory(folder: Path, sizes: tuple[int, int], calls: int) -> tuple[float, float, float]:
    rings = RingGroups(SkyRLOptions(source="rings", rings=folder, deadline_s=120.0), vocabulary=VOCABULARY)
    source = Aside(rings)  # in a thread of its own, as in a training
    await source.open()
    reported = SPAWN.Queue()
    process = SPAWN.Process(target=producing, args=(str(folder), sizes, reported), daemon=True)
    process.start()
    while not rings.exchange.workers:  # noqa: ASYNC110 - once, before anything is measured
        await asyncio.sleep(0.01)
    await source.fetch(
        [GroupRequest(Draw(number, "none", "train", 0, 1), N, True) for number in range(CONCURRENCY)],
        PARAMS,
        step_wise=False,
    )
    found = await generated(source, calls)
    await source.close()
    theirs = await asyncio.to_thread(reported.get, True, 30)
    process.join(20)
    return *found, theirs


async def through_http(sizes: tuple[int, int], calls: int, connections: int) -> tuple[float, float, float]:
    import uvicorn

    source = Posted()
    server = uvicorn.Server(uvicorn.Config(source.app, port=0, interface="asgi3", log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    reported = SPAWN.Queue()
    arguments = (server.servers[0].sockets[0].getsockname()[1], sizes, (calls + 1) * A_CALL, connections, reported)
    process = SPAWN.Process(target=posting, args=arguments, daemon=True)
    process.start()
    await AtroposGenerator(source).generate(call(0))  # what starts up is not measured
    found = await generated(source, calls)
    theirs = await asyncio.to_thread(reported.get, True, 60)
    server.should_exit = True
    await serving
    process.join(20)
    return *found, theirs


def profile(sizes: tuple[int, int]) -> dict[str, float]:
    """Microseconds of CPU for a trajectory in each stage by itself, the least of seven."""
    groups, count = [group_of(number, sizes) for number in range(KINDS)], KINDS * N
    rows = [rows_of(group, step_wise=False) for group in groups]
    sent = [list(packs(one)) for one in rows]
    flat = [one for group in rows for one in group]
    ids, seconds = list(range(count)), [0.0] * count

    def made(arrays: bool) -> Any:
        return output_of(flat, ids, seconds, step_wise=False, own_advantages=False, arrays=arrays)

    def tensors(output: Any) -> Any:
        rewards = [[0.0] * (len(row) - 1) + [1.0] for row in output["response_ids"]]
        columns = (
            output["prompt_token_ids"],
            output["response_ids"],
            rewards,
            output["loss_masks"],
            output["rollout_logprobs"],
        )
        return batch_tensors(convert_prompts_responses_to_batch_tensors, tokenizer, *columns)

    tokenizer, arrays, lists = get_tokenizer(str(TOY_MODEL), padding_side="left"), made(True), made(False)
    stages: dict[str, Callable[[], Any]] = {
        "producer: episodes to rows": lambda: [rows_of(group, step_wise=False) for group in groups],
        "producer: rows to messages": lambda: [list(packs(one)) for one in rows],
        "messages to rows in order": lambda: [
            in_order([unpacked(data, VOCABULARY) for data in one], N, step_wise=False) for one in sent
        ],
        "rows to GeneratorOutput": lambda: made(True),
        "validate_generator_output (SkyRL's)": lambda: validate_generator_output(count, arrays),
        "after it: tensors of arrays (SkyRL's)": lambda: tensors(arrays),
        "for comparison: rows to lists alone": lambda: made(False),
        "for comparison: validation of lists": lambda: validate_generator_output(count, lists),
        "for comparison: tensors of lists": lambda: tensors(lists),
    }
    found = {}
    for name, stage in stages.items():
        times = []
        for _ in range(7):
            began = time.process_time()
            stage()
            times.append(time.process_time() - began)
        found[name] = 1e6 * min(times) / count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--groups", type=int, default=4096, help="of 16 trajectories, in each run through shared memory"
    )
    parser.add_argument("--connections", type=int, default=4, help="of HTTP")
    parser.add_argument("--results", default="skyrl_throughput.json", help="the file in benchmarks/results")
    wanted = parser.parse_args()
    results: dict[str, Any] = {"machine": described(), "SkyRL": form().split(", in ")[0], "goal": GOAL, "missed": []}
    table = []
    with tempfile.TemporaryDirectory(prefix="atropos-bench-") as scratch:
        for name, sizes in TOKENS.items():
            ours, theirs = [], []
            for repeat in range(wanted.repeat):
                folder = Path(scratch) / f"{name}-{repeat}"
                ours.append(asyncio.run(through_memory(folder, sizes, wanted.groups // A_CALL)))
                theirs.append(
                    asyncio.run(through_http(sizes, max(wanted.groups // A_CALL // 16, 1), wanted.connections))
                )
            columns = {
                "shared memory": zip(*ours, strict=True),
                f"HTTP/JSON, {wanted.connections} connections": zip(*theirs, strict=True),
            }
            found = {}
            for way, values in columns.items():
                rates, here, there = ([*one] for one in values)
                found[way] = {
                    "a second": statistics.median(rates), "best": max(rates), "µs of CPU here": 1e6 * statistics.median(here),
                    "µs of CPU in the producer": 1e6 * statistics.median(there),
                }  # fmt: skip
                table.append(
                    (
                        name,
                        way,
                        *(f"{value:,.1f}" if value < 1000 else f"{value:,.0f}" for value in found[way].values()),
                    )
                )
            results[name] = found | {"µs of CPU by stage": profile(sizes)}
            if name == "256 tokens" and found["shared memory"]["a second"] < GOAL:
                results["missed"].append(f"{name}: {found['shared memory']['a second']:,.0f} a second, wanted {GOAL:,}")
    (RESULTS / wanted.results).write_text(json.dumps(results, indent=1) + "\n")
    console.table(("", "way", "a second", "best", "µs of CPU here", "in the producer"), table)
    stages = [
        (stage, *(f"{results[name]['µs of CPU by stage'][stage]:.1f}" for name in TOKENS))
        for stage in results["256 tokens"]["µs of CPU by stage"]
    ]
    console.table(("µs of CPU for a trajectory", *TOKENS), stages)
    for missed in results["missed"]:
        console.warn(missed)
    raise SystemExit(1 if results["missed"] else 0)


if __name__ == "__main__":
    main()
