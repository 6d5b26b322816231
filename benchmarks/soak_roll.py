"""The adapter `roll` for long: ten thousand episodes over 64 threads, some abandoned, some answered with nonsense; what is left
behind, whether tools acted once, and what a step costs. Runs in .venv-roll: `python -m benchmarks.soak_roll`."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gem

import atropos_adapter_roll.env  # noqa: F401 - registers
from atropos_adapter_roll.shared import shared_loop
from atropos_adapter_roll.trial import Stock, right_replies
from benchmarks.machine import RESULTS, described

STOCK = "atropos_adapter_roll.trial:Stock"
TASKS = {task.id: task for task in Stock().tasks("train")}
THREADS, EPISODES = 64, 160
PLAIN_S = 5.0


class Tally:
    """What the threads saw, together."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended: Counter[str] = Counter()
        self.orders = 0
        self.wrong: list[str] = []
        self.steps_s: list[float] = []


def worker(number: int, tally: Tally) -> None:
    rng = random.Random(number)
    env = gem.make("atropos", environment=STOCK)
    for episode in range(EPISODES):
        env.reset(seed=number * EPISODES + episode)
        replies = right_replies(TASKS[env.record()["task"]])
        fate = rng.choices(("right", "wrong", "abandoned", "no text"), (70, 10, 15, 5))[0]
        turns = len(replies) if fate in ("right", "wrong") else rng.randrange(len(replies))
        reward, over, taken = 0.0, False, []
        for turn in range(turns):
            reply = "-1" if fate == "wrong" and turn == len(replies) - 1 else replies[turn]
            began = time.perf_counter()
            _, reward, over, _, _ = env.step(reply)
            taken.append(time.perf_counter() - began)
        if fate == "no text":
            _, reward, over, _, info = env.step(None)
            over = over and info["metrics"]["failed"] == 1.0
        with tally.lock:
            tally.ended[fate] += 1
            tally.orders += turns > 1
            tally.steps_s += taken
            if (reward, over) != (float(fate == "right"), fate != "abandoned"):
                tally.wrong.append(f"{number}/{episode}: {fate} gave {reward}, over {over}")
    env.close()


def episodes() -> dict[str, Any]:
    holder = gem.make("atropos", environment=STOCK)  # keeps the environment open, for its orders
    tally, threads_before = Tally(), threading.active_count()
    threads = [threading.Thread(target=worker, args=(number, tally)) for number in range(THREADS)]
    resident, began = [], time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        resident.append(resident_mb())
    lasted_s = time.monotonic() - began
    orders, left = len(holder._environment.orders), tasks_left()
    holder.close()
    steps_ms = [1000 * step for step in tally.steps_s]
    cuts = statistics.quantiles(steps_ms, n=100)
    return {
        "threads": THREADS, "episodes": sum(tally.ended.values()), "ended": dict(tally.ended), "wrong": tally.wrong,
        "orders_sent": tally.orders, "orders_placed": orders, "tasks_left_on_the_loop": left,
        "threads_left": threading.active_count() - threads_before, "seconds": round(lasted_s, 1),
        "episodes_per_s": round(sum(tally.ended.values()) / lasted_s), "step_ms_p50": round(cuts[49], 3),
        "step_ms_p99": round(cuts[98], 3), "resident_mb_early": resident[len(resident) // 4], "resident_mb_late": resident[-1],
    }  # fmt: skip


def alone() -> dict[str, Any]:
    """One thread: what turning control round costs a step, without anyone else on the loop."""
    env = gem.make("atropos", environment=STOCK)
    steps_ms, began, seed = [], time.monotonic(), 0
    while time.monotonic() - began < PLAIN_S:
        env.reset(seed=seed)
        seed += 1
        for reply in right_replies(TASKS[env.record()["task"]]):
            start = time.perf_counter()
            env.step(reply)
            steps_ms.append(1000 * (time.perf_counter() - start))
    env.close()
    cuts = statistics.quantiles(steps_ms, n=100)
    return {"steps": len(steps_ms), "step_ms_p50": round(cuts[49], 3), "step_ms_p99": round(cuts[98], 3)}


def tasks_left() -> int:
    async def count() -> int:
        import asyncio

        return len(asyncio.all_tasks()) - 1

    return shared_loop().call(count(), 10, "counting")


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


def main() -> None:
    found = {"machine": described(), "alone": alone(), "episodes": episodes()}
    (RESULTS / "soak_roll.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    one = found["episodes"]
    kept = not one["wrong"] and one["orders_sent"] == one["orders_placed"]
    raise SystemExit(0 if kept and not one["tasks_left_on_the_loop"] and not one["threads_left"] else 1)


if __name__ == "__main__":
    main()
