"""What a curriculum costs at ten million tasks, and what it saves on simulated task banks: python -m benchmarks.curriculum

First: `draw(64)`, settling one draw, the mark of a step's end and the saved state, over ten million tasks of which every one
has been tried. Second: draws until a simulated learner (benchmarks/task_bank.py) is as accurate as required, beside `shuffled` on the
same banks and seeds; curricula are given the banks' own noisy difficulty as a prior, `learning_progress` on the bank of skills the
skill, and in a second table nothing. Ends with 1 where a bound is broken: draw(64) under 1 ms, state under 200 MB; at least 20 %
fewer draws on the bank that a curriculum is made for, at most 10 % more on any other. Writes benchmarks/results/curriculum.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.interfaces import Curriculum, TaskSource
from atropos_curriculum import config
from atropos_curriculum.base64_columns import packed
from atropos_curriculum.curriculum import AdaptiveCurriculum
from atropos_curriculum.strategies import strategy_of
from atropos_testing.samples import make_group
from benchmarks.machine import RESULTS, described
from benchmarks.task_bank import BANKS, samples_to_threshold

OPTIONS: Mapping[str, type[config.CurriculumOptions]] = {
    "easy_first": config.EasyFirstOptions,
    "competence": config.CompetenceOptions,
    "learning_progress": config.LearningProgressOptions,
    "prioritized": config.PrioritizedOptions,
    "window": config.WindowOptions,
}
MADE_FOR = {
    "easy_first": "ladder", "competence": "ladder", "learning_progress": "skills", "prioritized": "extremes",
    "window": "extremes",
}  # fmt: skip
TASKS, DRAWS = 10_000_000, 64
DRAW_MS, STATE_MB = 1.0, 200.0
FEWER, WORSE = 0.8, 1.1
FIRST_SEED = 1000  # the options' defaults were tuned on banks 0 to 3: these are none of them


def made(name: str, seed: int, bank: str = "", *, prior: bool = False) -> Curriculum:
    if name == "uniform":
        return OrderedCurriculum(seed, shuffled=True)
    field = "skill" if (name, bank) == ("learning_progress", "skills") else "difficulty"
    options = OPTIONS[name](prior=config.Prior(field=field) if prior else None)
    return AdaptiveCurriculum(seed, options, strategy_of(options))


def cost(name: str, tasks: int = TASKS) -> dict[str, float]:
    """At `tasks` tasks, all of them tried."""
    options = OPTIONS[name]()
    one = AdaptiveCurriculum(0, options, strategy_of(options))
    began = perf_counter()
    one.open({"all": TaskSource(tasks, 1.0)})
    open_s = perf_counter() - began
    held_mb = one.size_bytes / 1e6
    rng = np.random.default_rng(0)
    success = (rng.integers(0, 9, tasks) / 8).astype(np.float32)  # as if each task had been tried once
    columns = {
        "mean": success,
        "weight": np.full(tasks, 8, np.float32),
        "slow": success,
        "cell": np.zeros(tasks, np.uint8),
    }
    state: Any = one.state()
    rows = {column: packed(values) for column, values in columns.items()}
    state["banks"]["all"] |= {"index": None, "rows": rows, "levels": []}  # of no curriculum: cells are found anew
    one.load(state)
    del columns, rows, state
    group = make_group(0, (0, 1, 0, 0, 1, 1, 0, 1))
    draw_ms, settle_us, mark_ms = [], [], []
    for _ in range(200):
        began = perf_counter()
        drawn = one.draw(DRAWS)
        drawn_at = perf_counter()
        for draw in drawn:
            one.settle(draw, "trained", replace(group, draw=draw))
        settled_at = perf_counter()
        one.take_snapshot()
        draw_ms.append(1e3 * (drawn_at - began))
        settle_us.append(1e6 * (settled_at - drawn_at) / DRAWS)
        mark_ms.append(1e3 * (perf_counter() - settled_at))
    began = perf_counter()
    text = json.dumps(one.snapshot())
    save_s = perf_counter() - began
    return {
        "open_s": open_s,
        "draw_ms": statistics.median(draw_ms),
        "settle_us": statistics.median(settle_us),
        "mark_ms": statistics.median(mark_ms),
        "save_s": save_s,
        "held_mb": held_mb,
        "saved_mb": len(text) / 1e6,
    }


def draws_needed(name: str, bank: str, seed: int, *, prior: bool) -> int:
    return samples_to_threshold(BANKS[bank], made(name, seed, bank, prior=prior), seed)


def compared(seeds: Sequence[int], *, prior: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Draws to the threshold, by bank and curriculum, and how many times those of uniform that is."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for bank in BANKS:
            found[bank] = {}
            for name in ("uniform", *OPTIONS):
                needed = pool.map(partial(_needed, name, bank, prior), seeds)
                times = (
                    statistics.mean(needed) / found[bank].get("uniform", {"draws": statistics.mean(needed)})["draws"]
                )
                error = statistics.stdev(needed) / len(seeds) ** 0.5
                found[bank][name] = {"draws": statistics.mean(needed), "standard_error": error, "times": times}
            console.say(f"{bank}: " + ", ".join(f"{name} {one['times']:.2f}" for name, one in found[bank].items()))
    return found


def _needed(name: str, bank: str, prior: bool, seed: int) -> int:
    return draws_needed(name, bank, seed, prior=prior)


def broken(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Where a curriculum saves less on its own bank, or costs more on another, than is promised."""
    problems = []
    for name, own in MADE_FOR.items():
        if not found[own][name]["times"] <= FEWER:
            problems.append(
                f"{name} needs {found[own][name]['times']:.2f} times the draws of uniform on {own}, made for it"
            )
        problems += [
            f"{name} needs {of[name]['times']:.2f} times the draws of uniform on {bank}"
            for bank, of in found.items()
            if not of[name]["times"] <= WORSE
        ]
    return problems


def _show(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    rows = [
        (bank, f"{of['uniform']['draws']:.0f}", *(
            f"{of[name]['times']:.2f}" + (" *" if MADE_FOR[name] == bank else "") for name in OPTIONS
        ))
        for bank, of in found.items()
    ]  # fmt: skip
    console.table(("bank", "uniform: draws", *(f"{name}: times that" for name in OPTIONS)), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--tasks", type=int, default=TASKS)
    wanted = parser.parse_args(arguments)
    costs = {name: cost(name, wanted.tasks) for name in OPTIONS}
    console.table(
        (f"{wanted.tasks:,} tasks", *next(iter(costs.values()))),
        [(name, *(f"{value:.3g}" for value in of.values())) for name, of in costs.items()],
    )
    result: dict[str, Any] = {
        "machine": described(),
        "tasks": wanted.tasks,
        "cost": costs,
        "first_seed": wanted.first_seed,
        "seeds": wanted.seeds,
    }
    problems = [
        f"{name}: draw({DRAWS}) takes {of['draw_ms']:.2f} ms" for name, of in costs.items() if of["draw_ms"] >= DRAW_MS
    ]
    problems += [
        f"{name}: {what} takes {of[what]:.0f} MB"
        for name, of in costs.items()
        for what in ("held_mb", "saved_mb")
        if of[what] >= STATE_MB
    ]
    if wanted.seeds > 1:
        for key, prior in (("with_prior", True), ("without_prior", False)):
            console.say(key.replace("_", " "))
            result[key] = compared(range(wanted.first_seed, wanted.first_seed + wanted.seeds), prior=prior)
            _show(result[key])
        problems += broken(result["with_prior"])
    for problem in problems:
        console.warn(problem)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "curriculum.json").write_text(json.dumps(result | {"holds": not problems}, indent=1) + "\n")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
