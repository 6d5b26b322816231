"""The figures on the pages are those of benchmarks/results/, and every results file says what it was measured at."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from statistics import mean, median
from typing import Any

import pytest

from benchmarks.problems_in_a_row import PROBLEMS
from benchmarks.reward_hacking import row as row_of_exploit
from benchmarks.turn_learning import rows, summary
from tests.conftest import REPOSITORY
from tests.pages.blocks import PAGES

RESULTS = REPOSITORY / "benchmarks/results"
OF_OTHERS = {"baselines"}  # prime-rl's
Figures = dict[str, list[str]]  # page -> what must stand on it


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def percent(shares: list[float]) -> list[str]:
    """Mean, least and most of shares from 0 to 1."""
    return [f"{100 * value:.1f}" for value in (mean(shares), min(shares), max(shares))]


# -- of each results file


def soak() -> Figures:
    seeds, kills = results("soak")["seeds"], results("soak")["kills"]
    of = {name: [one[name] for one in seeds] for name in seeds[0]}
    gains, shifts = of["gain_points"], of["probe_shift_nats"]
    assert min(len(kills), sum(one["same_bits"] for one in kills)) == 30
    return {
        "docs/benchmarks.md": [
            f"| {min(of['seconds']):.0f}–{max(of['seconds']):.0f} s, {max(of['pss_bytes']) / 1e9:.1f} GB over all processes |",
            f"| {min(gains):.1f} to {max(gains):.1f} points, median {median(gains):.1f} |",
            f"| {max(of['max_abs_logprob_diff']):.1e} nats, while the policy moved by {min(shifts):.1f} to {max(shifts):.1f} |",
            f"| {1e3 * median(of['publish_s_median']):.1f} ms, at most {1e3 * max(of['publish_s_max']):.0f} ms; nothing copied |",
            f"all ended within {max(one['ended_in_s'] for one in kills):.1f} s; all resumed to the same bits",
        ]
    }


def speculation() -> Figures:
    names = {"copy": "a text to repeat", "story": "a story to tell"}
    made = []
    for name, row in results("speculation")["requests"].items():
        kind, temperature, n = name.split(", ")
        speeds = f"{row['plain_tokens_per_s']:.1f} | {row['ngram_tokens_per_s']:.1f}"
        accepted = f"{100 * row['draft_acceptance']:.0f} % | {row['acceptance_length']:.1f}"
        made.append(f"| {names[kind]}, {temperature}, {n} | {speeds} | {accepted} |")
    return {"plugins/engine_vllm/README.md": made}


def quantized() -> Figures:
    return {
        "plugins/trainer_grpo/README.md": [
            f"| {row['seed']} | "
            + " | ".join(
                f"{100 * of['before']:.1f} to {100 * of['after']:.1f} % | {of['gap_nats']:.1e}".replace("e-0", "e-")
                for of in (row["float32"], row["nf4"], row["int8"])
            )
            for row in results("quantized")["rows"]
        ]
    }


def evolved() -> Figures:
    """Weights without a gradient, and prompts."""
    weights, prompts = results("evolution")["rows"], results("prompts")["rows"]
    return {
        "plugins/trainer_es/README.md": [
            f"| {row['seed']} | {100 * row['before']:.1f} % | {100 * row['after']:.1f} % |" for row in weights
        ],
        "plugins/optimizer_gepa/README.md": [
            f"| {row['seed']} | {100 * row['before']:.1f} % | {100 * row['after']:.1f} % | {row['prompt']} |"
            for row in prompts
        ],
    }


def ray() -> Figures:
    found = results("soak_ray")
    ended, waited = found["outcomes"], found["until_the_next_step_s"]
    assert sum(ended.values()) == 30 and found["actors_left"] == []
    return {
        "plugins/launcher_ray/README.md": [
            f"| driver | {ended['driver: resumed']} | the run was resumed |",
            f"| trainer's machine | {ended['trainer node: started again']} | the run started again",
            f"| engine's machine | {ended['engine node: started again']} | the run started again",
            f"| workers' machine | {ended['worker node: went on']} | the run continued |",
            f"after {waited['median']:.0f} s in the median, {waited['most']:.0f} s at most",
            f"{found['draws_settled']} draws were settled and {found['groups_trained']} groups trained, each once",
        ]
    }


def hub() -> Figures:
    found = results("hub_limit_long")
    assert found["holds"] and found["limits"][0]["draws"] == 1_000_000 and found["limits"][0]["workers"] == 10_000
    rows = []
    for of in found["limits"]:
        put = of["latency_ms"]["put"]
        rows.append(
            f"| 8 rollouts of {of['tokens_of_a_rollout']:,} tokens | {of['draws']:,} | {1e3 * of['hub_group_s']:.2f} ms | "
            f"{of['groups_per_s_of_one_server']:,.0f} | {of['groups_per_s_here']:,.0f} | {put['p50']:.0f} and {put['p99']:.0f} ms | "
            f"{of['engines_of_5000_tokens_per_s']:,.0f} | {of['servers_for_512_engines']:.1f} |"
        )
    return {"docs/simulation.md": rows}


def simulation() -> Figures:
    found = results("simulation_waiting")
    ratio = {(case["engines"], case["max_staleness"]): f"{case['ratio']:.2f}" for case in found["cases"]}
    real = results("simulation_real")
    assert real["within_15_percent"]
    one, two, stale = (f"{case['ratio']:.2f}" for case in real["cases"])
    assert found["within_15_percent"] and all(0.95 <= case["ratio"] <= 1.05 for case in found["cases"])
    return {
        "docs/simulation.md": [
            f"| `max_staleness = 0` | {ratio[1, 0]} | {ratio[2, 0]} | {ratio[3, 0]} | {ratio[4, 0]} |",
            f"| `max_staleness = 1` | {ratio[1, 1]} | {ratio[2, 1]} | | {ratio[4, 1]} |",
            f"{one} for the run that the figures come from, {two} for two engines, {stale} for `max_staleness = 1`",
        ]
    }


def sandboxes() -> Figures:
    found = results("sandboxes")
    assert f"{found['load_at_start']:.0f}" == "7", "the page says how busy the machine was"
    rows, bubblewrap = found["sandboxes"], found["sandboxes"]["bubblewrap"]
    table = [
        f"| {name} | {1e3 * median(one['exit_s']):.0f} ms, {1e3 * max(one['exit_s']):.0f} at most | "
        f"{1e3 * median(one['gone_s']):.0f} ms | {1e3 * one['at_once_s']:.0f} ms |"
        for name, one in rows.items()
    ]
    listener = f"took {1e3 * (bubblewrap['call_api_s'] - bubblewrap['call_host_s']):.2f} ms more"
    return {"docs/agent-sandboxes.md": [*table, f"holds {rows['process']['monitor_bytes'] / 1e6:.1f} MB", listener]}


def engine() -> Figures:
    rows = results("engine")["tokens_per_s"]
    times = [row["hosted"] / row["generate"] for row in rows.values()]
    table = [
        f"| {count} | {row['generate']:,.0f} | {row['in process']:,.0f} ({row['in process'] / row['generate']:.1f} times) | "
        f"{row['hosted']:,.0f} ({row['hosted'] / row['generate']:.1f}) |"
        for count, row in rows.items()
    ]
    return {
        "plugins/engine_hf/README.md": table,
        "docs/benchmarks.md": [f"| {min(times):.1f} to {max(times):.1f} times |"],
    }


def whole_loop() -> Figures:
    overlap, memory = results("overlap"), results("memory")
    rate = overlap["trajectories_per_s"]
    return {
        "docs/benchmarks.md": [
            f"| {results('quickstart')['ratio']:.1f} times |",
            f"| {overlap['ratio']:.1f} times |",
            f"(a trainer's gradients and moments come on top: {memory['copies_training']:.1f} in all) | {memory['copies_loaded']:.2f} |",
        ],
        "docs/how-a-run-works.md": [
            f"{rate['1'] / rate['0']:.1f} times the trajectories a second at k = 1 and {rate['2'] / rate['0']:.1f} at 2"
        ],
    }


def real_model() -> Figures:
    found = results("real_model")
    ratio, busy = found["ratio"], " on a busy machine" * found["busy"]
    return {
        "docs/benchmarks.md": [
            f"| {ratio['trajectories_per_s']:.1f} times; sampling {ratio['sampling_tokens_per_s']:.1f}, update "
            f"{ratio['update_tokens_per_s']:.1f}, with {ratio['peak_bytes']:.2f} of its memory{busy} |"
        ]
    }


def real_learning() -> Figures:
    rows = results("real_learning")["rows"]
    [before] = {row["before"]["accuracy"] for row in rows}  # greedy, so the same under every seed
    [answered] = {row["before"]["answered"] for row in rows}
    after = sorted(row["after"]["accuracy"] for row in rows)
    named, minutes = min(row["after"]["answered"] for row in rows), sorted(row["seconds"] / 60 for row in rows)
    words, lasted = rows[0]["before"]["problems"], f"{minutes[0]:.0f} to {minutes[-1]:.0f} minutes"
    gain = f"{100 * before:.0f} to {100 * after[0]:.0f}, {100 * after[1]:.0f} and {100 * after[2]:.0f} %"
    risen = f"{before:.0%} to {after[0]:.0%}, {after[1]:.0%} and {after[2]:.0%}"
    return {
        "README.md": [
            f"accuracy on {words} held-out words rose from {risen}",
            f"name a category at all, right or wrong, rose much less, from {answered:.0%} to {named:.0%}",
            f"in {lasted}",
        ],
        "docs/benchmarks.md": [
            f"| {gain}; {lasted} each; replies that name a kind: {100 * answered:.0f} to {100 * named:.0f} % |"
        ],
        "libs/recipes/atropos_recipes/run_files/laptop-smollm2-135m.toml": [gain],
    }


def trainer() -> Figures:
    found = results("trainer")
    tiny, large = found["beside_trl"]["tiny"], found["beside_trl"]["30M"]
    rows = []
    for of, ours in ((tiny, "tiny policy, defaults"), (large, "`logprob_chunk = 128`")):
        speed = {name: of["tokens"] / mean(one["seconds"] for one in runs) for name, runs in of["runs"].items()}
        grown = {name: mean(one["growth"] for one in runs) / 1e6 for name, runs in of["runs"].items()}
        times = f"{of['speed']:.1f}" if of is tiny else f"{of['speed']:.2f}"
        rows += [f"{ours} | {speed['Atropos']:,.0f} | {times} × | {grown['Atropos']:,.0f} |"]
        rows += [f"{speed[of['best']]:,.0f} | | {grown[of['best']]:,.0f} |"]
    names = {
        "as it comes": "defaults",
        "padded, prompts not shared": "padded, prompts not shared",
        "packed, prompts not shared": "packed, `share_prompts = false`",
        "all logits held at once": "all logits held at once",
        "micro-batches of 256 tokens": "`tokens_per_microbatch = 256`",
        "the same, gradient checkpointing": "the same with `gradient_checkpointing`",
        "two optimiser steps": "`minibatches = 2`",
        "the same, with an old-policy pass": "the same with an old-policy pass",
    }
    for name, runs in found["tricks"].items():
        seconds, cpu = mean(one["seconds"] for one in runs), mean(one["cpu_seconds"] for one in runs)
        rows.append(f"| {names[name]} | {seconds:.2f} | {cpu:.2f} | {mean(one['growth'] for one in runs) / 1e6:,.0f} |")
    for model, of in found["branches"].items():
        speed = {name: of["tokens"] / median(one["seconds"] for one in runs) for name, runs in of["runs"].items()}
        grown = {name: median(one["growth"] for one in runs) / 1e6 for name, runs in of["runs"].items()}
        ours = "tiny policy, defaults" if model == "tiny" else "a group is a micro-batch"
        rows += [
            f"{ours} | {speed['Atropos']:,.0f} | {of['speed']:.2f} × | {of['speed_apart']:.2f} × | {grown['Atropos']:,.0f} |",
            f"| {speed['Atropos, nothing shared']:,.0f} | | | {grown['Atropos, nothing shared']:,.0f} |",
            f"| {speed[of['best']]:,.0f} | | | {grown[of['best']]:,.0f} |",
        ]
    padding = found["padding"]
    rows.append(
        f"{100 * padding['prompts shared']:.1f} % are padding ({100 * padding['prompts not shared']:.1f} % without shared "
        f"prompts; {100 * padding['a padded trainer']:.0f} % in a padded trainer)"
    )
    plan = [one for one in results("plan")["configurations"] if one["ranks"] == 2]
    (float32, of32), (bfloat16, of16) = [(one["predicted"] / 1e6, one["growth"] / 1e6) for one in plan]
    rows.append(
        f"predicts {float32:,.0f} MB beyond imports, and {of32:,.0f} are measured (float32). In bfloat16 with KL to a copy it "
        f"predicts {bfloat16:,.0f} and {of16:,.0f} are measured"
    )
    return {
        "plugins/trainer_grpo/README.md": rows,
        "docs/benchmarks.md": [
            f"{tiny['speed']:.1f} times; {large['speed']:.2f} times, with {large['memory']:.2f} of its growth of memory"
        ],
    }


def curriculum() -> Figures:
    found, whole = results("curriculum"), results("soak_curriculum")
    rows = []
    for row in found["with_prior"].values():
        times = [
            row[name]["times"] for name in ("easy_first", "competence", "learning_progress", "prioritized", "window")
        ]
        rows.append(f"| {row['uniform']['draws']:.0f} | {' | '.join(f'{value:.2f}' for value in times)} |")
    cost = found["cost"].values()
    draws = [one["draw_ms"] for one in cost]
    rows.append(
        f"`draw(64)` takes {min(draws):.2f} to {max(draws):.2f} ms, the state {max(one['held_mb'] for one in cost):.0f} MB in memory and "
        f"{max(one['saved_mb'] for one in cost):.0f} MB in a checkpoint, and marking the end of a step "
        f"{max(one['mark_ms'] for one in cost):.2f} ms"
    )
    for name in ("shuffled", "window", "prioritized"):
        runs = [one["runs"][name] for one in whole["seeds"]]
        saved = whole["saved"].get(name)
        said = f"{100 * saved['mean']:.0f} % ({100 * saved['low']:.0f} to {100 * saved['high']:.0f}) " if saved else ""
        rows.append(
            f"| `{name}` | {mean(one['rollouts'] for one in runs):,.0f} | {said}| "
            f"{100 * mean(one['curve'][-1][1] for one in runs):.1f} % | {100 * mean(one['trained_share'] for one in runs):.0f} % |"
        )
    return {"plugins/curriculum/README.md": rows}


def transforms_and_rewards() -> Figures:
    scaled, rated = results("soak_normalization"), results("soak_ensemble")
    names = {"plain": "without `zscore`", "zscore": "`[transform.zscore]`, with its defaults"}
    names["divided"] = "neither, but divided advantages (GRPO)"
    rows = []
    for run, name in names.items():
        (before, *_), after = (
            percent([one[run]["before"] for one in scaled["runs"]]),
            percent([one[run]["after"] for one in scaled["runs"]]),
        )
        rows.append(f"| {name} | {before} % | {after[0]} % ({after[1]} to {after[2]}) |")
    better, median_points = scaled["better_points"], rated["median_points"]
    rows.append(f"{better['mean']:.1f} points, bootstrap 95 % interval {better['low']:.1f} to {better['high']:.1f}")
    names = {"gameable": "only `gameable`", "grader": "only one honest grader", "median": "median of the five"}
    names["exclude"] = 'mean of the five, `on_departure = "exclude"`'
    table = []
    for run, name in names.items():
        last = percent([one["last"] / 100 for one in rated["runs"][run]])
        table.append(f"| {name} | {last[0]} % ({last[1]} to {last[2]}) |")
    table.append(
        f"ends {median_points['mean']:.1f} points above `gameable` (bootstrap 95 % interval over the seeds "
        f"{median_points['low']:.1f} to {median_points['high']:.1f})"
    )
    return {"plugins/normalization/README.md": rows, "plugins/reward_ensemble/README.md": table}


def sinks() -> Figures:
    found = results("sinks")

    def step(name: str) -> str:
        one = found[name]
        return f"{one['step_ms_median']:.2f} ms a step, {one['step_ms_p99']:.2g} ms at p99"

    return {
        "plugins/sinks/README.md": [
            step("csv"),
            f"{found['csv']['bytes_per_step']:.0f} bytes a step",
            step("tensorboard"),
            f"{found['tensorboard']['bytes_per_step']:.0f} bytes a step",
            f"{found['tensorboard']['open_s']:.1f} s to open",
            step("wandb"),
            f"{found['wandb']['bytes_per_step'] / 1e3:.1f} kB a step",
            f"{found['wandb']['open_s']:.1f} s to open and {found['wandb']['close_s']:.2f} s to close",
        ],
    }


def vllm() -> Figures:
    families, kills = results("soak_vllm_families")["families"], results("soak_vllm_kills")["kills"]
    whole = [max(one["differences"]) for one in families if one["way"] != "lora"]
    adapters = [max(one["differences"]) for one in families if one["way"] == "lora"]
    moved = [one["moved"] for one in families]
    of = {way: [one for one in families if one["way"] == way] for way in ("ipc eager", "ipc compiled", "ipc copying")}
    worst = {way: max(max(one["differences"]) for one in some) for way, some in of.items()}
    publishes = [1e3 * each for one in of["ipc eager"] for each in one["publish_s"]]
    shared, adapted = (
        next(one for one in results("soak_vllm_load")["load"] if one["bridge"] == name) for name in ("ipc", "lora")
    )
    ipc, checkpoint = results("bridges_memory")["memory"]
    ended = max(one["ended_in_s"] for one in kills if "ended_in_s" in one)
    return {
        "docs/benchmarks.md": [
            f"`checkpoint` {max(whole):.1e} nats at most, `lora` {max(adapters):.1e}; "
            f"the policy moved by {min(moved):.1f} to {max(moved):.1f}",
            f"| all ended within {ended:.1f} s with a name, left nothing, were resumed |",
            f"95th percentile {shared['publish_p95_s']:.2f} s, no byte copied; {adapted['publish_p95_s']:.2f} s;",
            f"with a model of {ipc['weights'] / 1e6:.0f} MB",
            f"{ipc['copies_after'] - ipc['copies_before']:.2f} copies, and "
            f"{ipc['copies_read'] - ipc['copies_before']:.2f} once the trainer has read them; "
            f"`checkpoint` {checkpoint['copies_read'] - checkpoint['copies_before']:.2f}",
        ],
        "plugins/bridge_ipc/README.md": [
            f"{worst['ipc eager']:.1e} nats eager, {worst['ipc compiled']:.1e} compiled and {worst['ipc copying']:.1e} "
            "where weights are copied",
            f"A publish without copies took {min(publishes):.0f} to {max(publishes):.0f} ms",
        ],
        "plugins/bridge_lora/README.md": [
            f"{adapted['publishes']} swaps", f"{adapted['requests']:,} requests", f"{adapted['tokens']:,} tokens",
            f"within {adapted['worst_nats']:.1e} nats", f"95th percentile {adapted['publish_p95_s']:.2f} s",
        ],
    }  # fmt: skip


def roll() -> Figures:
    found = results("soak_roll")
    played = found["episodes"]
    return {
        "docs/roll.md": [
            f"{played['episodes']:,} episodes of three turns over {played['threads']} threads",
            f"{played['episodes_per_s']} episodes a second",
            f"({played['orders_placed']:,} times)",
            f"a `step` takes {found['alone']['step_ms_p50']:.2f} ms",
        ]
    }


def skyrl() -> Figures:
    published, newest, long = results("skyrl_throughput"), results("skyrl_throughput_source"), results("soak_skyrl")
    sizes = ("256 tokens", "1,000 tokens")
    rows = []

    def row(of: str, *values: Any) -> None:
        rows.append(f"{of} | {' | '.join(str(value) for value in values)} |")

    def rates(found: Any, way: str) -> list[str]:
        return [f"{found[size][way]['a second']:,.0f} ({found[size][way]['best']:,.0f})" for size in sizes]

    def stage(name: str, *sources: Any) -> list[str]:
        return ["; ".join(f"{one[size]['µs of CPU by stage'][name]:.1f}" for one in sources) for size in sizes]

    http = "HTTP/JSON, 4 connections"
    row("trajectories a second, median (best), SkyRL 0.3.0", *rates(published, "shared memory"))
    row("the same, SkyRL a9564572", *rates(newest, "shared memory"))
    row("HTTP/JSON over 4 connections, 0.3.0", *rates(published, http))
    for of, name in {
        "episodes to rows": "producer: episodes to rows",
        "rows to messages": "producer: rows to messages",
        "messages to rows, checked and in order": "messages to rows in order",
        "ours, there: rows to `GeneratorOutput`": "rows to GeneratorOutput",
        "| SkyRL's `validate_generator_output`": "validate_generator_output (SkyRL's)",
        "of lists instead: rows to `GeneratorOutput`": "for comparison: rows to lists alone",
        "of lists instead: `validate_generator_output`": "for comparison: validation of lists",
    }.items():
        row(of, *stage(name, published))
    row(
        "SkyRL's tensors, after validation; a9564572",
        *stage("after it: tensors of arrays (SkyRL's)", published, newest),
    )
    row("of lists instead: SkyRL's tensors; a9564572", *stage("for comparison: tensors of lists", published, newest))
    for of, way in (("with the exchange", "shared memory"), ("the same for HTTP/JSON", http)):
        row(of, *(f"{published[size][way]['µs of CPU here']:.1f}" for size in sizes))
    for size in sizes:
        one = long["speed"][size]
        p50, p99 = one["p50 and p99 at half of the goal, ms"]
        alone, alone_p99 = one["its p50 and p99 at half of that, ms"]
        slow, slow_p99 = one["its p50 and p99 at half of its own rate, ms"]
        row(
            f"{size}: trajectories a second, in groups of 16, median (best)",
            f"{one['shared memory, a second']:,.0f} ({one['best']:,.0f})",
        )
        row("trajectories a second, p50 and p99", f"{p50:.3f} and {p99:.2f} ms")
        row(
            f"{size}: one trajectory a message, a second; latency at half of that, p50 and p99",
            f"{one['one trajectory alone, a second']:,.0f}; {alone:.3f} and {alone_p99:.2f} ms",
        )
        row(
            f"{size}: HTTP/JSON, one a request over one connection, a second; latency at half of that",
            f"{one['HTTP/JSON, a second']:,.0f}; {slow:.3f} and {slow_p99:.2f} ms",
        )
    kills, memory = long["kills"], long["memory"]
    usual, most = kills["a death is noticed after, median and most, ms"]
    rows.append(f"every field bit-equal; {kills['groups played again']} groups run again |")
    row("until a death is noticed, median and most", f"{usual:.0f} and {most:.0f} ms")
    alone, engine_too = (
        memory[name] for name in ("the adapter alone, MB", "with an engine of 0.5 B parameters in bfloat16, MB")
    )
    row("in bfloat16", f"{alone:.0f}; {engine_too:,.0f} MB")
    return {"docs/skyrl.md": rows}


def short_groups() -> Figures:
    found = results("api_short")
    assert found["machine"]["load_at_start"] < 1.5, "the page says that the machine was quiet"
    table = []
    for row in found["rows"]:
        if "ingest" not in row["measure"]:
            continue
        off, on = (f"{row[kind]:,.0f} ({row['ratios'][kind]:.1f}" for kind in ("journal off", "journal on"))
        cpu = " | ".join(f"{row['server_ms'][kind]:.2f}" for kind in ("upstream", "journal off", "journal on"))
        table.append(
            f"| {row['measure']}, groups/s | {row['upstream']:,.0f} | {off} times) | {on}) | "
            f"| the same in processor time of the server, ms a group | {cpu} |"
        )
    return {"docs/trajectory-api.md": table}


def hostile() -> Figures:
    found = results("soak_api_hostile")
    kinds, default = found["kinds"], found["defaults, plain JSON of 40 MB"]
    long = [one for one in kinds.values() if one["seconds"] == 20]
    held = [one for one in kinds.values() if not one["missed"]]
    half, numbers = kinds["half bodies"], kinds["numbers"]
    return {
        "docs/trajectory-api.md": [
            f"{len(long)} of the kinds were measured for twenty seconds",
            f"{len(held)} kinds hold the bar",
            f"p95 up to {max(one['p95_ms'] for one in held):.0f} ms, memory up to {max(one['grown_mb'] for one in held):.0f} MB",
            f"| 1,200 connections with half a body each, all opened again when they are closed | {half['p95_ms']:.0f} ms",
            f"| bodies of a million numbers | {numbers['p95_ms']:.0f} ms",
            f"took up to {default['grown_mb']:.0f} MB, of which {default['kept_mb']:.0f} were left",
            f"another client's p95 was {default['p95_ms']:.0f} ms",
            "; ".join(found["missed"]),
            *(
                f"| {name} | {kinds[kind]['kept_mb']:.0f} MB | {kinds[kind]['kept_again_mb']:.0f} MB |"
                for name, kind in (
                    ("small lists", "small lists"),
                    ("answers that the client does not read", "pipelined, unread"),
                    ("numbers", "numbers"),
                )
            ),
        ]
    }


def viewer() -> Figures:
    found = results("viewer")
    assert found["rollouts"] == 10_000 and found["steps"] == 1_000
    worst = max(found[name]["p95_ms"] for name in ("list_frames", "curve_frames"))
    return {
        "docs/view.md": [
            f"10,000 rollouts is read {found['list_s']['median']:.1f} s after its address is opened, 1,000 steps of every metric "
            f"after {found['curves_s']['median']:.1f} s",
            f"p95 {worst:.0f} ms",
        ]
    }


def recording() -> Figures:
    run, made_up = results("recording")["run"], results("recording")["made_up"]
    return {
        "docs/records.md": [
            f"{run['tokens_a_step']:,.0f} tokens) takes {run['recording_ms']:.0f} ms, {100 * run['share']:.1f} % of it",
            f"{run['bytes_a_token']:.1f} bytes a token, the texts {run['text_bytes_a_token']:.1f} more",
            f"takes {made_up['recording_ms'] / 1e3:.2f} s to record",
        ]
    }


def rescoring() -> Figures:
    small, large = results("rescoring")["rows"]
    assert (small["rollouts"], large["rollouts"]) == (10_000, 100_000)
    return {
        "docs/debugging.md": [
            f"100,000 rollouts of a trivial reward take {large['seconds']:.0f} s and at most {large['peak_bytes'] / 1e6:.0f} MB",
            f"10,000 take {small['seconds']:.1f} s and {small['peak_bytes'] / 1e6:.0f} MB",
        ]
    }


GIB = 2**30 / 1e9  # in GB, which pages have


def gpu() -> Figures:
    checks = {name: check["figures"] for name, check in results("gpu")["checks"].items()}
    held, tree, quantized_base = checks["one_copy"], checks["trees"], checks["training_8B_nf4"]
    rows = []
    for check, name in (
        ("training_0.6B_full", "0.6B, full"),
        ("training_0.6B_lora", "0.6B, LoRA of rank 16"),
        ("training_8B_nf4", "8B, LoRA beside 4 bits, 65,536 tokens, activations offloaded"),
    ):
        of = checks[check]
        plan = of["`atropos plan` says [GiB]"] * GIB
        rows.append(
            f"| {name} | {of['trained [tokens/s]']:,.0f} | {of['most allocated [GiB]'] * GIB:.2f} | {plan:.2f} |"
        )
    for way, name in (("flash", "by levels"), ("padded", "padded layout")):
        speed, most = tree[f"shared, {way} [tokens/s]"], tree[f"shared, {way}, at most [GiB]"] * GIB
        rows.append(f"| 0.6B, eight branches, {name} | {speed:,.0f} | {most:.2f} |")
    groups, head = checks["groups"], checks["head"]
    rows.append(
        f"| 0.6B, eight groups of eight, by levels | {groups['flash [tokens/s]']:,.0f} | {groups['flash, at most [GiB]'] * GIB:.2f} |"
    )
    trl = {
        kind: [checks[f"training_0.6B_{kind}"][f"TRL's update [{unit}]"] for unit in ("tokens/s", "GiB")]
        for kind in ("full", "lora")
    }
    taken, reserved = (quantized_base[f"most {what} [GiB]"] * GIB for what in ("allocated", "reserved"))
    ways = {
        way: f"{1e3 * head[f'forward and backward, {way} [s]']:.0f} ms and {head[f'forward and backward, {way} [GiB]'] * GIB:.2f} GB"
        for way in ("kernels", "torch", "TRL")
    }
    slowest = held["publish, slowest of 20 (pause, version, resume) [s]"]
    trained = [checks[f"training_0.6B_{kind}"]["trained [tokens/s]"] for kind in ("full", "lora")]
    return {
        "README.md": [
            f"With eight requests in flight, publishing an update to the engine took at most {1e3 * slowest:.0f} ms",
            f"processes {trained[1]:,.0f} tokens per second with LoRA on a model with Qwen3-0.6B's architecture (TRL 1.15: "
            f"{trl['lora'][0]:,.0f}). With full fine-tuning, it is about as fast as TRL: {trained[0]:,.0f} "
            f"(TRL 1.15: {trl['full'][0]:,.0f})",
        ],
        "docs/gpu.md": [
            *rows,
            f"takes {1e3 * held['publish, median [s]']:.0f} ms in the median and {1e3 * slowest:.0f} ms at most",
            f"by themselves {tree['each by itself [tokens/s]']:,.0f} and {tree['each by itself, at most [GiB]'] * GIB:.2f}: "
            f"{tree['shared, flash: over each by itself [times]']:.1f} times",
            *(f"TRL 1.15: {speed:,.0f} and {memory * GIB:.2f}" for speed, memory in trl.values()),
            f"{ways['kernels']} by the trainer's Triton kernels, {ways['torch']} by torch's operations, {ways['TRL']} by TRL's kernels",
            f"Of its {taken:.1f} GB the allocator held {reserved:.1f}",
        ],
    }


def front_page() -> Figures:
    """The README's reasons: those of a GPU are above."""
    worlds, seeds, kills = results("worlds"), results("soak")["seeds"], results("soak")["kills"]
    rows = [row for source in worlds.values() for row in source["rows"]]
    runs = sum(bool(row["runs"]) for row in rows)
    files = results("atroposlib_environments")["counts"]
    assert sum(one["same_bits"] for one in kills) == len(kills) == 30 and len(seeds) == 5
    return {
        "README.md": [
            "In five complete runs of the tiny policy, the trainer's and the engine's logprobs differed by at most "
            + f"{max(one['max_abs_logprob_diff'] for one in seeds):.1e} nats".replace("e-0", "e-"),
            "All 30 were resumed and reached the same weights, bit for bit, as a run that was never killed",
            f"Of the {len(rows)} environments that we tried from gem, OpenEnv, reasoning-gym, textarena and verifiers, {runs} run in "
            f"Atropos. So do {files['give a group']} of the {files['files']} environment files of atroposlib",
            f"With the tiny policy on two CPU cores, Atropos completes {results('quickstart')['ratio']:.1f} times as many rollouts "
            f"per second as TRL 1.16; with SmolLM2-135M-Instruct, {results('real_model')['ratio']['trajectories_per_s']:.1f} times",
        ]
    }


def turn_learning() -> Figures:
    """Turn rewards next to an outcome reward."""
    found = results("turn_learning")
    of = found["summary"]
    gains = {
        arm: [100 * (one - other) for one, other in zip(of[arm]["mean"], of["outcome"]["mean"], strict=True)]
        for arm in ("turns", "discount")
    }
    assert sum(gain > 0 for gain in gains["turns"]) == 4 and all(gain > 0 for gain in gains["discount"])
    medians = {arm: [median(of[arm]["steps_to"][mark]) for mark in ("0.5", "0.6")] for arm in ("turns", "outcome")}
    assert medians["turns"] == medians["outcome"] and found["summary"] == summary(found["runs"])
    reached = {arm: sum(step is not None for step in of[arm]["steps_to"]["0.7"]) for arm in of}
    assert (len(found["runs"]), reached["discount"], reached["outcome"]) == (5, 4, 2)
    return {
        "docs/credit.md": [
            *(f"| {' | '.join(row)} |" for row in rows(of, found["steps"])),
            f"four of five seeds, by {median(gains['turns']):.1f} points in the median",
            f"for all five seeds, by {median(gains['discount']):.1f} points in the median",
            f"a dash says that none of them did in {found['steps']} steps",
            f"{PROBLEMS * found['episodes']} held-out problems",
        ]
    }


def reward_hacking() -> Figures:
    found = results("reward_hacking")
    gamed, well, simulated = found["exploits"], found["honest"], found["simulated"]
    assert all(one["both"]["named"] and one["gold"]["named"] for one in gamed)
    delays = {kind: [one[kind]["named"] - one["first"] for one in gamed] for kind in ("both", "gold")}
    assert max(delays["both"]) <= 10
    before = max(max(one["shares"][: found["opens"] - 1]) for one in gamed)
    assert before < 0.1
    rollouts, used = (sum(one[name] for one in gamed) for name in ("named_rollouts", "named_rollouts_that_exploit"))
    alarms = sum(one["both"]["named"] is not None for one in well)
    histories, false = (sum(one[name] for one in simulated) for name in ("histories", "false_alarms"))
    assert alarms == false == 0
    return {
        "docs/reward-hacking.md": [
            *(f"| {' | '.join(row_of_exploit(one))} |" for one in gamed),
            f"did not happen in {found['steps']} steps",
            f"from step {found['opens']} on the exploit earns 10",
            f"named within {max(delays['both'])} steps of its first success",
            f"With only the gold reward it takes {min(delays['gold'])} to {max(delays['gold'])} steps",
            f"{used} of the {rollouts} rollouts that the messages name use the exploit",
            f"none in {len(well)} runs of {found['steps']} steps with honest rewards",
            f"none in {histories} made-up honest histories of 100 steps",
        ]
    }


def tinker() -> Figures:
    found = results("tinker")
    large, tiny = (found[name]["ratio"] for name in ("pretrained", "tiny"))
    return {
        "docs/tinker.md": [
            f"it takes {large['step']:.2f} times as long (rollouts {large['rollouts']:.2f}, update {large['training']:.2f})",
            f"it takes {tiny['step']:.1f} times as long (rollouts {tiny['rollouts']:.1f}, update {tiny['training']:.1f})",
        ]
    }


COMPUTED = (
    tinker,
    front_page,
    reward_hacking,
    turn_learning,
    gpu,
    recording,
    rescoring,
    viewer,
    short_groups,
    hostile,
    soak,
    speculation,
    quantized,
    evolved,
    ray,
    hub,
    simulation,
    sandboxes,
    engine,
    whole_loop,
    real_model,
    real_learning,
    trainer,
    curriculum,
    transforms_and_rewards,
    sinks,
    vllm,
    roll,
    skyrl,
)


@pytest.mark.parametrize("computed", COMPUTED, ids=lambda computed: computed.__name__)
def test_the_figures_on_the_pages_are_those_that_were_measured(computed: Callable[[], Figures]) -> None:
    for page, wanted in computed().items():
        text = re.sub(r"\s+", " ", (REPOSITORY / page).read_text()).replace(r" \*", "")  # a mark beside a figure
        for each in wanted:
            assert each in text, f"{page} does not say: {each}"


# -- of what the pages name


def commits(value: Any) -> Iterator[str]:
    """Those of a results file, which may have several parts."""
    if isinstance(value, dict):
        if "commit" in value:
            yield value["commit"]
        for below in value.values():
            yield from commits(below)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_every_results_file_says_at_which_commit_it_was_measured(file: Any) -> None:
    found = list(commits(json.loads(file.read_text())))
    assert found and all(re.fullmatch(r"[0-9a-f]{40}(\+changes)?", each) for each in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_results_file_and_benchmark_that_a_page_names_exists(page: Any) -> None:
    text = page.read_text()
    for name in set(re.findall(r"benchmarks/results/(\w+\.json)", text)):
        assert (RESULTS / name).is_file(), name
    for name in re.findall(r"benchmarks[./](\w+)(?:\.py)?`", text):
        assert name in OF_OTHERS or find_spec(f"benchmarks.{name}"), name
