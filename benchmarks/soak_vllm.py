"""Long runs with real vLLM that `make test-vllm` has no time for. `make soak` runs it in `.venv-vllm`.

    .venv-vllm/bin/python -m benchmarks.soak_vllm                    about half an hour on two cores
    .venv-vllm/bin/python -m benchmarks.soak_vllm --kills 2 --only kills

A learning run over every bridge; every family of models over every bridge; publishing and adapter swaps under 32
concurrent requests; kills at random moments. Each part writes benchmarks/results/soak_vllm_PART.json with the commit;
ends with 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun
from tests.vllm.ends import connected, five_updates
from tests.vllm.learning import learns
from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference
from tests.vllm.models import FAMILIES, make_model
from tests.vllm.processes import ROLES, left, segments, still_running, vllm_processes

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ipc eager": ("ipc", {"engine": {"enforce_eager": True}}),
    "ipc compiled": ("ipc", {"engine": {"enforce_eager": False}}),
    "ipc copying": ("ipc", {"bridge": {"copies": True}}),
    "lora": ("lora", {}),
    "checkpoint": ("checkpoint", {}),
}
POINTS = 15
UPDATE_NATS, MOVED_NATS = 1e-4, 0.5
PUBLISH_P95_S, SWAP_P95_S = 0.15, 0.3
RUN = (
    "--engine", "vllm", "--env", "gsm8k", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "evaluation.problems=8", "--set", "checkpoint.every=2",
)  # fmt: skip
ENDED_WITHIN_S = 10


def learned(bridge: str, folder: Path) -> dict[str, Any]:
    found = learns(bridge, 16, folder)
    right = found.points >= POINTS and found.worst_alignment <= UPDATE_NATS
    return {
        "bridge": bridge,
        "points": found.points,
        "worst_alignment": found.worst_alignment,
        "bytes_copied": sorted(found.bytes_copied),
        "alive": found.alive,
        "left": sorted(found.segments_left),
        "files": sorted(found.files),
        "held": found.code == 0 and right and found.leaves_nothing,
    }


def agrees(family: str, way: str, folder: Path) -> dict[str, Any]:
    """Five updates: how far engine and trainer are apart after each, and how far the policy has moved."""
    bridge, changes = WAYS[way]
    model = make_model(folder / "model", family)

    async def measure() -> dict[str, Any]:
        async with connected(model, bridge, folder / "run", changes) as ends:
            found = await five_updates(ends)
        return {
            "differences": found.difference,
            "moved": found.probe_shift,
            "publish_s": found.publish_s,
            "bytes_copied": found.bytes_copied,
            "held": float(np.max(found.difference)) <= UPDATE_NATS and found.probe_shift > MOVED_NATS,
        }

    return {"family": family, "way": way, **asyncio.run(measure())}


def under_load(bridge: str, publishes: int, folder: Path) -> dict[str, Any]:
    model = make_model(folder / "model", "qwen3")
    trainer = {"learning_rate": 1e-3, "old_logprobs": "recompute"}

    async def measure() -> Any:
        async with connected(model, bridge, folder / "run", {"trainer": trainer}) as ends:
            return await publish_under_load(ends, folder / "saved", publishes=publishes, concurrent=32)

    load = asyncio.run(measure())
    worst, compared = worst_difference(load, folder / "saved", transformers_scorer)
    bound = PUBLISH_P95_S if bridge == "ipc" else SWAP_P95_S
    whole = len(load.answers) == load.requests and compared == load.tokens
    return {
        "bridge": bridge,
        "publishes": publishes,
        "requests": load.requests,
        "answers": len(load.answers),
        "of_several_versions": load.mixed,
        "tokens": compared,
        "worst_nats": worst,
        "publish_median_s": sorted(load.publish_s)[publishes // 2],
        "publish_p95_s": load.p95_s(),
        "publish_max_s": max(load.publish_s),
        "bytes_copied": sum(load.bytes_copied),
        "seconds": load.seconds,
        "held": whole and worst <= UPDATE_NATS and load.p95_s() < bound,
    }


def survives(role: str, bridge: str, folder: Path) -> dict[str, Any]:
    """Kill `role` at a random moment; the run must end with a name, leave nothing, and be resumed."""
    run = RunningRun(folder, "run", "--dir", str(folder), "--bridge", bridge, *RUN, "--steps", "400")
    step = random.randrange(2, 12)
    run.wait_for_step(step, 240)
    time.sleep(random.uniform(0, 0.5))
    everyone = run.supervisor.children(recursive=True)
    segments_before = segments(everyone)
    victim = run.children["trainer"] if role == "trainer" else vllm_processes(run.supervisor)[role]
    killed = time.monotonic()
    victim.kill()
    try:
        code = run.process.wait(60)
    except subprocess.TimeoutExpired:
        run.process.kill()
        code = run.process.wait()
    alive = still_running(everyone, 10)
    seconds = time.monotonic() - killed
    for one in alive:
        one.kill()
    stays = sorted(left(segments_before))
    files = [str(path) for where in ("ipc", "adapters", "published") for path in folder.glob(f"{where}/*")]
    named = code == 1 and "ProcessDied" in run.text
    at = metrics_of(folder)[-1]["step"]
    resumed = RunningRun(folder, "resume", str(folder), "--steps", str(at + 2))
    again = resumed.process.wait(300) == 0 and metrics_of(folder)[-1]["step"] == at + 2
    return {
        "role": role, "bridge": bridge, "step": step, "ended_in_s": seconds, "named": named, "alive": len(alive),
        "left": stays, "files": files, "resumed": again,
        "held": named and not alive and not stays and not files and again and seconds <= ENDED_WITHIN_S,
    }  # fmt: skip


def takes_everything_along(folder: Path) -> dict[str, Any]:
    """Kill the supervisor: every process below it must end, and no segment stay."""
    run = RunningRun(folder, "run", "--dir", str(folder), *RUN, "--steps", "400")
    run.wait_for_step(random.randrange(2, 6), 240)
    everyone = run.supervisor.children(recursive=True)
    segments_before = segments(everyone)
    run.supervisor.kill()
    run.process.wait(10)
    alive, stays = still_running(everyone, 10), sorted(left(segments_before))
    for one in alive:
        one.kill()
    return {"role": "supervisor", "of": len(everyone), "alive": len(alive), "left": stays,
            "held": len(everyone) >= 5 and not alive and not stays}  # fmt: skip


def starts_again(role: str, folder: Path) -> dict[str, Any]:
    """Kill `role` in a run that may start again once: it must go on to its last step by itself."""
    run = RunningRun(folder, "run", "--dir", str(folder), *RUN, "--steps", "8", "--set", "restarts=1")
    run.wait_for_step(random.randrange(3, 6), 240)
    segments_before = segments(run.supervisor.children(recursive=True))
    victim = run.children["trainer"] if role == "trainer" else vllm_processes(run.supervisor)[role]
    victim.kill()
    code = run.process.wait(300)
    steps = [line["step"] for line in metrics_of(folder)]
    went_on = code == 0 and steps == list(range(9)) and "starting again from the last checkpoint" in run.text
    stays = sorted(left(segments_before))
    return {"role": role, "restarts": 1, "steps": steps[-1], "left": stays, "held": went_on and not stays}


def learning(folder: Path, wanted: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for bridge in ("ipc", "lora", "checkpoint"):
        yield learned(bridge, folder / f"learning-{bridge}")


def families(folder: Path, wanted: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for family in FAMILIES:
        for way in WAYS:
            yield agrees(family, way, folder / f"{family}-{way.replace(' ', '-')}")


def load(folder: Path, wanted: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for bridge in ("ipc", "lora"):
        yield under_load(bridge, wanted.publishes, folder / f"load-{bridge}")


def kills(folder: Path, wanted: argparse.Namespace) -> Iterator[dict[str, Any]]:
    roles = [*ROLES, "trainer"]
    for number in range(wanted.kills):
        bridge = random.choice(["ipc", "ipc", "lora", "checkpoint"])
        yield survives(roles[number % len(roles)], bridge, folder / f"kill-{number}")
    if wanted.kills:
        yield takes_everything_along(folder / "supervisor")
        yield starts_again(random.choice(roles), folder / "restarted")


PARTS = {
    "learning": (learning, f"the tiny policy gains {POINTS} points in 16 steps over each bridge, and leaves nothing"),
    "families": (families, "engine and trainer agree to 1e-4 after each of 5 updates, while the policy moves"),
    "load": (load, "nothing is lost under load, and every token is of the version that it names"),
    "kills": (
        kills,
        "every kill has a name, ends within 10 s, leaves nothing, and is resumed, or the run starts again where it may",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the moments of the kills")
    wanted = parser.parse_args()
    random.seed(wanted.seed)
    os.environ["HF_HUB_OFFLINE"] = "1"
    holds = {}
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        for name, (part, promise) in PARTS.items():
            if wanted.only not in (None, name):
                continue
            machine, entries = described(), []
            for entry in part(Path(scratch), wanted):
                entries.append(entry)
                console.say(f"{name}: {entry}")
            holds[promise] = all(entry["held"] for entry in entries)
            result = {"machine": machine, "seed": wanted.seed, promise: holds[promise], name: entries}
            (RESULTS / f"soak_vllm_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    console.table(
        ("", "holds"), [(name, "yes" if segments_before else "NO") for name, segments_before in holds.items()]
    )
    raise SystemExit(0 if all(holds.values()) else 1)


if __name__ == "__main__":
    main()
